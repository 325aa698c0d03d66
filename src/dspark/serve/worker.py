"""The engine's own thread: requests in through a queue, what they produce out through the event loop."""

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dspark.config import SamplingParams
from dspark.engine import Chunk, Engine
from dspark.errors import DsparkError
from dspark.serve.errors import FAILED, ApiError, refused

logger = logging.getLogger("dspark.serve")

STOP_WAIT_S = 10.0  # for the pass that is running when the thread is told to stop


@dataclass(frozen=True, slots=True)
class Job:
    """One engine request: a prompt's token ids, how to answer, and which of several choices it is."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    choice: int = 0
    speculate: bool = True
    policy: str | None = None  # None: the engine's


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did for job `index` of a ticket; the last one carries the chunk's output, a fault, or both."""

    index: int
    chunk: Chunk | None
    fault: ApiError | None
    at_s: float  # time.perf_counter()

    @property
    def last(self) -> bool:
        return self.fault is not None or (self.chunk is not None and self.chunk.output is not None)


class Ticket:
    """The jobs of one HTTP request, as the event loop sees them."""

    def __init__(self, jobs: Sequence[Job], begun_s: float):
        self.jobs, self.begun_s = jobs, begun_s
        self.last_token_s: list[float | None] = [None] * len(jobs)
        self.open = len(jobs)  # jobs whose last event has not come
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self.request_ids: list[int] = []  # the engine thread's

    async def events(self) -> AsyncIterator[Event]:
        """Every event until each job has had its last one."""
        unread = len(self.jobs)
        while unread:
            event = await self.queue.get()
            unread -= event.last
            yield event


@dataclass
class _Live:
    """A request inside the engine, as the engine thread sees it."""

    ticket: Ticket
    index: int
    fault: ApiError | None = None  # why it is being aborted


class Worker:
    """Owns the engine. Methods are the event loop's, except those that say otherwise.

    A failure inside one request ends it alone; an unexpected one inside a step ends the requests that were running and
    leaves the engine empty and usable.
    """

    def __init__(self, engine: Engine, max_queue: int, timeout_s: float):
        self.engine = engine
        self.observers: list[Callable[[Ticket, Event], None]] = []  # told every event, in the event loop
        self.draining = False
        self.most_jobs = engine.config.max_batch + max_queue
        self._timeout_s = timeout_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: set[Ticket] = set()
        self._recent_s: deque[float] = deque([1.0], maxlen=32)  # how long the latest answers took
        self._idle = asyncio.Event()
        self._idle.set()
        # The engine thread's own:
        self._live: dict[int, _Live] = {}
        self._outbox: list[tuple[Ticket, Event]] = []
        self._stopped = False

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_jobs(self) -> int:
        """Jobs accepted and not yet ended."""
        return sum(ticket.open for ticket in self._tickets)

    async def submit(self, jobs: Sequence[Job], begun_s: float) -> Ticket:
        """Queue all jobs of one HTTP request that arrived at `begun_s` (time.perf_counter()), or none.

        Raises:
            ApiError: 400 when the engine refuses one, 429 when the queue is full, 503 while shutting down.
        """
        if self.draining or not self.alive:
            raise ApiError(503, "The server is shutting down; send the request elsewhere or later.")
        if len(jobs) > self.most_jobs:
            raise ApiError(
                400,
                f"n is too large: the request asks for {len(jobs)} answers and the server takes {self.most_jobs}.",
                "n",
            )
        if self.num_jobs + len(jobs) > self.most_jobs:
            headers = {"Retry-After": str(self._retry_after_s())}
            raise ApiError(429, "The queue is full; send the request again a little later.", headers=headers)
        ticket = Ticket(jobs, begun_s)
        self._tickets.add(ticket)
        self._idle.clear()
        answer: asyncio.Future[ApiError | None] = self.loop.create_future()
        self._commands.put(partial(self._add, ticket, answer))
        try:
            fault = await answer
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        if fault:
            raise fault
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for these jobs any more: end what is left of them at the next step."""
        if ticket.open:
            self._commands.put(partial(self._abort, ticket, None))

    async def wait_until_idle(self) -> None:
        """Return when no job is waiting or running."""
        await self._idle.wait()

    async def drain(self, seconds: float) -> None:
        """Take no more jobs; let the running ones finish for so long, then end them."""
        self.draining = True
        try:
            await asyncio.wait_for(self.wait_until_idle(), seconds)
        except TimeoutError:
            fault = ApiError(503, "The server is shutting down and the answer was not finished in time.")
            for ticket in self._tickets:
                self._commands.put(partial(self._abort, ticket, fault))

    def stop(self) -> None:
        """End everything and the thread; waits for the pass that is running."""
        self.draining = True
        self._commands.put(self._stop)
        self._thread.join(STOP_WAIT_S)

    def _retry_after_s(self) -> int:
        """Roughly when a place becomes free, from how long recent answers took."""
        mean_s = sum(self._recent_s) / len(self._recent_s)
        rounds = self.num_jobs / self.engine.config.max_batch
        return max(1, min(60, math.ceil(mean_s * rounds)))

    def _deliver(self, batch: Sequence[tuple[Ticket, Event]]) -> None:
        for ticket, event in batch:
            self._tell_observers(ticket, event)
            if event.chunk and event.chunk.token_ids:
                ticket.last_token_s[event.index] = event.at_s
            ticket.queue.put_nowait(event)
            if event.last:
                ticket.open -= 1
                self._recent_s.append(event.at_s - ticket.begun_s)
            if not ticket.open:
                self._forget(ticket)

    def _tell_observers(self, ticket: Ticket, event: Event) -> None:
        try:
            for observe in self.observers:
                observe(ticket, event)
        except Exception:
            logger.exception("An observer failed; requests go on.")

    def _answer(self, ticket: Ticket, answer: "asyncio.Future[ApiError | None]", fault: ApiError | None) -> None:
        if fault:  # no job of it is left, and no event will come
            ticket.open = 0
            self._forget(ticket)
        if not answer.done():
            answer.set_result(fault)

    def _forget(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        if not self._tickets:
            self._idle.set()

    # The engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            while not self._commands.empty() or not self._live:
                self._commands.get()()
                self._flush()
                if self._stopped:
                    return
            self._expire()
            try:
                if self.engine.step() is None:
                    raise RuntimeError("requests are waiting and none can run")
            except Exception:
                logger.exception("A step of the engine failed; the requests that were running end with an error.")
                self._reset()
            self._flush()

    def _add(self, ticket: Ticket, answer: "asyncio.Future[ApiError | None]") -> None:
        fault = None
        try:
            for index, job in enumerate(ticket.jobs):
                on_chunk = partial(self._on_chunk, ticket, index)
                request_id = self.engine.add(
                    job.prompt_ids, job.params, job.choice, on_chunk, job.speculate, job.policy
                )
                ticket.request_ids.append(request_id)
                self._live[request_id] = _Live(ticket, index)
        except DsparkError as error:
            fault = refused(str(error))
        except Exception:
            logger.exception("A request could not be added to the engine.")
            fault = ApiError(500, FAILED)
        if fault:
            self._abort(ticket, None)
            self._outbox = [(t, event) for t, event in self._outbox if t is not ticket]
        self._call(self._answer, ticket, answer, fault)

    def _on_chunk(self, ticket: Ticket, index: int, chunk: Chunk) -> None:
        fault = None
        if chunk.output:
            live = self._live.pop(chunk.output.request_id, None)
            fault = live.fault if live else None
            if chunk.output.error:
                fault = refused(chunk.output.error)
        self._outbox.append((ticket, Event(index, chunk, fault, time.perf_counter())))

    def _abort(self, ticket: Ticket, fault: ApiError | None) -> None:
        for request_id in ticket.request_ids:
            self._end(request_id, fault)

    def _end(self, request_id: int, fault: ApiError | None) -> None:
        """Abort a request that may have ended before; its last event carries the fault."""
        live = self._live.get(request_id)
        if live is None:
            return
        live.fault = fault
        try:
            self.engine.abort(request_id)
        except Exception:
            logger.exception("A request could not be ended cleanly.")
        if self._live.pop(request_id, None):  # no last chunk came
            fault = fault or ApiError(500, FAILED)
            self._outbox.append((live.ticket, Event(live.index, None, fault, time.perf_counter())))

    def _expire(self) -> None:
        now = time.perf_counter()
        for request_id, live in list(self._live.items()):
            if now > live.ticket.begun_s + self._timeout_s:
                message = (
                    f"The request took longer than {self._timeout_s:g} s; ask for fewer tokens or raise the limit."
                )
                self._end(request_id, ApiError(504, message, code="timeout"))

    def _reset(self) -> None:
        """Leave the engine as empty as it began."""
        for request_id in list(self._live):
            self._end(request_id, ApiError(500, FAILED))
        try:
            self.engine.reset()
        except Exception:
            logger.exception("The engine could not be emptied after a failed step.")

    def _stop(self) -> None:
        for request_id in list(self._live):
            self._end(request_id, ApiError(503, "The server is shutting down."))
        self._stopped = True

    def _flush(self) -> None:
        if self._outbox:
            self._call(self._deliver, self._outbox)
            self._outbox = []

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop has gone; nobody listens
            self._stopped = True
