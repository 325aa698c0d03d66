"""A run with its folder: steps, logs, saves and rollouts in one stream of events."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark.data import Corpus
from dspark.train.features import FeatureStore
from dspark.train.state import TRAIN_LOG, VALIDATION_LOG, CsvLog
from dspark.train.trainer import StepReport, Trainer
from dspark.train.validate import Rollout, roll_out, roll_out_sampled, rollout_anchors, sampled_anchors

_AVERAGED = ("loss", "ce", "l1", "bce", "hidden", "agreement", "grad_norm")


@dataclass(frozen=True)
class SessionPlan:
    """How often, in steps; none of it changes the weights."""

    save_every: int = 500
    validate_every: int = 1000
    log_every: int = 20
    validate_blocks: int = 400  # at T = 0
    sampled_blocks: int = 100  # at T = 1


@dataclass(frozen=True)
class Validation:
    """Rollouts of one moment; None where the held-out data has no text of that temperature."""

    greedy: Rollout | None
    sampled: Rollout | None


class Session:
    """One process's part of a run. `held_out` is text never trained on; `dtype` is what drafters are served in."""

    def __init__(
        self, trainer: Trainer, held_out: Corpus, folder: Path, plan: SessionPlan, dtype: str, cache_bytes: float
    ):
        self._trainer, self._held_out, self._folder, self._plan, self._dtype = trainer, held_out, folder, plan, dtype
        config = trainer.config
        self._anchors = rollout_anchors(held_out, config.block_size, plan.validate_blocks, seed=0)
        self._features = (
            FeatureStore(trainer.target.decoder, config.target_layer_ids, held_out, cache_bytes)
            if self._anchors
            else None
        )
        self._sampled_anchors = sampled_anchors(held_out, config.block_size, plan.sampled_blocks, seed=0)
        slots = range(1, config.block_size + 1)
        names = ("al_", "slot_", "al_t1_")
        self._columns = ["validation_blocks", *(f"{name}{k}" for name in names for k in slots), "t1_blocks"]

    @property
    def can_validate(self) -> bool:
        return bool(self._anchors or self._sampled_anchors)

    def validate(self) -> Validation:
        """Roll out the drafter as it would be served now."""
        drafter, target = self._trainer.served(self._dtype), self._trainer.target.decoder
        greedy = sampled = None
        if self._features is not None:
            greedy = roll_out(drafter, self._features, self._held_out, self._anchors)
        if self._sampled_anchors:
            sampled = roll_out_sampled(drafter, target, self._held_out, self._sampled_anchors)
        return Validation(greedy, sampled)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[StepReport | Validation]:
        """Train to the end or until `should_stop`; either way the last step is saved.

        Raises:
            TrainError: as `Trainer.run` and `Trainer.save`.
        """
        trainer, plan = self._trainer, self._plan
        log = CsvLog(self._folder / TRAIN_LOG, ("blocks", "seconds", *_AVERAGED, "lr", "skipped"), trainer.step)
        results = CsvLog(self._folder / VALIDATION_LOG, ("blocks", "seconds", *self._columns), trainer.step)
        recent: list[StepReport] = []
        for report in trainer.run(should_stop):
            recent.append(report)
            last = report.step == trainer.settings.steps
            if report.step % plan.log_every == 0 or last:
                log.write(_averages(recent) | {"seconds": trainer.seconds, "skipped": trainer.skipped})
                recent = []
            yield report
            if report.step % plan.save_every == 0 and not last:
                trainer.save(self._folder)
            if (report.step % plan.validate_every == 0 or last) and self.can_validate:
                validation = self.validate()
                results.write(self._row(validation))
                yield validation
        trainer.save(self._folder)

    def _row(self, validation: Validation) -> dict[str, object]:
        trainer = self._trainer
        row: dict[str, object] = {"step": trainer.step, "blocks": trainer.blocks, "seconds": trainer.seconds}
        if greedy := validation.greedy:
            row |= {"validation_blocks": greedy.blocks, **_lengths("al_", greedy)}
            row |= {f"slot_{k}": share for k, share in enumerate(greedy.slot_acceptance, start=1)}
        if sampled := validation.sampled:
            row |= {"t1_blocks": sampled.blocks, **_lengths("al_t1_", sampled)}
        return row


def _lengths(name: str, rollout: Rollout) -> dict[str, float]:
    return {f"{name}{k}": rollout.acceptance_length(k) for k in range(1, len(rollout.survived) + 1)}


def _averages(reports: list[StepReport]) -> dict[str, object]:
    """Means of the losses since the last row, leaving out skipped steps unless there are only those."""
    counted = [r for r in reports if not r.skipped] or reports
    means: dict[str, object] = {n: sum(getattr(r, n) for r in counted) / len(counted) for n in _AVERAGED}
    return means | {"step": reports[-1].step, "blocks": reports[-1].blocks, "lr": reports[-1].lr}
