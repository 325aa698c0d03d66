"""Fit a drafter's calibration on one half of the prompts and say on the other half how well it holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dspark.artifacts import CalibrationCell
from dspark.engine import Engine
from dspark.errors import DataError, SettingsError
from dspark.measure.answers import Decoding, EngineFor, Ids, answers, decodings, seeded
from dspark.measure.confidence import BlockCollector, Blocks, split_by_prompt
from dspark.schedule.calibration import RULES, SlotScaling, bucket_of, choose, fit_platt, fit_sts, survival
from dspark.schedule.reliability import auc, chance_ece, ece


@dataclass(frozen=True)
class CalibrationPlan:
    """What to collect: `blocks` of `block_size` drafts in each half, for every rule and sampling temperature.

    Raises:
        SettingsError: an unknown rule, a temperature below 0, or two that share a bucket.
    """

    block_size: int
    rules: tuple[str, ...] = RULES
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    blocks: int = 5000
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        seen: dict[str, float] = {}
        for decoding in self.decodings:
            bucket = bucket_of(decoding.temperature)
            other = seen.setdefault(bucket, decoding.temperature)
            if other != decoding.temperature:
                raise SettingsError(
                    f"Temperatures {other:g} and {decoding.temperature:g} share one calibration ({bucket}); leave one "
                    "of them out."
                )

    @property
    def decodings(self) -> list[Decoding]:
        return decodings(self.rules, self.temperatures)


@dataclass(frozen=True)
class Collected:
    """Progress: blocks of this decoding so far, of both halves together."""

    decoding: Decoding
    blocks: int


@dataclass(frozen=True)
class Cell:
    """A fitted cell, and the other half's blocks for a diagram."""

    decoding: Decoding
    stored: CalibrationCell
    scaling: SlotScaling
    held_out: Blocks


def calibrate(engine_for: EngineFor, prompts: Sequence[Ids], plan: CalibrationPlan) -> Iterator[Collected | Cell]:
    """Collect and fit, decoding by decoding. The engines verify whole blocks: policy `fixed:K`.

    Raises:
        DataError: the prompts do not fill both halves.
        SettingsError: the drafter states no confidence.
    """
    halves = split_by_prompt(prompts)
    if not all(halves):
        raise DataError(f"{sum(map(len, halves))} different prompts do not make two halves; give a hundred or more.")
    for decoding in plan.decodings:
        engine = engine_for(decoding)
        parts: list[Blocks] = []
        for half in halves:
            collector = BlockCollector(plan.block_size)
            engine.listeners[:] = [collector]
            for _ in _collect(engine, half, decoding.temperature, plan, collector):
                yield Collected(decoding, sum(map(len, parts)) + len(collector))
            if not len(collector):
                raise SettingsError(
                    "No block with confidences was collected; use a drafter with a confidence head and a larger "
                    "--max-tokens."
                )
            parts.append(collector.blocks())
        yield fit_cell(decoding, *parts)


def _collect(
    engine: Engine, prompts: Sequence[Ids], temperature: float, plan: CalibrationPlan, collector: BlockCollector
) -> Iterator[object]:
    requests = seeded(prompts, temperature, plan.max_tokens, plan.seed)
    return answers(engine, requests, lambda: len(collector) >= plan.blocks)


def fit_cell(decoding: Decoding, fitting: Blocks, held_out: Blocks) -> Cell:
    """Fit every form on one half, take the simplest that is about as good as the best there, report on the other."""
    forms = {
        "raw": SlotScaling(),
        "sts": fit_sts(fitting.confidence, fitting.survived),
        "platt": fit_platt(fitting.confidence, fitting.survived),
    }
    scaling = choose(tuple(forms.values()), fitting.confidence, fitting.survived)
    slots = fitting.confidence.shape[1]
    stored = CalibrationCell(
        rules=decoding.rules,
        bucket=bucket_of(decoding.temperature),
        temperature=decoding.temperature,
        form=next(name for name, candidate in forms.items() if candidate is scaling),
        temperatures=scaling.temperatures or (1.0,) * slots,
        biases=scaling.biases or (0.0,) * slots,
        sts_temperatures=forms["sts"].temperatures,
        fitted_blocks=len(fitting),
        reported_blocks=len(held_out),
        report=_report(forms, scaling, held_out),
    )
    return Cell(decoding, stored, scaling, held_out)


def _report(forms: dict[str, SlotScaling], scaling: SlotScaling, blocks: Blocks) -> dict[str, tuple[float | None, ...]]:
    """Per slot: share of blocks that survive it, ECE of each form, the ECE chance alone would show, AUC."""
    kept = list(blocks.survived.T)
    stated = {name: _stated(form, blocks) for name, form in forms.items()}
    chosen = _stated(scaling, blocks)

    def errors(slots: list[Tensor]) -> tuple[float, ...]:
        return tuple(float(ece(s, k)) for s, k in zip(slots, kept, strict=True))

    return {
        "survival": tuple(float(k.double().mean()) for k in kept),
        **{f"ece_{name}": errors(slots) for name, slots in stated.items()},
        "ece": errors(chosen),
        "chance_ece": tuple(map(chance_ece, chosen)),
        "auc_raw": tuple(auc(s, k) for s, k in zip(stated["raw"], kept, strict=True)),
        "auc": tuple(auc(s, k) for s, k in zip(chosen, kept, strict=True)),
    }


def _stated(scaling: SlotScaling, blocks: Blocks) -> list[Tensor]:
    """Stated survival, slot by slot."""
    return list(survival(scaling.apply(blocks.confidence)).T.contiguous())
