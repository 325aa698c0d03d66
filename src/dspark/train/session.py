"""A run with its folder: steps, logs, saves and rollouts in one stream of events."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark.data import Corpus
from dspark.train.features import FeatureStore
from dspark.train.state import TRAIN_LOG, VALIDATION_LOG, CsvLog
from dspark.train.trainer import StepReport, Trainer
from dspark.train.validate import Rollout, roll_out, rollout_anchors

_AVERAGED = ("loss", "ce", "l1", "bce", "agreement", "grad_norm")


@dataclass(frozen=True)
class SessionPlan:
    """How often, in steps; none of it changes the weights."""

    save_every: int = 500
    validate_every: int = 1000
    log_every: int = 20
    validate_blocks: int = 400


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
        slots = range(1, config.block_size + 1)
        self._columns = [*(f"al_{k}" for k in slots), *(f"slot_{k}" for k in slots)]

    @property
    def can_validate(self) -> bool:
        return self._features is not None

    def validate(self) -> Rollout | None:
        """Roll out the drafter as it would be served now; None without held-out text at temperature 0."""
        if self._features is None:
            return None
        return roll_out(self._trainer.served(self._dtype), self._features, self._held_out, self._anchors)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[StepReport | Rollout]:
        """Train to the end or until `should_stop`; either way the last step is saved.

        Raises:
            TrainError: as `Trainer.run` and `Trainer.save`.
        """
        trainer, plan = self._trainer, self._plan
        log = CsvLog(self._folder / TRAIN_LOG, ("blocks", "seconds", *_AVERAGED, "lr", "skipped"), trainer.step)
        results = CsvLog(
            self._folder / VALIDATION_LOG, ("blocks", "seconds", "validation_blocks", *self._columns), trainer.step
        )
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
            if (report.step % plan.validate_every == 0 or last) and (rollout := self.validate()):
                results.write(self._row(rollout))
                yield rollout
        trainer.save(self._folder)

    def _row(self, rollout: Rollout) -> dict[str, object]:
        trainer = self._trainer
        lengths = {f"al_{k}": rollout.acceptance_length(k) for k in range(1, len(rollout.survived) + 1)}
        slots = {f"slot_{k}": share for k, share in enumerate(rollout.slot_acceptance, start=1)}
        place = {"step": trainer.step, "blocks": trainer.blocks, "seconds": trainer.seconds}
        return {**place, "validation_blocks": rollout.blocks, **lengths, **slots}


def _averages(reports: list[StepReport]) -> dict[str, object]:
    """Means of the losses since the last row, leaving out skipped steps unless there are only those."""
    counted = [r for r in reports if not r.skipped] or reports
    means: dict[str, object] = {n: sum(getattr(r, n) for r in counted) / len(counted) for n in _AVERAGED}
    return means | {"step": reports[-1].step, "blocks": reports[-1].blocks, "lr": reports[-1].lr}
