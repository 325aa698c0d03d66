"""What drafting brings on this machine, worked out from a cost profile and how far drafts survive. Pure tables.

Expected tokens of a step with k drafts: 1 + sum of the first k survivals. Divided by what the step costs and compared
with plain steps, that is the speed-up everything here is about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

from dspark.errors import SettingsError
from dspark.schedule.profile import Profile

PARTS = ("draft", "weights", "attention", "host")
_FINE = 1e-4  # of an acceptance


@dataclass(frozen=True, slots=True)
class Survival:
    """How far drafts survive: `slots[k]` = share of drafts whose tokens 0..k are all kept; `coverage` = share of steps
    that have a draft at all (lookups often find none); `passes` = share of drafts that took a pass of the drafter (the
    others were looked up).

    Raises:
        SettingsError: not between 0 and 1, or survivals that rise.
    """

    slots: tuple[float, ...]
    coverage: float = 1.0
    passes: float = 1.0

    def __post_init__(self) -> None:
        values = (*self.slots, self.coverage, self.passes)
        if not self.slots or not all(isinstance(v, int | float) and 0 <= v <= 1 for v in values):
            raise SettingsError(
                f"The acceptance is {list(values)}; allowed are shares from 0 to 1, one per draft slot."
            )
        if any(a < b for a, b in pairwise(self.slots)):
            raise SettingsError(f"The survival is {list(self.slots)}; it cannot rise from one slot to the next.")

    @classmethod
    def of_slots(cls, acceptance: Sequence[float], coverage: float = 1.0) -> "Survival":
        """From the chance of each slot, given that all before it were kept."""
        return cls(tuple(accumulate(acceptance, mul)), coverage)

    @classmethod
    def constant(cls, alpha: float, slots: int, coverage: float = 1.0) -> "Survival":
        """Every slot kept with the same chance."""
        return cls.of_slots((alpha,) * slots, coverage)

    def kept(self, block: int) -> float:
        """Expected tokens of a step with a draft of `block` tokens, the target's own included."""
        return 1 + sum(self.slots[:block])


@dataclass(frozen=True, slots=True)
class Load:
    """How an engine is used: requests at once, their cached positions, and whether they are sampled (temperature
    above 0)."""

    rows: int
    context: int
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the time of a step goes, in ms: the drafter; the target's weights (tokens); attention (requests and their
    context); everything outside passes."""

    draft: float
    weights: float
    attention: float
    host: float

    @property
    def total(self) -> float:
        return self.draft + self.weights + self.attention + self.host

    @property
    def dominant(self) -> str:
        return max(PARTS, key=lambda part: float(getattr(self, part)))


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One concurrency. `speedup[k - 1]` belongs to blocks of k tokens; `best` is 0 where plain decoding is fastest.

    `break_even` is the acceptance, the same for every slot, above which some block pays; None when even certain drafts
    would not. Times are ms per token of one request, at the best block, or at blocks of one token where none pays.
    """

    concurrency: int
    speedup: tuple[float, ...]
    best: int
    break_even: float | None
    parts: StepParts
    plain_ms: float
    ours_ms: float
    article_ms: float

    @property
    def best_speedup(self) -> float:
        return self.speedup[self.best - 1] if self.best else 1.0


def step_parts(profile: Profile, load: Load, block: int, passes: float = 1.0) -> StepParts:
    """A step in which every request drafts and verifies `block` tokens, for a share `passes` of them by a pass of the
    drafter; 0 is plain decoding."""
    tokens, sampled = load.rows * (1 + block), load.rows if load.sampled else 0
    weights, attention = profile.pass_parts(tokens, load.rows, load.context)
    host = profile.host_ms(load.rows, tokens, sampled)
    return StepParts(_drafting_ms(profile, load, block, passes), weights, attention, host)


def drafter_runs(load: Load, passes: float) -> float:
    """Share of drafting steps in which any request needs the drafter, when a share `passes` of the drafts does."""
    return 1 - (1 - passes) ** load.rows


def _drafting_ms(profile: Profile, load: Load, block: int, passes: float) -> float:
    """The drafter runs in a step where any request needs it, for those that do."""
    if not passes:
        return 0.0
    runs = drafter_runs(load, passes)
    drafted = max(1, round(load.rows * passes / runs))  # requests that do where any does
    return runs * profile.draft_ms(drafted, block, drafted if load.sampled else 0)


def latency_ms(profile: Profile, load: Load, survival: Survival, block: int) -> float:
    """Our model, per token of one request: (t_draft + t_verify + t_host) / tokens kept."""
    plain = step_parts(profile, load, 0).total
    if not block:
        return plain
    drafted = step_parts(profile, load, block, survival.passes).total
    share = survival.coverage
    kept = share * survival.kept(block) + 1 - share
    return (share * drafted + (1 - share) * plain) / kept


def article_latency_ms(profile: Profile, load: Load, survival: Survival, block: int) -> float:
    """The model of the article this project started from, per token: plain t_forward; speculative
    t_draft + max(t_verify, t_correction).

    Read with our costs: drafting and verifying are shared by the tokens of a block, and a correction is one more pass
    of the target for every block that has an error. Tokens lost behind an error are not in it, so it is optimistic.
    """
    forward = profile.pass_ms(load.rows, load.rows, load.context)
    if not block:
        return forward
    parts = step_parts(profile, load, block, survival.passes)
    correction = (1 - survival.slots[block - 1]) * forward / block
    return parts.draft / block + max((parts.weights + parts.attention) / (1 + block), correction)


def speedups(profile: Profile, load: Load, survival: Survival) -> tuple[float, ...]:
    """Expected speed over plain decoding for blocks of 1, 2, ... tokens."""
    plain = latency_ms(profile, load, survival, 0)
    blocks = range(1, len(survival.slots) + 1)
    return tuple(plain / latency_ms(profile, load, survival, block) for block in blocks)


def best_block(speedup: Sequence[float]) -> int:
    """The fastest block, the shorter of equals; 0 when none is faster than plain decoding."""
    best = max(range(len(speedup)), key=lambda i: speedup[i])
    return best + 1 if speedup[best] > 1 else 0


def break_even(profile: Profile, load: Load, slots: int, coverage: float = 1.0, passes: float = 1.0) -> float | None:
    """The smallest acceptance, the same for every slot, above which some block of up to `slots` tokens pays; `coverage`
    and `passes` as in `Survival`."""

    def pays(alpha: float) -> bool:
        survival = replace(Survival.constant(alpha, slots, coverage), passes=passes)
        return best_block(speedups(profile, load, survival)) > 0

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def plan(
    profile: Profile, survival: Survival, concurrency: Sequence[int], context: int, sampled: bool = False
) -> list[PlanRow]:
    """The table of `dspark plan`, a row per number of requests at once."""
    rows = []
    for count in concurrency:
        load = Load(count, context, sampled)
        speedup = speedups(profile, load, survival)
        best = best_block(speedup)
        shown = best or 1
        rows.append(
            PlanRow(
                concurrency=count,
                speedup=speedup,
                best=best,
                break_even=break_even(profile, load, len(survival.slots), survival.coverage, survival.passes),
                parts=step_parts(profile, load, best, survival.passes),
                plain_ms=latency_ms(profile, load, survival, 0),
                ours_ms=latency_ms(profile, load, survival, shown),
                article_ms=article_latency_ms(profile, load, survival, shown),
            )
        )
    return rows
