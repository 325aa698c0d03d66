"""One differentiable pass over some blocks of one sequence."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.drafter import Drafter
from dspark.train.anchors import slot_mask
from dspark.train.features import Features
from dspark.train.losses import LossSums, loss_sums, slot_weights
from dspark.train.refine import Refinement, drafted_blocks


@dataclass(frozen=True)
class Slots:
    """A chunk's blocks as tensors. A anchors, K slots, N slots that count (`mask` in row-major order).

    `previous[a, k-1]` is the token before slot k's (teacher forcing: the anchor for slot 1). `labels` are draft ids,
    `rows` the response offsets of the positions whose target distributions the counted slots are compared with.
    """

    anchors: Int[Tensor, " A"]
    tokens: Int[Tensor, " A"]
    previous: Int[Tensor, "A K"]
    mask: Tensor
    labels: Int[Tensor, " N"]
    weights: Float[Tensor, " N"]
    rows: Int[Tensor, " N"]


def chunk_slots(
    ids: Int[Tensor, " T"],
    prompt_len: int,
    anchors: Int[Tensor, " A"],
    block_size: int,
    decay: float,
    to_draft: Int[Tensor, " V"],
) -> Slots:
    """Blocks at `anchors` of a sequence: slot k predicts position anchor + k from the token at anchor + k - 1."""
    length = ids.shape[0]
    mask = slot_mask(anchors, block_size, length)
    before = anchors[:, None] + torch.arange(block_size, device=anchors.device)
    inside = before.clamp(max=length - 2)  # slots past the end are masked; their places only need to exist
    return Slots(
        anchors=anchors,
        tokens=ids[anchors],
        previous=ids[inside],
        mask=mask,
        labels=to_draft[ids[inside + 1]][mask],
        weights=slot_weights(mask, decay)[mask],
        rows=(before - prompt_len)[mask],
    )


def chunk_sums(
    drafter: Drafter,
    features: Features,
    slots: Slots,
    probs: Float[Tensor, "N V_draft"],
    refine: Refinement | None = None,
) -> LossSums:
    """Loss sums of a chunk, differentiable in the drafter's weights. `probs` are the target's, of the counted slots;
    with `refine` the backbone sees its own samples in place of masks."""
    context = features.taps[: int(slots.anchors.max())].float()
    blocks = drafter.masked_block(slots.tokens)
    if refine is not None:
        blocks = drafted_blocks(drafter, context, slots.tokens, slots.anchors, refine)
    hidden = drafter.backbone.block_hidden(context, drafter.embed(blocks), slots.anchors)
    embedded = drafter.head.embed(slots.previous, like=hidden)
    logits = drafter.base_logits(hidden) + drafter.head.block_bias(embedded, hidden)
    confidence = []
    if drafter.confidence is not None:
        confidence.append(drafter.confidence.logits(hidden, embedded)[slots.mask])
    if drafter.token_free is not None:
        # An observer: it must not pull the backbone towards what can be known without tokens.
        confidence.append(drafter.token_free.logits(hidden.detach())[slots.mask])
    hidden, logits = (x.flatten(0, 1) if bool(slots.mask.all()) else x[slots.mask] for x in (hidden, logits))
    states = (hidden, features.hidden[slots.rows].float())
    return loss_sums(logits, probs, slots.labels, slots.weights, confidence, states)
