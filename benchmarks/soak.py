"""Many clients against one server: does anything leak, does any answer change, what does serving cost?

    python benchmarks/soak.py [--model smollm2] [--seconds 300] [--clients 32] [--rounds 5] > soak.md

Random lengths, random disconnects, 5 % malformed requests. Afterwards the cache must be empty and memory as before;
every answer, also those cut short, is compared with plain decoding of the same prompt alone, and differences that are
not ties make the script exit 1. Then eight requests at once, through the server and straight through its engine in
turns: the difference is the server's overhead, that of the clients included, which run in a process of their own.
Standard output is one page of Markdown; progress goes to standard error. With SmolLM2 on two cores it takes about
three times --seconds.
"""

import argparse
import asyncio
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does

import torch  # noqa: E402

from dspark.cli.markdown import markdown_table  # noqa: E402
from dspark.config import SamplingParams  # noqa: E402
from dspark.engine import Engine  # noqa: E402
from dspark.measure import WORKLOADS, Difference, differences  # noqa: E402
from dspark.measure.paired import Cell, Mode, median_speed, ratio, run_paired  # noqa: E402
from dspark.serve import ServeConfig  # noqa: E402
from dspark.serve.run import DrainingServer, listen  # noqa: E402
from dspark.serve.worker import Event, Ticket  # noqa: E402
from dspark.target import KvPool  # noqa: E402

CLIENTS = Path(__file__).with_name("soak_clients.py")
MALFORMED, LEAVING = 0.05, 0.15  # shares of the requests
OVERHEAD_LIMIT, BATCH = 0.05, 8
MEMORY_TOLERANCE_BYTES = 48e6  # growth over the second half that is not called a leak
Ids = tuple[int, ...]


@dataclass
class Answers:
    """What the engine said to each prompt, complete or cut short, as the server's events tell it."""

    found: dict[tuple[Ids, float, int | None], set[Ids]] = field(default_factory=dict)  # by prompt, temperature, seed
    stopped: set[tuple[tuple[Ids, float, int | None], Ids]] = field(default_factory=set)  # by themselves
    wrong_length: int = 0  # said to be as long as asked for, and are not
    latest: dict[Ids, Ids] = field(default_factory=dict)

    def observe(self, ticket: Ticket, event: Event) -> None:
        output = event.chunk.output if event.chunk else None
        if output is None:
            return
        params = ticket.jobs[event.index].params
        asked = (output.prompt_ids, params.temperature, params.seed)
        self.found.setdefault(asked, set()).add(output.token_ids)
        if output.finish_reason == "stop":
            self.stopped.add((asked, output.token_ids))
        elif output.finish_reason == "length":
            self.wrong_length += len(output.token_ids) != params.max_tokens
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
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The clients' process has ended; what it printed above says why.")
        return json.loads(line)

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
    wrong_length: int = 0

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
        if self.wrong_length:
            wrong.append(f"answers that ended for their length at another: {self.wrong_length}")
        if self.end.memory_bytes - self.half.memory_bytes > MEMORY_TOLERANCE_BYTES:
            wrong.append(f"memory grew from {_mb(self.half.memory_bytes)} to {_mb(self.end.memory_bytes)}")
        wrong += [f"prompt {d.prompt}, token {d.position}: gap {d.gap:.2g}" for d in self.different if not d.is_tie]
        return wrong


EXPECTED = ("answered", "left", "429", "malformed, refused")


def soak(engine: Engine, fleet: Fleet, prompts: Sequence[Sequence[int]], **load: Any) -> Soak:
    """Let the clients loose in two halves, then look at what is left and compare every answer."""
    answers, seen = Answers(), {}
    _touch_caches()
    with serving(engine) as server:
        server.worker.observers.append(answers.observe)
        common = {"url": server.url, "prompts": [list(p) for p in prompts], **load, "seconds": load["seconds"] / 2}
        fleet.do("soak", **(common | {"seconds": min(5.0, load["seconds"] / 4)}))  # what is made once is made now
        marks = [_settled(server)]
        for half in range(2):
            for what, count in fleet.do("soak", **common, seed=half).items():
                seen[what] = seen.get(what, 0) + count
            marks.append(_settled(server))
            _say(f"half {half + 1} of 2: {seen}")
    _say(f"comparing the answers to {len(answers.found)} requests")
    compared, different = compare(engine, answers, prompts)
    return Soak(load["seconds"], seen, *marks, compared, different, answers.wrong_length)


def _touch_caches() -> None:
    """Use every page of the empty caches, so that filling them later is no growth of memory."""
    for pool in [thing for thing in gc.get_objects() if type(thing) is KvPool]:
        for cache in pool.caches:
            cache.zero_()


def _settled(server: DrainingServer) -> Footprint:
    """After the last request has ended and its connection was closed."""
    worker = server.worker
    asyncio.run_coroutine_threadsafe(worker.wait_until_idle(), worker.loop).result(60)
    time.sleep(1.0)  # connections that clients have dropped are closed by now
    return Footprint.of(worker.engine)


def compare(engine: Engine, answers: Answers, prompts: Sequence[Sequence[int]] = ()) -> tuple[int, list[Difference]]:
    """Every answer against plain decoding of its prompt alone; how many there were, and where they part.

    An answer that stopped by itself must be all that plain decoding says; others must be how that begins.
    """
    plain = engine.without_drafts()
    compared, found = 0, []
    numbers = {tuple(prompt): number for number, prompt in enumerate(prompts)}
    for asked, variants in answers.found.items():
        prompt, temperature, seed = asked
        longest = max(map(len, variants))
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max(longest, 1))
        serial = plain.generate([prompt], params)[0].token_ids
        for ids in sorted(variants):
            compared += 1
            right = serial if (asked, ids) in answers.stopped else serial[: len(ids)]
            if ids != right:
                parted = differences(engine.target, [prompt], [right], [ids], params)
                found += [replace(one, prompt=numbers.get(prompt, -1)) for one in parted]
    return compared, found


DIRECT, WHOLE, STREAMED, CONTROL = "engine alone", "served, whole", "served, streamed", "engine alone, again"


def overhead(engine: Engine, fleet: Fleet, prompts: Sequence[Sequence[int]], tokens: int, rounds: int) -> list[Cell]:
    """All prompts at once, straight through the engine and through the server, in turns."""
    params, answers = SamplingParams(temperature=0, max_tokens=tokens), Answers()

    def through(stream: bool) -> Mode:
        def run(batch: Sequence[Sequence[int]]) -> list[Ids]:
            body = {"model": "soak", "temperature": 0, "max_tokens": tokens, "stream": stream}
            fleet.do("burst", url=server.url, bodies=[body | {"prompt": list(p)} for p in batch])
            return [answers.latest[tuple(p)] for p in batch]

        return Mode(STREAMED if stream else WHOLE, run)

    with serving(engine) as server:
        server.worker.observers.append(answers.observe)
        # The server's thread leaves the engine alone while there are no requests.
        direct = [
            Mode(name, lambda batch: [o.token_ids for o in engine.generate(list(batch), params)])
            for name in (DIRECT, CONTROL)
        ]
        return list(run_paired([direct[0], through(False), through(True), direct[1]], {"mixed": prompts}, rounds))


def overhead_report(cells: Sequence[Cell]) -> str:
    """Speeds, and what the server costs: both ways, against the mean of the engine alone and its control."""
    rows = [
        [name, f"{median_speed(cells, name):.1f}", str(ratio(cells, name, DIRECT))]
        for name in (DIRECT, WHOLE, STREAMED, CONTROL)
    ]
    # Against the mean of the engine alone and its control, which stand on both sides of the served modes.
    costs = {name: median(_costs(cells, name)) for name in (WHOLE, STREAMED)}
    # A server that is faster than its engine is noise, like a control that differs.
    noise = max(abs(1 - ratio(cells, CONTROL, DIRECT).median), -min(costs.values()))
    if noise >= OVERHEAD_LIMIT:
        verdict = f"cannot be judged here, since equal work differs by {100 * noise:.1f} %"
    else:
        verdict = f"is {'held' if max(costs.values()) < OVERHEAD_LIMIT else 'missed'}"
    return (
        markdown_table(["mode", "tok/s", "against the engine alone"], rows)
        + f"\n\nThe server costs {100 * costs[WHOLE]:.1f} % of the engine's throughput for whole answers and "
        f"{100 * costs[STREAMED]:.1f} % for streamed ones, clients included; the limit of {100 * OVERHEAD_LIMIT:.0f} % "
        f"{verdict}."
    )


def _costs(cells: Sequence[Cell], mode: str) -> list[float]:
    """Share of the engine's own throughput that is missing, round by round."""
    speed = {(cell.mode, cell.round): cell.tok_per_s for cell in cells}
    rounds = {cell.round for cell in cells}
    return [1 - 2 * speed[mode, n] / (speed[DIRECT, n] + speed[CONTROL, n]) for n in rounds]


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
    page = markdown_table([f"{result.seconds:g} s", ""], rows.items())
    if ties:
        rows = [
            [str(d.prompt), str(d.position), f"{d.gap:.2g}", f"{d.noise:.2g}"] for d in result.different if d.is_tie
        ]
        page += "\n\n" + markdown_table(["tie in prompt", "at token", "gap of the two scores", "kernel noise"], rows)
    return page


def heading(engine: Engine, clients: int, tokens: int, given: Sequence[str]) -> str:
    """What is run, and where."""
    config, load = engine.config, os.getloadavg()[0]
    return (
        f"```bash\n{shlex.join(['python', 'benchmarks/soak.py', *given])}\n```\n\n"
        f"{config.model}, proposer {engine.proposer.name}, policy {config.policy}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, load {load:.2f} at the start, {time.strftime('%Y-%m-%d')}. "
        f"{clients} clients, answers of 1 to {tokens} tokens, {100 * MALFORMED:g} % of the requests malformed, "
        f"{100 * LEAVING:g} % left at a random moment of their first 3 s."
    )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


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
    print(heading(engine, args.clients, args.tokens, sys.argv[1:]) + "\n", flush=True)
    load = {"seconds": args.seconds, "clients": args.clients, "most_tokens": args.tokens}
    result = soak(engine, fleet, prompts, **load, malformed=MALFORMED, leaving=LEAVING)
    print(report(result) + "\n", flush=True)
    if args.rounds:
        # No prompt is known from the round before.
        fresh = Engine.over(engine.target, replace(engine.config, max_batch=BATCH, prefix_cache=False))
        _say("overhead")
        print(overhead_report(overhead(fresh, fleet, prompts[::7][:BATCH], args.tokens, args.rounds)), flush=True)
    fleet.close()
    for fault in result.faults():
        print(f"\nFAULT: {fault}", flush=True)
    if not result.faults():
        print("\nNo fault: nothing failed, nothing leaked, and every text is the right one, up to the ties listed.")
    sys.exit(bool(result.faults()))


if __name__ == "__main__":
    main()
