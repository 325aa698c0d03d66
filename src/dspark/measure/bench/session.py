"""A benchmark put together: target, systems, journal, and the result of what was run."""

import datetime
import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from dspark import __version__
from dspark.config import EngineConfig
from dspark.data.journal import Journal
from dspark.engine.setup import pick_device
from dspark.errors import DataError, DsparkError
from dspark.measure.bench.baselines import Place, open_baseline
from dspark.measure.bench.control import control_summary
from dspark.measure.bench.drive import System
from dspark.measure.bench.machine import MemoryPeak, describe, load, measure_peaks, model_size
from dspark.measure.bench.modes import Mode, check_installed, missing
from dspark.measure.bench.ours import open_ours
from dspark.measure.bench.proof import prove
from dspark.measure.bench.random_drafter import write_random_drafter
from dspark.measure.bench.records import PLAIN, BenchResult, Cell, Settings
from dspark.measure.bench.runner import Runner, Turn, closed_groups, open_groups, turns
from dspark.measure.bench.summary import reliability, summarise
from dspark.measure.bench.workload import Questions, Workload
from dspark.target import Target, load_target

logger = logging.getLogger("dspark")

JOURNAL_FILE = "parts.jsonl"
_ROOM = 8  # tokens of context beyond the longest prompt and answer


class Observer(Protocol):
    """Who watches a run."""

    def planned(self, cells: int) -> None:
        """So many cells more."""
        ...

    def begins(self, turn: Turn) -> None: ...

    def ended(self, cell: Cell) -> None: ...

    def says(self, sentence: str) -> None: ...


@dataclass(frozen=True)
class Request:
    """What a run is to do. `optional` modes are left out, and that is said, where they cannot run."""

    settings: Settings
    modes: tuple[Mode, ...]
    optional: frozenset[str]
    questions: Questions
    out: Path
    resume: bool = False
    profile: str = "auto"
    command: str = ""


def run_bench(request: Request, observer: Observer) -> BenchResult:
    """Run everything that the journal in `request.out` does not hold yet. After Ctrl-C the result is of what was done,
    and says that it is not complete.

    Raises:
        DsparkError: a mode, the target or the prompts are wrong, or `out` belongs to another run.
    """
    modes, skipped = _installed(request)
    settings = replace(request.settings, modes=tuple(mode.name for mode in modes))
    _check_out(request)
    device = pick_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    target = load_target(settings.target, device, settings.dtype, settings.exact)
    workload = Workload(target.tokenizer, request.questions, settings)
    workload.with_room(target.spec.context)
    with Journal(request.out / JOURNAL_FILE, settings.to_dict()) as journal:
        machine = describe(device)
        peaks = measure_peaks(device)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        began = time.perf_counter()
        systems = _systems(request, modes, target, workload, skipped, observer)
        runner = Runner(systems, workload, settings, journal, MemoryPeak(device))
        complete = _run_all(runner, systems, settings, observer)
    size = model_size(target, settings.dtype)
    promises = {name: system.promises for name, system in systems.items()}
    observer.says("Comparing answers.")
    proofs = prove(runner.done, promises, target, workload, settings.acceptance != "rejection")
    notes = {name: system.note for name, system in systems.items() if system.note}
    return BenchResult(
        settings=settings,
        machine=replace(machine, load_after=load(), peaks=peaks),
        target_name=target.name,
        model=size,
        version=__version__,
        command=request.command,
        started=started,
        seconds=round(time.perf_counter() - began, 3),
        complete=complete,
        cells=tuple(runner.cells),
        rows=summarise(runner.cells, proofs, size, peaks, notes),
        control=control_summary(runner.cells),
        proofs=proofs,
        notes=notes,
        skipped=tuple(skipped),
        reliability=reliability(runner.cells),
    )


def _run_all(runner: Runner, systems: dict[str, System], settings: Settings, observer: Observer) -> bool:
    """Closed loop, then open loop; whether it came to the end."""
    most = {name: system.at_once for name, system in systems.items()}
    together = {name: at_once for name, at_once in most.items() if at_once is None}
    try:
        plan = turns(closed_groups(settings), most, settings.rounds)
        observer.planned(len(plan))
        for cell in runner.run(plan, observer.begins):
            observer.ended(cell)
        plan = turns(open_groups(settings, runner.cells), together, settings.rounds)
        observer.planned(len(plan))
        for cell in runner.run(plan, observer.begins):
            observer.ended(cell)
    except KeyboardInterrupt:
        return False
    return True


def _installed(request: Request) -> tuple[list[Mode], list[str]]:
    """The modes whose packages are there, and sentences on the others.

    Raises:
        SettingsError: one that is not optional is missing.
    """
    modes, skipped = [], []
    for mode in request.modes:
        if mode.name in request.optional and (why := missing(mode)):
            skipped.append(f"{mode.name} was left out: it {why}.")
            continue
        check_installed(mode)
        modes.append(mode)
    return modes, skipped


def _check_out(request: Request) -> None:
    path = request.out / JOURNAL_FILE
    with suppress(OSError):
        if not request.resume and path.stat().st_size:
            raise DataError(f"{request.out} holds a run already; give --resume to go on with it, or another --out.")


def _systems(
    request: Request, modes: Sequence[Mode], target: Target, workload: Workload, skipped: list[str], observer: Observer
) -> dict[str, System]:
    """Every mode, ready to run; what is optional and cannot is added to `skipped`."""
    settings = request.settings
    at_once = max(settings.concurrencies)
    context = min(target.spec.context, workload.longest() + settings.max_tokens + _ROOM)
    config = EngineConfig(
        model=settings.target,
        profile=request.profile,
        acceptance=settings.acceptance,
        device=settings.device,
        dtype=settings.dtype,
        exact=settings.exact,
        kv_gb=4 * at_once * (context + 256) * target.decoder.kv_token_bytes / 1e9,  # more than is ever taken
        max_batch=at_once,
        context=context,
        threads=settings.threads,
    )
    place = Place(target, context, at_once)
    systems: dict[str, System] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            observer.says(f"Opening {mode.name}.")
            try:
                systems[mode.name] = _system(mode, config, place, settings.drafter, Path(folder))
            except DsparkError as error:
                if mode.name not in request.optional:
                    raise
                skipped.append(f"{mode.name} was left out: {error}")
    assert PLAIN in systems
    for sentence in skipped:
        observer.says(sentence)
    return systems


def _system(mode: Mode, config: EngineConfig, place: Place, drafter: str, folder: Path) -> System:
    if mode.engine == "openai":
        from dspark.measure.bench.server import Server

        return Server(mode.argument)
    if mode.engine != "ours":
        return open_baseline(mode, place)
    if not mode.random:
        return open_ours(place.target, config, mode.proposer, mode.policy, drafter)
    if not (folder / "config.json").exists():
        write_random_drafter(place.target, folder)
    system = open_ours(place.target, config, mode.proposer, mode.policy, str(folder))
    system.note = "a drafter of random weights"
    return system
