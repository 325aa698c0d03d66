"""A drafter's own, smaller vocabulary: which target tokens it can propose."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import DrafterError

NEG_INF = float("-inf")


@dataclass(frozen=True)
class DraftVocabulary:
    """Draft token i is target token `ids[i]`; ids ascend. The target's vocabulary has `full_size` tokens."""

    ids: Int[Tensor, " V_draft"]
    full_size: int

    @classmethod
    def from_offsets(cls, d2t: Int[Tensor, " V_draft"], full_size: int) -> "DraftVocabulary":
        """From a checkpoint's `d2t`: target id = draft id + d2t[draft id] (as EAGLE-3, vLLM and speculators store it).

        Raises:
            DrafterError: an id falls outside the target's vocabulary, or ids do not ascend.
        """
        if d2t.dtype.is_floating_point or d2t.dtype == torch.bool:
            raise DrafterError(f"Tensor d2t is of type {d2t.dtype}; it must hold whole numbers, so export it again.")
        ids = torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()
        outside = ids[(ids < 0) | (ids >= full_size)]
        if outside.numel():
            raise DrafterError(
                f"Tensor d2t leads to token id {int(outside[0])}; the target has ids 0 to {full_size - 1}, so d2t must "
                "hold offsets (target id minus draft id) for this target."
            )
        falling = (ids[1:] <= ids[:-1]).nonzero()
        if falling.numel():
            at = int(falling[0])
            raise DrafterError(
                f"Tensor d2t maps draft ids {at} and {at + 1} to token ids {int(ids[at])} and {int(ids[at + 1])}; "
                "target ids must ascend, so d2t must hold offsets (target id minus draft id), not ids."
            )
        return cls(ids, full_size)

    def offsets(self) -> Int[Tensor, " V_draft"]:
        """The checkpoint's `d2t`."""
        return self.ids - torch.arange(self.ids.shape[0], device=self.ids.device)

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.ids.tolist())

    def expand(self, logits: Float[Tensor, "*rows V_draft"]) -> Float[Tensor, "*rows V"]:
        """Logits over the target's vocabulary; tokens outside the draft vocabulary get -inf, so probability 0."""
        full = logits.new_full((*logits.shape[:-1], self.full_size), NEG_INF)
        return full.index_copy_(-1, self.ids, logits)
