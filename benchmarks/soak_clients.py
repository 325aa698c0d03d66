"""The clients of soak.py, in a process of their own: one JSON command per line in, one JSON result per line out."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MALFORMED = (
    b"",
    b"{",
    b"[1, 2]",
    b'{"model": "soak"}',
    b'{"model": "soak", "messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"model": "soak", "messages": [{"role": "user", "content": "x"}], "best_of": 3}',
    b'{"model": "soak", "messages": [{"role": "king", "content": "x"}]}',
    b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "soak", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "soak", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"-1": 5}}',
    b'{"model": "soak", "messages": [{"role": "user", "content": "x"}], "stop": ["", ""]}',
)


@dataclass
class Load:
    """What the clients do; every choice follows from `seed`."""

    url: str
    seconds: float
    clients: int
    prompts: list[list[int]]
    most_tokens: int
    seed: int = 0
    malformed: float = 0.05
    leaving: float = 0.15


class Client:
    """Asks one thing after the other until the time is up."""

    def __init__(self, load: Load, number: int, http: httpx.AsyncClient, seen: "Counter[str]"):
        self._load, self._http, self._seen = load, http, seen
        self._random = random.Random(f"{load.seed} {number}")

    async def run(self) -> None:
        end = time.monotonic() + self._load.seconds
        while time.monotonic() < end:
            self._seen[await self._ask()] += 1

    async def _ask(self) -> str:
        if self._random.random() < self._load.malformed:
            return await self._send_malformed()
        body = {
            "model": "soak",
            "prompt": self._random.choice(self._load.prompts),
            "max_tokens": self._random.randint(1, self._load.most_tokens),
            "stream": self._random.random() < 0.5,
            **self._random.choice(({"temperature": 0}, {"temperature": 1, "seed": 0})),
        }
        leaves = self._random.random() < self._load.leaving
        try:
            # Whoever leaves does so at some time before, during or after the answer.
            return await asyncio.wait_for(self._complete(body), self._random.random() * 3 if leaves else None)
        except TimeoutError:
            return "left"
        except httpx.HTTPError as error:
            return f"connection failed: {type(error).__name__}"

    async def _complete(self, body: dict[str, Any]) -> str:
        async with self._http.stream("POST", COMPLETIONS, json=body) as response:
            raw = await response.aread()
        if response.status_code == 429:
            await asyncio.sleep(float(response.headers["retry-after"]))
        if response.status_code != 200:
            return str(response.status_code)
        complete = raw.endswith(b"data: [DONE]\n\n") if body["stream"] else raw.endswith(b"}")
        return "answered" if complete and b'"error"' not in raw else "incomplete"

    async def _send_malformed(self) -> str:
        content = self._random.choice(MALFORMED)
        try:
            response = await self._http.post(CHAT, content=content, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            return f"malformed, connection failed: {type(error).__name__}"
        return "malformed, refused" if response.status_code in (400, 404) else f"malformed, {response.status_code}"


async def soak(load: Load) -> dict[str, int]:
    """How often each thing happened."""
    seen: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.clients)
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits) as http:
        await asyncio.gather(*(Client(load, number, http, seen).run() for number in range(load.clients)))
    return dict(seen)


async def burst(url: str, bodies: list[dict[str, Any]]) -> int:
    """All requests at once; the number of bytes received."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        responses = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))
    for response in responses:
        response.raise_for_status()
    return sum(len(response.content) for response in responses)


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "soak":
            result: Any = asyncio.run(soak(Load(**command["with"])))
        else:
            result = asyncio.run(burst(**command["with"]))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
