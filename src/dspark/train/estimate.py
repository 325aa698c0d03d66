"""Time, memory and disk of a run, measured on a few real steps before it starts."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import TrainError
from dspark.train.features import feature_bytes
from dspark.train.trainer import Trainer

_TIMED_STEPS = 3
_ADAM_COPIES = 4  # weight, gradient and two moments, float32


@dataclass(frozen=True)
class Estimate:
    """Seconds, bytes and rates of one run."""

    step_s: float  # one optimiser step with its features in memory
    blocks_per_step: float
    feature_tok_per_s: float  # tokens a second through the target
    tokens: int  # of the training data
    batch_tokens: float  # tokens of the sequences of one batch
    feature_bytes: int  # memory of all features
    cache_bytes: float  # memory allowed for them
    train_bytes: int  # weights, gradients, optimiser
    disk_bytes: float = 0.0  # room for features on disk
    on_disk_bytes: float = 0.0  # features that are there already
    probs_bytes: int = 0  # memory for the target's probabilities, where they are kept too

    @property
    def blocks_per_s(self) -> float:
        return self.blocks_per_step / self.step_s

    @property
    def cached(self) -> float:
        """Share of the data whose features stay in memory."""
        return min(1.0, self.cache_bytes / max(1, self.feature_bytes))

    @property
    def kept(self) -> float:
        """Share of the data whose features stay, in memory or on disk."""
        return min(1.0, max(self.cache_bytes, self.disk_bytes) / max(1, self.feature_bytes))

    @property
    def fill_s(self) -> float:
        """Seconds of running the target once over what stays and is not there yet."""
        there = min(1.0, self.on_disk_bytes / max(1, self.feature_bytes))
        return max(0.0, self.kept - there) * self.tokens / self.feature_tok_per_s

    @property
    def written_bytes(self) -> float:
        """Disk the features will take beyond what is there."""
        return max(0.0, min(self.feature_bytes, self.disk_bytes) - self.on_disk_bytes)

    @property
    def run_bytes(self) -> float:
        """Disk the run's own folder takes: weights and two moments in float32, weights in float16."""
        return self.train_bytes * 7 / 8

    @property
    def recompute_s(self) -> float:
        """Seconds a step spends on features that do not stay."""
        return (1 - self.kept) * self.batch_tokens / self.feature_tok_per_s

    def seconds(self, steps: int) -> float:
        # A short run does not come to see all data.
        fill = min(self.fill_s, steps * self.kept * self.batch_tokens / self.feature_tok_per_s)
        return fill + steps * (self.step_s + self.recompute_s)

    def steps_in(self, seconds: float) -> int:
        """As many steps as fit, at least 1."""
        low, high = 1, max(2, int(seconds / self.step_s) + 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle)
        return low


def require_disk(folder: Path, needed_bytes: float) -> None:
    """Raises TrainError when the disk under `folder` has less than `needed_bytes` free."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise TrainError(
            f"The run will need {needed_bytes / 1e9:.2f} GB of disk under {folder} and {free / 1e9:.2f} GB are free; "
            "free some space there or choose another folder."
        )


def estimate(trainer: Trainer) -> Estimate:
    """Time the target and `_TIMED_STEPS` steps of `trainer`. Nothing changes but what its cache holds."""
    plan, corpus, store = trainer.plan, trainer.corpus, trainer.store
    first = sorted({chunk.sequence for step in range(_TIMED_STEPS) for chunk in plan.batch(step)})
    there_before = store.on_disk_bytes
    new = [sequence for sequence in first if not store.holds(sequence)]
    began = time.perf_counter()
    run = [store[i].taps.shape[0] for i in new] or [store.compute(i).taps.shape[0] for i in first[:_TIMED_STEPS]]
    feature_rate = sum(run) / (time.perf_counter() - began)
    trainer.gradients(0)  # allocations and first-time costs
    times, blocks, tokens = [], [], []
    for step in range(_TIMED_STEPS):
        sequences = [chunk.sequence for chunk in plan.batch(step)]
        missing = sum(corpus.length(i) for i in set(sequences) if not store.holds(i))
        began = time.perf_counter()
        _, count = trainer.gradients(step)
        # Features this step had to compute are counted apart.
        times.append(max(1e-6, time.perf_counter() - began - missing / feature_rate))
        blocks.append(count)
        tokens.append(sum(map(corpus.length, sequences)))
    trainer.clear_gradients()
    return Estimate(
        step_s=sorted(times)[len(times) // 2],
        blocks_per_step=sum(blocks) / len(blocks),
        feature_tok_per_s=feature_rate,
        tokens=corpus.ids.shape[0],
        batch_tokens=sum(tokens) / len(tokens),
        feature_bytes=feature_bytes(trainer.target.decoder, trainer.config.target_layer_ids, corpus),
        cache_bytes=store.cache_bytes,
        train_bytes=_ADAM_COPIES * 4 * sum(t.numel() for t in trainer.weights.values()),
        disk_bytes=0.0 if store.disk is None else store.on_disk_bytes + store.disk.left_bytes,
        on_disk_bytes=there_before,
        probs_bytes=trainer.probs.num_bytes if trainer.probs.keeps else 0,
    )
