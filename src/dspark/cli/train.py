"""`dspark train`: from packed token files to a drafter folder. `dspark estimate`: what that would take."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.cli import options
from dspark.cli import train_options as opt
from dspark.cli.show import err
from dspark.cli.train_show import show_estimate, show_validation
from dspark.errors import SettingsError, TrainError

if TYPE_CHECKING:
    from dspark.data import Corpus
    from dspark.target import Target
    from dspark.train import Session, Trainer

_DEFAULT_MINUTES = 60.0
_HELD_OUT_CACHE = 0.1  # of --cache-gb


def train(
    data: opt.Data,
    out: opt.Out = None,
    more: opt.More = None,
    target: opt.Target = "smollm2",
    minutes: opt.Minutes = None,
    steps: opt.Steps = None,
    resume: opt.Resume = False,
    init_from: opt.InitFrom = None,
    estimate_only: opt.EstimateOnly = False,
    taps: opt.Taps = None,
    layers: opt.Layers = None,
    kv_heads: opt.KvHeads = None,
    head: opt.Head = None,
    rank: opt.Rank = None,
    block: opt.Block = None,
    draft_vocab: opt.DraftVocab = None,
    batch_blocks: opt.BatchBlocks = 64,
    chunk_blocks: opt.ChunkBlocks = 16,
    lr: opt.Lr = 1e-3,
    decay: opt.Decay = 4.0,
    bigrams: opt.Bigrams = True,
    distance_heads: opt.DistanceHeads = True,
    copy_heads: opt.CopyHeads = True,
    hidden_weight: opt.HiddenWeight = 1.0,
    warm_start: opt.WarmStart = False,
    refine_prob: opt.RefineProb = 0.0,
    bf16: opt.Bf16 = False,
    cut_loops: opt.CutLoops = True,
    held_out: opt.HeldOut = 0.04,
    validate_blocks: opt.ValidateBlocks = 400,
    sampled_blocks: opt.SampledBlocks = 100,
    save_minutes: opt.SaveMinutes = 5.0,
    validate_minutes: opt.ValidateMinutes = 15.0,
    mask_token_id: opt.MaskTokenId = None,
    cache_gb: opt.CacheGb = 4.0,
    cache_dir: opt.CacheDir = None,
    cache_dir_gb: opt.CacheDirGb = 20.0,
    seed: opt.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Train a drafter on text its target generated.

    Time, memory and disk are printed before the first step. A run may be killed at any moment and taken up again with
    --resume; Ctrl-C saves first. The folder --out is a drafter from the first save on. With several GPUs, start it as
    `accelerate launch -m dspark train ...`.

    Examples:

    \b
    dspark train --data data/*.npz --out runs/first --minutes 30
    dspark train --data data/*.npz --out runs/first --minutes 30 --resume
    dspark train --data code.npz --out runs/code --init-from runs/first --steps 2000 --lr 3e-4
    """
    opt.check_length(minutes, steps)
    for name, value in (("--save-minutes", save_minutes), ("--validate-minutes", validate_minutes)):
        opt.check_least(name, value, 0.01)
    for name, value in (("--cache-gb", cache_gb), ("--cache-dir-gb", cache_dir_gb)):
        opt.check_least(name, value, 0)
    opt.check_share("--held-out", held_out)
    if out is None and not estimate_only:
        raise SettingsError("There is no --out; give the folder the drafter is to be written to.")
    from dspark.train import CacheLimits, Session, SessionPlan, TrainSettings, join_processes, new_trainer, sizes_of
    from dspark.train.estimate import estimate as estimate_run
    from dspark.train.estimate import require_disk
    from dspark.train.start import default_taps

    given: dict[str, Any] = {"layers": layers, "kv_heads": kv_heads, "head": head, "rank": rank, "block_size": block}
    given |= {"draft_vocab": draft_vocab, "taps": opt.parse_taps(taps)}
    sizes = opt.chosen_sizes(given, sizes_of(init_from) if init_from else {})
    settings = TrainSettings(
        steps=1 if steps is None else steps,  # a run by time is planned once a step was timed
        batch_blocks=batch_blocks,
        chunk_blocks=min(chunk_blocks, batch_blocks),
        lr=lr,
        decay=decay,
        bigrams=bigrams,
        distance_heads=distance_heads,
        copy_heads=copy_heads,
        hidden_weight=hidden_weight,
        warm_start=warm_start,
        refine_prob=refine_prob,
        bf16=bf16,
        seed=seed,
        **sizes,
    )  # before the slow part
    saved = None if out is None else _saved_steps(out, resume, estimate_only)
    if saved is not None and steps is None:
        settings = replace(settings, steps=saved)  # a resumed run keeps its length
    processes = join_processes(device)
    err.quiet = processes.index > 0
    loaded, resolved = _load_target(target, processes.device or device, dtype, threads)
    if "taps" not in sizes:
        settings = replace(settings, taps=default_taps(loaded.spec.num_layers))
    training, validation = _read_data([*data, *(more or [])], loaded, cut_loops, held_out)
    held_bytes = cache_gb * 1e9 * (_HELD_OUT_CACHE if len(validation) else 0)
    cache = CacheLimits(cache_gb * 1e9 - held_bytes, cache_dir, cache_dir_gb * 1e9, probs=True)
    trainer = new_trainer(loaded, training, settings, cache, init_from, mask_token_id, processes)
    resumed = saved is not None and out is not None and trainer.resume(out)
    found = estimate_run(trainer)
    if steps is None and not resumed:
        trainer.plan_steps(found.steps_in(60 * (minutes or _DEFAULT_MINUTES)))
    show_estimate(found, trainer, training, validation)
    if out is None or estimate_only:
        return
    require_disk(out, found.run_bytes)
    if cache_dir is not None:
        require_disk(cache_dir, found.written_bytes)
    plan = SessionPlan(
        save_every=max(1, round(60 * save_minutes / found.step_s)),
        validate_every=max(1, round(60 * validate_minutes / found.step_s)),
        validate_blocks=validate_blocks,
        sampled_blocks=sampled_blocks,
    )
    if processes.index:
        _follow(trainer)
    else:
        _run(Session(trainer, validation, out, plan, resolved, held_bytes), trainer, out)


@wraps(train)
def estimate(**given: Any) -> None:
    train(**given | {"estimate_only": True})


estimate.__doc__ = """Say what a training run would take: time, memory, disk.

    Takes the options of `dspark train`, loads target and data, times a few steps, and writes nothing but features to
    --cache-dir, if that is given.

    Examples:

    \b
    dspark estimate --data data/*.npz --minutes 600
    dspark estimate --data data/*.npz --steps 20000 --layers 2 --cache-gb 8
    """


def _saved_steps(out: Path, resume: bool, estimate_only: bool) -> int | None:
    """Length of the run saved in `out`, None without one. Raises TrainError when it would be overwritten."""
    from dspark.train.state import read_state

    if estimate_only and not resume:
        return None
    state = read_state(out)
    if state is None:
        if (out / "config.json").exists() and not estimate_only:
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
        opt.check_least("--threads", threads, 1)
        torch.set_num_threads(threads)
    place = pick_device(device)
    return load_target(name, place, dtype), resolve_dtype(dtype, place)


def _read_data(files: list[Path], target: "Target", loops: bool, share: float) -> "tuple[Corpus, Corpus]":
    """(training, held out), with the files' notes printed."""
    from dspark.data import cut_loops, hold_out, read_corpus

    corpus = read_corpus(files, target.spec.vocab_size, target.spec.context, target.fingerprint)
    if loops:
        corpus = cut_loops(corpus)
    for note in corpus.notes:
        err.print(note)
    return hold_out(corpus, share)


def _follow(trainer: "Trainer") -> None:
    """Another process than the first: steps only; saves, logs and rollouts are the first one's."""
    with _stop_flag() as stopped:
        for _ in trainer.run(stopped):
            pass


def _run(session: "Session", trainer: "Trainer", out: Path) -> None:
    """Steps under a progress bar, rollouts as lines; Ctrl-C and SIGTERM save and exit 130."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dspark.train import StepReport

    if not session.can_validate:
        err.print("No held-out text was written at temperature 0 or 1, so there is no validation.")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _stop_flag() as stopped, Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("training", total=trainer.settings.steps, completed=trainer.step)
        for event in session.run(stopped):
            if isinstance(event, StepReport):
                bar.update(task, completed=event.step, description=f"agreement {event.agreement:.3f}")
            else:
                show_validation(event, trainer)
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
