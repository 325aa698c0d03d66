"""`dspark profile`: what passes cost on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.artifacts.profile import StoredProfile
    from dspark.config import EngineConfig
    from dspark.engine import Engine
    from dspark.engine.proposer import Proposer
    from dspark.measure.observe import Check
    from dspark.schedule.profile import Profile
    from dspark.target import Target

TargetName = Annotated[
    str, typer.Option("--target", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")
]
_SHOWN_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128, 256, 512)
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32)


def profile(
    target: TargetName = "smollm2",
    drafter: options.Drafter = "auto",
    proposer: options.Proposer = "auto",
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the profile to this file too.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again, even if the cache has it.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Decode some prompts and compare step times with the profile's.")
    ] = False,
    exact: options.Exact = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Measure what target passes, drafts and the work around them cost here; kept in the cache.

    Measured by itself when a policy first needs it. Other work on the machine makes it less sure.

    Examples:

    \b
    dspark profile
    dspark profile --drafter runs/first --check
    dspark profile --target ./my-model --force --out profile.json
    """
    if out_file is not None and out_file.is_dir():
        raise SettingsError(f"--out {out_file} is a folder; give the name of a file.")
    measured = open_measured(target, drafter, proposer, exact, device, dtype, threads, force)
    if out_file is not None:
        from dspark.artifacts.profile import write_profile

        write_profile(out_file, measured.stored)
    _show(measured)
    if check:
        _show_check(run_check(measured))


@dataclass(frozen=True)
class Measured:
    """A target, what drafts for it, and their costs here."""

    target: "Target"
    proposer: "Proposer"
    config: "EngineConfig"
    stored: "StoredProfile"
    costs: "Profile"

    def engine(self, policy: str, rows: int) -> "Engine":
        """An engine for `rows` requests at once; only one at a time, since they share the proposer."""
        from dataclasses import replace

        from dspark.engine import Engine

        settings = replace(self.config, policy=policy, max_batch=rows, prefix_cache=False)
        return Engine(self.target, self.proposer, settings, costs=self.costs)


def open_measured(
    model: str,
    drafter: str,
    proposer: str,
    exact: bool,
    device: str,
    dtype: str,
    threads: int | None,
    force: bool = False,
    path: Path | None = None,
) -> Measured:
    """Load a target and its proposer, and their profile from `path`, the cache, or a measurement now."""
    import torch

    from dspark.config import EngineConfig
    from dspark.engine import Engine
    from dspark.engine.profiling import stored_profile
    from dspark.engine.setup import build_proposer, pick_device
    from dspark.schedule.profile import Profile
    from dspark.target import load_target

    config = EngineConfig(
        model=model,
        drafter=drafter,
        proposer=proposer,
        policy="fixed:4",
        exact=exact,
        device=device,
        dtype=dtype,
        threads=threads,
    )
    if threads:
        torch.set_num_threads(threads)
    loaded = load_target(model, pick_device(device), dtype, exact)
    drafts = build_proposer(config, loaded)
    stored = stored_profile(loaded, drafts, config, Engine, path, force)
    return Measured(loaded, drafts, config, stored, Profile.from_dict(stored.costs))


def run_check(measured: Measured, max_tokens: int = 40) -> "Check":
    """Decode prompts of three kinds at several batch and draft sizes, and compare step times."""
    from dspark.config import SamplingParams
    from dspark.measure.observe import KINDS, check_profile, check_runs, decoding_steps, prompts_of

    records = []
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for number, (rows, length) in enumerate(check_runs()):
        engine = measured.engine(f"fixed:{length}", rows)
        prompts = [ids for i in range(rows) for ids in prompts_of(engine, KINDS[i % len(KINDS)], 1, number + i)]
        records += decoding_steps(engine, prompts, params)
    return check_profile(measured.costs, records, drafter=measured.stored.drafter_name)


def _show(measured: Measured) -> None:
    from rich.table import Table

    from dspark.cli.show import out

    stored, costs = measured.stored, measured.costs
    key = stored.key
    drafts = stored.drafter_name if costs.block else f"{stored.drafter_name}, no model of its own"
    out.print(
        f"{stored.target_name} on {key.cpu if key.device == 'cpu' else key.device}, {key.dtype}"
        f"{', exact' if key.exact else ''}, {key.threads} threads; drafts: {drafts}",
        markup=False,
    )
    passes = Table("tokens", "pass ms", "of one token", box=None, pad_edge=False)
    one = costs.pass_ms(1, 1, costs.base_context)
    for tokens in _SHOWN_TOKENS:
        if tokens <= costs.tokens.at[-1]:
            ms = costs.pass_ms(tokens, 1, costs.base_context)
            passes.add_row(str(tokens), f"{ms:.1f}", f"{ms / one:.2f}x")
    out.print(passes)
    table = Table("requests", "plain pass ms", "the same, context 512", "draft ms", "host ms", box=None, pad_edge=False)
    for rows in _SHOWN_ROWS:
        near, far = costs.pass_ms(rows, rows, costs.base_context), costs.pass_ms(rows, rows, 512)
        table.add_row(
            str(rows), f"{near:.1f}", f"{far:.1f}", f"{costs.draft_ms(rows):.1f}", f"{costs.host_ms(rows):.1f}"
        )
    out.print(table)
    out.print(
        f"Each further drafted token costs {costs.host_token_ms:.2f} ms of host time; a request with a temperature "
        f"{costs.host_sampled_ms:.2f} ms, {costs.host_token_sampled_ms:.2f} ms more a drafted token, and "
        f"{costs.draft_sampled_ms:.2f} ms a token in drafting."
    )
    out.print(
        f"Measured {stored.measured} in {stored.seconds:.0f} s; {stored.residual:.0%} off (median) on points not used."
    )


def _show_check(check: "Check") -> None:
    from rich.table import Table

    from dspark.cli.show import out

    table = Table("tokens", "requests", "steps", "measured ms", "predicted ms", "ratio", box=None, pad_edge=False)
    for size in check.sizes:
        numbers = (f"{size.measured_ms:.1f}", f"{size.predicted_ms:.1f}", f"{size.ratio:.2f}")
        table.add_row(str(size.tokens), str(size.rows), str(size.steps), *numbers)
    out.print(table)
    out.print(
        f"{check.steps} steps on prompts not used before: predicted times are {check.error:.1%} off (median). "
        f"Steps took {check.factor:.2f}x the predicted time throughout; without that, {check.shape_error:.1%}."
    )
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 1 + (os.cpu_count() or 1):
        out.print("The machine is busy with other work, so these figures say little.")
