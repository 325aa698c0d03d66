"""What a drafter is trained to minimise. Pure. Source: arXiv 2607.05147.

Over the N counted slots of an optimiser batch, with draft distribution q, target distribution p and label y:

    loss = 0.1 CE + 0.9 L1 + 1.0 BCE + w H  each term = sum(weight * value) / sum(weight)
    CE   = -log q(y)
    L1   = sum over the whole vocabulary of |q - p| (twice the total variation distance)
    BCE  = cross entropy of the confidence against the detached 1 - L1 / 2
    H    = 1 - cosine of the slot's hidden state and the target's at the same position, both as their heads see them

H is not in the paper. It says where to go in every dimension at once, where L1 speaks of a few tokens only, and spares
a small drafter most of the data it would need otherwise (EAGLE's feature regression, arXiv 2401.15077, is its kin).

Slot k weighs exp(-(k-1) / decay). With a reduced draft vocabulary p stays normalised over the full vocabulary: q is 0
outside, so L1 there is p's left-over mass, and a label outside has no CE (its slot leaves that term's sums).

Sums and denominators are separate, so that a batch may be computed in pieces: denominators depend on masks and labels
only and are known before any piece runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CE_WEIGHT, L1_WEIGHT, BCE_WEIGHT = 0.1, 0.9, 1.0
OUTSIDE = -1  # draft id of a label that the draft vocabulary lacks
_PIECE_ELEMENTS = 64 * 1024  # of logits at a time: three such arrays fit a core's cache


@dataclass(frozen=True)
class LossSums:
    """Weighted sums of each term over some slots; `distances`, L1 per slot, are for statistics and detached."""

    ce: Tensor
    l1: Tensor
    bce: Tensor
    hidden: Tensor
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
    hidden: tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]] | None = None,
) -> LossSums:
    """The weighted sums over N slots, differentiable in draft and confidence logits and the drafter's hidden states.

    `target_probs` are the target's probabilities of the draft vocabulary's tokens under its full softmax, so rows sum
    to at most 1. `labels` are draft ids, `OUTSIDE` where there is none. Several confidence heads add up. `hidden` are
    the drafter's and the target's hidden states; None leaves their term 0.
    """
    cross_entropy, inner = _SlotDistances.apply(draft_logits, target_probs, labels)
    distances = inner + (1 - target_probs.sum(dim=-1)).clamp(min=0)
    survives = (1 - distances.detach() / 2).clamp(0, 1)
    bce = distances.new_zeros(())
    for logits in confidence_logits:
        bce = bce + (weights * F.binary_cross_entropy_with_logits(logits, survives, reduction="none")).sum()
    apart = weights.new_zeros(())
    if hidden is not None:
        apart = (weights * (1 - F.cosine_similarity(*hidden, dim=-1))).sum()
    return LossSums((weights * cross_entropy).sum(), (weights * distances).sum(), bce, apart, distances.detach())


class _SlotDistances(torch.autograd.Function):
    """(CE, L1 over the draft vocabulary) of every slot, with the gradient written out.

    Rows of a vocabulary are long, and autograd's chain of softmax, difference and sign reads and writes them a dozen
    times; by hand and a few rows at a time they stay in the processor's cache. With s = sign(q - p),

        d CE / d logits = q - onehot(y)        d L1 / d logits = q (s - sum(q s))
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.empty_like(logits)
        inside = labels != OUTSIDE
        own = labels.clamp(min=0)[:, None]
        cross_entropy, distances = logits.new_empty(len(labels)), logits.new_empty(len(labels))
        for rows in _pieces(logits):
            torch.softmax(logits[rows], dim=-1, out=q[rows])
            # the largest never underflows, so it tells the normaliser
            top = q[rows].max(dim=-1, keepdim=True)
            normaliser = logits[rows].gather(-1, top.indices) - top.values.log()
            # where, not a product with the mask: a logit of -inf times 0 is not a number
            of_label = (normaliser - logits[rows].gather(-1, own[rows])).squeeze(-1)
            cross_entropy[rows] = torch.where(inside[rows], of_label, torch.zeros_like(of_label))
            distances[rows] = (q[rows] - target_probs[rows]).abs_().sum(dim=-1)
        ctx.save_for_backward(q, target_probs, labels)
        return cross_entropy, distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_ce: Tensor, of_l1: Tensor) -> tuple[Tensor, None, None]:
        q, target_probs, labels = ctx.saved_tensors
        of_ce = torch.where(labels != OUTSIDE, of_ce, torch.zeros_like(of_ce))[:, None]
        grad = torch.empty_like(q)
        for rows in _pieces(q):
            sign = (q[rows] - target_probs[rows]).sign_()
            factor = torch.linalg.vecdot(q[rows], sign)[:, None]
            # q (of_l1 (s - sum(q s)) + of_ce)
            sign.mul_(of_l1[rows, None]).add_(of_ce[rows] - of_l1[rows, None] * factor)
            torch.mul(q[rows], sign, out=grad[rows])
            grad[rows].scatter_add_(-1, labels[rows].clamp(min=0)[:, None], -of_ce[rows])
        return grad, None, None


def _pieces(logits: Tensor) -> list[slice]:
    size = max(1, _PIECE_ELEMENTS // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    return [slice(first, first + size) for first in range(0, len(logits), size)]


def total_loss(sums: LossSums, over: Denominators, hidden_weight: float = 0.0) -> Float[Tensor, ""]:
    """This piece's share of the batch's loss; shares of all pieces add up to it, and so do their gradients."""
    labelled, everything = max(over.labelled, 1e-12), max(over.all, 1e-12)
    others = L1_WEIGHT * sums.l1 + BCE_WEIGHT * sums.bce + hidden_weight * sums.hidden
    return CE_WEIGHT * sums.ce / labelled + others / everything
