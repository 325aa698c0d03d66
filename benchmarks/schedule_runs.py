"""What the sections of schedule.py share: engines by mode, pieces of work in turns, and a journal to go on from."""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dspark.config import EngineConfig, SamplingParams, StepRecord
from dspark.engine import Chunk, Engine, Output
from dspark.engine.profiling import load_or_measure
from dspark.engine.proposer import NoneProposer
from dspark.engine.setup import build_proposer
from dspark.errors import DsparkError
from dspark.measure.answers import seeded
from dspark.measure.bench.records import CONTROL, PLAIN
from dspark.measure.bench.workload import Conversation, Questions, built_in, digest_of, from_sources, render
from dspark.measure.paired import Cell
from dspark.schedule.profile import Profile
from dspark.target import Tokenizer, load_target

CONTEXT = 512
GOLDEN = 0.618  # its multiples are spread evenly between whole numbers
SLICE_S = 0.02  # modes take turns of this length, one step at least, within a piece
VOID = 0.03  # a control that differs more makes a run void
RANDOM = " (random drafter)"  # ends the name of a mode that has a drafter of random weights


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass(frozen=True)
class Setting:
    """What the modes of a comparison share."""

    section: str
    drafter: str
    batch: int
    temperature: float = 0.0


class Tally:
    """What decoding steps did, from their records."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("steps", "row_steps", "drafted", "verified", "accepted", "committed"), 0)

    def add(self, record: StepRecord) -> None:
        if any(row.prefill for row in record.rows):
            return
        self.counts["steps"] += 1
        for row in record.rows:
            self.counts["row_steps"] += 1
            for name in ("drafted", "verified", "accepted", "committed"):
                self.counts[name] += getattr(row, name)


class Work:
    """Requests that one engine answers, with pauses. Timed are steps that begin with every place taken: what is left
    of a batch at its end would be another load. The rest is made too, since all answers are compared."""

    def __init__(self, engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]):
        self._engine, self._waiting = engine, list(requests)
        self._running: set[int] = set()
        self._outputs: list[Output] = []
        self._tally, self._seconds, self._tokens = Tally(), 0.0, 0

    @property
    def ended(self) -> bool:
        return not self._waiting and not self._running

    def go_on(self, seconds: float) -> None:
        """Make steps until the time is up or all is answered."""
        end = time.perf_counter() + seconds
        while not self.ended and (began := time.perf_counter()) < end:
            while self._waiting and len(self._running) < self._engine.config.max_batch:
                self._running.add(self._engine.add(*self._waiting.pop(0), on_chunk=self._collect))
            full = len(self._running) == self._engine.config.max_batch
            record = self._engine.step()
            if full and record is not None:
                self._seconds += time.perf_counter() - began
                self._tokens += sum(row.committed for row in record.rows)
                self._tally.add(record)

    def result(self) -> dict[str, Any]:
        outputs = sorted(self._outputs, key=lambda output: output.request_id)
        work = hashlib.sha256(repr([output.token_ids for output in outputs]).encode()).hexdigest()[:12]
        return {"seconds": self._seconds, "tokens": self._tokens, "work": work, "counts": self._tally.counts}

    def _collect(self, chunk: Chunk) -> None:
        if chunk.output:
            self._outputs.append(chunk.output)
            self._running.discard(chunk.output.request_id)


class Bench:
    """One target, drafters by name, and the journal of all pieces."""

    def __init__(self, args: argparse.Namespace, questions: Questions):
        self.args = args
        self._questions, self._digest = questions, digest_of(questions)
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.target = load_target(args.target, torch.device("cpu"))
        self.deadline = time.monotonic() + 60 * args.budget_minutes
        self.left: list[str] = []
        self._costs: dict[str, Profile] = {}
        self._path = self.out / "pieces.jsonl"
        self._pieces: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                if line.endswith("}"):  # a killed run may have left half a line
                    values = json.loads(line)
                    self._pieces[values["key"]] = values

    # Engines ----------------------------------------------------------------------------------------------------

    def config(self, setting: Setting, policy: str, proposer: str = "auto") -> EngineConfig:
        folder = setting.drafter
        if folder == "random":
            from dspark.measure.bench.random_drafter import write_random_drafter

            folder = str(self.out / "random-drafter")
            if not Path(folder, "config.json").exists():
                write_random_drafter(self.target, Path(folder))
        # Rounds repeat their prompts: a prefix cache would leave later rounds nothing to prefill.
        return EngineConfig(
            model=self.args.target,
            drafter=folder,
            proposer=proposer,
            policy=policy,
            prefix_cache=False,
            max_batch=setting.batch,
            context=CONTEXT,
        )

    def engine(self, setting: Setting, mode: str, proposer: str = "auto") -> Engine:
        """Of its own per mode: estimates learnt in one do not reach another, and outlive its requests."""
        if mode.endswith(RANDOM):
            setting, mode = replace(setting, drafter="random"), mode.removesuffix(RANDOM)
        if mode in (PLAIN, CONTROL):
            return Engine(self.target, NoneProposer(), self.config(Setting("", "none", setting.batch), "fixed:1"))
        config = self.config(setting, mode, proposer)
        return Engine(self.target, build_proposer(config, self.target), config, self.costs(setting, proposer))

    def costs(self, setting: Setting, proposer: str = "auto") -> Profile:
        """The profile of the target with this drafter, measured if need be."""
        if setting.drafter not in self._costs:
            config = self.config(setting, "auto", proposer)
            proposer_of = build_proposer(config, self.target)
            self._costs[setting.drafter] = load_or_measure(self.target, proposer_of, config, Engine)
        return self._costs[setting.drafter]

    # Pieces -----------------------------------------------------------------------------------------------------

    def prompts(self, kind: str, first: int, count: int) -> list[list[int]]:
        """Of one kind of text, as far as they leave room for an answer."""
        found = fitting(self.target.tokenizer, in_turn(self._questions, kind), round(1.5 * self.args.answer))
        return [found[(first + i) % len(found)] for i in range(count)]

    def first_prompt(self, kind: str, number: int) -> int:
        """Where a round begins, so that three rounds together see as many different prompts as they can."""
        return number * len(in_turn(self._questions, kind)) // self.args.rounds

    def run(self, setting: Setting, modes: Sequence[str], kinds: Sequence[str], proposer: str = "auto") -> list[Cell]:
        """Cells of every mode on every kind in every round, of --tokens tokens or more. Modes take turns within each
        piece, so that drifts of the machine cancel. Without time left: the cells of rounds that are whole."""
        engines: dict[str, Engine] = {}

        def engine_of(mode: str) -> Engine:
            if mode not in engines:
                engines[mode] = self.engine(setting, mode, proposer)
                self._time_left()
                # A piece that does not count: estimates outlive requests.
                self._in_turns({mode: engines[mode]}, setting, kinds[0], 99, 0)
            return engines[mode]

        cells: list[Cell] = []
        for number in range(self.args.rounds):
            found = []
            try:
                for kind in kinds:
                    found += self._cells(setting, modes, kind, number, engine_of)
            except OutOfTime:
                self.left.append(f"{setting.section}: {setting.drafter}, batch {setting.batch}, "
                                 f"T={setting.temperature:g}, from round {number + 1} on")  # fmt: skip
                break
            cells += found
        return cells

    def _cells(self, setting: Setting, modes: Sequence[str], kind: str, number: int, engine_of: Any) -> Iterator[Cell]:
        done: dict[str, list[dict[str, Any]]] = defaultdict(list)
        piece, first = 0, self.first_prompt(kind, number)
        while sum(values["tokens"] for values in done[modes[0]]) < self.args.tokens:
            keys = {mode: self.key(setting, kind, number, piece, mode) for mode in modes}
            missing = {mode: engine_of(mode) for mode, key in keys.items() if key not in self._pieces}
            self._time_left()
            for mode, values in self._in_turns(missing, setting, kind, piece, first).items():
                self._keep(keys[mode], values)
            for mode, key in keys.items():
                done[mode].append(self._pieces[key])
            piece += 1
        for mode in modes:
            own = done[mode]
            work = hashlib.sha256("".join(values["work"] for values in own).encode()).hexdigest()[:12]
            yield Cell(mode, kind, number, sum(v["seconds"] for v in own), sum(v["tokens"] for v in own), work)

    def counts(self, setting: Setting, kind: str, mode: str) -> dict[str, int]:
        """What the steps of all kept pieces of a mode did together."""
        total: dict[str, int] = defaultdict(int)
        for values in self._pieces.values():
            mine = {**asdict(setting), "kind": kind, "mode": mode}
            if all(values["what"].get(name) == value for name, value in mine.items()):
                for name, count in values["counts"].items():
                    total[name] += count
        return total

    def key(self, setting: Setting, kind: str, number: int, piece: int, mode: str) -> str:
        what = {**asdict(setting), "kind": kind, "round": number, "piece": piece, "mode": mode}
        asked = {"prompts": self._digest, "first": self.first_prompt(kind, number), "answer": self.args.answer}
        return json.dumps({**what, **asked, "threads": torch.get_num_threads()}, sort_keys=True)

    def _in_turns(
        self, engines: dict[str, Engine], setting: Setting, kind: str, piece: int, first: int
    ) -> dict[str, dict[str, Any]]:
        """One piece of work by every mode: its places filled several times over, with answers of different lengths, so
        that no mode's requests begin and end together.

        Modes take turns of a few steps: a machine whose speed wanders within seconds is as fast for all of them.
        """
        count = min(3 * setting.batch, max(40, 2 * setting.batch))
        prompts = self.prompts(kind, first + piece * count, count)
        requests = [
            (ids, replace(params, max_tokens=round(self.args.answer * (0.5 + GOLDEN * i % 1))))
            for i, (ids, params) in enumerate(seeded(prompts, setting.temperature, self.args.answer, piece))
        ]
        works = {mode: Work(engine, requests) for mode, engine in engines.items()}
        order = list(works)
        while any(not work.ended for work in works.values()):
            for mode in order:
                works[mode].go_on(SLICE_S)
            order.append(order.pop(0))
        return {mode: work.result() for mode, work in works.items()}

    def _keep(self, key: str, values: dict[str, Any]) -> None:
        values = {"key": key, "what": json.loads(key), **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self._pieces[key] = values
        what = values["what"]
        where = f"{what['section']} {what['drafter']} batch {what['batch']} T={what['temperature']:g}"
        rate = values["tokens"] / values["seconds"]
        print(f"  {where} {what['kind']} {what['mode']}: {rate:.1f} tok/s", file=sys.stderr, flush=True)

    def _time_left(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def questions_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Questions:
    """The prompts that --prompts and --kinds name; default the built-in ones."""
    parts = [part for kind in args.kinds for part in kind.split("+")]
    try:
        return from_sources([args.prompts], parts) if args.prompts else built_in(parts)
    except DsparkError as problem:
        parser.error(str(problem))


def in_turn(questions: Questions, kind: str) -> list[Conversation]:
    """The prompts of a kind; of several, such as "code+chat", one of each in turn."""
    parts = [questions[part] for part in kind.split("+")]
    return [each for together in zip(*parts, strict=False) for each in together]


def fitting(tokenizer: Tokenizer, prompts: Sequence[Conversation], answer: int) -> list[list[int]]:
    """Rendered prompts, without those that leave no room for an answer of so many tokens."""
    found = [ids for ids in (render(tokenizer, each) for each in prompts) if len(ids) <= CONTEXT - answer]
    if not found:
        raise SystemExit(f"No prompt leaves room for {answer} tokens in a context of {CONTEXT}; give shorter ones.")
    return found


def rounds_of(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.round for cell in cells})


def speed(cells: Sequence[Cell], mode: str, kind: str, rounds: Sequence[int]) -> float:
    """Tokens per second over some rounds."""
    mine = [c for c in cells if c.mode == mode and c.group == kind and c.round in rounds]
    return sum(c.tokens for c in mine) / sum(c.seconds for c in mine)


def against_plain(cells: Sequence[Cell], mode: str, kind: str) -> list[float]:
    """Speed over plain decoding's, round by round. Both plain engines are the baseline: two equal engines differ by a
    percent or two in a round, and so only half of the first one's luck is left."""
    both = [replace(c, mode=PLAIN) if c.mode == CONTROL else c for c in cells]
    return [speed(cells, mode, kind, [number]) / speed(both, PLAIN, kind, [number]) for number in rounds_of(cells)]


def spread(cells: Sequence[Cell], kind: str) -> float:
    """How far the second run of plain decoding is from the first, in the worst round."""
    pairs = [(speed(cells, CONTROL, kind, [n]), speed(cells, PLAIN, kind, [n])) for n in rounds_of(cells)]
    return max(abs(again / plain - 1) for again, plain in pairs)


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}x ({min(values):.3f}-{max(values):.3f})"


def verdict(holds: bool, control: float) -> str:
    return f"void: control {control:.1%} off" if control > VOID else "yes" if holds else "**no**"


def savefig(bench: Bench, name: str, draw: Any) -> None:
    """Draw a picture; says so where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print(f"(no {name}: matplotlib is not installed)\n")
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(bench.out / name, dpi=120)
    print(f"Picture: {bench.out / name}\n")
