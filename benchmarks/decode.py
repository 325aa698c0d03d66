"""Speed, memory and start-up of decoding SmolLM2-135M: paired runs, a plain-vs-plain control, hashes of the answers.

    python benchmarks/decode.py                   all sections, about 35 minutes on two cores
    python benchmarks/decode.py --sections lookup --prompts 2 --rounds 1

Prints Markdown; every cell goes to --cells as JSON lines. Needs an otherwise idle machine and the `transformers` extra
for section plain.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does

import torch  # noqa: E402

from dspark.config import EngineConfig, SamplingParams  # noqa: E402
from dspark.engine import Engine  # noqa: E402
from dspark.engine.lookup import LookupProposer  # noqa: E402
from dspark.engine.proposer import NoneProposer  # noqa: E402
from dspark.engine.tables import find_table  # noqa: E402
from dspark.measure.bench.records import CONTROL  # noqa: E402
from dspark.measure.paired import Cell, Mode, median_speed, ratio, run_paired  # noqa: E402
from dspark.measure.workloads import COPY, WORKLOADS  # noqa: E402
from dspark.target import load_target  # noqa: E402

CPU = torch.device("cpu")
TEXTS = {**WORKLOADS, "copy": COPY}
_STARTUP = """
import time; began = time.perf_counter()
import dspark
engine = dspark.Engine.from_pretrained("smollm2", proposer="lookup")
print(time.perf_counter() - began)
"""
_MEMORY = """
import re
import dspark
engine = dspark.Engine.from_pretrained("smollm2", proposer="lookup", kv_gb=1.0)
prompt = engine.target.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 300)[:1792]
output = engine.generate([prompt], dspark.SamplingParams(temperature=0, max_tokens=256, ignore_eos=True))[0]
assert len(output.prompt_ids) + len(output.token_ids) == 2048
# Not ru_maxrss, which starts at what the parent process had.
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024 / 1e9)
"""


class Bench:
    """Loads what the sections share, and keeps their cells."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.params = SamplingParams(temperature=0, max_tokens=args.tokens)
        self.targets = {name: load_target("smollm2", CPU, exact=name == "exact") for name in ("fast", "exact")}
        self.cells_file = args.cells.open("a", encoding="utf-8")

    def prompts(self, *kinds: str) -> dict[str, list[list[int]]]:
        tokenizer = self.targets["fast"].tokenizer
        return {
            kind: [
                tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
                for text in TEXTS[kind][: self.args.prompts]
            ]
            for kind in kinds
        }

    def mode(
        self, name: str, target: str = "fast", lookup: bool = False, table: bool = False, at_once: int = 1
    ) -> Mode:
        # Rounds repeat their prompts: a cache would leave later rounds nothing to prefill.
        config = EngineConfig(policy="fixed:4", max_batch=at_once, prefix_cache=False)
        found = find_table(config, self.targets[target]) if table else None
        proposer = LookupProposer(found) if lookup else NoneProposer()
        engine = Engine(self.targets[target], proposer, config)
        if at_once > 1:
            return Mode(name, lambda prompts: [o.token_ids for o in engine.generate(prompts, self.params)])
        return Mode(name, lambda prompts: [engine.generate([p], self.params)[0].token_ids for p in prompts])

    def run(self, modes: list[Mode], groups: dict[str, list[list[int]]]) -> list[Cell]:
        cells = []
        for cell in run_paired(modes, groups, self.args.rounds):
            cells.append(cell)
            print(json.dumps(asdict(cell)), file=self.cells_file, flush=True)
            print(f"  {cell.group} {cell.mode}: {cell.tok_per_s:.1f} tok/s", file=sys.stderr, flush=True)
        return cells


def table(cells: list[Cell], modes: list[str], baseline: str, groups: list[str]) -> None:
    columns = [*groups, *(["all"] if len(groups) > 1 else [])]
    print(f"| mode | tok/s | {' | '.join(f'{c}, against {baseline}' for c in columns)} |")
    print(f"| --- | --- |{' --- |' * len(columns)}")
    for mode in modes:
        ratios = [ratio(cells, mode, baseline, None if c == "all" else c) for c in columns]
        print(f"| {mode} | {median_speed(cells, mode):.1f} | {' | '.join(map(str, ratios))} |")
    print(flush=True)


def section_plain(bench: Bench) -> None:
    """One stream, no drafts, against transformers' generate in float32 on the same weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.targets["fast"].folder, dtype=torch.float32).eval()

    def generate(prompts):
        answers = []
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=bench.args.tokens, do_sample=False, pad_token_id=2
            )
            answers.append(out[0, len(prompt) :].tolist())
        return answers

    modes = [Mode("transformers", generate), bench.mode("plain, fast"), bench.mode("plain, exact", "exact")]
    modes.append(bench.mode("plain, fast, again"))
    groups = {kind: prompts[:1] for kind, prompts in bench.prompts("code", "math", "chat").items()}
    cells = bench.run(modes, {"one prompt a kind": [p for group in groups.values() for p in group]})
    print("### One stream, plain\n")
    table(cells, [m.name for m in modes], "transformers", ["one prompt a kind"])
    table(cells, [m.name for m in modes[1:]], "plain, fast", ["one prompt a kind"])


def section_batch(bench: Bench) -> None:
    """Eight requests at once against one after the other."""
    prompts = [p for group in bench.prompts("code", "math", "chat").values() for p in group]
    prompts = (prompts * 8)[:8]
    modes = [bench.mode("one by one"), bench.mode("8 at once", at_once=8)]
    modes.append(bench.mode("8 at once, exact", "exact", at_once=8))
    cells = bench.run(modes, {"mixed": prompts})
    print("### Eight requests\n")
    table(cells, [m.name for m in modes], "one by one", ["mixed"])


def section_lookup(bench: Bench) -> None:
    """Lookup with fixed:4 against plain, by kind of text: the request's own text, the shipped table after it."""
    modes = [bench.mode("plain"), bench.mode("own text", lookup=True)]
    modes.append(bench.mode("own text, then table", lookup=True, table=True))
    modes.append(bench.mode(CONTROL))
    if not bench.args.fast_only:
        modes.append(bench.mode("own text, then table, exact", "exact", lookup=True, table=True))
    groups = bench.prompts(*bench.args.kinds.split(","))
    cells = bench.run(modes, groups)
    print("### Lookup, fixed:4, one stream\n")
    usual = [kind for kind in groups if kind != "copy"]
    for kinds in filter(None, (usual, [kind for kind in groups if kind == "copy"])):
        table([c for c in cells if c.group in kinds], [m.name for m in modes], "plain", kinds)


def section_host(bench: Bench) -> None:
    """How much of a step is spent outside model passes, at batch 1."""
    print("### Host work, one stream\n\n| mode | draft ms | verify ms | host ms | outside the target's pass |")
    print("| --- | --- | --- | --- | --- |")
    prompts = [group[0] for group in bench.prompts("code", "math", "chat").values()]
    for name, proposer in (("plain", NoneProposer()), ("lookup", LookupProposer())):
        engine = Engine(bench.targets["fast"], proposer, EngineConfig(prefix_cache=False))
        times = []
        engine.listeners.append(lambda r, times=times: times.append(r.times) if not r.rows[0].prefill else None)
        engine.generate(prompts[0], bench.params)
        times.clear()
        for prompt in prompts:
            engine.generate([prompt], bench.params)
        parts = [statistics.median(getattr(t, f"{part}_ms") for t in times) for part in ("draft", "verify", "host")]
        share = (parts[0] + parts[2]) / sum(parts)
        print(f"| {name} | {parts[0]:.2f} | {parts[1]:.2f} | {parts[2]:.2f} | {share:.1%} |")
    print(flush=True)


def section_fresh(bench: Bench) -> None:
    """Start-up from a warm cache and peak memory, each in processes of their own."""

    def measure(script: str) -> list[float]:
        runs = [
            subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in "123"
        ]
        return [float(run.stdout) for run in runs]

    startup, memory = measure(_STARTUP), measure(_MEMORY)
    print("### Fresh process, median of three\n\n| figure | value | runs |\n| --- | --- | --- |")
    print(f"| import and load from a warm cache | {statistics.median(startup):.2f} s | {_list(startup)} s |")
    print(f"| peak memory, batch 1, 2,048 tokens of KV | {statistics.median(memory):.2f} GB | {_list(memory)} GB |\n")


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.2f}" for v in values)


SECTIONS = {
    "fresh": section_fresh,
    "host": section_host,
    "plain": section_plain,
    "batch": section_batch,
    "lookup": section_lookup,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--prompts", type=int, default=3, help="prompts a kind")
    parser.add_argument("--kinds", default="code,math,chat,copy", help="kinds of text of section lookup")
    parser.add_argument("--fast-only", action="store_true", help="leave exact mode out of section lookup")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", type=Path, default=Path("runs/decode-cells.jsonl"))
    args = parser.parse_args()
    args.cells.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {load:.2f} at the start, "
          f"{time.strftime('%Y-%m-%d')}, up to {args.tokens} tokens, {args.rounds} rounds\n", flush=True)  # fmt: skip
    for name in args.sections.split(","):
        SECTIONS[name](bench)


if __name__ == "__main__":
    main()
