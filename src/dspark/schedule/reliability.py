"""How far stated probabilities are from what happened: reliability bins, expected calibration error (ECE), AUC."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

NUM_BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Statements sorted into bins of equal width over 0..1: how many, what they claim on average, how often it came
    true. Empty bins hold zeros."""

    counts: Float[Tensor, " bins"]
    stated: Float[Tensor, " bins"]
    observed: Float[Tensor, " bins"]


def reliability(probability: Float[Tensor, " N"], outcome: Bool[Tensor, " N"], bins: int = NUM_BINS) -> Reliability:
    """The points of a reliability diagram."""
    counts, stated, observed = _sums(probability[None], outcome, bins)
    filled = counts[0].clamp(min=1)
    return Reliability(counts[0], stated[0] / filled, observed[0] / filled)


def ece(
    probability: Float[Tensor, "*grid N"], outcome: Bool[Tensor, " N"], bins: int = NUM_BINS
) -> Float[Tensor, "*grid"]:
    """Expected calibration error: mean over statements of |stated - observed| of their bin, per row of `probability`.

    It is above 0 even for true probabilities, by chance; `chance_ece` says by how much.
    """
    _, stated, observed = _sums(probability.reshape(-1, probability.shape[-1]), outcome, bins)
    error = (stated - observed).abs().sum(-1) / max(1, outcome.shape[0])
    return error.reshape(probability.shape[:-1])


def chance_ece(probability: Float[Tensor, " N"], draws: int = 50, seed: int = 0, bins: int = NUM_BINS) -> float:
    """The ECE that these probabilities would show on average, at this number of statements, if they were true."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((draws, probability.shape[0]), generator=generator, dtype=torch.float64)
    return sum(float(ece(probability, row < probability, bins)) for row in uniform) / draws


def auc(score: Float[Tensor, " N"], outcome: Bool[Tensor, " N"]) -> float | None:
    """Chance that a statement that came true has a higher score than one that did not, ties counting half.

    None when all outcomes are the same.
    """
    positives = int(outcome.sum())
    negatives = outcome.shape[0] - positives
    if not positives or not negatives:
        return None
    _, place, counts = torch.unique(score, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[place]  # ties share the mean of their ranks
    return float((ranks[outcome].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _sums(
    probability: Float[Tensor, "G N"], outcome: Bool[Tensor, " N"], bins: int
) -> tuple[Float[Tensor, "G bins"], Float[Tensor, "G bins"], Float[Tensor, "G bins"]]:
    """Per row and bin: number of statements, sum of what they state, number that came true."""
    probability = probability.double()
    rows, count = probability.shape
    place = (probability * bins).long().clamp(0, bins - 1)
    place = (place + bins * torch.arange(rows)[:, None]).reshape(-1)

    def total(values: Tensor) -> Tensor:
        return torch.bincount(place, values.expand(rows, count).reshape(-1), minlength=rows * bins).reshape(rows, bins)

    return total(torch.ones(count, dtype=torch.float64)), total(probability), total(outcome.double())
