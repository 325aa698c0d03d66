"""Any OpenAI-compatible server as a system under measurement: streamed chat completions over HTTP."""

import json
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dspark.errors import SettingsError
from dspark.measure.bench.drive import Ask, Event
from dspark.measure.bench.records import StepCounts

KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 600.0


class Server:
    """One thread per running request reads its stream; token counts are the server's own.

    Raises:
        SettingsError: the server does not answer or serves no model.
    """

    at_once: int | None = None
    promises = False
    note = "over HTTP; the server's own chat template, cache and settings"

    def __init__(self, url: str):
        import httpx

        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        try:
            reply = self._client.get(f"{self._base}/models")
            reply.raise_for_status()
            self._model = str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise SettingsError(
                f"The server {url} does not list a model ({reason}); start it, or give another openai:URL."
            ) from None
        self._events: queue.Queue[Event | Exception] = queue.Queue()
        self._stopped: set[int] = set()
        self._next = 0

    def start(self, ask: Ask) -> int:
        key = self._next
        self._next += 1
        threading.Thread(target=self._run, args=(key, ask), daemon=True).start()
        return key

    def step(self) -> list[Event]:
        events = [self._events.get()]
        while not self._events.empty():
            events.append(self._events.get())
        found = []
        for event in events:
            if isinstance(event, Exception):
                raise SettingsError(f"The server {self._base} failed ({event}); look at its log.") from None
            if event.key not in self._stopped:
                found.append(event)
        return found

    def abort(self) -> None:
        self._stopped.update(range(self._next))

    def counts(self) -> StepCounts | None:
        return None

    def _run(self, key: int, ask: Ask) -> None:
        body = {
            "model": self._model,
            "messages": [dict(message) for message in ask.messages],
            "temperature": ask.params.temperature,
            "max_tokens": ask.params.max_tokens,
            "seed": ask.params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._client.stream("POST", f"{self._base}/chat/completions", json=body) as reply:
                if reply.status_code >= 400:
                    reply.read()
                    raise RuntimeError(f"status {reply.status_code}: {reply.text[:200]}")
                for event in events_of(key, data_of(reply.iter_lines())):
                    if key in self._stopped:
                        return
                    self._events.put(event)
        except Exception as error:  # the thread that waits is told
            self._events.put(error)


def data_of(lines: Iterable[str]) -> Iterator[Any]:
    """The JSON objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
            yield json.loads(text)


def events_of(key: int, objects: Iterable[Any]) -> Iterator[Event]:
    """What a stream of chat completion chunks says; how many tokens a chunk holds is not known, so each counts as one
    until the usage at the end says how many came.

    Raises:
        ValueError: the stream ended without usage.
    """
    reason, tokens = "unknown", None
    for chunk in objects:
        for choice in chunk.get("choices") or ():
            if (choice.get("delta") or {}).get("content"):
                yield Event(key, time.perf_counter(), 1)
            reason = choice.get("finish_reason") or reason
        if chunk.get("usage"):
            tokens = int(chunk["usage"]["completion_tokens"])
    if tokens is None:
        raise ValueError("the stream ended without usage")
    yield Event(key, time.perf_counter(), 0, reason, None, tokens)
