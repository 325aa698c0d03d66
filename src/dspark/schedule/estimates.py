"""What past steps say about a source: how often its tokens are kept, and what its confidences are worth.

Everything here depends on older steps only, so any use of it is lossless (docs/exactness.md, clause 4). Estimates are
shared by all requests of one kind (acceptance rule and range of temperature) and outlive them, so that a hopeless
drafter is found out once; each request's own outcomes are mixed in as they come.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

SHARED_MEMORY, OWN_MEMORY = 256, 48  # observations of a slot after which an older one counts 1/e
PRIOR = 0.6  # chance of a token nobody has tried and nothing is known of; hopeful, so that it is tried
PRIOR_WEIGHT, OWN_WEIGHT = 4.0, 8.0  # observations that the prior, and all requests together, are worth
CLAIM_WEIGHT = 4.0  # kept tokens before what was claimed is doubted
TRIAL_MEMORY = 4.0  # observations that count when a source unused for long is tried again


class SlotShares:
    """Per slot, the share of ones among values in 0..1; old ones are forgotten exponentially."""

    __slots__ = ("_keep", "seen", "total")

    def __init__(self, memory: float):
        self._keep = 1 - 1 / memory
        self.seen: list[float] = []
        self.total: list[float] = []

    def add(self, slot: int, value: float) -> None:
        while slot >= len(self.seen):
            self.seen.append(0.0)
            self.total.append(0.0)
        self.seen[slot] = self.seen[slot] * self._keep + 1
        self.total[slot] = self.total[slot] * self._keep + value

    def fade(self, most: float) -> None:
        """Let no slot count more than `most` observations from now on."""
        for slot, seen in enumerate(self.seen):
            if seen > most:
                self.total[slot] *= most / seen
                self.seen[slot] = most

    def at(self, slot: int) -> tuple[float, float]:
        """(total, seen) of a slot."""
        return (self.total[slot], self.seen[slot]) if slot < len(self.seen) else (0.0, 0.0)


class _Shared:
    """What all requests of one kind have met with one source."""

    __slots__ = ("_expected", "_first", "claimed", "kept", "rates")

    def __init__(self, first: Sequence[float] = ()) -> None:
        self.rates = SlotShares(SHARED_MEMORY)
        self._first = list(first)  # what each slot was thought to be worth before `rates`; later ones: nobody knows
        self.claimed, self.kept = SlotShares(SHARED_MEMORY), SlotShares(SHARED_MEMORY)
        self._expected: list[float] = []  # remembered until something is learnt, for all rows of a batch ask for it

    def expected(self, slots: int) -> list[float]:
        """Chance of each slot, given that all before it are kept; at least `slots` of them."""
        if len(self._expected) < slots:
            before, self._expected = PRIOR, []
            for slot in range(slots):
                # A slot that nobody has reached is taken to be like the one before it.
                first = self._first[slot] if slot < len(self._first) else before
                total, seen = self.rates.at(slot)
                before = (total + PRIOR_WEIGHT * first) / (seen + PRIOR_WEIGHT)
                self._expected.append(before)
        return self._expected

    def learn(self, slot: int, value: float) -> None:
        self.rates.add(slot, value)
        self._expected = []

    def fade(self) -> None:
        """All that is known counts as little as a first guess from now on. It stays what it is: a source that was
        found hopeless has to win its trial before anything is hoped of it again."""
        self._first = self.expected(len(self.rates.seen))[: len(self.rates.seen)]
        self.rates = SlotShares(SHARED_MEMORY)
        for shares in (self.claimed, self.kept):
            shares.fade(TRIAL_MEMORY)
        self._expected = []


class Estimates:
    """Acceptance per source, kind and slot, conditional on every slot before having been kept.

    `first` gives, by kind, what slots of a source that nobody has tried are worth, as far as it is known.
    """

    def __init__(self, first: Callable[[str], Sequence[float]] = lambda kind: ()) -> None:
        self._first = first
        self._shared: dict[tuple[str, str], _Shared] = {}
        self._own: dict[int, dict[str, SlotShares]] = {}
        self._untried: dict[str, _Shared] = {}  # by kind

    def survival(self, request_id: int, kind: str, source: str, slots: int) -> tuple[float, ...]:
        """Expected survival of draft tokens 1..slots of one request: never rising, in 0..1."""
        expected = (self._shared.get((source, kind)) or self._new(kind)).expected(slots)
        own = self._own.get(request_id, {}).get(source)
        if own is None:
            return tuple(accumulate(expected[:slots], mul))
        survivals, product = [], 1.0
        for slot, chance in enumerate(expected[:slots]):
            total, seen = own.at(slot)
            product *= (total + OWN_WEIGHT * chance) / (seen + OWN_WEIGHT)
            survivals.append(product)
        return tuple(survivals)

    def correct(self, source: str, kind: str, confidence: Sequence[float]) -> list[float]:
        """Confidences of one draft, scaled by how often tokens were kept against what was claimed for them."""
        shared = self._shared.get((source, kind))
        if shared is None:
            return list(confidence)
        corrected, worth = [], 1.0
        for slot, chance in enumerate(confidence):
            kept, claimed = shared.kept.at(slot)[0], shared.claimed.at(slot)[0]
            # Claims about a slot that nobody has reached are worth what those about the slot before it are.
            worth = (kept + CLAIM_WEIGHT * worth) / (claimed + CLAIM_WEIGHT)
            corrected.append(min(1.0, chance * worth))
        return corrected

    def observe(
        self,
        request_id: int,
        source: str,
        kind: str,
        verified: int,
        accepted: int,
        claimed: Sequence[float] = (),
        corrected: Sequence[float] = (),
    ) -> None:
        """The first `accepted` of `verified` tokens were kept; confidences are those of all drafted slots.

        Slots behind the first rejection say nothing. The slot behind a draft that was kept whole was left out because
        little was hoped of it; its confidence stands in for the outcome, or deep slots would look better than they are.
        """
        if (shared := self._shared.get((source, kind))) is None:
            shared = self._shared[source, kind] = _Shared(self._first(kind))
        own = self._own.setdefault(request_id, {}).setdefault(source, SlotShares(OWN_MEMORY))
        for slot in range(min(accepted + 1, verified)):
            kept = float(slot < accepted)
            shared.learn(slot, kept)
            own.add(slot, kept)
            if claimed:
                shared.kept.add(slot, kept)
                shared.claimed.add(slot, claimed[slot])
        if accepted == verified < len(corrected):
            shared.learn(verified, corrected[verified])
            own.add(verified, corrected[verified])

    def fade(self, request_id: int, source: str, kind: str, shared: bool = True) -> None:
        """A source is tried again after a pause: what comes now shall count against what was before it, of this
        request and, with `shared`, of all."""
        if shared and (everyone := self._shared.get((source, kind))):
            everyone.fade()
        if own := self._own.get(request_id, {}).get(source):
            own.fade(TRIAL_MEMORY)

    def release(self, request_id: int) -> None:
        """The request has ended; what it taught about its source stays."""
        self._own.pop(request_id, None)

    def _new(self, kind: str) -> _Shared:
        """Of a source nobody has tried; nothing is learnt into it."""
        if kind not in self._untried:
            self._untried[kind] = _Shared(self._first(kind))
        return self._untried[kind]
