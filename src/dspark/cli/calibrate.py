"""`dspark calibrate`: from what a drafter says about its drafts to how often they are kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import measuring, options
from dspark.errors import DataError, DsparkError, SettingsError

if TYPE_CHECKING:
    from dspark.engine import Engine
    from dspark.measure.answers import Decoding, Ids
    from dspark.measure.calibrate import CalibrationPlan, Cell

DIAGRAM = "reliability.png"


def calibrate(
    drafter: Annotated[Path, typer.Option(help="The drafter's folder.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Packed token files; their held-out prompts are used.")
    ] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSONL files of prompts, or folders of them.")] = None,
    target: measuring.Target = "smollm2",
    temperatures: measuring.Temperatures = "0,0.7,1",
    rules: measuring.Rules = "rejection,coupled",
    blocks: Annotated[int, typer.Option(help="Blocks to fit on, and as many again to report on.")] = 5000,
    max_tokens: options.MaxTokens = 256,
    held_out: Annotated[float, typer.Option(help="Share of --data that training held out; 1 takes all of it.")] = 0.04,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default is the drafter's.")] = None,
    seed: measuring.Seed = 0,
    batch: measuring.Batch = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    threads: options.Threads = None,
) -> None:
    """Fit a drafter's confidences to how often its drafts are kept.

    The drafter drafts whole blocks for prompts it was not trained on. Half of the prompts are fitted, the other half
    says how well that holds. Writes calibration.json beside the drafter, and reliability.png where matplotlib is
    installed.

    Examples:

    \b
    dspark calibrate --drafter runs/first --data data/*.npz
    dspark calibrate --drafter runs/first --prompts prompts.jsonl --temperatures 0,1 --rules rejection
    """
    if bool(data) == bool(prompts):
        raise SettingsError("Give prompts as --data or as --prompts, one of the two.")
    measuring.check_range("--blocks", blocks, 1)
    measuring.check_range("--max-tokens", max_tokens, 1)
    measuring.check_range("--seed", seed, 0)
    if not 0 < held_out <= 1:
        raise SettingsError(f"--held-out is {held_out}; allowed is above 0 and up to 1.")
    measuring.check_folder("--out", out or drafter)
    values, names = measuring.numbers("--temperatures", temperatures), measuring.names(rules)
    from dspark.drafter import DrafterConfig
    from dspark.measure.calibrate import CalibrationPlan
    from dspark.schedule.policy import MAX_DRAFT

    block_size = min(DrafterConfig.load(drafter).block_size, MAX_DRAFT)
    plan = CalibrationPlan(block_size, names, values, blocks, max_tokens, seed)
    engine = options.load_engine(
        model=target,
        drafter=str(drafter),
        proposer="dspark",
        device=device,
        dtype=dtype,
        kv_gb=kv_gb,
        threads=threads,
        max_batch=batch,
    )
    ids = _held_out_prompts(engine, data, held_out) if data else _chat_prompts(engine, prompts or [])
    _write(engine, drafter, out or drafter, plan, _run(engine, measuring.with_room(engine, ids, max_tokens), plan))


def _chat_prompts(engine: "Engine", paths: list[Path]) -> "list[Ids]":
    from dspark.measure.prompts import prompt_sets

    return [ids for each in prompt_sets(paths).values() for ids in measuring.chat_ids(engine, each)]


def _held_out_prompts(engine: "Engine", files: list[Path], share: float) -> "list[Ids]":
    from dspark.cli.show import err
    from dspark.data import hold_out, read_corpus

    target = engine.target
    corpus = read_corpus(files, target.spec.vocab_size, target.spec.context, target.fingerprint)
    for note in corpus.notes:
        err.print(note)
    held = hold_out(corpus, share)[1]
    if not len(held):
        raise DataError(
            f"A share of {share:g} holds no prompt out of {len(corpus)}; raise --held-out or use --prompts."
        )
    return [held.sequence(i)[: held.prompt_lens[i]].tolist() for i in range(len(held))]


def _run(engine: "Engine", prompts: "list[Ids]", plan: "CalibrationPlan") -> "list[Cell]":
    from dspark.cli.measuring import progress
    from dspark.cli.show import err
    from dspark.measure.answers import sibling
    from dspark.measure.calibrate import Collected
    from dspark.measure.calibrate import calibrate as run

    def engine_for(decoding: "Decoding") -> "Engine":
        return sibling(engine, acceptance=decoding.rule, policy=f"fixed:{plan.block_size}")

    cells: list[Cell] = []
    with progress() as bar:
        task = bar.add_task("", total=2 * plan.blocks)
        for event in run(engine_for, prompts, plan):
            if isinstance(event, Collected):
                bar.update(task, completed=event.blocks, description=str(event.decoding))
                continue
            cells.append(event)
            fewest = min(event.stored.fitted_blocks, event.stored.reported_blocks)
            if fewest < plan.blocks:
                err.print(
                    f"{event.decoding}: the prompts gave {fewest} of {plan.blocks} blocks; more prompts make it surer."
                )
    return cells


def _write(engine: "Engine", drafter: Path, out: Path, plan: "CalibrationPlan", cells: "list[Cell]") -> None:
    from dspark.artifacts import StoredCalibration, kept_cells, weights_digest, write_calibration
    from dspark.cli.show import err

    settings = {
        "blocks": plan.blocks,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "policy": f"fixed:{plan.block_size}",
    }
    digest, target = weights_digest(drafter), engine.target.fingerprint
    stored = tuple(cell.stored for cell in cells)
    kept = kept_cells(out, digest, target, stored)
    path = write_calibration(out, StoredCalibration(digest, target, stored + kept, settings))
    for cell in cells:
        _show(cell)
    before = f"; {len(kept)} of the cells there were measured before and stay" if kept else ""
    err.print(f"Written to {path}{before}.")
    try:
        _draw(cells, out / DIAGRAM)
    except (DsparkError, OSError) as error:
        err.print(f"No diagram was drawn: {error}", markup=False)


def _show(cell: "Cell") -> None:
    from dspark.cli.markdown import markdown_table, percent
    from dspark.cli.show import out

    stored, figures = cell.stored, cell.stored.report
    out.print(
        f"\n### {cell.decoding}\n\nFitted on {stored.fitted_blocks} blocks, reported on {stored.reported_blocks} of "
        f"other prompts; used: {stored.form}.\n"
    )
    names = ("survival", "ece_raw", "ece_sts", "ece_platt", "ece", "chance_ece", "auc_raw", "auc")
    headers = ("slot", "kept so far", "ECE raw", "STS", "Platt", "used", "by chance", "AUC raw", "used", "T", "bias")
    rows = [
        (
            str(slot + 1),
            *(percent(figures[name][slot]) for name in names),
            f"{stored.temperatures[slot]:.2f}",
            f"{stored.biases[slot]:+.2f}",
        )
        for slot in range(len(stored.temperatures))
    ]
    out.print(markdown_table(headers, rows), markup=False)


def _draw(cells: "list[Cell]", path: Path) -> None:
    from dspark.measure.plots import reliability_diagram
    from dspark.schedule.calibration import survival

    panels = {}
    for cell in cells:
        blocks = cell.held_out
        stated, kept = survival(cell.scaling.apply(blocks.confidence)), blocks.survived
        panels[str(cell.decoding)] = {
            "as stated": (survival(blocks.confidence).flatten(), kept.flatten()),
            f"calibrated ({cell.stored.form})": (stated.flatten(), kept.flatten()),
        }
    reliability_diagram(panels, path)
