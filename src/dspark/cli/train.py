"""`dspark train`: from packed token files to a drafter folder."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.errors import SettingsError, TrainError

if TYPE_CHECKING:
    from dspark.data import Corpus
    from dspark.target import Target
    from dspark.train import Estimate, Session, Trainer

_DEFAULT_MINUTES = 60.0
_HELD_OUT_CACHE = 0.1  # of --cache-gb


def train(
    data: Annotated[list[Path], typer.Option(help="Packed token files; more may follow, or repeat the option.")],
    out: Annotated[Path, typer.Option(help="The run's folder: the drafter, its logs, and what --resume needs.")],
    more: Annotated[list[Path] | None, typer.Argument(help="More data files.", show_default=False)] = None,
    target: Annotated[
        str, typer.Option("--target", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")
    ] = "smollm2",
    minutes: Annotated[float | None, typer.Option(help="Length of the run by time; default 60.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length of the run in optimiser steps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last save in --out, if any.")] = False,
    init_from: Annotated[Path | None, typer.Option(help="Start from this drafter's weights.")] = None,
    estimate_only: Annotated[bool, typer.Option("--estimate", help="Print time and memory, then stop.")] = False,
    taps: Annotated[str, typer.Option(help="Target layers the drafter reads, ascending.")] = "8,18,28",
    layers: Annotated[int, typer.Option(help="Drafter layers.")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default as many as query heads.")] = None,
    head: Annotated[str, typer.Option(help="Sequential head: markov, gated, rnn or none.")] = "markov",
    rank: Annotated[int, typer.Option(help="Rank of the sequential head.")] = 64,
    block: Annotated[int, typer.Option(help="Draft slots per block.")] = 8,
    draft_vocab: Annotated[int, typer.Option(help="Tokens the drafter can propose; 0 is all.")] = 8192,
    batch_blocks: Annotated[int, typer.Option(help="Blocks per optimiser step.")] = 64,
    chunk_blocks: Annotated[int, typer.Option(help="Blocks of one text computed together.")] = 16,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    decay: Annotated[float, typer.Option(help="Slot k weighs exp(-(k-1)/decay).")] = 4.0,
    bigrams: Annotated[bool, typer.Option(help="Start the Markov head from counted bigrams.")] = True,
    cut_loops: Annotated[bool, typer.Option(help="Cut responses where they begin to loop.")] = True,
    held_out: Annotated[float, typer.Option(help="Share of the prompts kept for validation.")] = 0.04,
    validate_blocks: Annotated[int, typer.Option(help="Blocks rolled out per validation.")] = 400,
    save_minutes: Annotated[float, typer.Option(help="Time between saves.")] = 5.0,
    validate_minutes: Annotated[float, typer.Option(help="Time between validations.")] = 15.0,
    mask_token_id: Annotated[int | None, typer.Option(help="Id that stands for masks; default an unused one.")] = None,
    cache_gb: Annotated[float, typer.Option(help="Memory for the target's features; the rest is recomputed.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Decides first weights and batches.")] = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Train a drafter on text its target generated.

    Time and memory are printed before the first step. A run may be killed at any moment and taken up again with
    --resume; Ctrl-C saves first. The folder --out is a drafter from the first save on.

    Examples:

    \b
    dspark train --data data/*.npz --out runs/first --minutes 30
    dspark train --data data/*.npz --out runs/first --minutes 30 --resume
    dspark train --data code.npz --out runs/code --init-from runs/first --steps 2000 --lr 3e-4
    dspark train --data data/*.npz --out runs/long --minutes 600 --estimate
    """
    if minutes is not None and steps is not None:
        raise SettingsError("Both --minutes and --steps are given; leave one of them out.")
    _check_range("--minutes", minutes, 0.01)
    _check_range("--cache-gb", cache_gb, 0)
    _check_range("--save-minutes", save_minutes, 0.01)
    _check_range("--validate-minutes", validate_minutes, 0.01)
    if not 0 <= held_out < 1:
        raise SettingsError(f"--held-out is {held_out}; allowed is 0 or more and below 1.")
    values: dict[str, Any] = {
        "steps": 1 if steps is None else steps,  # a run by time is planned once a step was timed
        "taps": _parse_taps(taps),
        "layers": layers,
        "kv_heads": kv_heads,
        "head": head,
        "rank": 0 if head == "none" else rank,
        "block_size": block,
        "draft_vocab": draft_vocab or None,
        "batch_blocks": batch_blocks,
        "chunk_blocks": min(chunk_blocks, batch_blocks),
        "lr": lr,
        "decay": decay,
        "bigrams": bigrams,
        "seed": seed,
    }
    from dspark.train import TrainSettings

    settings = TrainSettings(**values)  # before the slow part
    saved = _saved_steps(out, resume)
    loaded, resolved = _load_target(target, device, dtype, threads)
    training, validation = _read_data([*data, *(more or [])], loaded, cut_loops, held_out)
    from dspark.train import Session, SessionPlan, new_trainer
    from dspark.train import estimate as measure

    if saved is not None and steps is None:
        settings = replace(settings, steps=saved)  # a resumed run keeps its length
    held_bytes = cache_gb * 1e9 * (_HELD_OUT_CACHE if len(validation) else 0)
    trainer = new_trainer(loaded, training, settings, cache_gb * 1e9 - held_bytes, init_from, mask_token_id)
    resumed = resume and trainer.resume(out)
    found = measure(trainer, cache_gb * 1e9 - held_bytes)
    if steps is None and not resumed:
        trainer.plan_steps(found.steps_in(60 * (minutes or _DEFAULT_MINUTES)))
    _show_estimate(found, trainer, training, validation)
    if estimate_only:
        return
    plan = SessionPlan(
        save_every=max(1, round(60 * save_minutes / found.step_s)),
        validate_every=max(1, round(60 * validate_minutes / found.step_s)),
        validate_blocks=validate_blocks,
    )
    session = Session(trainer, validation, out, plan, resolved, held_bytes)
    _run(session, trainer, out)


def _check_range(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise SettingsError(f"{name} is {value}; allowed is {least} or more.")


def _parse_taps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"--taps is {text!r}; give layer numbers with commas between, such as 8,18,28.") from None


def _saved_steps(out: Path, resume: bool) -> int | None:
    """Length of the run saved in `out`, None without one. Raises TrainError when it would be overwritten."""
    from dspark.train.state import read_state

    state = read_state(out)
    if state is None:
        if (out / "config.json").exists():
            raise TrainError(f"{out} holds a drafter that this command has no saved run of; choose another --out.")
        return None
    if not resume:
        raise TrainError(
            f"{out} holds a run that stands at step {state['step']}; go on with --resume, or choose another --out."
        )
    return int(state["settings"]["steps"])


def _load_target(name: str, device: str, dtype: str, threads: int | None) -> "tuple[Target, str]":
    import torch

    from dspark.engine.setup import pick_device
    from dspark.target import load_target
    from dspark.target.linear import resolve_dtype

    if threads is not None:
        _check_range("--threads", threads, 1)
        torch.set_num_threads(threads)
    place = pick_device(device)
    return load_target(name, place, dtype), resolve_dtype(dtype, place)


def _read_data(files: list[Path], target: "Target", loops: bool, share: float) -> "tuple[Corpus, Corpus]":
    """(training, held out), with the files' notes printed."""
    from dspark.cli.show import err
    from dspark.data import cut_loops, hold_out, read_corpus

    corpus = read_corpus(files, target.spec.vocab_size, target.spec.context, target.fingerprint)
    if loops:
        corpus = cut_loops(corpus)
    for note in corpus.notes:
        err.print(note)
    return hold_out(corpus, share)


def _show_estimate(found: "Estimate", trainer: "Trainer", training: "Corpus", validation: "Corpus") -> None:
    from rich.table import Table

    from dspark.cli.show import err

    left = trainer.settings.steps - trainer.step
    size = sum(t.numel() for t in trainer.weights.values())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "data",
        f"{len(training)} sequences, {training.response_tokens} response tokens, {trainer.plan.num_anchors} blocks "
        f"an epoch; {len(validation)} sequences held out",
    )
    table.add_row("drafter", f"{size / 1e6:.1f} million weights, mask token {trainer.config.mask_token_id}")
    table.add_row(
        "speed",
        f"{found.blocks_per_s:.0f} blocks/s with features in memory ({1e3 * found.step_s:.0f} ms a step of "
        f"{found.blocks_per_step:.0f}); target {found.feature_tok_per_s:.0f} tokens/s",
    )
    table.add_row(
        "memory",
        f"features {found.feature_bytes / 1e9:.2f} GB, of which {found.cached:.0%} are kept (--cache-gb); training "
        f"{found.train_bytes / 1e9:.2f} GB",
    )
    table.add_row("disk", f"{found.train_bytes * 7 / 8 / 1e9:.2f} GB in --out")  # weights, moments, and half of one
    blocks = trainer.blocks + left * found.blocks_per_step
    table.add_row("steps", f"{left} from step {trainer.step}, {blocks:.0f} blocks in all")
    table.add_row("time", f"{_duration(found.seconds(left))}, validation not counted")
    err.print(table)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def _run(session: "Session", trainer: "Trainer", out: Path) -> None:
    """Steps under a progress bar, rollouts as lines; Ctrl-C and SIGTERM save and exit 130."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dspark.cli.show import err
    from dspark.train import StepReport

    if not session.can_validate:
        err.print("No held-out text was written at temperature 0, so there is no validation.")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _stop_flag() as stopped, Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("training", total=trainer.settings.steps, completed=trainer.step)
        for event in session.run(stopped):
            if isinstance(event, StepReport):
                bar.update(task, completed=event.step, description=f"agreement {event.agreement:.3f}")
                continue
            lengths = " ".join(f"{event.acceptance_length(k):.2f}" for k in range(1, len(event.survived) + 1))
            slots = " ".join(f"{share:.0%}" for share in event.slot_acceptance)
            err.print(
                f"step {trainer.step}, {trainer.blocks} blocks: AL for 1.. drafts {lengths}; accepted per slot {slots} "
                f"({event.blocks} held-out blocks, T=0)"
            )
    if trainer.skipped:
        err.print(f"{trainer.skipped} steps were skipped because their gradients were not finite.")
    if trainer.step < trainer.settings.steps:
        err.print(f"Saved at step {trainer.step}; go on with --resume.")
        raise typer.Exit(130)
    err.print(f"The drafter is in {out}; use it with --drafter {out}.")


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C and SIGTERM only set a flag, so that no step is cut in two; a second Ctrl-C leaves at once,
    without what was not saved."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
