"""Tool calls in the Hermes and Qwen style: what the model is shown, what it must say, and what it said. Pure.

A model made for it writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, before,
between or after ordinary text. How an endpoint uses this module:

1. `check_tools(tools, choice)` refuses what does not fit together.
2. `engine.chat_ids(tool_messages(messages), tools=offered(tools, choice))` renders the conversation; a template that
   cannot present tools is refused there.
3. `call_grammar(tools, choice, parallel)` goes to `SamplingParams.grammar` unless it is None.
4. With `offered` tools, `split_calls(text)` takes a whole answer apart, a `CallStream` per choice a streamed one; an
   answer with calls that ended by itself has the finish reason `tool_calls`.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config import Grammar
from dspark.engine.grammar import WHITESPACE
from dspark.errors import RequestError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_QUOTE = re.compile(r'\\.|(")', re.DOTALL)  # group 1: a quote that no backslash escapes
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Choice = str | Mapping[str, Any]  # "none", "auto", "required" or {"type": "function", "function": {"name": ...}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asks for; `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        """As the API shows it; a streamed chunk adds the call's `index`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Parsed:
    """Ordinary text and calls that are certain now."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def check_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Choice | None) -> None:
    """Raises RequestError when tools and tool_choice do not fit together."""
    names = _names(tools)
    for name in names:
        if not _NAME.fullmatch(name):
            raise RequestError(f"tools holds a function named {name!r}; allowed are 1 to 64 letters, digits, _ and -.")
        if names.count(name) > 1:
            raise RequestError(f"tools holds two functions named {name!r}; give each its own name.")
    if choice is None or choice == "none":
        return
    if not names:
        raise RequestError("tool_choice is given without tools; leave it out or give at least one tool.")
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise RequestError(f"tool_choice is {choice!r}; allowed are none, auto, required and a function to call.")
    if (named := _named(choice)) is not None and named not in names:
        raise RequestError(f"tool_choice names {named!r}; tools has {', '.join(names)}.")


def offered(tools: Sequence[Mapping[str, Any]] | None, choice: Choice | None) -> list[dict[str, Any]] | None:
    """The tools the model is shown: None where there are none or none may be called."""
    return None if not tools or choice == "none" else [dict(tool) for tool in tools]


def tool_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: arguments of earlier calls as objects, no content as empty content."""
    result = []
    for message in messages:
        plain = {**message, "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [{**call, "function": _opened(call["function"])} for call in calls]
        result.append(plain)
    return result


def call_grammar(
    tools: Sequence[Mapping[str, Any]] | None, choice: Choice | None, parallel: bool = True
) -> Grammar | None:
    """What the answer must match so that it calls the tool or tools `choice` asks for; None where it may say anything.

    Arguments follow each function's own schema. `parallel` allows several calls in one answer; a named function is
    called once.
    """
    named = None if choice is None else _named(choice)
    if not tools or (choice != "required" and named is None):
        return None
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    rules = [f"call_{i}: {_rule(function)}" for i, function in enumerate(functions)]
    several = ' ("\\n" call)*' if parallel and named is None else ""
    any_call = " | ".join(f"call_{i}" for i in range(len(functions)))
    return Grammar("lark", "\n".join([f"start: call{several}", f"call: {any_call}", *rules]))


def split_calls(text: str, new_id: Callable[[], str] | None = None) -> Parsed:
    """A whole answer's ordinary text and calls. What looks like a call and is none stays text."""
    stream = CallStream(new_id or new_call_id)
    first, last = stream.push(text), stream.finish()
    return Parsed(first.content + last.content, first.calls + last.calls)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass
class CallStream:
    """Takes a streamed answer apart, text by text. Never hands out part of a marker, nor blanks that lead to a call."""

    new_id: Callable[[], str] = new_call_id
    _held: str = field(default="", init=False)  # not decided yet
    _blanks: str = field(default="", init=False)  # before the call that is open
    _inside: bool = field(default=False, init=False)
    _called: bool = field(default=False, init=False)

    def push(self, text: str) -> Parsed:
        """Add text; what is certain now."""
        self._held += text
        content, calls = "", []
        while True:
            if not self._inside:
                said, opened = self._before_call()
                content += said
                if not opened:
                    break
            end = _close(self._held)
            if end < 0:
                break
            body, self._held, self._inside = self._held[:end], self._held[end + len(CLOSE) :], False
            if (call := _call(body, self.new_id)) is not None:
                calls.append(call)
                self._called = True
            else:
                content += self._blanks + OPEN + body + CLOSE
        return Parsed(content, tuple(calls))

    def finish(self) -> Parsed:
        """The answer has ended: a call without its closing marker counts, half a marker is text."""
        held, self._held = self._held, ""
        if not self._inside:
            return Parsed("" if self._called and not held.strip() else held)
        whole = held[: len(held) - _half_marker(held, CLOSE)]
        call = _call(whole, self.new_id)
        return Parsed(self._blanks + OPEN + held) if call is None else Parsed(calls=(call,))

    def _before_call(self) -> tuple[str, bool]:
        """Text up to the next call, and whether one is open now."""
        at = self._held.find(OPEN)
        end = at if at >= 0 else len(self._held) - _half_marker(self._held, OPEN)
        said = self._held[:end].rstrip()
        if at >= 0:
            self._blanks, self._held, self._inside = self._held[len(said) : at], self._held[at + len(OPEN) :], True
        else:
            self._held = self._held[len(said) :]
        return said, at >= 0


def _names(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return [tool["function"]["name"] for tool in tools or ()]


def _named(choice: Choice) -> str | None:
    return None if isinstance(choice, str) else choice["function"]["name"]


def _opened(function: Mapping[str, Any]) -> dict[str, Any]:
    """A called function with its arguments as an object, where they are one."""
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (ValueError, RecursionError):
        return dict(function)


def _rule(function: Mapping[str, Any]) -> str:
    """One function's call in Lark's notation, spelled as the templates teach it."""
    schema = {"type": "object", **(function.get("parameters") or _NO_PARAMETERS)}
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    begin = f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
    return f"{json.dumps(begin)} %json {json.dumps(schema)} {json.dumps('}' + chr(10) + CLOSE)}"


def _close(text: str) -> int:
    """Where the closing marker is that does not lie inside a JSON string; -1 without one."""
    at = text.find(CLOSE)
    while at >= 0 and sum(bool(match[1]) for match in _QUOTE.finditer(text, 0, at)) % 2:
        at = text.find(CLOSE, at + 1)
    return at


def _half_marker(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)


def _call(body: str, new_id: Callable[[], str]) -> ToolCall | None:
    """A call from what stands between the markers; None when it is not one."""
    try:
        said = json.loads(body, parse_constant=_refuse)
        name, arguments = said["name"], said.get("arguments", {})
        arguments = json.loads(arguments, parse_constant=_refuse) if isinstance(arguments, str) else arguments
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return ToolCall(new_id(), name, _as_text(arguments))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _as_text(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, escaped by the model
        return json.dumps(arguments)
    return text
