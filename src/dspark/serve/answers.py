"""What clients read: whole answers and the chunks of streamed ones. Pure; the shapes are OpenAI's."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.engine import Chunk, Output, RequestStats, TokenLogprobs
from dspark.serve.logprobs import chat_logprobs, completion_logprobs
from dspark.serve.tools import CallStream, Parsed, split_calls
from dspark.serve.worker import Event
from dspark.target import Tokenizer


@dataclass
class Choice:
    """One choice as far as it has come."""

    index: int
    begun_s: float  # when the HTTP request arrived; time.perf_counter(), as all times here
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    output: Output | None = None
    first_s: float | None = None
    last_s: float | None = None

    def add(self, event: Event) -> None:
        chunk = event.chunk
        if chunk is None:
            return
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.offsets += chunk.offsets
        self.output = chunk.output
        if chunk.token_ids:
            self.first_s = self.first_s or event.at_s
            self.last_s = event.at_s

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None


@dataclass(frozen=True, slots=True)
class Head:
    """What every body of one answer begins with."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> "Head":
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)

    def body(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Shape(Protocol):
    """How one endpoint writes the choices of one answer; it may keep what a stream has not decided yet."""

    prefix: str
    whole_kind: str
    chunk_kind: str

    def first(self) -> dict[str, Any] | None:
        """What a choice's first chunk says before any text; None for nothing."""
        ...

    def whole(self, choice: Choice, wants_logprobs: bool) -> dict[str, Any]:
        """A finished choice."""
        ...

    def part(self, choice: Choice, chunk: Chunk, wants_logprobs: bool) -> dict[str, Any] | None:
        """What one step added to a choice, which has it already; None when a client need not hear of it."""
        ...


class ChatShape:
    """Messages and deltas. With `calls` the text is read for tool calls."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, calls: bool):
        self._tokenizer, self._calls = tokenizer, calls
        self._streams: dict[int, CallStream] = {}  # by choice
        self._made: dict[int, int] = {}  # calls so far, by choice

    def first(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def whole(self, choice: Choice, wants_logprobs: bool) -> dict[str, Any]:
        parsed = split_calls(choice.text) if self._calls else Parsed(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message |= {"content": parsed.content or None, "tool_calls": [call.body() for call in parsed.calls]}
        logprobs = chat_logprobs(self._tokenizer, choice.logprobs) if wants_logprobs else None
        reason = _chat_reason(choice, bool(parsed.calls))
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def part(self, choice: Choice, chunk: Chunk, wants_logprobs: bool) -> dict[str, Any] | None:
        parsed = self._parse(choice, chunk)
        delta: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
        begin = self._made.get(choice.index, 0)
        if parsed.calls:
            delta["tool_calls"] = [{"index": begin + i, **call.body()} for i, call in enumerate(parsed.calls)]
            self._made[choice.index] = begin + len(parsed.calls)
        logprobs = chat_logprobs(self._tokenizer, chunk.logprobs) if wants_logprobs and chunk.logprobs else None
        if not (delta or logprobs or chunk.output):
            return None
        reason = _chat_reason(choice, choice.index in self._made)
        return {"delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _parse(self, choice: Choice, chunk: Chunk) -> Parsed:
        if not self._calls:
            return Parsed(chunk.text)
        stream = self._streams.setdefault(choice.index, CallStream())
        parsed = stream.push(chunk.text)
        if chunk.output is None:
            return parsed
        rest = stream.finish()
        return Parsed(parsed.content + rest.content, parsed.calls + rest.calls)


def _chat_reason(choice: Choice, called: bool) -> str | None:
    return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason


class CompletionShape:
    """Texts."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def first(self) -> dict[str, Any] | None:
        return None

    def whole(self, choice: Choice, wants_logprobs: bool) -> dict[str, Any]:
        tokens, offsets = choice.logprobs, choice.offsets
        logprobs = completion_logprobs(self._tokenizer, tokens, offsets) if wants_logprobs else None
        return {"text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def part(self, choice: Choice, chunk: Chunk, wants_logprobs: bool) -> dict[str, Any] | None:
        tokens, offsets = chunk.logprobs, chunk.offsets
        logprobs = completion_logprobs(self._tokenizer, tokens, offsets) if wants_logprobs and tokens else None
        if not (chunk.text or logprobs or chunk.output):
            return None
        return {"text": chunk.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompts count once, however many choices they have; the end token counts as every token the model made."""
    outputs = [choice.output for choice in choices if choice.output]
    made = sum(len(output.token_ids) for output in outputs)
    # Choices of one prompt share it: what the first one found cached is what the prompt had cached.
    cached = {output.prompt_ids: output.stats.cached_tokens for output in reversed(outputs)}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def numbers(choices: Sequence[Choice]) -> dict[str, Any]:
    """The `dspark` block: what drafting did for this answer, and where its time went; sums over its choices."""
    stats = [choice.output.stats for choice in choices if choice.output]
    made = sum(len(choice.output.token_ids) for choice in choices if choice.output)
    begun = min(choice.begun_s for choice in choices)
    first = min((choice.first_s for choice in choices if choice.first_s), default=None)
    last = max((choice.last_s for choice in choices if choice.last_s), default=None)
    steps = _sum(stats, "steps")
    return {
        "acceptance_length": round(_sum(stats, "committed") / steps, 3) if steps else None,
        **{name: _sum(stats, name) for name in ("steps", "drafted", "verified", "accepted", "committed", "truncated")},
        "time_to_first_token_ms": round((first - begun) * 1e3, 2) if first else None,
        "tokens_per_s": round(made / (last - begun), 2) if last else None,
        **{name: round(_sum(stats, name), 2) for name in ("prefill_ms", "draft_ms", "verify_ms", "host_ms")},
        "sources": _by_source(stats),
    }


def _sum(stats: Sequence[RequestStats], name: str) -> Any:
    return sum(getattr(one, name) for one in stats)


def _by_source(stats: Sequence[RequestStats]) -> dict[str, int]:
    """Steps by the proposer their draft came from."""
    total: dict[str, int] = {}
    for one in stats:
        for source, count in one.sources.items():
            total[source] = total.get(source, 0) + count
    return total


def whole_body(
    head: Head, shape: Shape, choices: Sequence[Choice], prompt_tokens: int, wants_logprobs: bool
) -> dict[str, Any]:
    return {
        **head.body(shape.whole_kind),
        "choices": [{"index": choice.index, **shape.whole(choice, wants_logprobs)} for choice in choices],
        "usage": usage(prompt_tokens, choices),
        "dspark": numbers(choices),
    }


def chunk_body(head: Head, shape: Shape, index: int, part: dict[str, Any]) -> dict[str, Any]:
    return {**head.body(shape.chunk_kind), "choices": [{"index": index, **part}]}
