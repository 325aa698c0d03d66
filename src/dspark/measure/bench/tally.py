"""Adds up an engine's step records into the counts of a cell (no I/O)."""

from itertools import accumulate
from operator import mul
from typing import Any

from dspark.config import RowRecord, StepRecord
from dspark.measure.acceptance import add_slots
from dspark.measure.bench.records import StepCounts

BINS = 10  # of stated survival
_ROW_SUMS = ("drafted", "verified", "accepted", "committed", "truncated")
_SUMS = ("steps", "draft_steps", *_ROW_SUMS, "passes", "pass_tokens", "pass_cached", "pass_sampled")


class Tally:
    """Call it with every step's record; `counts()` is what came together."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMS, 0)
        self._ms = dict.fromkeys(("draft_ms", "verify_ms", "host_ms", "prefill_ms"), 0.0)
        names = ("slot_drafted", "slot_verified", "slot_reached", "slot_accepted", "histogram")
        self._lists: dict[str, list[int]] = {name: [] for name in names}
        self._sources: dict[str, int] = {}
        self._cached: dict[int, int] = {}  # by request: positions whose keys and values are kept
        stated = ("stated_count", "stated_sum", "stated_kept")
        self._stated: dict[str, list[float]] = {name: [0] * BINS for name in stated}

    def __call__(self, record: StepRecord) -> None:
        sums, times = self._sums, record.times
        sums["passes"] += 1
        sums["pass_tokens"] += record.tokens
        if any(row.prefill for row in record.rows):
            self._ms["prefill_ms"] += times.step_ms
        else:
            for part in ("draft_ms", "verify_ms", "host_ms"):
                self._ms[part] += getattr(times, part)
        for row in record.rows:
            self._add_cache(row)
            if row.prefill:
                sums["pass_sampled"] += row.committed > 0
            else:
                sums["pass_sampled"] += row.verified + 1
                self._add_step(row)

    def counts(self) -> StepCounts:
        values: dict[str, Any] = {**self._sums, **self._ms}
        values |= {name: tuple(numbers) for name, numbers in self._lists.items()}
        if any(self._stated["stated_count"]):
            values |= {name: tuple(numbers) for name, numbers in self._stated.items()}
        return StepCounts(**values, sources=dict(self._sources))

    def _add_cache(self, row: RowRecord) -> None:
        """A pass reads what was kept before and what it writes itself; afterwards its last token is not in it yet."""
        before = self._cached.get(row.request_id, 0)
        run = row.prefill or row.verified + 1
        self._sums["pass_cached"] += before + run
        self._cached[row.request_id] = before + (row.prefill or row.committed)

    def _add_step(self, row: RowRecord) -> None:
        sums = self._sums
        sums["steps"] += 1
        sums["draft_steps"] += row.verified > 0
        for name in _ROW_SUMS:
            sums[name] += getattr(row, name)
        self._sources[row.source] = self._sources.get(row.source, 0) + 1
        add_slots(self._lists["slot_drafted"], [1] * row.drafted)
        add_slots(self._lists["slot_verified"], [1] * row.verified)
        add_slots(self._lists["slot_reached"], [int(slot <= row.accepted) for slot in range(row.verified)])
        add_slots(self._lists["slot_accepted"], [int(kept) for kept in row.slot_accepted])
        if row.verified:
            add_slots(self._lists["histogram"], [int(n == row.accepted) for n in range(row.verified + 1)])
        for survival, survived in zip(accumulate(row.confidence, mul), row.slot_accepted, strict=False):
            place = min(int(survival * BINS), BINS - 1)
            for column, value in zip(self._stated.values(), (1, survival, int(survived)), strict=True):
                column[place] += value
