"""Costs that a profile has wrong are corrected from what steps take, by part."""

import random

import pytest

from dspark.schedule import StepView
from dspark.schedule.drift import CostDrift
from dspark.schedule.planner import plan_drafts
from tests.schedule import machines as m

PLAIN, TOKEN, DRAFTER = 30.0, 3.0, 6.0  # ms, as the profile has them


def steps(drift, count, rest=1.0, token=1.0, drafter=1.0, length=4, plain_every=4):
    """Steps of a machine that differs from the profile by the given factors; one in `plain_every` drafts nothing."""
    for i in range(count):
        drafts = i % plain_every != 0
        predicted = PLAIN + TOKEN * length * drafts
        took = (PLAIN + TOKEN * token * length * drafts) * rest
        drift.observe(took, DRAFTER * drafter * drafts, PLAIN, predicted, DRAFTER * drafts)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_each_part_is_followed_and_leaves_the_others_alone(factor):
    for part in ("rest", "token", "drafter"):
        drift = CostDrift()
        steps(drift, 400, **{part: factor})
        expected = {"rest": 1.0, "token": 1.0, "drafter": 1.0, part: factor}
        assert drift.rest == pytest.approx(expected["rest"], rel=0.15)
        assert drift.more == pytest.approx(expected["token"], rel=0.15)
        assert drift.draft == pytest.approx(expected["drafter"], rel=0.05)


def test_small_differences_and_single_hiccups_change_no_token_cost():
    drift = CostDrift()
    steps(drift, 200, token=1.15)
    assert drift.more == 1.0
    drift.observe(100 * PLAIN, 0.0, PLAIN, PLAIN + 4 * TOKEN, 0.0)
    assert drift.more < 1.5


def test_noise_larger_than_what_tokens_cost_cancels():
    drift = CostDrift()
    for i in range(1200):
        drafts, noise = i % 4 != 0, 1.15 if i % 8 < 4 else 0.85
        predicted = PLAIN + TOKEN * drafts
        drift.observe(predicted * (noise if drafts else 1.0), 0.0, PLAIN, predicted, 0.0)
    assert drift.more == 1.0


@pytest.mark.parametrize("seed", range(8))
def test_a_machine_whose_speed_wanders_is_not_blamed_on_tokens(seed):
    """One plain step in 50, drafts of 1 to 8 tokens, a speed that jumps by a quarter now and then, and noise."""
    chance, drift, speed, worst = random.Random(seed), CostDrift(), 1.0, 1.0
    for i in range(2000):
        if chance.random() < 0.05:
            speed = chance.uniform(0.8, 1.25)
        length = 0 if i % 50 < 2 else chance.randint(1, 8)
        predicted = PLAIN + TOKEN * length
        drift.observe(predicted * speed * chance.gauss(1, 0.08), 0.0, PLAIN, predicted, 0.0)
        worst = max(worst, drift.more, 1 / drift.more)
    assert worst < 1.3 and drift.more == 1.0


def test_a_machine_that_got_slower_between_plain_steps_is_not_blamed_on_tokens():
    drift = CostDrift()
    steps(drift, 100)
    for _ in range(400):
        drift.observe(1.6 * (PLAIN + 4 * TOKEN), DRAFTER, PLAIN, PLAIN + 4 * TOKEN, DRAFTER)
    steps(drift, 100, rest=1.6)
    assert drift.more == 1.0 and drift.rest == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_drafter_not_used_since_gets_faster_and_slower_with_the_machine(factor):
    drift = CostDrift()
    steps(drift, 300, rest=factor, drafter=factor)
    assert drift.draft == pytest.approx(factor, rel=0.05)
    for _ in range(300):
        drift.observe(PLAIN, 0.0, PLAIN, PLAIN, 0.0)
    assert drift.rest == pytest.approx(1.0, rel=0.05) and drift.draft == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("part", "wrong"), [("rest", False), ("token", True), ("drafter", True)])
def test_a_profile_is_to_be_measured_anew_when_proportions_are_wrong(part, wrong):
    drift = CostDrift()
    steps(drift, 400, **{part: 1.5 if part == "rest" else 4.0})
    assert drift.wrong is wrong


def test_a_step_without_a_prediction_teaches_nothing():
    drift = CostDrift()
    drift.observe(10.0, 0.0, 0.0, 0.0, 0.0)
    assert (drift.draft, drift.rest, drift.more, drift.wrong) == (1.0, 1.0, 1.0, False)


def best_length(costs, chances, **drift):
    step = m.step_of([chances])
    (choice,) = plan_drafts(StepView(step.rows, 1, 1, 100, **drift), costs)
    return choice.length


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_plan_on_a_profile_wrong_by_a_factor_of_three_recovers(factor):
    """What tokens cost is wrong in the profile: the length that was right for it comes to what is right here."""
    chances = [0.8] * 12
    said = m.curves(lambda tokens: PLAIN + TOKEN * (tokens - 1) / factor)
    true = m.curves(lambda tokens: PLAIN + TOKEN * (tokens - 1))
    right = best_length(true, chances)
    assert best_length(said, chances) != right
    drift = CostDrift()
    for i in range(300):
        length = best_length(said, chances, rest_drift=drift.rest, more_drift=drift.more) if i % 4 else 0
        drift.observe(PLAIN + TOKEN * length, 0.0, PLAIN, PLAIN + TOKEN * length / factor, 0.0)
    assert abs(best_length(said, chances, rest_drift=drift.rest, more_drift=drift.more) - right) <= 1
