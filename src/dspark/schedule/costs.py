"""What a step costs: the interface a measured profile has, and its curves over the size of a pass."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.schedule.policy import MAX_DRAFT

CONTEXT_STEP = 256  # contexts that differ by less share a curve
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
        self._curves: dict[tuple[int, int, int, int], NDArray[np.float64]] = {}
        self._drafts: dict[tuple[int, int], NDArray[np.float64]] = {}

    def step_ms(self, tokens: int, most: int, rows: int, context: int, sampled_rows: int = 0) -> NDArray[np.float64]:
        """[most + 1]: a step without drafting whose pass has `tokens` tokens and 0..most draft tokens beside them."""
        context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        key = (tokens, rows, context, sampled_rows)
        curve = self._curves.get(key)
        if curve is None or len(curve) <= most:
            if len(self._curves) >= MOST_CURVES:
                self._curves.clear()
            sizes = range(tokens, tokens + most + 1)
            passes = [self._costs.pass_ms(size, rows, context) for size in sizes]
            curve = np.array(passes) + [self._costs.host_ms(rows, size, sampled_rows) for size in sizes]
            self._curves[key] = curve
        return curve[: most + 1]

    def draft_ms(self, rows: int, sampled_rows: int = 0) -> NDArray[np.float64]:
        """[MAX_DRAFT + 1]: drafting 0..MAX_DRAFT tokens for each of `rows` requests."""
        key = (rows, sampled_rows)
        if key not in self._drafts:
            slots = range(1, MAX_DRAFT + 1) if rows else ()
            times = [self._costs.draft_ms(rows, n, sampled_rows) for n in slots]
            self._drafts[key] = np.array([0.0, *times] if rows else [0.0] * (MAX_DRAFT + 1))
        return self._drafts[key]
