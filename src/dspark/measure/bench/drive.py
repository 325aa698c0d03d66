"""Hands requests to a system and writes down what comes back: closed loop (N at a time) or open loop (arrivals)."""

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dspark.config import SamplingParams
from dspark.data.sources import Message
from dspark.measure.bench.records import RequestRecord, StepCounts

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: which prompt of its kind, as token ids and as the conversation they render."""

    prompt: int
    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Event:
    """Something arrived from a request: `new` tokens `at` a time of the clock. The last one carries the answer;
    `token_ids` are None where only text is known, of which `tokens` were counted."""

    key: int
    at: float
    new: int
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    tokens: int = 0


class System(Protocol):
    """Something that answers requests: our engine in some mode, or another engine.

    `at_once`: most requests it takes together, None for no limit of its own. `promises`: greedy and seeded answers
    are plain's. `step` moves on whatever runs and returns what arrived; it may block until something does.
    """

    at_once: int | None
    promises: bool
    note: str

    def start(self, ask: Ask) -> int: ...

    def step(self) -> list[Event]: ...

    def abort(self) -> None: ...

    def counts(self) -> StepCounts | None:
        """Of the steps since the last call; None where the engine does not say."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    record: RequestRecord
    token_ids: tuple[int, ...] | None


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    number: int
    ask: Ask
    due: float
    arrivals: list[float] = field(default_factory=list)


Enough = Callable[[int, int], bool]


def until(tokens: int, requests: int) -> Enough:
    """Enough once that many tokens have come and that many requests have begun."""
    return lambda begun, arrived: begun >= requests and arrived >= tokens


def drive(
    system: System,
    asks: Iterable[Ask],
    at_once: int,
    arrivals: Iterable[float] | None = None,
    enough: Enough = lambda begun, arrived: False,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Answer], float]:
    """Answers in the order of the requests, and seconds from the first arrival to the last token.

    Requests begin in order: as places get free, or with `arrivals` (seconds since the start) when they are due and a
    place is free; what waits for a place has arrived. Once `enough`, no new one begins and those begun are answered.
    An exception, Ctrl-C included, aborts what runs.
    """
    waiting = iter(asks)
    due_times = iter(arrivals) if arrivals is not None else None
    running: dict[int, _Open] = {}
    answers: dict[int, Answer] = {}
    begun = arrived = 0
    began = last = clock()
    upcoming = _next(waiting, due_times)
    try:
        while running or upcoming is not None:
            while upcoming is not None and len(running) < at_once:
                if enough(begun, arrived):
                    upcoming = None
                    break
                ask, due = upcoming
                if due is not None and began + due > clock():
                    break
                running[system.start(ask)] = _Open(begun, ask, clock() if due is None else began + due)
                begun += 1
                upcoming = _next(waiting, due_times)
            if not running:
                if upcoming is not None and upcoming[1] is not None:
                    sleep(max(0.0, began + upcoming[1] - clock()))
                continue
            for event in system.step():
                request = running[event.key]
                arrived += event.new
                last = max(last, event.at)
                if event.new:
                    request.arrivals.append(event.at)
                if event.finish_reason is not None:
                    answers[request.number] = _answer(running.pop(event.key), event, began)
    except BaseException:
        system.abort()
        raise
    return [answers[number] for number in sorted(answers)], last - began


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds at `rate` a second; the same for every mode and round. The first is at 0."""
    make = random.Random(f"{seed} {rate}")
    at = 0.0
    while True:
        yield at
        at += make.expovariate(rate)


def work_of(token_ids: Sequence[int]) -> str:
    """Short hash of an answer's ids."""
    return hashlib.sha256(repr(list(token_ids)).encode()).hexdigest()[:12]


def _next(waiting: Iterator[Ask], due_times: Iterator[float] | None) -> tuple[Ask, float | None] | None:
    ask = next(waiting, None)
    if ask is None:
        return None
    return ask, None if due_times is None else next(due_times)


def _answer(request: _Open, event: Event, began: float) -> Answer:
    arrivals = request.arrivals
    tokens = len(event.token_ids) if event.token_ids is not None else event.tokens
    streamed = len(arrivals) > 1 or tokens <= 1
    record = RequestRecord(
        prompt=request.ask.prompt,
        prompt_tokens=len(request.ask.ids),
        output_tokens=tokens,
        latency_s=(arrivals[-1] if arrivals else event.at) - request.due,
        ttft_s=arrivals[0] - request.due if arrivals and streamed else None,
        gaps_ms=tuple(round(1e3 * (b - a), 3) for a, b in zip(arrivals, arrivals[1:], strict=False)),
        finish_reason=event.finish_reason or "unknown",
        work="" if event.token_ids is None else work_of(event.token_ids),
        arrival_s=request.due - began,
    )
    return Answer(record, event.token_ids)
