"""What the server is doing now, for the page that shows it live."""

import time
from collections import deque
from threading import Lock
from typing import Any

from dspark.config import StepRecord
from dspark.engine import Engine
from dspark.serve.metrics import decodes

WINDOW_S = 5.0


class LiveState:
    """Figures over the last seconds, from the engine's step records."""

    def __init__(self, engine: Engine, model_name: str):
        self._engine, self._model_name = engine, model_name
        self._begun_s = time.monotonic()
        self._recent: deque[tuple[float, StepRecord]] = deque()
        self._lock = Lock()

    def on_step(self, record: StepRecord) -> None:
        """The engine thread calls this after every step."""
        now = time.monotonic()
        with self._lock:
            self._recent.append((now, record))
            while self._recent[0][0] < now - WINDOW_S:
                self._recent.popleft()

    def body(self) -> dict[str, Any]:
        """The answer of `/v1/dspark/state`; docs/serving.md says what each field means."""
        now = time.monotonic()
        with self._lock:
            records = [record for at, record in self._recent if at >= now - WINDOW_S]
        engine, batcher = self._engine, self._engine.loop.batcher
        rows = [row for record in records for row in record.rows]
        steps = [row for row in rows if decodes(row)]
        batches = [sum(map(decodes, record.rows)) for record in records]
        return {
            "model": self._model_name,
            "proposer": engine.proposer.name,
            "policy": engine.config.policy,
            "uptime_s": round(now - self._begun_s, 1),
            "window_s": WINDOW_S,
            "running": len(batcher.running),
            "waiting": len(batcher.waiting),
            "max_batch": engine.config.max_batch,
            "kv_slots": batcher.slots.capacity,
            "kv_slots_used": batcher.slots.capacity - batcher.free_slots,
            "tokens_per_s": round(
                sum(row.committed for row in rows) / min(WINDOW_S, max(now - self._begun_s, 1e-3)), 2
            ),
            "steps": len(steps),
            "batch_size": _mean([size for size in batches if size]),
            "verify_length": _mean([row.verified for row in steps]),
            "acceptance_length": _mean([row.committed for row in steps]),
            "slot_acceptance": _slot_acceptance([row.slot_accepted for row in steps]),
            "speculating": any(row.drafted for row in steps),
            "sources": {source: sum(row.source == source for row in steps) for source in {row.source for row in steps}},
            "draft_ms": _mean([record.times.draft_ms for record in records]),
            "verify_ms": _mean([record.times.verify_ms for record in records]),
            "host_ms": _mean([record.times.host_ms for record in records]),
        }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def _slot_acceptance(slots: list[tuple[bool, ...]]) -> list[float]:
    """Share of verified draft tokens that were kept, slot by slot."""
    shares = []
    for slot in range(max(map(len, slots), default=0)):
        kept = [row[slot] for row in slots if slot < len(row)]
        shares.append(round(sum(kept) / len(kept), 3))
    return shares
