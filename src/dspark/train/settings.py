"""How a drafter is trained. Two runs with equal settings, data and target take the same steps, bit for bit."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspark.drafter.config import HEADS
from dspark.errors import SettingsError


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides the weights of a run.

    Raises:
        SettingsError: a value is outside its range.
    """

    steps: int  # optimiser steps of the whole run; the learning rate falls to 0 over them
    taps: tuple[int, ...] = (8, 18, 28)
    layers: int = 1
    kv_heads: int | None = None  # None = as many as query heads
    head: str = "markov"
    rank: int = 64
    block_size: int = 8
    draft_vocab: int | None = 8192  # None = the whole vocabulary
    batch_blocks: int = 64  # per optimiser step
    chunk_blocks: int = 16  # blocks of one sequence that share its context, computed together
    lr: float = 1e-3
    warmup: float = 0.02  # of all steps
    weight_decay: float = 0.01  # on the backbone's matrices
    clip: float = 1.0  # largest gradient norm
    decay: float = 4.0  # slot k weighs exp(-(k-1) / decay)
    bigrams: bool = True  # start the Markov head from counted bigrams
    distance_heads: bool = True  # start most heads looking at the last few positions
    copy_heads: bool = True  # start some heads finding what followed here before, where there is room for them
    hidden_weight: float = 1.0  # at first, of the loss that pulls hidden states towards the target's
    warm_start: bool = False  # start the layers from the target's last ones
    refine_prob: float = 0.0  # how often a chunk's blocks show the drafter's own samples in place of masks
    bf16: bool = False  # matrix products in bfloat16, masters in float32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "block_size", "batch_blocks", "chunk_blocks"):
            self._check(_is_whole(getattr(self, name), 1), name, "a whole number of 1 or more")
        self._check(bool(self.taps), "taps", "at least one target layer")
        self._check(self.head in HEADS, "head", f"one of {', '.join(HEADS)}")
        self._check(_is_whole(self.rank, 0 if self.head == "none" else 1), "rank", "1 or more, or 0 with head none")
        self._check(self.draft_vocab is None or _is_whole(self.draft_vocab, 1), "draft_vocab", "1 or more")
        self._check(self.kv_heads is None or _is_whole(self.kv_heads, 1), "kv_heads", "1 or more")
        self._check(self.chunk_blocks <= self.batch_blocks, "chunk_blocks", f"up to batch_blocks {self.batch_blocks}")
        self._check(_is_whole(self.seed, 0) and self.seed < 2**32, "seed", "a whole number from 0 to 2**32 - 1")
        for name in ("lr", "clip", "decay"):
            value = getattr(self, name)
            self._check(math.isfinite(value) and value > 0, name, "a number above 0")
        self._check(0 <= self.warmup < 1, "warmup", "0 or more and below 1")
        hidden = self.hidden_weight
        self._check(math.isfinite(hidden) and hidden >= 0, "hidden_weight", "0 or more")
        self._check(0 <= self.refine_prob <= 1, "refine_prob", "a number from 0 to 1")
        self._check(math.isfinite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", "0 or more")

    def _check(self, ok: bool, name: str, allowed: str) -> None:
        if not ok:
            raise SettingsError(f"Training setting {name} is {getattr(self, name)!r}; allowed is {allowed}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainSettings":
        return cls(**{**values, "taps": tuple(values["taps"])})


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Of optimiser step `step` (from 0): a linear rise, then half a cosine down to 0 at the end."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.lr * (step + 1) / warm
    done = (step - warm) / max(1, settings.steps - warm)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def hidden_weight(step: int, settings: TrainSettings) -> float:
    """Of the hidden states' loss at a step: it shows the way at first and fades with the learning rate, since in the
    end only the distribution counts."""
    return settings.hidden_weight * learning_rate(step, settings) / settings.lr


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
