"""Responses that loop: small models, greedy ones above all, end up saying the same thing until their limit.

The rule: a response ends where one of its n-grams ends for the (m+1)-th time. With n = 16 and m = 3 a sentence may
stand three times and the fourth is cut; text that repeats shorter pieces (code, tables, lists) is left alone.
Prompts do not count, and what comes before the cut stays, because a prefix of the target's text is the target's text.
"""

from collections import Counter
from collections.abc import Sequence

from dspark.data.packed import Corpus

NGRAM, REPEATS = 16, 3


def loop_start(ids: Sequence[int], ngram: int = NGRAM, repeats: int = REPEATS) -> int:
    """How many leading tokens of `ids` to keep: all before an n-gram's last token completes it for the
    (repeats + 1)-th time, or all of them."""
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(ngram, len(ids) + 1):
        piece = tuple(ids[end - ngram : end])
        seen[piece] += 1
        if seen[piece] > repeats:
            return end - 1
    return len(ids)


def cut_loops(corpus: Corpus, ngram: int = NGRAM, repeats: int = REPEATS) -> Corpus:
    """`corpus` with looping tails of responses cut off, and a note saying how much that was."""
    lengths = [
        corpus.prompt_lens[i] + loop_start(corpus.response(i).tolist(), ngram, repeats) for i in range(len(corpus))
    ]
    shorter = corpus.shortened(lengths)
    looping = sum(n < corpus.length(i) for i, n in enumerate(lengths))
    dropped, total = corpus.response_tokens - shorter.response_tokens, corpus.response_tokens
    if not looping:
        return corpus
    return shorter.with_notes(
        f"{looping} of {len(corpus)} responses loop; their tails were cut ({dropped} of {total} response tokens, "
        f"{dropped / total:.0%})."
    )
