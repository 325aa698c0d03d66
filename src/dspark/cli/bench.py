"""`dspark bench`: modes and baselines side by side, with a control, a proof and a report."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import measuring, options
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dspark.measure.bench.records import BenchResult, Cell, Settings
    from dspark.measure.bench.runner import Turn
    from dspark.measure.bench.session import Request
    from dspark.measure.bench.workload import Questions

SUSTAINED = 0.9  # of the requests a second that plain sustains, for --rate auto
COMPARE_FILE = "compare.html"


@dataclass(frozen=True)
class Defaults:
    """What a run does where the command line does not say."""

    modes: str
    kinds: str
    temperatures: str
    concurrency: str
    baselines: str
    max_tokens: int
    min_tokens: int
    limit: int | None


FULL = Defaults("lookup/fixed:4,dspark/fixed:4,auto/auto", "code,math,chat", "0,1", "1,4,16", "auto", 256, 1500, None)
QUICK = Defaults("lookup/fixed:4,auto/auto", "code,chat", "0", "1", "none", 64, 256, 4)


def bench(
    target: measuring.Target = "smollm2",
    modes: Annotated[
        str | None,
        typer.Option(
            help="What to compare with plain: PROPOSER or PROPOSER/POLICY, or another engine; commas between."
        ),
    ] = None,
    baselines: Annotated[
        str | None, typer.Option(help="Other engines: auto (those installed), none, or names with commas between.")
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="Kinds of text: code, math, chat, writing, extraction, translation, or your own.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Your prompts: a JSONL file, a folder of them, or hf:owner/name; default built in."),
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help="Sampling temperatures; 0 is greedy.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests kept running, with commas between.")] = None,
    depths: Annotated[
        str, typer.Option(help="Pad prompts with other text to so many tokens; 0 leaves them as they are.")
    ] = "0",
    rate: Annotated[
        str | None,
        typer.Option(
            help="Also open loop: arrivals a second, or auto (0.9 of what plain sustains at the largest concurrency)."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Tokens that every mode answers with in a cell.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts of a kind.")] = None,
    rounds: Annotated[int, typer.Option(help="How often everything is repeated; quartiles need 3 or more.")] = 3,
    seed: measuring.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the results and of what a stopped run goes on from; default runs/bench."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, with the same settings.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A first look in under three minutes.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Run nothing; show how the second result differs from the first.")
    ] = None,
    drafter: options.Drafter = "auto",
    random_drafter: Annotated[
        bool, typer.Option("--random-drafter", help="Also dspark-random/auto: what a hopeless drafter costs.")
    ] = False,
    acceptance: Annotated[str, typer.Option(help="Acceptance rule: auto (coupled), coupled or rejection.")] = "auto",
    profile: options.Profile = "auto",
    exact: options.Exact = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Measure decoding modes and other engines side by side, on the same prompts, in turns.

    Plain decoding always runs, twice: the second time shows the noise. Answers are compared with plain's. Writes
    bench.json, bench.html and bench.md to --out; Ctrl-C keeps what is done, --resume goes on.

    Modes: lookup/fixed:4, dspark/auto, auto/auto, model:PATH, dspark-random/auto (random weights); other engines:
    transformers, transformers-lookup, transformers-assisted:PATH, llama.cpp, llama.cpp-lookup, vllm, openai:URL.

    Examples:

    \b
    dspark bench --quick
    dspark bench --kinds code,chat --temperatures 0 --concurrency 1,8 --modes lookup/fixed:4,auto/auto --limit 6
    dspark bench --prompts eval --limit 10 --baselines transformers,llama.cpp --out runs/eval
    dspark bench --kinds code --concurrency 16 --rate auto --out runs/arrivals
    dspark bench --compare runs/before/bench.json runs/after/bench.json
    """
    if compare is not None:
        _compare(*compare, out)
        return
    out = out or Path("runs") / "bench"
    usual = QUICK if quick else FULL
    least_1 = {"--max-tokens": max_tokens, "--min-tokens": min_tokens, "--limit": limit, "--rounds": rounds}
    for name, value in {**least_1, "--threads": threads}.items():
        measuring.check_range(name, value, 1)
    measuring.check_range("--seed", seed, 0)
    measuring.check_folder("--out", out)
    rates, share = _rates(rate)
    questions = _questions(prompts, kinds, usual, limit or usual.limit)
    from dspark.measure.bench.records import Settings
    from dspark.measure.bench.workload import digest_of

    settings = Settings(
        target=target,
        modes=(),
        kinds=tuple(questions),
        temperatures=_temperatures(temperatures or usual.temperatures),
        concurrencies=_wholes("--concurrency", concurrency or usual.concurrency, 1),
        depths=_wholes("--depths", depths, 0),
        rates=rates,
        rate_share=share,
        max_tokens=max_tokens or usual.max_tokens,
        min_tokens=min_tokens or usual.min_tokens,
        limit=limit or usual.limit,
        rounds=rounds,
        seed=seed,
        drafter=drafter,
        dtype=dtype,
        device=device,
        exact=exact,
        acceptance=acceptance,
        threads=threads,
        prompts=", ".join(prompts) if prompts else "built in",
        prompts_digest=digest_of(questions),
    )
    request = _request(settings, questions, modes, baselines, usual, random_drafter, out, resume, profile)
    result = _run(request)
    _report(result, out)
    if not result.complete:
        raise typer.Exit(130)


def _request(
    settings: "Settings",
    questions: "Questions",
    modes: str | None,
    baselines: str | None,
    usual: Defaults,
    random_drafter: bool,
    out: Path,
    resume: bool,
    profile: str,
) -> "Request":
    """Modes that nobody named are optional."""
    from dspark.measure.bench.modes import BASELINES, parse_modes
    from dspark.measure.bench.session import Request

    ours = measuring.names(modes if modes is not None else usual.modes)
    wanted = baselines if baselines is not None else usual.baselines
    others = BASELINES if wanted == "auto" else () if wanted == "none" else measuring.names(wanted)
    if random_drafter:
        ours = (*ours, "dspark-random/auto")
    return Request(
        settings=settings,
        modes=tuple(parse_modes([*ours, *others])),
        optional=frozenset((*(ours if modes is None else ()), *(others if wanted == "auto" else ()))),
        questions=questions,
        out=out,
        resume=resume,
        profile=profile,
        command=_command(),
    )


def _questions(prompts: list[str] | None, kinds: str | None, usual: Defaults, limit: int | None) -> "Questions":
    from dspark.measure.bench.workload import built_in, from_sources

    named = None if kinds is None else measuring.names(kinds)
    if prompts:
        return from_sources(prompts, named, limit)
    return built_in(named or measuring.names(usual.kinds), limit)


def _temperatures(text: str) -> tuple[float, ...]:
    found = measuring.numbers("--temperatures", text)
    for value in found:
        if not 0 <= value < float("inf"):
            raise SettingsError(f"--temperatures is {text!r}; allowed is 0 (greedy) or more.")
    return tuple(dict.fromkeys(found))


def _wholes(name: str, text: str, least: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) >= least for part in parts):
        raise SettingsError(f"{name} is {text!r}; give whole numbers of {least} or more with commas between.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _rates(text: str | None) -> tuple[tuple[float, ...], float | None]:
    """Arrival rates, and the share of what plain sustains where that is asked for."""
    if text is None:
        return (), None
    parts = measuring.names(text)
    found = measuring.numbers("--rate", ",".join(part for part in parts if part != "auto") or "1")
    if not all(0 < value < float("inf") for value in found):
        raise SettingsError(f"--rate is {text!r}; give arrivals a second above 0 with commas between, or auto.")
    return (found if any(part != "auto" for part in parts) else ()), (SUSTAINED if "auto" in parts else None)


class _Watcher:
    """Shows a run on a bar, or line by line where there is no terminal."""

    def __init__(self, bar: "Progress", task: "TaskID", say: Callable[[str], None], terminal: bool):
        self._bar, self._task, self._say, self._terminal = bar, task, say, terminal
        self._cells = 0

    def planned(self, cells: int) -> None:
        self._cells += cells
        self._bar.update(self._task, total=self._cells)

    def begins(self, turn: "Turn") -> None:
        self._bar.update(self._task, description=f"round {turn.round + 1}: {turn.group}, {turn.mode}")

    def ended(self, cell: "Cell") -> None:
        self._bar.advance(self._task)
        if not self._terminal:
            self._say(f"round {cell.round + 1}: {cell.group}, {cell.mode}: {cell.tok_per_s:.1f} tok/s")

    def says(self, sentence: str) -> None:
        self._say(sentence)


def _run(request: "Request") -> "BenchResult":
    from dspark.cli.show import err
    from dspark.measure.bench.session import run_bench

    def say(sentence: str) -> None:
        err.print(sentence, markup=False)

    with measuring.progress() as bar:
        task = bar.add_task("starting", total=None)
        return run_bench(request, _Watcher(bar, task, say, err.is_terminal))


def _report(result: "BenchResult", out: Path) -> None:
    from dspark.cli.show import err
    from dspark.cli.show import out as stdout
    from dspark.measure.bench.report import markdown, write_report

    if not result.cells:
        err.print("Nothing was finished, so there is no report.")
        return
    files = write_report(result, out)
    stdout.print(markdown(result), markup=False)
    if not result.complete:
        err.print("Stopped early: the report holds what was done; the same command with --resume goes on.")
    err.print(f"Wrote {', '.join(map(str, files))}.", markup=False)


def _compare(before: Path, after: Path, folder: Path | None) -> None:
    """A table on standard output; with `folder` also a page in it."""
    from dspark.cli.show import err, out
    from dspark.measure.bench.records import BenchResult
    from dspark.measure.bench.report import write_text
    from dspark.measure.bench.report_compare import compare

    found = compare(BenchResult.read(before), BenchResult.read(after))
    out.print(found.markdown(), markup=False)
    if folder is not None:
        write_text(folder / COMPARE_FILE, found.page(_command()))
        err.print(f"Wrote {folder / COMPARE_FILE}.", markup=False)


def _command() -> str:
    return shlex.join(["dspark", *sys.argv[1:]])
