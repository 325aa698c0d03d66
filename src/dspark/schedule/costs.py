"""What a step costs: the interface a measured profile has, and its curves over the size of a pass."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
    """Step times as a function of the number of draft tokens, remembered because a plan asks for every number.

    Each comes as an array and as a list, which is the faster of the two for a few values.
    """

    def __init__(self, costs: Costs):
        self._costs = costs
        self._curves: dict[tuple[int, int, int, int], tuple[NDArray[np.float64], list[float], float]] = {}
        self._drafts: dict[tuple[int, int], tuple[NDArray[np.float64], list[float]]] = {}

    def step_ms(self, tokens: int, most: int, rows: int, context: int, sampled_rows: int = 0) -> NDArray[np.float64]:
        """[most + 1]: a step without drafting whose pass has `tokens` tokens and 0..most draft tokens beside them."""
        return self._curve(tokens, most, rows, context, sampled_rows)[0][: most + 1]

    def step_times(self, tokens: int, most: int, rows: int, context: int, sampled_rows: int = 0) -> list[float]:
        """The same as a list of at least most + 1 values; not to be changed."""
        return self._curve(tokens, most, rows, context, sampled_rows)[1]

    def least_token_ms(self, tokens: int, most: int, rows: int, context: int, sampled_rows: int = 0) -> float:
        """What a draft token adds to such a step where up to `most` of them add least."""
        return self._curve(tokens, most, rows, context, sampled_rows)[2]

    def draft_ms(self, rows: int, sampled_rows: int = 0) -> NDArray[np.float64]:
        """[MAX_DRAFT + 1]: drafting 0..MAX_DRAFT tokens for each of `rows` requests."""
        return self._draft(rows, sampled_rows)[0]

    def draft_times(self, rows: int, sampled_rows: int = 0) -> list[float]:
        """The same as a list; not to be changed."""
        return self._draft(rows, sampled_rows)[1]

    def _curve(
        self, tokens: int, most: int, rows: int, context: int, sampled_rows: int
    ) -> tuple[NDArray[np.float64], list[float], float]:
        context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        key = (tokens, rows, context, sampled_rows)
        found = self._curves.get(key)
        if found is None or len(found[1]) <= most:
            if len(self._curves) >= MOST_CURVES:
                self._curves.clear()
            # Somewhat longer than asked for: each step has a few candidates more or less than the one before.
            sizes = range(tokens, tokens + -(-(most + 1) // LENGTH_STEP) * LENGTH_STEP)
            passes = [self._costs.pass_ms(size, rows, context) for size in sizes]
            times = [ms + self._costs.host_ms(rows, size, sampled_rows) for ms, size in zip(passes, sizes, strict=True)]
            curve = np.array(times)
            least = float(((curve[1:] - curve[0]) / np.arange(1, len(curve))).min())
            found = self._curves[key] = (curve, times, least)
        return found

    def _draft(self, rows: int, sampled_rows: int) -> tuple[NDArray[np.float64], list[float]]:
        key = (rows, sampled_rows)
        found = self._drafts.get(key)
        if found is None:
            slots = range(1, MAX_DRAFT + 1)
            times = [0.0, *(self._costs.draft_ms(rows, n, sampled_rows) if rows else 0.0 for n in slots)]
            found = self._drafts[key] = (np.array(times), times)
        return found
