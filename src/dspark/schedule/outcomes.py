"""How often drafts of some kind were right lately: the estimate that plans go by where no drafter states confidence.

An estimate here depends on past outcomes only, so any use of it is lossless (docs/exactness.md, clause 4).
"""

from collections.abc import Callable, Hashable, Sequence

PRIOR_WEIGHT = 8.0  # observations that the prior is worth
HALF_LIFE = 256  # later observations after which one counts half
LAST_SLOT = 4  # this slot and all later ones share their counts: few drafts reach them
OWN_MEMORY, COMMON_MEMORY = 48, 64  # decided slots after which an older one counts 1/e: of one owner, of all
OWN_DOUBT, COMMON_DOUBT = 6.0, 4.0  # expected tokens before an owner, or all together, are doubted


class OutcomeRates:
    """Share of accepted among decided draft slots, by kind of draft and slot, smoothed and slowly forgotten.

    A slot is decided when every slot before it was accepted, so rates are conditional, as confidences are. Keys are
    the caller's: whatever makes drafts alike, such as (source, match length).
    """

    def __init__(
        self,
        prior: Callable[[Hashable, int], float],
        prior_weight: float = PRIOR_WEIGHT,
        half_life: float = HALF_LIFE,
    ):
        self._prior, self._weight = prior, prior_weight
        self._keep = 0.5 ** (1 / half_life)
        self._cells: dict[tuple[Hashable, int], tuple[float, float]] = {}  # (accepted, decided)

    def rate(self, key: Hashable, slot: int) -> float:
        """Estimated probability that a draft token of this kind at `slot` (0-based) is kept if all before it were."""
        slot = min(slot, LAST_SLOT)
        accepted, decided = self._cells.get((key, slot), (0.0, 0.0))
        return (self._weight * self._prior(key, slot) + accepted) / (self._weight + decided)

    def rates(self, keys: Sequence[Hashable]) -> tuple[float, ...]:
        """The estimate of every slot of one draft, whose slots may be of different kinds."""
        return tuple(self.rate(key, slot) for slot, key in enumerate(keys))

    def observe(self, key: Hashable, accepted: int, verified: int) -> None:
        """A draft of one kind had `verified` slots checked, and the first `accepted` of them were kept."""
        self.observe_each((key,) * verified, accepted)

    def observe_each(self, keys: Sequence[Hashable], accepted: int) -> None:
        """The same for a draft whose verified slots are of the kinds `keys`."""
        for slot, key in enumerate(keys[: accepted + 1]):
            cell = (key, min(slot, LAST_SLOT))
            kept, decided = self._cells.get(cell, (0.0, 0.0))
            self._cells[cell] = (kept * self._keep + (slot < accepted), decided * self._keep + 1)


class Shortfall:
    """How far guesses fall short of what their kinds are worth: those of one owner, and those of all of late.

    When the text changes from code to chat, every kind of guess is worth less at once, which its own counts learn one
    kind at a time. It never says that guesses are worth more: plans take the most promising guesses, so estimates that
    are too high cost more than ones that are too low.
    """

    def __init__(self) -> None:
        self._common = (0.0, 0.0)  # (kept, expected) tokens
        self._own: dict[int, tuple[float, float]] = {}  # the same by owner

    def factor(self, owner: int) -> float:
        """What to multiply estimates of this owner's guesses by, in 0..1."""
        kept, expected = self._common
        common = (kept + COMMON_DOUBT) / (expected + COMMON_DOUBT)
        kept, expected = self._own.get(owner, (0.0, 0.0))
        return min(1.0, (kept + OWN_DOUBT * common) / (expected + OWN_DOUBT))

    def observe(self, owner: int, expected: Sequence[float], accepted: int) -> None:
        """The first `accepted` tokens of a guess were kept, of whose decided slots its kinds expected `expected`."""
        own = self._own.get(owner, (0.0, 0.0))
        for slot, chance in enumerate(expected[: accepted + 1]):
            own = _faded(own, OWN_MEMORY, float(slot < accepted), chance)
            self._common = _faded(self._common, COMMON_MEMORY, float(slot < accepted), chance)
        self._own[owner] = own

    def release(self, owner: int) -> None:
        """The owner's request has ended."""
        self._own.pop(owner, None)


def _faded(sums: tuple[float, float], memory: float, kept: float, expected: float) -> tuple[float, float]:
    keep = 1 - 1 / memory
    return sums[0] * keep + kept, sums[1] * keep + expected
