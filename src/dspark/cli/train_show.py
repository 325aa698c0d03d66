"""What `dspark train` prints: the estimate before a run, its progress, its rollouts."""

from typing import TYPE_CHECKING

from dspark.cli.show import err

if TYPE_CHECKING:
    from dspark.data import Corpus
    from dspark.train import Estimate, Rollout, Trainer, Validation


def show_estimate(found: "Estimate", trainer: "Trainer", training: "Corpus", validation: "Corpus") -> None:
    from rich.table import Table

    left = trainer.settings.steps - trainer.step
    size = sum(t.numel() for t in trainer.weights.values())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "data",
        f"{len(training)} sequences, {training.response_tokens} response tokens, {trainer.plan.num_anchors} blocks "
        f"an epoch; {len(validation)} sequences held out",
    )
    table.add_row("drafter", f"{size / 1e6:.1f} million weights, mask token {trainer.config.mask_token_id}")
    processes = trainer.processes.count
    table.add_row(
        "speed",
        f"{found.blocks_per_s:.0f} blocks/s with features at hand ({1e3 * found.step_s:.0f} ms a step of "
        f"{found.blocks_per_step:.0f}); target {found.feature_tok_per_s:.0f} tokens/s"
        + (f"; {processes} processes" if processes > 1 else ""),
    )
    table.add_row(
        "memory",
        f"features {found.feature_bytes / 1e9:.2f} GB, of which {found.cached:.0%} are kept (--cache-gb)"
        + (f", target probabilities {found.probs_bytes / 1e9:.2f} GB" if found.probs_bytes else "")
        + f"; training {found.train_bytes / 1e9:.2f} GB",
    )
    table.add_row("disk", _disk(found))
    blocks = trainer.blocks + left * found.blocks_per_step
    table.add_row("steps", f"{left} from step {trainer.step}, {blocks:.0f} blocks in all")
    table.add_row("time", f"{_duration(found.seconds(left))}, validation not counted")
    err.print(table)


def _disk(found: "Estimate") -> str:
    run = f"{found.run_bytes / 1e9:.2f} GB in --out"
    if not found.disk_bytes:
        return run
    return (
        f"{run}; features {found.on_disk_bytes / 1e9:.2f} GB in --cache-dir and {found.written_bytes / 1e9:.2f} GB to "
        f"come, {found.kept:.0%} of the data in all"
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def show_validation(validation: "Validation", trainer: "Trainer") -> None:
    """One line per temperature."""
    place = f"step {trainer.step}, {trainer.blocks} blocks"
    for temperature, rollout in (("T=0", validation.greedy), ("T=1", validation.sampled)):
        if rollout is not None:
            err.print(f"{place}: {_rollout(rollout)} ({rollout.blocks} held-out blocks, {temperature})")


def _rollout(rollout: "Rollout") -> str:
    lengths = " ".join(f"{rollout.acceptance_length(k):.2f}" for k in range(1, len(rollout.survived) + 1))
    slots = " ".join(f"{share:.0%}" for share in rollout.slot_acceptance)
    return f"AL for 1.. drafts {lengths}; accepted per slot {slots}"
