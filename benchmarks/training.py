"""What each choice of a training run buys, at equal compute: the same data, the same CPU seconds, one after the other.

    python benchmarks/training.py --data data/*.npz --cache-dir features --cpu-minutes 6 --out runs/choices
    python benchmarks/training.py --data data/*.npz --variants base "rnn:head=rnn" --out runs/heads

A variant is `name:setting=value,...`, settings as in `dspark.train.TrainSettings`. Each run's length in steps is set
from the CPU time of its own first steps, so a dearer variant takes fewer; the learning rate falls to 0 in each. Prints
Markdown: acceptance lengths are of four drafts rolled out in held-out text through the path that serves. Finished
variants are kept in --out and not run again.
"""

import argparse
import ast
import json
import time
from pathlib import Path
from typing import Any

import torch

from dspark.cli.markdown import markdown_table
from dspark.data import hold_out, read_corpus
from dspark.target import load_target
from dspark.train import (
    CacheLimits,
    FeatureStore,
    TrainSettings,
    new_trainer,
    roll_out,
    roll_out_sampled,
    rollout_anchors,
    sampled_anchors,
)

COMMON: dict[str, Any] = {"block_size": 4, "chunk_blocks": 32, "lr": 1.2e-3, "decay": 2.0, "layers": 2, "bf16": True}
CHOICES = (
    "base",
    "no copying heads:copy_heads=False",
    "no sequential head:head='none'",
    "warm start:warm_start=True",
    "16k draft vocabulary:draft_vocab=16384",
    "base, second seed:seed=1",
    "warm start, second seed:warm_start=True,seed=1",
)
_TIMED = 6  # steps that tell what one costs; the first is not counted
_LAST = 0.1  # share of the steps whose agreement is averaged


def parse(variant: str) -> tuple[str, dict[str, Any]]:
    """`name:setting=value,...` -> (name, settings)."""
    name, _, given = variant.partition(":")
    call = ast.parse(f"f({given})", mode="eval").body
    assert isinstance(call, ast.Call)
    return name, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}


class Choices:
    """Target and data, which all variants share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.target = load_target(args.target, torch.device("cpu"))
        corpus = read_corpus(args.data, self.target.spec.vocab_size, self.target.spec.context, self.target.fingerprint)
        self.training, self.held_out = hold_out(corpus, 0.04)
        self.cache = CacheLimits(args.cache_gb * 1e9, args.cache_dir, 20e9)

    def trainer(self, changes: dict[str, Any], steps: int) -> Any:
        values: dict[str, Any] = {"taps": tuple(map(int, self.args.taps.split(","))), **COMMON, **changes}
        return new_trainer(self.target, self.training, TrainSettings(steps=steps, **values), self.cache)

    def run(self, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        trainer = self.trainer(changes, _TIMED)
        for chunk in (c for step in range(_TIMED) for c in trainer.plan.batch(step)):
            _ = trainer.store[chunk.sequence]
        times = []
        for _ in range(_TIMED):
            began = time.process_time()
            next(trainer.run())
            times.append(time.process_time() - began)
        step_s = sorted(times[1:])[len(times[1:]) // 2]
        trainer = self.trainer(changes, max(1, round(60 * self.args.cpu_minutes / step_s)))
        began, agreement = time.process_time(), []
        for report in trainer.run():
            agreement.append(report.agreement)
        last = agreement[-max(1, round(_LAST * len(agreement))) :]
        found = {
            "name": name,
            "changes": changes,
            "weights": sum(t.numel() for t in trainer.weights.values()),
            "blocks": trainer.blocks,
            "cpu_minutes": (time.process_time() - began) / 60,
            "agreement": sum(last) / len(last),
        }
        return found | self.validate(trainer)

    def validate(self, trainer: Any) -> dict[str, float]:
        drafter, blocks = trainer.served("float16"), self.args.validate_blocks
        anchors = rollout_anchors(self.held_out, drafter.config.block_size, blocks, seed=0)
        features = FeatureStore(self.target.decoder, drafter.config.target_layer_ids, self.held_out, 2e9)
        greedy = roll_out(drafter, features, self.held_out, anchors)
        sampled = roll_out_sampled(
            drafter,
            self.target.decoder,
            self.held_out,
            sampled_anchors(self.held_out, drafter.config.block_size, blocks // 2, 0),
        )
        return {
            "al": greedy.acceptance_length(4),
            "slot_1": greedy.slot_acceptance[0],
            "al_t1": sampled.acceptance_length(4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=CHOICES)
    parser.add_argument("--taps", default="8,18,28")
    parser.add_argument("--cpu-minutes", type=float, default=6.0)
    parser.add_argument("--validate-blocks", type=int, default=1200)
    parser.add_argument("--cache-gb", type=float, default=2.0)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    journal = args.out / "choices.jsonl"
    done = {}
    if journal.exists():
        done = {row["name"]: row for row in map(json.loads, journal.read_text().splitlines())}
    choices = Choices(args)
    for name, changes in map(parse, args.variants):
        if name not in done:
            done[name] = choices.run(name, changes)
            with journal.open("a") as file:
                print(json.dumps(done[name]), file=file)
    print(markdown_table(*as_table(list(done.values()))))


def as_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    headers = ["variant", "million weights", "blocks", "CPU minutes", "agreement", "AL, T=0", "slot 1", "AL, T=1"]
    return headers, [
        [
            row["name"],
            f"{row['weights'] / 1e6:.1f}",
            f"{row['blocks']:,}",
            f"{row['cpu_minutes']:.1f}",
            f"{row['agreement']:.3f}",
            f"{row['al']:.3f}",
            f"{row['slot_1']:.1%}",
            f"{row['al_t1']:.3f}",
        ]
        for row in rows
    ]


if __name__ == "__main__":
    main()
