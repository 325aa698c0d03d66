"""What policies make of texts that are known: differences of half a percent in a minute, not in hours of timed runs.

    python benchmarks/schedule_replay.py                          collects the texts once, then replays them
    python benchmarks/schedule_replay.py --policies fixed:4,auto --draft 0.26 --noise 0.14
    python benchmarks/schedule_replay.py --prompts FOLDER --kinds gsm8k+math500,mbpp

One request at a time, T=0. Collected are the answers to the built-in prompts or those of files, and the drafter's
draft at every position of them; replayed are the engine's own scheduler, guard and lookup, with steps that take what
--steps and --draft say, noise aside. What decisions themselves take is not in it, nor how the machine changes: a change
that wins here has to win in `schedule.py` too.
"""

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from schedule_runs import CONTEXT, GOLDEN, fitting, in_turn, questions_of

from dspark.cli.markdown import markdown_table
from dspark.config import Draft, EngineConfig, RowRecord, SamplingParams, StepRecord, StepTimes, Streams
from dspark.engine import Engine
from dspark.engine.auto_proposer import AutoProposer
from dspark.engine.batcher import Row
from dspark.engine.guard import Guard
from dspark.engine.lookup import LookupProposer
from dspark.engine.profiling import load_or_measure
from dspark.engine.proposer import Outlook, Proposer, StatelessProposer
from dspark.engine.request import Request
from dspark.engine.scheduler import Scheduler
from dspark.engine.setup import build_proposer, find_table
from dspark.engine.text import TextStream
from dspark.measure import WORKLOADS
from dspark.measure.bench.workload import Conversation, digest_of
from dspark.schedule import MAX_DRAFT, CostCurves, Offer
from dspark.schedule.parse import is_adaptive, parse_policy
from dspark.target import Target, load_target

# SmolLM2 on two cores of a Zen 5 EPYC, of a plain step; above 8 draft tokens by what its profile said.
STEPS = "1,1.10,1.155,1.175,1.25,1.30,1.41,1.42,1.50,1.57,1.66,1.72,1.78,1.84,1.90,1.95,2.0"
PLAIN_MS = 16.0
ANSWER = 144  # tokens of a collected answer


class EveryPosition:
    """A scheduler that has a whole block drafted in every step and none of it verified, and keeps the drafts."""

    def __init__(self, proposer: Proposer):
        self.most = proposer.most
        self.drafts: dict[int, dict[int, tuple[list[int], list[float]]]] = {}  # by request and output tokens before
        self._rows: list[Row] = []

    def draft_lens(self, rows: Sequence[Row]) -> list[int]:
        self._rows = [row for row in rows if row.samples]
        for row in self._rows:
            row.source = "dspark"
        return [self.most if row.request.output_ids else 0 for row in self._rows]

    def verify_lens(self, draft: Draft) -> tuple[int, ...]:
        for i, row in enumerate(self._rows):
            if draft.lens[i]:
                stated = [] if draft.confidence is None else draft.confidence[i].tolist()
                mine = self.drafts.setdefault(row.request.id, {})
                mine[len(row.request.output_ids)] = (draft.ids[i].tolist(), stated)
        return (0,) * len(draft.lens)

    def observe(self, record: StepRecord) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


def collect(
    target: Target, config: EngineConfig, questions: Mapping[str, Sequence[Conversation]]
) -> dict[str, list[dict[str, Any]]]:
    """By kind of text: prompt, answer, and the drafts along it."""
    texts = {}
    for kind, prompts in questions.items():
        engine = Engine.over(target, config)
        scheduler = EveryPosition(engine.loop.proposer)
        engine.loop.scheduler = scheduler  # type: ignore[assignment]
        ids = fitting(target.tokenizer, prompts, ANSWER)
        outputs = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=ANSWER))
        texts[kind] = [
            {"prompt": o.prompt_ids, "output": o.token_ids, "drafts": scheduler.drafts.get(o.request_id, {})}
            for o in outputs
        ]
    return texts


class Remembered(StatelessProposer):
    """The drafter, by what it drafted when the texts were collected."""

    name = "dspark"

    def __init__(self, neural: Proposer):
        self.most, self.calibration = neural.most, neural.calibration
        self.text: dict[str, Any] = {}  # that is being replayed

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        return (Offer(self.name, outlook.survival(self.name, self.most), True, True, outlook.draft_cost),)

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        ids, stated = self.text["drafts"][str(len(rows[0].request.output_ids))]
        n = min(lens[0], self.most)
        return Draft(torch.tensor([ids[:n]]), (n,), None, torch.tensor([stated[:n]]), (self.name,))


class Replay:
    """One policy's way through the texts, and what it took."""

    def __init__(self, policy: str, proposer: AutoProposer, costs: CostCurves, target: Target, args: Any, seed: int):
        guard = Guard() if is_adaptive(policy) else None
        self._scheduler = Scheduler(parse_policy(policy, costs), proposer, costs, proposer.calibration, guard)
        self._proposer, self._target, self._args = proposer, target, args
        self._random, self._steps = random.Random(seed), 0

    def answer(self, number: int, text: dict[str, Any]) -> tuple[int, float]:
        """(tokens, plain steps that they took) of one request."""
        params = SamplingParams(temperature=0.0)
        limit = min(len(text["output"]), round(96 * (0.5 + GOLDEN * number % 1)))
        prompt, output = list(text["prompt"]), text["output"][:limit]
        stream = TextStream(self._target.tokenizer)
        request = Request(self._steps, prompt, params, len(prompt) + limit, frozenset(), stream, key=0, coupled=False)
        request.output_ids.append(output[0])  # it comes with the prompt's pass
        self._proposer.neural.text = text  # type: ignore[attr-defined]
        took = 0.0
        while request.remaining:
            took += self._step(request, output)
        self._proposer.release(request)
        self._scheduler.release(request)
        return limit - 1, took

    def _step(self, request: Request, output: Sequence[int]) -> float:
        row = Row(request, request.output_ids[-1:], samples=True, prefill=False, max_draft=MAX_DRAFT)
        request.kv_len = request.num_tokens - 1
        draft = self._proposer.propose([row], self._scheduler.draft_lens([row]), Streams((False,), (0,), (0,), (0,)))
        (verified,) = self._scheduler.verify_lens(draft)
        guessed = draft.ids[0, :verified].tolist() if verified else []
        rest = output[len(request.output_ids) :]
        right = [guess == token for guess, token in zip(guessed, rest, strict=False)]
        accepted = right.index(False) if False in right else len(right)
        committed = rest[: accepted + 1]
        request.output_ids += committed
        source = draft.sources[0] if draft.lens[0] else "none"
        target, drafting = self._args.steps[min(verified, len(self._args.steps) - 1)], 0.0
        if source == self._proposer.neural.name:
            drafting = self._args.draft
        self._steps += 1
        kept = tuple(slot < accepted for slot in range(verified))
        truncated = accepted + 1 - len(committed)
        done = RowRecord(request.id, source, draft.lens[0], verified, accepted, len(committed), truncated, 0, kept)
        times = StepTimes(self._noisy(drafting), self._noisy(target), 0.0)
        self._proposer.observe(row, None, len(committed))
        self._scheduler.observe(StepRecord(self._steps, 1 + verified, request.kv_len, times, (done,)))
        return target + drafting

    def _noisy(self, plain_steps: float) -> float:
        return PLAIN_MS * plain_steps * min(2.0, math.exp(self._random.gauss(0, self._args.noise)))


def speeds(texts: dict[str, list[dict[str, Any]]], replays: Sequence[Replay]) -> dict[str, float]:
    """Speed over plain decoding by kind of text, geometric mean over the replays."""
    found = {}
    for kind, mine in texts.items():
        logs = []
        for replay in replays:
            answers = [replay.answer(i, text) for i, text in enumerate(mine) if len(text["output"]) > 1]
            logs.append(math.log(sum(tokens for tokens, _ in answers) / sum(took for _, took in answers)))
        found[kind] = math.exp(sum(logs) / len(logs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--policies", default="fixed:1,fixed:2,fixed:4,fixed:8,auto")
    parser.add_argument("--steps", default=STEPS, help="time of a step with 0, 1, ... draft tokens; the last for more")
    parser.add_argument("--draft", type=float, default=0.29, help="time of the drafter's pass, in plain steps")
    parser.add_argument("--noise", type=float, default=0.18, help="of the logarithm of a step's time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", help="file or folder of prompts, in place of the built-in ones")
    parser.add_argument("--kinds", default=",".join(WORKLOADS), help="of prompts; a+b takes them in turn")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), help="a new one for another drafter")
    args = parser.parse_args()
    args.steps, args.kinds = [float(step) for step in args.steps.split(",")], args.kinds.split(",")
    every = questions_of(args, parser)
    questions = {kind: in_turn(every, kind) for kind in args.kinds}
    target = load_target(args.target, torch.device("cpu"))
    config = EngineConfig(model=args.target, context=CONTEXT, prefix_cache=False)
    path = args.out / f"{target.name}-{digest_of(questions)}.json"
    if not path.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        collected = collect(target, replace(config, max_batch=8, proposer="dspark"), questions)
        path.write_text(json.dumps(collected), encoding="utf-8")
    texts = json.loads(path.read_text(encoding="utf-8"))
    proposer = build_proposer(config, target)
    if not isinstance(proposer, AutoProposer):
        parser.error(f"there is no drafter for {args.target}")
    costs = CostCurves(load_or_measure(target, proposer, config, Engine))
    table, neural, rows = find_table(config, target), proposer.neural, []
    for policy in args.policies.split(","):
        seeds = range(args.seeds if is_adaptive(policy) else 1)
        proposers = [AutoProposer(LookupProposer(table), Remembered(neural)) for _ in seeds]
        found = speeds(
            texts, [Replay(policy, own, costs, target, args, seed) for seed, own in zip(seeds, proposers, strict=True)]
        )
        rows.append([policy, *(f"{speed:.3f}" for speed in found.values())])
    print(markdown_table(["policy", *texts], rows))


if __name__ == "__main__":
    main()
