"""What the drafter said about its tokens, and what became of them: collected from the engine's own records."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dspark.config import StepRecord
from dspark.measure.answers import Ids


@dataclass(frozen=True)
class Blocks:
    """Whole drafted blocks, every slot of them verified. `survived[n, k]`: the first k + 1 tokens were all kept."""

    confidence: Float[Tensor, "N K"]
    survived: Bool[Tensor, "N K"]

    def __len__(self) -> int:
        return self.confidence.shape[0]


class BlockCollector:
    """A listener that keeps the blocks of `block_size` drafts.

    Shorter ones are left out: a request drafts them only where its limit is near, whatever they hold, so nothing is
    chosen by outcome. A block whose commit was cut short (end token, limit) has a full verdict and is kept.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._confidence: list[tuple[float, ...]] = []
        self._survived: list[tuple[bool, ...]] = []

    def __len__(self) -> int:
        return len(self._confidence)

    def __call__(self, record: StepRecord) -> None:
        for row in record.rows:
            if row.verified == self._block_size == len(row.confidence):
                self._confidence.append(row.confidence)
                self._survived.append(row.slot_accepted)

    def blocks(self) -> Blocks:
        shape = (len(self), self._block_size)
        return Blocks(
            torch.tensor(self._confidence, dtype=torch.float64).reshape(shape),
            torch.tensor(self._survived, dtype=torch.bool).reshape(shape),
        )


def split_by_prompt(prompts: Iterable[Ids]) -> tuple[list[Ids], list[Ids]]:
    """Two halves, each prompt once. Its hash decides the half and the place in it, whatever order prompts come in."""
    hashed = {hashlib.sha256(b"calibration" + repr(list(ids)).encode()).digest(): ids for ids in prompts}
    halves: tuple[list[Ids], list[Ids]] = ([], [])
    for key in sorted(hashed):
        halves[key[-1] % 2].append(hashed[key])
    return halves
