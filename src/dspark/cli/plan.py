"""`dspark plan`: what drafting brings on this machine, and why it may not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.profile import Measured, TargetName, open_measured
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.config import SamplingParams
    from dspark.measure.plan import PlanRow, Survival

LOOKUP_SLOTS = 8  # drafted by proposers without a block of their own
_MEASURED_TOKENS = 64
_SHOWN_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16)  # as many as fit a line


def plan(
    target: TargetName = "smollm2",
    drafter: options.Drafter = "auto",
    proposer: options.Proposer = "auto",
    acceptance: Annotated[
        str | None, typer.Option(help="Chance of each draft slot, given all before it are kept, such as 0.6,0.5,0.4.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="The same chance for every slot.")] = None,
    from_file: Annotated[Path | None, typer.Option("--from", help="Counts of dspark acceptance --json.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas between.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(help="Cached positions of each request.")] = 512,
    temperature: options.Temperature = 0.0,
    measure: Annotated[bool, typer.Option("--measure", help="Also decode a little at every concurrency.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    profile: Annotated[Path | None, typer.Option(help="A profile.json measured with these settings.")] = None,
    exact: options.Exact = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Expected speed-up against requests at once and draft length, from measured costs and acceptance.

    Without --acceptance, --alpha or --from, acceptance is measured on a few prompts of three kinds. Latency per token
    is given by two models: time of a step over tokens kept, and the simpler one that adds drafting to the longer of
    verifying and correcting; --measure puts the measured one beside them.

    Examples:

    \b
    dspark plan
    dspark plan --drafter runs/first --plot plan.png
    dspark plan --alpha 0.6 --concurrency 1,8,64 --context 2000
    """
    counts = _counts(concurrency)
    _check_one_of(acceptance, alpha, from_file)
    if context < 0:
        raise SettingsError(f"--context is {context}; allowed is 0 or more.")
    given = _given(acceptance, alpha, from_file, temperature)  # before the slow part
    measured = open_measured(target, drafter, proposer, exact, device, dtype, threads, path=profile)
    survival, kinds = given or _observed(measured, temperature)
    if alpha is not None and measured.costs.block:
        from dspark.measure.plan import Survival

        survival = Survival.constant(alpha, measured.costs.block)
    from dspark.measure.advice import advice
    from dspark.measure.plan import plan as work_out

    sampled = temperature > 0
    rows = work_out(measured.costs, survival, counts, context, sampled)
    said = advice(measured.costs, survival, rows, context, kinds, sampled)
    latencies = _latencies(measured, rows, temperature) if measure else {}
    if plot is not None:
        from dspark.measure.plan_plot import plot_plan

        plot_plan(rows, f"{measured.stored.target_name} with {measured.stored.drafter_name}", plot)
    if as_json:
        typer.echo(json.dumps(_as_data(measured, survival, kinds, rows, said, latencies), indent=1))
    else:
        _show(survival, rows, said, latencies)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise SettingsError(
            f"--concurrency is {text!r}; give whole numbers above 0 with commas between, such as 1,4,16."
        )
    return sorted({int(part) for part in parts})


def _check_one_of(acceptance: str | None, alpha: float | None, from_file: Path | None) -> None:
    given = {"--acceptance": acceptance, "--alpha": alpha, "--from": from_file}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SettingsError(f"{' and '.join(names)} are given; leave all but one out.")


def _given(
    acceptance: str | None, alpha: float | None, from_file: Path | None, temperature: float
) -> "tuple[Survival, dict[str, Survival]] | None":
    """The acceptance the command line states, None when it is to be measured."""
    from dspark.measure.plan import Survival

    if from_file is not None:
        from dspark.measure.observe import read_survival

        return read_survival(from_file, temperature)
    if acceptance is not None:
        try:
            return Survival.of_slots([float(part) for part in acceptance.split(",")]), {}
        except ValueError:
            raise SettingsError(f"--acceptance is {acceptance!r}; give shares with commas, such as 0.6,0.5.") from None
    return None if alpha is None else (Survival.constant(alpha, LOOKUP_SLOTS), {})


def _params(temperature: float) -> "SamplingParams":
    from dspark.config import SamplingParams

    return SamplingParams(temperature=temperature, max_tokens=_MEASURED_TOKENS, seed=0 if temperature else None)


def _observed(measured: Measured, temperature: float) -> "tuple[Survival, dict[str, Survival]]":
    """Decode a few prompts and count."""
    from dspark.cli.show import err
    from dspark.measure.observe import measure_survival

    slots = measured.costs.block or LOOKUP_SLOTS
    err.print("Measuring acceptance on a few prompts of code, math and chat.")
    found, kinds = measure_survival(measured.engine(f"fixed:{slots}", 2), slots, _params(temperature))
    if found is None:
        raise SettingsError(
            f"The proposer {measured.proposer.name} drafted nothing on these prompts; state an acceptance with --alpha."
        )
    return found, kinds


def _latencies(measured: Measured, rows: "Sequence[PlanRow]", temperature: float) -> dict[int, float | None]:
    """Measured ms per token at each concurrency, with the best block, or one token where none pays; None where that
    many requests never decoded together."""
    from dspark.measure.observe import measured_latency_ms

    params = replace(_params(temperature), ignore_eos=True)
    return {
        row.concurrency: measured_latency_ms(
            measured.engine(f"fixed:{row.best or 1}", row.concurrency), row.concurrency, params
        )
        for row in rows
    }


def _as_data(
    measured: Measured,
    survival: "Survival",
    kinds: "Mapping[str, Survival]",
    rows: "Sequence[PlanRow]",
    said: Sequence[str],
    latencies: Mapping[int, float | None],
) -> dict[str, object]:
    return {
        "target": measured.stored.target_name,
        "drafter": measured.stored.drafter_name,
        "survival": asdict(survival),
        "kinds": {name: asdict(own) for name, own in kinds.items()},
        "rows": [{**asdict(row), "measured_ms": latencies.get(row.concurrency)} for row in rows],
        "advice": list(said),
    }


def _show(
    survival: "Survival", rows: "Sequence[PlanRow]", said: Sequence[str], latencies: Mapping[int, float | None]
) -> None:
    from rich.table import Table

    from dspark.cli.show import out

    slots = " ".join(f"{share:.0%}" for share in survival.slots)
    looked_up = f", of which {1 - survival.passes:.0%} are looked up" if survival.passes < 1 else ""
    out.print(f"Drafts kept up to slot 1, 2, ...: {slots}; {survival.coverage:.0%} of steps have a draft{looked_up}.")
    out.print("Expected speed-up over plain decoding, by drafted tokens, and the acceptance above which drafts pay:")
    blocks = [k for k in range(1, len(survival.slots) + 1) if len(survival.slots) <= 8 or k in _SHOWN_BLOCKS]
    table = Table("requests", *map(str, blocks), "best", "pays above", box=None, pad_edge=False)
    for row in rows:
        needed = "never" if row.break_even is None else f"{row.break_even:.0%}"
        best = f"{row.best}: {row.best_speedup:.2f}x" if row.best else "plain"
        table.add_row(str(row.concurrency), *(f"{row.speedup[k - 1]:.2f}" for k in blocks), best, needed)
    out.print(table)
    out.print("Where the time of a step goes, at the best length:")
    table = Table("requests", "drafter", "weights", "attention", "host", "most", box=None, pad_edge=False)
    for row in rows:
        parts = (row.parts.draft, row.parts.weights, row.parts.attention, row.parts.host)
        table.add_row(str(row.concurrency), *(f"{ms / row.parts.total:.0%}" for ms in parts), row.parts.dominant)
    out.print(table)
    heads = ("requests", "plain ms", "step over kept", "draft + max(verify, correct)", "measured")
    table = Table(*(heads if latencies else heads[:-1]), box=None, pad_edge=False)
    for row in rows:
        cells = [f"{row.plain_ms:.1f}", f"{row.ours_ms:.1f}", f"{row.article_ms:.1f}"]
        if latencies:
            found = latencies[row.concurrency]
            cells.append("-" if found is None else f"{found:.1f}")
        table.add_row(str(row.concurrency), *cells)
    out.print("Milliseconds per token of one request:")
    out.print(table)
    if never := [str(count) for count, found in latencies.items() if found is None]:
        out.print(
            f"Not measured with {', '.join(never)} requests: so many never decoded together here; "
            "the cache holds fewer, or the first ended before the last began."
        )
    for sentence in said or ["Drafting pays at every concurrency asked for."]:
        out.print(sentence, markup=False)
