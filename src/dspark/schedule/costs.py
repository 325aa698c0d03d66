"""What a step costs: the interface a measured profile has, and its curves over the size of a pass."""

from typing import Protocol

from dspark.schedule.policy import MAX_DRAFT

CONTEXT_STEP = 256  # contexts that differ by less share a curve
LENGTH_STEP = 32  # curves have a multiple of so many values
MOST_CURVES = 4096  # remembered; a workload meets a few hundred


class Costs(Protocol):
    """Milliseconds on this machine, for one target and drafter; staircases stay staircases."""

    def pass_ms(self, tokens: int, rows: int, context: int) -> float:
        """Target pass over `tokens` tokens of `rows` requests with about `context` cached positions each."""
        ...

    def draft_ms(self, rows: int, slots: int | None = None, sampled_rows: int = 0) -> float:
        """Drafting `slots` tokens (None: a whole block) for `rows` requests, `sampled_rows` of them not greedy."""
        ...

    def host_ms(self, rows: int, tokens: int | None = None, sampled_rows: int = 0) -> float:
        """Everything of a step outside model passes; `tokens` are those of the pass (None: no drafts)."""
        ...


class CostCurves:
    """Step times as a function of the number of draft tokens, remembered because a plan asks for every number."""

    def __init__(self, costs: Costs):
        self._costs = costs
        self._curves: dict[tuple[int, int, int, int], list[float]] = {}
        self._drafts: dict[tuple[int, int], list[float]] = {}

    def step_times(self, tokens: int, most: int, rows: int, context: int, sampled_rows: int = 0) -> list[float]:
        """A step without drafting whose pass has `tokens` tokens and 0, 1, ... draft tokens beside them: at least
        most + 1 values; not to be changed."""
        context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        key = (tokens, rows, context, sampled_rows)
        found = self._curves.get(key)
        if found is None or len(found) <= most:
            if len(self._curves) >= MOST_CURVES:
                self._curves.clear()
            # Somewhat longer than asked for: each step has a few candidates more or less than the one before.
            sizes = range(tokens, tokens + -(-(most + 1) // LENGTH_STEP) * LENGTH_STEP)
            passes = [self._costs.pass_ms(size, rows, context) for size in sizes]
            found = [ms + self._costs.host_ms(rows, size, sampled_rows) for ms, size in zip(passes, sizes, strict=True)]
            self._curves[key] = found
        return found

    def draft_times(self, rows: int, sampled_rows: int = 0) -> list[float]:
        """Drafting 0, 1, ... MAX_DRAFT tokens for each of `rows` requests; not to be changed."""
        key = (rows, sampled_rows)
        found = self._drafts.get(key)
        if found is None:
            slots = range(1, MAX_DRAFT + 1)
            found = [0.0, *(self._costs.draft_ms(rows, n, sampled_rows) if rows else 0.0 for n in slots)]
            self._drafts[key] = found
        return found
