"""Prometheus metrics of one server; docs/serving.md lists them."""

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dspark.config import RowRecord, StepRecord
from dspark.engine import Engine
from dspark.serve.worker import Event, Ticket

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_ANSWER_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LATELY = 32  # the last step of an answer never drafts, so one pass alone says little
_VERIFIED = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)


def decodes(row: RowRecord) -> bool:
    """Is this a decoding step? Not a prompt chunk, and not the pass in which the request failed."""
    return not row.prefill and row.committed + row.truncated > 0


class Metrics:
    """Counts what the engine's records and the requests' events say.

    Identities, over any period without running steps: committed = accepted + decode steps - truncated, and generated
    tokens = committed + first tokens.
    """

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        self._add_request_metrics()
        self._add_step_metrics()
        self._add_gauges(engine)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def on_response(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def on_event(self, ticket: Ticket, event: Event) -> None:
        """Called before the ticket notes the event's time."""
        chunk, index = event.chunk, event.index
        if chunk and chunk.token_ids:
            before_s = ticket.last_token_s[index]
            if before_s is None:
                self._ttft.observe(event.at_s - ticket.begun_s)
            else:
                for _ in chunk.token_ids:
                    self._between.observe((event.at_s - before_s) / len(chunk.token_ids))
        if event.last:
            self._outcomes.labels(_outcome(event)).inc()
            self._answers.observe(event.at_s - ticket.begun_s)

    def on_step(self, record: StepRecord) -> None:
        """The engine thread calls this after every step."""
        times, steps = record.times, [row for row in record.rows if decodes(row)]
        self._passes.inc()
        self._step_time.observe(times.step_ms / 1e3)
        for part in ("draft", "verify", "host"):
            self._parts.labels(part).inc(getattr(times, f"{part}_ms") / 1e3)
        self._prompt_tokens.inc(sum(row.prefill for row in record.rows))
        self._first_tokens.inc(sum(row.committed for row in record.rows if row.prefill))
        self._generated.inc(sum(row.committed for row in record.rows))
        self._decode_steps.inc(len(steps))
        for counter, name in self._sums:
            counter.inc(sum(getattr(row, name) for row in steps))
        for row in steps:
            self._verify_length.observe(row.verified)
            self._sources.labels(row.source).inc()
            for slot, accepted in enumerate(row.slot_accepted, 1):
                self._slot_verified.labels(str(slot)).inc()
                self._slot_accepted.labels(str(slot)).inc(accepted)
        if steps:
            self._lately_drafted.append(any(row.drafted for row in steps))
            self._speculating.set(any(self._lately_drafted))

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"dspark_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"dspark_{name}", about, buckets=buckets, registry=self.registry)

    def _add_request_metrics(self) -> None:
        self._responses = self._counter("http_responses", "HTTP responses.", "route", "status")
        self._outcomes = self._counter("requests", "Answers by how they ended.", "outcome")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._between = self._histogram(
            "inter_token_seconds", "Between tokens; those that come together share the time since the last.", _BETWEEN_S
        )
        self._answers = self._histogram("answer_seconds", "Arrival to the end of the answer.", _ANSWER_S)

    def _add_step_metrics(self) -> None:
        self._passes = self._counter("passes", "Passes of the engine's loop.")
        self._step_time = self._histogram("step_seconds", "Time of a pass.", _STEP_S)
        self._parts = self._counter("step_part_seconds", "Time of passes by part.", "part")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens run.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._first_tokens = self._counter("first_tokens", "Tokens that came with a prompt's pass.")
        self._decode_steps = self._counter("decode_steps", "Decoding steps, counted per request.")
        about = {
            "drafted": "Draft tokens made.",
            "verified": "Draft tokens the target ran on.",
            "accepted": "Draft tokens the target kept.",
            "committed": "Tokens of decoding steps.",
            "truncated": "Tokens cut off by an end token, a stop string or a limit.",
        }
        self._sums = [(self._counter(f"{name}_tokens", text), name) for name, text in about.items()]
        self._verify_length = self._histogram("verify_length", "Draft tokens verified per decoding step.", _VERIFIED)
        self._sources = self._counter("steps_by_source", "Decoding steps by origin of the draft.", "source")
        self._slot_verified = self._counter("slot_verified", "Draft tokens verified per slot.", "slot")
        self._slot_accepted = self._counter("slot_accepted", "Draft tokens kept per slot.", "slot")
        about_drafts = f"1 if one of the last {LATELY} decoding passes had a draft."
        self._speculating = Gauge("dspark_speculating", about_drafts, registry=self.registry)
        self._lately_drafted: deque[bool] = deque(maxlen=LATELY)

    def _add_gauges(self, engine: Engine) -> None:
        batcher = engine.loop.batcher
        for name, about, read in (
            ("dspark_requests_running", "Requests in the batch.", lambda: len(batcher.running)),
            ("dspark_requests_waiting", "Requests waiting for a place.", lambda: len(batcher.waiting)),
            ("dspark_kv_slots", "Token slots of the cache.", lambda: batcher.slots.capacity),
            (
                "dspark_kv_slots_used",
                "Token slots reserved.",
                lambda: batcher.slots.capacity - batcher.free_slots,
            ),
        ):
            Gauge(name, about, registry=self.registry).set_function(read)


def _outcome(event: Event) -> str:
    """stop or length; abort when the client left; timeout; refused by the engine; error."""
    if event.fault:
        return event.fault.code or ("refused" if event.fault.status < 500 else "error")
    assert event.chunk is not None and event.chunk.output is not None
    return event.chunk.output.finish_reason
