"""What a packed corpus holds, in figures."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.data.loops import loop_start
from dspark.data.packed import Corpus

COVERED = 8192  # tokens: the usual draft vocabulary


@dataclass(frozen=True)
class Group:
    """One kind of text at one temperature, or everything (then both are None). Lengths in tokens.

    `covered` is the share of response tokens among the corpus's `COVERED` most frequent ones, `looping` the share of
    responses that begin to loop, `repeated_prompts` the sequences whose prompt stands earlier in the corpus.
    """

    kind: str | None
    temperature: float | None
    sequences: int
    prompt_tokens: int
    response_tokens: int
    mean_response: float
    p90_response: float
    looping: float
    covered: float
    repeated_prompts: int


def summarise(corpus: Corpus) -> list[Group]:
    """A group per kind and temperature, sorted, then the whole corpus."""
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for index, key in enumerate(zip(corpus.kinds, corpus.temperatures, strict=True)):
        groups[key].append(index)
    common = _common_tokens(corpus)
    repeated = _repeated_prompts(corpus)
    rows = [_group(corpus, members, common, repeated, *key) for key, members in sorted(groups.items())]
    return [*rows, _group(corpus, range(len(corpus)), common, repeated, None, None)]


def _group(
    corpus: Corpus,
    members: Sequence[int],
    common: torch.Tensor,
    repeated: set[int],
    kind: str | None,
    temperature: float | None,
) -> Group:
    responses = [corpus.response(i) for i in members]
    lengths = torch.tensor([r.shape[0] for r in responses], dtype=torch.float64)
    loops = sum(loop_start(r.tolist()) < r.shape[0] for r in responses)
    return Group(
        kind,
        temperature,
        len(members),
        sum(corpus.prompt_lens[i] for i in members),
        int(lengths.sum()),
        lengths.mean().item(),
        lengths.quantile(0.9).item(),
        loops / len(members),
        common[torch.cat(responses)].double().mean().item(),
        sum(i in repeated for i in members),
    )


def _common_tokens(corpus: Corpus) -> torch.Tensor:
    """[V] bool: whether a token is among the `COVERED` most frequent of all responses."""
    counts = torch.bincount(torch.cat([corpus.response(i) for i in range(len(corpus))]))
    common = torch.zeros(counts.shape[0], dtype=torch.bool)
    common[counts.argsort(descending=True, stable=True)[:COVERED]] = True
    return common


def _repeated_prompts(corpus: Corpus) -> set[int]:
    seen: set[bytes] = set()
    repeated = set()
    for index in range(len(corpus)):
        prompt = corpus.sequence(index)[: corpus.prompt_lens[index]].numpy().tobytes()
        if prompt in seen:
            repeated.add(index)
        seen.add(prompt)
    return repeated
