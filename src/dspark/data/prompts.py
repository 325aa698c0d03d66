"""Which sampled user turns are worth an answer: what a good one looks like, and no two alike (pure)."""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from dspark.data.loops import loop_start

MIN_CHARS = 12
SHINGLE = 3  # words
NEAR = 0.7  # share of shingles in common that makes two prompts near-duplicates
_NGRAM, _REPEATS = 6, 2  # tokens; prompts are short, so they loop by a stricter rule than responses


def defect(text: str, new_ids: Sequence[int], ended: bool) -> str | None:
    """Why a sampled user turn is not used, or None. `new_ids` are the tokens the model added to the opening."""
    if not ended:
        return "cut off"
    if len(text) < MIN_CHARS or not new_ids:
        return "too short"
    if not all(c in "\n\t" or (c.isprintable() and c != "\ufffd") for c in text):
        return "not printable"
    if loop_start(new_ids, _NGRAM, _REPEATS) < len(new_ids):
        return "loops"
    return None


def normalise(text: str) -> tuple[str, ...]:
    """Words without case, accents' spelling variants, punctuation and spacing; texts equal in this are duplicates."""
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


class Dedup:
    """Prompts seen so far; says whether another one is new.

    Two prompts are near-duplicates when they share at least `NEAR` of the larger one's word shingles. One that shares
    that many shares at least one of any few of them, so only prompts found through the rarest shingles are compared.
    """

    def __init__(self) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._shingles: list[frozenset[tuple[str, ...]]] = []
        self._where: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Whether `text` is new; if so it is remembered."""
        words = normalise(text)
        if not words or words in self._exact:
            return False
        shingles = frozenset(words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1)))
        if any(self._near(shingles, other) for other in self._candidates(shingles)):
            return False
        self._exact.add(words)
        for shingle in shingles:
            self._where[shingle].append(len(self._shingles))
        self._shingles.append(shingles)
        return True

    def _candidates(self, shingles: frozenset[tuple[str, ...]]) -> set[int]:
        enough = len(shingles) - math.ceil(NEAR * len(shingles)) + 1
        rarest = sorted(shingles, key=lambda s: (len(self._where.get(s, ())), s))[:enough]
        return {other for shingle in rarest for other in self._where.get(shingle, ())}

    def _near(self, shingles: frozenset[tuple[str, ...]], other: int) -> bool:
        theirs = self._shingles[other]
        return len(shingles & theirs) >= NEAR * max(len(shingles), len(theirs))


class Chooser:
    """Takes candidates as they are ready and decides them in the order of their index, so that the choice does not
    depend on which was ready first.

    Candidate i is of kind `kinds[i % len(kinds)]`. Each kind has a quota; it ends when that is filled, or given up
    after `patience` candidates, (at first, more for each one taken). A kind that has ended is skipped.
    """

    def __init__(self, kinds: Sequence[str], quota: Sequence[int], patience: tuple[int, int] = (50, 20)):
        self.kinds, self.quota, self.patience = tuple(kinds), tuple(quota), patience
        self.chosen: list[tuple[int, str]] = []
        self.rejected: Counter[str] = Counter()
        self._taken = [0] * len(kinds)
        self._ready: dict[int, tuple[str, str | None]] = {}
        self._ready_good = [0] * len(kinds)
        self._next = 0
        self._dedup = Dedup()
        self._skip_ended()

    def kind(self, index: int) -> str:
        return self.kinds[index % len(self.kinds)]

    def ended(self, index: int) -> bool:
        """Whether candidate `index` is not wanted, as things stand."""
        kind, tries = index % len(self.kinds), index // len(self.kinds)
        at_first, more = self.patience
        return self._taken[kind] >= self.quota[kind] or tries >= at_first + more * self._taken[kind]

    @property
    def done(self) -> bool:
        return all(map(self.ended, range(self._next, self._next + len(self.kinds))))

    def shortfall(self) -> dict[str, int]:
        """Kinds that ended before their quota was filled, and by how much."""
        left = (quota - taken for quota, taken in zip(self.quota, self._taken, strict=True))
        return {kind: missing for kind, missing in zip(self.kinds, left, strict=True) if missing}

    def missing(self, kind: int) -> int:
        """Prompts a kind still needs, those that are ready and wait for earlier ones counted as taken."""
        return max(0, self.quota[kind] - self._taken[kind] - self._ready_good[kind])

    @property
    def filled(self) -> int:
        """How much of all quotas is filled, counted in the same way."""
        return sum(self.quota) - sum(map(self.missing, range(len(self.kinds))))

    def offer(self, index: int, text: str, why: str | None) -> None:
        """Candidate `index` is ready; `why` says what is wrong with it, None if nothing."""
        if index < self._next:
            return
        self._ready[index] = (text, why)
        self._ready_good[index % len(self.kinds)] += why is None
        self._skip_ended()
        while not self.done and self._next in self._ready:
            self._decide(self._next, *self._ready.pop(self._next))
            self._next += 1
            self._skip_ended()

    def _decide(self, index: int, text: str, why: str | None) -> None:
        kind = index % len(self.kinds)
        self._ready_good[kind] -= why is None
        if why is None and not self._dedup.add(text):
            why = "duplicate"
        if why:
            self.rejected[why] += 1
            return
        self._taken[kind] += 1
        self.chosen.append((index, text))

    def _skip_ended(self) -> None:
        while not self.done and self.ended(self._next):
            if ready := self._ready.pop(self._next, None):
                self._ready_good[self._next % len(self.kinds)] -= ready[1] is None
            self._next += 1


def quotas(count: int, kinds: int) -> list[int]:
    """`count` split evenly; the first kinds get what is left over."""
    return [count // kinds + (i < count % kinds) for i in range(kinds)]
