"""Time and memory of a run, measured on a few real steps before it starts."""

import time
from dataclasses import dataclass

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

    @property
    def blocks_per_s(self) -> float:
        return self.blocks_per_step / self.step_s

    @property
    def cached(self) -> float:
        """Share of the data whose features stay in memory."""
        return min(1.0, self.cache_bytes / max(1, self.feature_bytes))

    @property
    def fill_s(self) -> float:
        """Seconds of running the target once over what stays in memory."""
        return self.cached * self.tokens / self.feature_tok_per_s

    @property
    def recompute_s(self) -> float:
        """Seconds a step spends on features that do not stay."""
        return (1 - self.cached) * self.batch_tokens / self.feature_tok_per_s

    def seconds(self, steps: int) -> float:
        # A short run does not come to see all data.
        fill = min(self.fill_s, steps * self.cached * self.batch_tokens / self.feature_tok_per_s)
        return fill + steps * (self.step_s + self.recompute_s)

    def steps_in(self, seconds: float) -> int:
        """As many steps as fit, at least 1."""
        low, high = 1, max(2, int(seconds / self.step_s) + 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle)
        return low


def estimate(trainer: Trainer, cache_bytes: float) -> Estimate:
    """Time the target and `_TIMED_STEPS` steps of `trainer`. Nothing changes but what its cache holds."""
    plan, corpus, store = trainer.plan, trainer.corpus, trainer.store
    first = {chunk.sequence for step in range(_TIMED_STEPS) for chunk in plan.batch(step)}
    began = time.perf_counter()
    run = [store[sequence].taps.shape[0] for sequence in first]
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
        cache_bytes=cache_bytes,
        train_bytes=_ADAM_COPIES * 4 * sum(t.numel() for t in trainer.weights.values()),
    )
