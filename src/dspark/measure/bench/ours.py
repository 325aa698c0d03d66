"""Our own engine as a system under measurement: one engine per mode on a shared target."""

import time
from dataclasses import replace

from dspark.config import EngineConfig
from dspark.engine import Chunk, Engine
from dspark.measure.bench.drive import Ask, Event
from dspark.measure.bench.records import StepCounts
from dspark.measure.bench.tally import Tally
from dspark.target import Target


class OurSystem:
    """Steps an engine; its records become counts.

    The engine lives as long as the run, as a server's does, so that what its plans learn in one cell serves the next.
    Nothing of earlier answers is cached.
    """

    at_once: int | None = None
    promises = True

    def __init__(self, engine: Engine, note: str = ""):
        self.engine, self.note = engine, note
        self._tally = Tally()
        engine.listeners.append(lambda record: self._tally(record))
        self._events: list[Event] = []
        self._next = 0

    def start(self, ask: Ask) -> int:
        key = self._next
        self._next += 1

        def collect(chunk: Chunk) -> None:
            output = chunk.output
            ended = (None, None) if output is None else (output.finish_reason, output.token_ids)
            self._events.append(Event(key, time.perf_counter(), len(chunk.token_ids), *ended))

        self.engine.add(ask.ids, ask.params, on_chunk=collect)
        return key

    def step(self) -> list[Event]:
        self.engine.step()
        events, self._events = self._events, []
        return events

    def abort(self) -> None:
        self.engine.reset()
        self._events.clear()
        self.counts()

    def counts(self) -> StepCounts | None:
        counts, self._tally = self._tally.counts(), Tally()
        return counts


def open_ours(target: Target, config: EngineConfig, proposer: str, policy: str | None, drafter: str) -> OurSystem:
    """An engine of one mode on a loaded target.

    Raises:
        DsparkError: the mode's proposer, policy or drafter is wrong.
    """
    uses_drafter = proposer in ("auto", "dspark")
    settings = replace(
        config,
        proposer=proposer,
        drafter=drafter if uses_drafter else "none" if proposer == "none" else "auto",
        policy=policy or config.policy,
        prefix_cache=False,
    )
    engine = Engine.over(target, settings)
    alone = proposer == "auto" and engine.proposer.name == "lookup"
    return OurSystem(engine, "there is no drafter, so drafts come from lookup" if alone else "")
