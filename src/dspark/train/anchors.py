"""Which blocks a drafter is trained on, and in which order. Pure.

A block with its anchor at position p has labels p+1..p+K. Anchor and first label must be tokens of the response, so
anchors are dense: every response position but the last. A slot counts only while all earlier labels of its block lie
in the response, which, labels being consecutive, means while its own does (arXiv 2607.05147).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some blocks of one sequence, which share its context: positions of their anchors, ascending."""

    sequence: int
    anchors: tuple[int, ...]


def response_anchors(prompt_len: int, length: int) -> range:
    """Positions that can be anchors in a sequence of `length` tokens."""
    return range(prompt_len, length - 1)


def slot_mask(anchors: Int[Tensor, " A"], block_size: int, length: int) -> Bool[Tensor, "A K"]:
    """Which slots count: slot k (column k-1) predicts position anchor + k, which must lie before `length`."""
    slots = torch.arange(1, block_size + 1, device=anchors.device)
    return anchors[:, None] + slots < length


class BatchPlan:
    """The batches of a run as a function of (seed, step), so that a resumed run draws what it would have drawn.

    An epoch shows every anchor once: each sequence's anchors are shuffled and dealt into chunks of at most
    `chunk_blocks`, the chunks of all sequences are shuffled, and a batch is the next `batch_blocks // chunk_blocks` of
    them (what is left at an epoch's end is dropped, another part each time).
    """

    def __init__(
        self, prompt_lens: Sequence[int], lengths: Sequence[int], batch_blocks: int, chunk_blocks: int, seed: int
    ):
        self._anchors = [response_anchors(p, n) for p, n in zip(prompt_lens, lengths, strict=True)]
        self._chunk_blocks, self._seed = chunk_blocks, seed
        self._per_batch = max(1, batch_blocks // chunk_blocks)
        chunks = sum(-(-len(a) // chunk_blocks) for a in self._anchors)
        self.steps_per_epoch = max(1, chunks // self._per_batch)
        self.num_anchors = sum(map(len, self._anchors))
        self._epoch, self._chunks = -1, list[Chunk]()

    def batch(self, step: int) -> list[Chunk]:
        """The chunks of optimiser step `step`, counted from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._chunks = epoch, self._deal(epoch)
        return self._chunks[within * self._per_batch : (within + 1) * self._per_batch]

    def _deal(self, epoch: int) -> list[Chunk]:
        # One stream per (seed, epoch); seeds of neighbouring runs must not give one run's epochs to the other.
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
        chunks = []
        for sequence, anchors in enumerate(self._anchors):
            if not anchors:
                continue
            shuffled = torch.randperm(len(anchors), generator=generator) + anchors.start
            for part in shuffled.tensor_split(-(-len(anchors) // self._chunk_blocks)):
                chunks.append(Chunk(sequence, tuple(part.sort().values.tolist())))
        order = torch.randperm(len(chunks), generator=generator).tolist()
        return [chunks[i] for i in order]
