"""From what a drafter says about its tokens to how often they are kept: sequential temperature scaling (STS).

A drafter's confidence c_k claims that token k is kept given that all before it were; what a plan needs is survival, the
product of the first k. STS (arXiv 2607.05147) goes slot by slot from the left and gives each slot the temperature at
which the product up to it is best calibrated, earlier slots fixed. A temperature only moves confidences away from 1/2
or towards it, so it cannot mend a slot that claims too much everywhere; for that there is a second form with a bias per
slot (Platt scaling), fitted in the same order.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dspark.schedule.reliability import ece

# 41 values, log-spaced; 1 (no change) is among them.
TEMPERATURES = tuple(10 ** (i / 20 - 1) for i in range(41))
RULES = ("rejection", "coupled")
# Ranges of sampling temperature that share a calibration, up to and including `_UPPER`; the value stands for the range.
BUCKETS = {"greedy": 0.0, "low": 0.35, "middle": 0.7, "high": 1.0}
_UPPER = {"greedy": 0.0, "low": 0.5, "middle": 0.85, "high": float("inf")}

_EDGE = 1e-6  # confidences are kept this far from 0 and 1, whose logits are infinite
_FLAT = 2e-3  # smaller differences of ECE are chance at any number of blocks we can collect
_MOST_BIAS = 10.0
_LBFGS_STEPS = 50


def bucket_of(temperature: float) -> str:
    """The bucket a sampling temperature belongs to."""
    return next(name for name, upper in _UPPER.items() if temperature <= upper)


@dataclass(frozen=True)
class SlotScaling:
    """Slot k's confidence c becomes sigmoid(logit(c) / temperatures[k] + biases[k]); later slots use the last values.

    Plain STS has no biases. `SlotScaling()` changes nothing.
    """

    temperatures: tuple[float, ...] = ()
    biases: tuple[float, ...] = ()

    def apply(self, confidence: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """Calibrated conditional confidences; their running product is the survival."""
        if not self.temperatures:
            return confidence
        slots = confidence.shape[-1]
        logits = torch.logit(confidence, _EDGE) / confidence.new_tensor(_spread(self.temperatures, slots))
        return torch.sigmoid(logits + confidence.new_tensor(_spread(self.biases or (0.0,), slots)))

    def apply_to(self, confidence: Sequence[float]) -> list[float]:
        """The same for one row as plain numbers, which is faster for a few of them."""
        if not self.temperatures:
            return list(confidence)
        slots = len(confidence)
        scales = zip(_spread(self.temperatures, slots), _spread(self.biases or (0.0,), slots), strict=True)
        return [_scaled(chance, *scale) for chance, scale in zip(confidence, scales, strict=True)]


def _scaled(chance: float, temperature: float, bias: float) -> float:
    chance = min(max(chance, _EDGE), 1 - _EDGE)
    logit = math.log(chance / (1 - chance)) / temperature + bias
    # exp of a large number overflows; at these the answer is 0 or 1 anyway
    return 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))


def _spread(values: Sequence[float], slots: int) -> list[float]:
    return [values[min(k, len(values) - 1)] for k in range(slots)]


@dataclass(frozen=True)
class Calibration:
    """One drafter's scalings by (acceptance rule, temperature bucket), and how often its slots were kept when these
    were fitted, each given that all before it were. `Calibration({})` changes and knows nothing."""

    scalings: Mapping[tuple[str, str], SlotScaling]
    chances: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def from_table(
        cls,
        table: Mapping[tuple[str, str], tuple[Sequence[float], Sequence[float]]],
        survivals: Mapping[tuple[str, str], Sequence[float]] | None = None,
    ) -> "Calibration":
        """From (temperatures, biases) and survivals by rule and bucket, as `artifacts.StoredCalibration` gives them."""
        scalings = {key: SlotScaling(tuple(ts), tuple(bs)) for key, (ts, bs) in table.items()}
        return cls(scalings, {key: _conditional(values) for key, values in (survivals or {}).items()})

    def scaling(self, rule: str, temperature: float) -> SlotScaling:
        """What was fitted for this rule at the nearest temperature; nothing fitted for the rule: no change.

        Greedy requests are nearest to greedy text whatever else was fitted; both rules coincide there.
        """
        nearest = _nearest(self.scalings, rule, temperature)
        return SlotScaling() if nearest is None else self.scalings[nearest]

    def chance(self, rule: str, temperature: float) -> tuple[float, ...]:
        """How often slots were kept, given all before them, at the nearest temperature; nothing where unknown."""
        nearest = _nearest(self.chances, rule, temperature)
        return () if nearest is None else self.chances[nearest]

    def apply(self, confidence: Float[Tensor, "B K"], rule: str, temperature: float) -> Float[Tensor, "B K"]:
        """Calibrated confidences of rows that share a rule and a temperature."""
        return self.scaling(rule, temperature).apply(confidence)


def _nearest(known: Collection[tuple[str, str]], rule: str, temperature: float) -> tuple[str, str] | None:
    own = bucket_of(temperature)
    names = [name for name in BUCKETS if (rule, name) in known]
    if not names:
        return None
    return rule, min(names, key=lambda name: (name != own, abs(BUCKETS[name] - temperature)))


def _conditional(survival: Sequence[float]) -> tuple[float, ...]:
    return tuple(now / before if before else 0.0 for before, now in pairwise((1.0, *survival)))


def survival(confidence: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Probability that the first k tokens are all kept."""
    return confidence.cumprod(-1)


def worst_ece(scaling: SlotScaling, confidence: Float[Tensor, "N K"], survived: Bool[Tensor, "N K"]) -> float:
    """Largest ECE of the survival over the slots."""
    stated = survival(scaling.apply(confidence.double()))
    return max((float(ece(stated[:, k], survived[:, k])) for k in range(survived.shape[1])), default=0.0)


def fit_sts(confidence: Float[Tensor, "N K"], survived: Bool[Tensor, "N K"]) -> SlotScaling:
    """One temperature per slot from `TEMPERATURES`, slot by slot from the left, by the ECE of the survival.

    Args:
        confidence: what the drafter said, of whole blocks whose every slot was verified.
        survived: whether the first k tokens were all kept.
    """
    grid = torch.tensor(TEMPERATURES, dtype=torch.float64)
    logits = torch.logit(confidence.double(), _EDGE)
    before, temperatures = torch.ones_like(logits[:, 0]), []
    for own, kept in zip(logits.T, survived.T, strict=True):
        stated = before * torch.sigmoid(own / grid[:, None])
        best = _smallest_ece(stated, kept)
        before = stated[best]
        temperatures.append(TEMPERATURES[best])
    return SlotScaling(tuple(temperatures), (0.0,) * len(temperatures))


def fit_platt(confidence: Float[Tensor, "N K"], survived: Bool[Tensor, "N K"]) -> SlotScaling:
    """A temperature and a bias per slot, in the same order as `fit_sts`, by likelihood: with two numbers to choose, the
    smallest ECE is mostly chance."""
    logits = torch.logit(confidence.double(), _EDGE)
    before, found = torch.ones_like(logits[:, 0]), []
    for own, kept in zip(logits.T, survived.T, strict=True):
        temperature, bias = _likeliest(before, own, kept)
        before = before * torch.sigmoid(own / temperature + bias)
        found.append((temperature, bias))
    return SlotScaling(tuple(t for t, _ in found), tuple(b for _, b in found))


def choose(
    candidates: Sequence[SlotScaling], confidence: Float[Tensor, "N K"], survived: Bool[Tensor, "N K"]
) -> SlotScaling:
    """The first candidate whose worst slot is about as good as the best candidate's; give the simplest first."""
    errors = [worst_ece(scaling, confidence, survived) for scaling in candidates]
    best = min(errors)
    return next(s for s, error in zip(candidates, errors, strict=True) if error <= best + _FLAT)


def _smallest_ece(stated: Float[Tensor, "G N"], kept: Bool[Tensor, " N"]) -> int:
    """The row with the smallest ECE. Where the ECE is flat, which it is over wide ranges of temperature, chance would
    choose; there the likelihood does, which is steeper."""
    errors = ece(stated, kept)
    loss = _loss(stated, kept).masked_fill(errors > errors.min() + _FLAT, float("inf"))
    return int(loss.argmin())


def _loss(stated: Float[Tensor, "G N"], kept: Bool[Tensor, " N"]) -> Float[Tensor, " G"]:
    """Mean negative log-likelihood, per row."""
    stated = stated.clamp(1e-12, 1 - 1e-12)
    return -torch.where(kept, stated.log(), torch.log1p(-stated)).mean(-1)


def _likeliest(before: Float[Tensor, " N"], own: Float[Tensor, " N"], kept: Bool[Tensor, " N"]) -> tuple[float, float]:
    """The temperature (0.1 to 10) and bias that make `kept` likeliest under before * sigmoid(own / T + bias)."""
    free = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=_LBFGS_STEPS, line_search_fn="strong_wolfe")

    def values() -> tuple[Tensor, Tensor]:
        return 10 ** torch.tanh(free[0]), _MOST_BIAS * torch.tanh(free[1])

    def closure() -> Tensor:
        optimizer.zero_grad()
        temperature, bias = values()
        stated = before * torch.sigmoid(own / temperature + bias)
        # The weight of one block keeps both numbers finite where the outcomes leave them open.
        loss = _loss(stated, kept) + (free**2).sum() / max(1, len(kept))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    temperature, bias = values()
    return float(temperature.detach()), float(bias.detach())
