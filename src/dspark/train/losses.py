"""What a drafter is trained to minimise. Pure. Source: arXiv 2607.05147.

Over the N counted slots of an optimiser batch, with draft distribution q, target distribution p and label y:

    loss = 0.1 CE + 0.9 L1 + 1.0 BCE        each term = sum(weight * value) / sum(weight)
    CE   = -log q(y)
    L1   = sum over the whole vocabulary of |q - p| (twice the total variation distance)
    BCE  = cross entropy of the confidence against the detached 1 - L1 / 2

Slot k weighs exp(-(k-1) / decay). With a reduced draft vocabulary p stays normalised over the full vocabulary: q is 0
outside, so L1 there is p's left-over mass, and a label outside has no CE (its slot leaves that term's sums).

Sums and denominators are separate, so that a batch may be computed in pieces: denominators depend on masks and labels
only and are known before any piece runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

CE_WEIGHT, L1_WEIGHT, BCE_WEIGHT = 0.1, 0.9, 1.0
OUTSIDE = -1  # draft id of a label that the draft vocabulary lacks


@dataclass(frozen=True)
class LossSums:
    """Weighted sums of each term over some slots; `l1` per slot [N] is for statistics and detached."""

    ce: Tensor
    l1: Tensor
    bce: Tensor
    distances: Float[Tensor, " N"]


@dataclass(frozen=True)
class Denominators:
    """Sums of weights over the whole optimiser batch: over slots whose label can be drafted, and over all."""

    labelled: float
    all: float


def slot_weights(mask: Bool[Tensor, "A K"], decay: float) -> Float[Tensor, "A K"]:
    """exp(-(k-1) / decay) for slots that count, 0 for others. float32."""
    slots = torch.arange(mask.shape[1], device=mask.device, dtype=torch.float32)
    return torch.exp(-slots / decay) * mask


def denominators(weights: Float[Tensor, " N"], labels: Int[Tensor, " N"]) -> Denominators:
    """Of one batch, from the weights and draft ids of the labels of all its counted slots."""
    double = weights.double()
    return Denominators(float((double * (labels != OUTSIDE)).sum()), float(double.sum()))


def loss_sums(
    draft_logits: Float[Tensor, "N V_draft"],
    target_probs: Float[Tensor, "N V_draft"],
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    confidence_logits: Sequence[Float[Tensor, " N"]] = (),
) -> LossSums:
    """The three weighted sums over N slots, differentiable in draft and confidence logits.

    `target_probs` are the target's probabilities of the draft vocabulary's tokens under its full softmax, so rows sum
    to at most 1. `labels` are draft ids, `OUTSIDE` where there is none. Several confidence heads add up.
    """
    log_q = draft_logits.log_softmax(dim=-1)
    inside = labels != OUTSIDE
    own = log_q.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    # where, not a product with the mask: a logit of -inf times 0 is not a number
    cross_entropy = torch.where(inside, -own, torch.zeros_like(own))
    left_over = (1 - target_probs.sum(dim=-1)).clamp(min=0)
    distances = (log_q.exp() - target_probs).abs().sum(dim=-1) + left_over
    survives = (1 - distances.detach() / 2).clamp(0, 1)
    bce = distances.new_zeros(())
    for logits in confidence_logits:
        bce = bce + (weights * F.binary_cross_entropy_with_logits(logits, survives, reduction="none")).sum()
    return LossSums((weights * cross_entropy).sum(), (weights * distances).sum(), bce, distances.detach())


def total_loss(sums: LossSums, over: Denominators) -> Float[Tensor, ""]:
    """This piece's share of the batch's loss; shares of all pieces add up to it, and so do their gradients."""
    labelled, everything = max(over.labelled, 1e-12), max(over.all, 1e-12)
    return CE_WEIGHT * sums.ce / labelled + (L1_WEIGHT * sums.l1 + BCE_WEIGHT * sums.bce) / everything
