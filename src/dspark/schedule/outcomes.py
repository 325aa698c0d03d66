"""How often drafts of some kind were right lately: the estimate that plans go by where no drafter states confidence.

An estimate here depends on past outcomes only, so any use of it is lossless (docs/exactness.md, clause 4).
"""

from collections.abc import Callable, Hashable, Sequence

PRIOR_WEIGHT = 8.0  # observations that the prior is worth
HALF_LIFE = 256  # later observations after which one counts half
LAST_SLOT = 4  # this slot and all later ones share their counts: few drafts reach them


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
