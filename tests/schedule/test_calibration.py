"""Calibration: what is fitted on drafters whose faults are known, and which fit a request gets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.schedule.calibration import (
    BUCKETS,
    TEMPERATURES,
    Calibration,
    SlotScaling,
    bucket_of,
    choose,
    fit_platt,
    fit_sts,
    survival,
    worst_ece,
)
from dspark.schedule.reliability import ece
from tests.schedule.synthetic import blocks

SLOTS = 4


def fits(made):
    return SlotScaling(), fit_sts(made.confidence, made.survived), fit_platt(made.confidence, made.survived)


def error(scaling, made):
    return worst_ece(scaling, made.confidence, made.survived)


def grid_steps(found, true):
    return [abs(20 * math.log10(f / t)) for f, t in zip(found, true, strict=True)]


def test_sts_finds_the_temperature_of_each_slot():
    true = (2.0, 0.5, 1.0, 1.6)
    made, held_out = blocks(12_000, SLOTS, true, seed=1), blocks(12_000, SLOTS, true, seed=2)
    raw, sts, _ = fits(made)
    assert max(grid_steps(sts.temperatures, true)) < 4  # of a grid whose steps are 12 %
    assert sts.biases == (0.0,) * SLOTS and set(sts.temperatures) <= set(TEMPERATURES)
    assert error(raw, held_out) > 0.05 and error(sts, held_out) < 0.02


def test_later_slots_make_up_for_what_a_temperature_could_not_mend():
    """The first slot is biased, the others state the truth; fitted alone they would keep T = 1 and its fault."""
    made, held_out = (blocks(6000, 3, 1.0, (1.5, 0.0, 0.0), seed=seed) for seed in (3, 4))
    sts = fit_sts(made.confidence, made.survived)

    def last_error(temperatures):
        stated = survival(SlotScaling(temperatures).apply(held_out.confidence))
        return float(ece(stated[:, 2], held_out.survived[:, 2]))

    assert last_error(sts.temperatures) < 0.75 * last_error((sts.temperatures[0], 1.0, 1.0))


@pytest.mark.parametrize("bias", [-0.8, 0.8])
def test_a_slot_that_always_claims_too_much_needs_a_bias(bias):
    made, held_out = blocks(6000, SLOTS, 1.5, bias, seed=4), blocks(6000, SLOTS, 1.5, bias, seed=5)
    raw, sts, platt = fits(made)
    assert choose((raw, sts, platt), made.confidence, made.survived) is platt
    assert error(sts, held_out) > 0.05 and error(platt, held_out) < 0.025
    assert max(grid_steps(platt.temperatures, (1.5,) * SLOTS)) < 2.5
    assert max(abs(b - bias) for b in platt.biases) < 0.25


def test_true_statements_stay_true():
    made, held_out = blocks(12_000, SLOTS, seed=6), blocks(12_000, SLOTS, seed=7)
    raw, sts, platt = fits(made)
    assert choose((raw, sts, platt), made.confidence, made.survived) is raw
    assert all(error(scaling, held_out) < error(raw, held_out) + 0.008 for scaling in (sts, platt))


def test_the_goal_of_three_percent_is_within_reach_of_5000_blocks():
    """Eight slots, faulty in both ways, fitted on 5,000 blocks and judged on 5,000 others."""
    faults = ((1.7,) * 8, tuple(-0.7 + 0.2 * k for k in range(8)))
    made, held_out = blocks(5000, 8, *faults, seed=8), blocks(5000, 8, *faults, seed=9)
    scaling = choose(fits(made), made.confidence, made.survived)
    assert error(SlotScaling(), held_out) > 0.1 and error(scaling, held_out) <= 0.03


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 1.0]))
def test_whatever_happened_the_fit_is_usable_and_not_worse(count, slots, seed, chance):
    """Also with few blocks, with nothing kept or everything, and with confidences of exactly 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    confidence = (torch.rand(count, slots, generator=generator) * 1.4 - 0.2).clamp(0, 1)
    survived = (torch.rand(count, slots, generator=generator) < chance).cumprod(1).bool()
    forms = SlotScaling(), fit_sts(confidence, survived), fit_platt(confidence, survived)
    chosen = choose(forms, confidence, survived)
    assert worst_ece(chosen, confidence, survived) <= worst_ece(SlotScaling(), confidence, survived)
    for scaling in forms[1:]:
        assert all(0.1 <= t <= 10 + 1e-9 for t in scaling.temperatures)
        assert all(math.isfinite(b) and abs(b) <= 10 for b in scaling.biases)
        applied = scaling.apply(confidence)
        assert applied.dtype == confidence.dtype and bool(((applied >= 0) & (applied <= 1)).all())
        order = confidence[:, 0].argsort()
        assert bool((applied[order, 0].diff() >= -1e-6).all())  # what was likelier stays likelier


def test_a_slot_does_not_depend_on_later_ones():
    made = blocks(500, SLOTS, 2.0, 0.5, seed=10)
    for fit in (fit_sts, fit_platt):
        whole, part = fit(made.confidence, made.survived), fit(made.confidence[:, :2], made.survived[:, :2])
        assert whole.temperatures[:2] == part.temperatures and whole.biases[:2] == part.biases


def test_scaling_acts_on_the_logit_and_the_last_slot_serves_later_ones():
    scaling = SlotScaling((2.0, 1.0), (0.0, 1.0))
    found = scaling.apply(torch.tensor([[0.8, 0.8, 0.8]]))
    logit = math.log(4)
    expected = [1 / (1 + math.exp(-logit / 2)), *[1 / (1 + math.exp(-logit - 1))] * 2]
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    stated = torch.rand(3, 5)
    assert SlotScaling().apply(stated) is stated


@given(
    confidence=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    temperatures=st.lists(st.floats(0.1, 10), max_size=4),
    biases=st.lists(st.floats(-5, 5), max_size=4),
)
def test_plain_numbers_scale_as_tensors_do(confidence, temperatures, biases):
    scaling = SlotScaling(tuple(temperatures), tuple(biases) if temperatures else ())
    rows = torch.tensor([confidence], dtype=torch.float64)
    assert scaling.apply_to(confidence) == pytest.approx(scaling.apply(rows)[0].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "bucket"),
    [(0, "greedy"), (0.01, "low"), (0.5, "low"), (0.7, "middle"), (0.85, "middle"), (0.9, "high"), (5, "high")],
)
def test_buckets(temperature, bucket):
    assert bucket_of(temperature) == bucket
    assert bucket_of(BUCKETS[bucket]) == bucket


def test_a_missing_bucket_is_served_by_the_nearest():
    greedy, high, other = (SlotScaling((t,), (0.0,)) for t in (2.0, 3.0, 4.0))
    calibration = Calibration(
        {("rejection", "greedy"): greedy, ("rejection", "high"): high, ("coupled", "middle"): other}
    )
    assert calibration.scaling("rejection", 0) is greedy and calibration.scaling("rejection", 1.2) is high
    assert calibration.scaling("rejection", 0.7) is high and calibration.scaling("rejection", 0.3) is greedy
    assert calibration.scaling("coupled", 0) is other
    stated = torch.rand(2, 3)
    assert torch.equal(calibration.apply(stated, "coupled", 1.0), other.apply(stated))
    only_coupled = Calibration.from_table({("coupled", "high"): ((2.0,), (0.5,))})
    assert only_coupled.apply(stated, "rejection", 1.0) is stated
    assert only_coupled.scaling("coupled", 1.0) == SlotScaling((2.0,), (0.5,))


def test_chances_of_slots_come_from_their_survival():
    table = {("rejection", "greedy"): ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))}
    calibration = Calibration.from_table(table, {("rejection", "greedy"): (0.5, 0.2, 0.0)})
    assert calibration.chance("rejection", 1.0) == pytest.approx((0.5, 0.4, 0.0))  # the nearest
    assert calibration.chance("coupled", 0) == Calibration.from_table(table).chance("rejection", 0) == ()
