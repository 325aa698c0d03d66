"""Does planning pay, is it ever slower, and what does it cost? Paired pieces, a plain-vs-plain control, resumable.

    python benchmarks/schedule.py --drafter runs/first            all sections, hours on two cores
    python benchmarks/schedule.py --sections never-below --batches 1,8 --budget-minutes 60
    python benchmarks/schedule.py --tokens 100 --rounds 1 --kinds code --batches 1    to see that it works
    python benchmarks/schedule.py --prompts FOLDER --kinds gsm8k+math500,mbpp         prompts of files, by file name

Prints Markdown; every piece goes to OUT/pieces.jsonl at once, so a stopped run goes on where it was. A control (plain
decoding against itself) that is more than 3 % off makes a comparison void. Needs an otherwise idle machine.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does

import torch  # noqa: E402
from schedule_runs import (  # noqa: E402
    RANDOM,
    Bench,
    Setting,
    against_plain,
    questions_of,
    rounds_of,
    savefig,
    shown,
    speed,
    spread,
    verdict,
)

from dspark.cli.markdown import markdown_table  # noqa: E402
from dspark.config import EngineConfig, SamplingParams, StepRecord  # noqa: E402
from dspark.engine import Engine  # noqa: E402
from dspark.measure.bench.records import CONTROL, PLAIN  # noqa: E402
from dspark.measure.observe import check_profile, decoding_steps  # noqa: E402
from dspark.measure.paired import Cell, ratio  # noqa: E402

FIXED = ("fixed:1", "fixed:2", "fixed:4", "fixed:8")
CONCURRENCY = (1, 2, 4, 8, 16, 32)
THRESHOLDS = tuple(i / 10 for i in range(10))
SHARED = "speed"  # sections that need the same pieces share them
LOSS = 0.02  # below plain decoding, that is allowed beside the control's spread


def section_policies(bench: Bench) -> None:
    """`auto` against the best fixed length, which is chosen on the other rounds."""
    modes = [PLAIN, *FIXED, "auto", "auto" + RANDOM, CONTROL]  # never-below shares them
    for batch in [b for b in bench.args.batches if b <= 8]:
        cells = bench.run(Setting(SHARED, bench.args.drafter, batch), modes, bench.args.kinds)
        print(f"### Policies, batch {batch}, T=0, drafter {bench.args.drafter}\n")
        if not cells:
            print("No whole round yet.\n")
            continue
        rows = []
        for kind in bench.args.kinds:
            against, chosen = against_best(cells, kind)
            control = spread(cells, kind)
            fixed = [f"{statistics.median(against_plain(cells, mode, kind)):.3f}" for mode in FIXED]
            auto = shown(against_plain(cells, "auto", kind))
            holds = statistics.median(against) >= 1 - control
            rows.append([kind, *fixed, auto, ", ".join(chosen), shown(against), f"{control:.1%}",
                         verdict(holds, control)])  # fmt: skip
        heads = ["text", *FIXED, "auto, against plain", "best fixed, by the other rounds", "auto against it",
                 "control spread", "auto at least equal"]  # fmt: skip
        print(markdown_table(heads, rows) + "\n", flush=True)


def against_best(cells: list[Cell], kind: str) -> tuple[list[float], list[str]]:
    """Per round: speed of `auto` over the fixed length that was fastest on the other rounds, and its name."""
    found, names = [], []
    for number in rounds_of(cells):
        others = [other for other in rounds_of(cells) if other != number] or [number]
        best = max(FIXED, key=lambda mode: speed(cells, mode, kind, others))
        found.append(speed(cells, "auto", kind, [number]) / speed(cells, best, kind, [number]))
        names.append(best)
    return found, list(dict.fromkeys(names))


def section_never_below(bench: Bench) -> None:
    """`auto` against plain decoding, also with a drafter that knows nothing."""
    drafters = {"auto": bench.args.drafter, "auto" + RANDOM: "random"}
    rows = []
    for batch in bench.args.batches:
        for temperature in bench.args.temperatures:
            setting = Setting(SHARED, bench.args.drafter, batch, temperature)
            cells = bench.run(setting, [PLAIN, *drafters, CONTROL], bench.args.kinds)
            for mode, drafter in drafters.items():
                for kind in bench.args.kinds if cells else ():
                    control = spread(cells, kind)
                    against = against_plain(cells, mode, kind)
                    same = "yes" if ratio(cells, mode, PLAIN, kind).same_work else "no"
                    holds = statistics.median(against) >= 1 - max(LOSS, control)
                    rows.append([drafter, str(batch), f"{temperature:g}", kind, shown(against), f"{control:.1%}",
                                 same, verdict(holds, control)])  # fmt: skip
    print("### Never below plain decoding\n")
    heads = ["drafter", "batch", "T", "text", "auto against plain", "control spread", "same text", "not below"]
    print(markdown_table(heads, rows) + "\n", flush=True)


def section_verify_length(bench: Bench) -> None:
    """How many draft tokens `auto` has the target check, as more requests share a pass; all kinds of text at once:
    many requests at once are over before plans have got used to the next kind."""
    rows, lengths, kind = [], {}, "+".join(bench.args.kinds)
    for batch in CONCURRENCY:
        setting = Setting("verify-length", bench.args.drafter, batch)
        if not bench.run(setting, ["auto"], [kind]):
            continue
        total = bench.counts(setting, kind, "auto")
        lengths[batch] = total["verified"] / total["row_steps"]
        rows.append([str(batch), f"{lengths[batch]:.2f}", f"{total['drafted'] / total['row_steps']:.2f}",
                     f"{total['committed'] / total['row_steps']:.2f}"])  # fmt: skip
    print("### Verify length against requests at once, policy auto, T=0\n")
    print(markdown_table(["requests", "verified a step and request", "drafted", "committed"], rows) + "\n")

    def draw(figure) -> None:
        axes = figure.add_subplot()
        axes.plot(list(lengths), list(lengths.values()), marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(lengths), [str(count) for count in lengths])
        axes.set_xlabel("requests at once")
        axes.set_ylabel("draft tokens verified per step and request")
        axes.set_ylim(bottom=0)

    savefig(bench, "verify-length.png", draw)


def section_threshold(bench: Bench) -> None:
    """`threshold:c` with the drafter alone: what a higher threshold saves and loses."""
    print("### Threshold sweep, T=0, drafter alone\n")
    if bench.args.drafter == "none":
        print("A threshold is about a drafter's confidences: give --drafter FOLDER.\n")
        return
    setting = Setting("threshold", bench.args.drafter, 1)
    modes = [f"threshold:{threshold:g}" for threshold in THRESHOLDS]
    if not bench.run(setting, modes, bench.args.kinds, "dspark"):
        print("No whole round yet.\n")
        return
    rows, curves = [], {}
    for kind in bench.args.kinds:
        counts = [bench.counts(setting, kind, mode) for mode in modes]
        per_step = [c["committed"] / c["row_steps"] for c in counts]
        rates = [c["accepted"] / max(1, c["verified"]) for c in counts]
        lost = [100 * (c["verified"] - c["accepted"]) / c["committed"] for c in counts]
        curves[kind] = (per_step, rates, lost)
        for values in zip(THRESHOLDS, per_step, rates, lost, strict=True):
            rows.append([kind, f"{values[0]:g}", f"{values[1]:.2f}", f"{values[2]:.1%}", f"{values[3]:.1f}"])
    heads = ["text", "threshold", "tokens a step", "acceptance rate", "rejected tokens per 100 committed"]
    print(markdown_table(heads, rows) + "\n")

    def draw(figure) -> None:
        titles = ("tokens a step", "acceptance rate", "rejected per 100 committed")
        for place, title in enumerate(titles):
            axes = figure.add_subplot(1, 3, place + 1)
            for kind, values in curves.items():
                axes.plot(THRESHOLDS, values[place], marker=".", label=kind)
            axes.set_title(title, fontsize="small")
            axes.set_xlabel("threshold")
        axes.legend(fontsize="small")

    savefig(bench, "threshold.png", draw)


class PlannerClock:
    """Milliseconds that an engine's scheduler takes in the steps that read no prompt: for plans, for looking up n-grams
    meanwhile, and for learning from the step."""

    def __init__(self, engine: Engine):
        self.spent = dict.fromkeys(("plan", "lookup", "learn"), 0.0)
        self.steps, self._step = 0.0, dict(self.spent)
        scheduler, proposer = engine.loop.scheduler, engine.proposer
        for name, part in (("draft_lens", "plan"), ("verify_lens", "plan"), ("observe", "learn")):
            setattr(scheduler, name, self._timed(getattr(scheduler, name), part))
        proposer.lookup.offers = self._timed(proposer.lookup.offers, "lookup")
        engine.listeners.append(self._finish)

    def _timed(self, call, name: str):
        def timed(*args):
            began = time.perf_counter()
            result = call(*args)
            self._step[name] += (time.perf_counter() - began) * 1e3
            return result

        return timed

    def _finish(self, record: StepRecord) -> None:
        if not any(row.prefill for row in record.rows):
            self._step["plan"] -= self._step["lookup"]
            self.spent = {part: ms + self._step[part] for part, ms in self.spent.items()}
            self.steps += record.times.step_ms
        self._step = dict.fromkeys(self._step, 0.0)


def section_profile_error(bench: Bench) -> None:
    """Predicted against measured step times on prompts the profile has not seen, and the planner's share of them."""
    rows = []
    for batch in bench.args.batches:
        setting = Setting("profile-error", bench.args.drafter, batch)
        costs = bench.costs(setting)
        for temperature in bench.args.temperatures:
            if time.monotonic() > bench.deadline:
                bench.left.append(f"profile-error: batch {batch}, T={temperature:g}")
                continue
            engine = bench.engine(setting, "scheduled")
            clock = PlannerClock(engine)
            params = SamplingParams(temperature=temperature, max_tokens=bench.args.answer, seed=0, ignore_eos=True)
            prompts = [ids for i in range(batch)
                       for ids in bench.prompts(bench.args.kinds[i % len(bench.args.kinds)], i + 7, 1)]  # fmt: skip
            steps = decoding_steps(engine, prompts, params)
            check = check_profile(costs, steps, temperature > 0, "dspark")
            rows.append([str(batch), f"{temperature:g}", str(check.steps), f"{check.error:.1%}", f"{check.factor:.2f}",
                         f"{check.shape_error:.1%}", *(f"{ms / clock.steps:.2%}" for ms in clock.spent.values()),
                         f"{clock.steps / len(steps):.1f}"])  # fmt: skip
    print("### Profile and planner, policy scheduled\n")
    heads = ["batch", "T", "steps", "median error", "measured over predicted", "error without that", "planning",
             "looking up", "learning", "step ms"]  # fmt: skip
    print(markdown_table(heads, rows) + "\n", flush=True)


SECTIONS = {
    "policies": section_policies,
    "never-below": section_never_below,
    "verify-length": section_verify_length,
    "threshold": section_threshold,
    "profile-error": section_profile_error,
}


def _list_of(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=list(SECTIONS), type=_list_of(str), help="comma-separated")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="auto", help="auto, none, random, or a drafter folder")
    parser.add_argument("--tokens", type=int, default=1500, help="of a cell, at least")
    parser.add_argument(
        "--answer", type=int, default=96, help="tokens of an answer: half to one and a half times as many at most"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", help="file or folder of prompts, in place of the built-in ones")
    parser.add_argument(
        "--kinds", default=["code", "math", "chat"], type=_list_of(str), help="of prompts; a+b takes them in turn"
    )
    parser.add_argument("--batches", default=[1, 8, 32], type=_list_of(int))
    parser.add_argument("--temperatures", default=[0.0, 1.0], type=_list_of(float))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--budget-minutes", type=float, default=1e6, help="stops after a piece, and says what is left")
    parser.add_argument("--out", type=Path, default=Path("runs/schedule"))
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; known are {', '.join(SECTIONS)}")
    EngineConfig(model=args.target, drafter="auto" if args.drafter == "random" else args.drafter)  # refuses early
    if args.threads:
        torch.set_num_threads(args.threads)
    bench = Bench(args, questions_of(args, parser))
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {load:.2f} at the start, ", end="")
    print(f"{time.strftime('%Y-%m-%d')}, cells of {args.tokens} tokens or more, {args.rounds} rounds\n", flush=True)
    for name in args.sections:
        SECTIONS[name](bench)
    if bench.left:
        print("Left for another run with the same --out:\n\n" + "\n".join(f"- {line}" for line in bench.left))


if __name__ == "__main__":
    main()
