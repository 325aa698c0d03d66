"""Holding out a share of the data by prompt, so that no held-out prompt was ever trained on."""

import hashlib

from dspark.data.packed import Corpus


def hold_out(corpus: Corpus, share: float) -> tuple[Corpus, Corpus]:
    """(training, held out). A prompt's hash decides, so a prompt is on the same side in every file and every run."""
    held = [i for i in range(len(corpus)) if _place(corpus, i) < share]
    rest = set(range(len(corpus))) - set(held)
    return corpus.subset(rest), corpus.subset(held)


def _place(corpus: Corpus, index: int) -> float:
    """A number in [0, 1) that depends on the prompt only."""
    prompt = corpus.sequence(index)[: corpus.prompt_lens[index]].numpy().tobytes()
    return int.from_bytes(hashlib.sha256(prompt).digest()[:8], "big") / 2**64
