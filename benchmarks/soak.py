"""Many clients against one server: does anything leak, does any answer change, what does serving cost?

    python benchmarks/soak.py [--model smollm2] [--seconds 300] [--clients 32] [--rounds 5] > soak.md

Random lengths, random disconnects, 5 % malformed requests. Afterwards the cache must be empty and memory as before;
every answer, also those cut short, is compared with plain decoding of the same prompt alone, and differences that are
not ties make the script exit 1. Then eight requests at once, through the server and straight through its engine in
turns: the difference is the server's overhead. The clients run in a process of their own.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does

from dspark.config import SamplingParams  # noqa: E402
from dspark.engine import Engine  # noqa: E402
from dspark.measure import WORKLOADS, Difference, differences  # noqa: E402
from dspark.measure.paired import Mode, median_speed, ratio, run_paired  # noqa: E402
from dspark.serve import ServeConfig  # noqa: E402
from dspark.serve.run import DrainingServer, listen  # noqa: E402
from dspark.serve.worker import Event, Ticket  # noqa: E402

CLIENTS = Path(__file__).with_name("soak_clients.py")
MEMORY_TOLERANCE_BYTES = 48e6  # growth over the second half that is not called a leak
Ids = tuple[int, ...]


@dataclass
class Answers:
    """What the engine said to each prompt, complete or cut short, as the server's events tell it."""

    found: dict[tuple[Ids, float, int | None], set[Ids]] = field(default_factory=dict)  # by prompt, temperature, seed
    latest: dict[Ids, Ids] = field(default_factory=dict)

    def observe(self, ticket: Ticket, event: Event) -> None:
        output = event.chunk.output if event.chunk else None
        if output is None:
            return
        params = ticket.jobs[event.index].params
        self.found.setdefault((output.prompt_ids, params.temperature, params.seed), set()).add(output.token_ids)
        self.latest[output.prompt_ids] = output.token_ids


class Fleet:
    """The process of the clients."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CLIENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, what: str, **values: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"do": what, "with": values}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=10)


@contextmanager
def serving(engine: Engine) -> Iterator[DrainingServer]:
    """A server on a free port of this machine, on a thread."""
    ready = threading.Event()
    server = DrainingServer(engine, ServeConfig(model_name="soak"), on_ready=lambda url: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listen("127.0.0.1", 0)]})
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Footprint:
    """What a leak would make grow."""

    memory_bytes: int
    files: int
    threads: int
    kv_slots: int
    requests: int

    @classmethod
    def of(cls, engine: Engine) -> "Footprint":
        status = Path("/proc/self/status").read_text()
        memory = re.search(r"VmRSS:\s+(\d+)", status)
        assert memory
        used = engine.loop.batcher.slots.capacity - engine.loop.batcher.free_slots
        files = len(os.listdir("/proc/self/fd"))
        return cls(int(memory[1]) * 1024, files, threading.active_count(), used, engine.num_requests)


@dataclass
class Soak:
    """The findings of one soak."""

    seconds: float
    seen: dict[str, int]
    start: Footprint
    half: Footprint
    end: Footprint
    compared: int
    different: list[Difference]

    def faults(self) -> list[str]:
        """What must not be; empty when all is well."""
        wrong = [f"{what}: {count}" for what, count in self.seen.items() if what not in EXPECTED]
        if not self.seen.get("answered"):
            wrong.append("nothing was answered")
        for name in ("kv_slots", "requests"):
            if getattr(self.end, name):
                wrong.append(f"{name} left: {getattr(self.end, name)}")
        for name in ("files", "threads"):
            if getattr(self.end, name) > getattr(self.start, name):
                wrong.append(f"{name}: {getattr(self.start, name)} at the start, {getattr(self.end, name)} at the end")
        if self.end.memory_bytes - self.half.memory_bytes > MEMORY_TOLERANCE_BYTES:
            wrong.append(f"memory grew from {_mb(self.half.memory_bytes)} to {_mb(self.end.memory_bytes)}")
        wrong += [f"prompt {d.prompt}, token {d.position}: gap {d.gap:.2g}" for d in self.different if not d.is_tie]
        return wrong


EXPECTED = ("answered", "left", "429", "malformed, refused")


def soak(engine: Engine, fleet: Fleet, prompts: Sequence[Sequence[int]], **load: Any) -> Soak:
    """Let the clients loose in two halves, then look at what is left and compare every answer."""
    answers, seen = Answers(), {}
    with serving(engine) as server:
        server.worker.observers.append(answers.observe)
        common = {"url": server.url, "prompts": [list(p) for p in prompts], **load, "seconds": load["seconds"] / 2}
        fleet.do("soak", **(common | {"seconds": min(5.0, load["seconds"] / 4)}))  # what is made once is made now
        marks = [_settled(server)]
        for half in range(2):
            for what, count in fleet.do("soak", **common, seed=half).items():
                seen[what] = seen.get(what, 0) + count
            marks.append(_settled(server))
    compared, different = compare(engine, answers)
    return Soak(load["seconds"], seen, *marks, compared, different)


def _settled(server: DrainingServer) -> Footprint:
    """After the last request has ended and its connection was closed."""
    worker = server.worker
    asyncio.run_coroutine_threadsafe(worker.wait_until_idle(), worker.loop).result(60)
    time.sleep(1.0)  # connections that clients have dropped are closed by now
    return Footprint.of(worker.engine)


def compare(engine: Engine, answers: Answers) -> tuple[int, list[Difference]]:
    """Every answer against plain decoding of its prompt alone; how many there were, and where they part."""
    plain = engine.without_drafts()
    compared, found = 0, []
    for (prompt, temperature, seed), variants in answers.found.items():
        longest = max(map(len, variants))
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max(longest, 1))
        serial = plain.generate([prompt], params)[0].token_ids
        for ids in sorted(variants):
            compared += 1
            if ids != serial[: len(ids)]:
                found += differences(engine.target, [prompt], [serial[: len(ids)]], [ids], params)
    return compared, found


def overhead(engine: Engine, fleet: Fleet, prompts: Sequence[Sequence[int]], tokens: int, rounds: int) -> str:
    """A table: eight requests at once, straight through the engine and through the server, in turns."""
    params, answers = SamplingParams(temperature=0, max_tokens=tokens), Answers()

    def through(stream: bool) -> Mode:
        def run(batch: Sequence[Sequence[int]]) -> list[Ids]:
            body = {"model": "soak", "temperature": 0, "max_tokens": tokens, "stream": stream}
            fleet.do("burst", url=server.url, bodies=[body | {"prompt": list(p)} for p in batch])
            return [answers.latest[tuple(p)] for p in batch]

        return Mode("served, streamed" if stream else "served, whole", run)

    with serving(engine) as server:
        server.worker.observers.append(answers.observe)
        # The server's thread leaves the engine alone while there are no requests.
        direct = [
            Mode(name, lambda batch: [o.token_ids for o in engine.generate(list(batch), params)])
            for name in ("engine alone", "engine alone, again")
        ]
        modes = [direct[0], through(False), through(True), direct[1]]
        cells = list(run_paired(modes, {"mixed": prompts}, rounds))
    lines = ["| mode | tok/s | against the engine alone |", "| --- | --- | --- |"]
    for mode in modes:
        lines.append(
            f"| {mode.name} | {median_speed(cells, mode.name):.1f} | {ratio(cells, mode.name, modes[0].name)} |"
        )
    return "\n".join(lines)


def report(result: Soak) -> str:
    ties = sum(d.is_tie for d in result.different)
    rows = {
        "requests": ", ".join(f"{count} {what}" for what, count in sorted(result.seen.items())),
        "answers compared with plain decoding alone": f"{result.compared}, {ties} part at a tie, "
        f"{len(result.different) - ties} otherwise",
        "cache slots in use at the end": str(result.end.kv_slots),
        "memory at the start, after half the time, at the end": ", ".join(
            _mb(mark.memory_bytes) for mark in (result.start, result.half, result.end)
        ),
        "open files; threads": "; ".join(
            f"{getattr(result.start, name)} at the start, {getattr(result.end, name)} at the end"
            for name in ("files", "threads")
        ),
    }
    lines = [f"| {result.seconds:g} s | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows.items())]
    return "\n".join(lines)


def _mb(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--proposer", default="auto")
    parser.add_argument("--policy", default="fixed:4")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--rounds", type=int, default=5, help="of the overhead, 0 for none")
    parser.add_argument("--kv-gb", type=float, default=0.5)
    args = parser.parse_args()
    settings = {"proposer": args.proposer, "policy": args.policy, "kv_gb": args.kv_gb}
    engine = Engine.from_pretrained(args.model, **settings)
    questions = [text for kind in ("code", "math", "chat") for text in WORKLOADS[kind]]
    prompts = [engine.chat_ids([{"role": "user", "content": text}]) for text in questions]
    fleet = Fleet()
    result = soak(engine, fleet, prompts, seconds=args.seconds, clients=args.clients, most_tokens=args.tokens)
    print(report(result) + "\n", flush=True)
    if args.rounds:
        # No prompt is known from the round before.
        fresh = Engine(engine.target, engine.proposer, replace(engine.config, max_batch=8, prefix_cache=False))
        print(overhead(fresh, fleet, prompts[::7][:8], args.tokens, args.rounds), flush=True)
    fleet.close()
    for fault in result.faults():
        print(f"\nFAULT: {fault}", flush=True)
    sys.exit(bool(result.faults()))


if __name__ == "__main__":
    main()
