"""Toy engines behind a real uvicorn on a free loopback port."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from dspark.engine import Engine
from dspark.serve import ServeConfig
from dspark.serve.app import Server
from dspark.serve.run import DrainingServer, listen

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WAIT_S = 20
LETTERS = {str(i): 40 for i in range(97, 123)}  # as logit_bias: every token a letter of its own, never an end token


@dataclass(frozen=True)
class Running:
    """A server on its own thread."""

    url: str
    process: DrainingServer
    client: httpx.Client

    @property
    def server(self) -> Server:
        return self.process.config.app.state.server

    @property
    def engine(self) -> Engine:
        return self.server.engine

    def post(self, path: str = CHAT, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def chat(self, text: str = "hello hello hello", **fields: Any) -> httpx.Response:
        return self.post(CHAT, **chat_request(text, **fields))

    def events(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        """A whole stream's bodies; the framing is checked on the way."""
        with self.client.stream("POST", path, json=fields | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            return parse_sse(response.read())

    def wait_until_idle(self) -> None:
        """Until the engine has nothing left of any request."""
        worker = self.process.worker
        try:
            asyncio.run_coroutine_threadsafe(worker.wait_until_idle(), worker.loop).result(WAIT_S)
        except TimeoutError:
            raise AssertionError("requests are still running") from None

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 where there is none yet."""
        return self.server.metrics.registry.get_sample_value(f"dspark_{name}", labels or None) or 0.0


def chat_request(text: str = "hello hello hello", **fields: Any) -> dict[str, Any]:
    return {
        "model": "toy",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 20,
        **fields,
    }


def completion_request(prompt: Any = "hello hello", **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}


def parse_sse(raw: bytes) -> list[dict[str, Any]]:
    """The bodies of a stream, byte by byte as the standard and OpenAI frame them."""
    assert raw.endswith(b"\n\n")
    *frames, done = raw[:-2].split(b"\n\n")
    assert done == b"data: [DONE]"
    bodies = []
    for frame in frames:
        assert frame.startswith(b"data: ") and b"\n" not in frame and b"\r" not in frame, frame
        bodies.append(json.loads(frame[6:].decode("utf-8", errors="strict")))
    return bodies


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream of either endpoint."""
    choices = [c for event in events for c in event.get("choices", []) if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Running]:
    config = ServeConfig(**{"model_name": "toy", "drain_s": 5.0, **settings})
    bound, ready = listen("127.0.0.1", 0), threading.Event()
    process = DrainingServer(engine, config, on_ready=lambda url: ready.set())
    thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert ready.wait(20)
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    with httpx.Client(base_url=process.url, headers=headers, timeout=60) as client:
        yield Running(process.url, process, client)
        process.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        assert not process.worker.alive
