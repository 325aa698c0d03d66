"""Costs that a profile has wrong are corrected from what steps take, by part."""

import itertools
import math
import random

import pytest

from dspark.schedule import StepView
from dspark.schedule.drift import AGE, CostDrift
from dspark.schedule.planner import plan_drafts
from dspark.schedule.policy import MAX_DRAFT
from tests.schedule import machines as m

PLAIN, TOKEN, DRAFTER = 30.0, 3.0, 6.0  # ms, as the profile has them
NUMBERS = itertools.count()  # of steps


def observe(drift, took, draft_ms, plain, full, drafting):
    """One step of one request, as the engine tells of it; a draft token adds about TOKEN by the profile."""
    count = max(math.ceil((full - plain) / TOKEN), 0)
    drift.learn_drafts(next(NUMBERS), 1, took / plain, full / plain - 1, count)
    drift.observe(took, draft_ms, plain, full, drafting, drift.drafts(1).ratio(full / plain - 1, count))


def over_profile(drift, count):
    """What a step of one request with so many draft tokens takes over what the profile says."""
    cost, added = drift.drafts(1), count * TOKEN / PLAIN
    return (1 + cost.more * added) * cost.extra * cost.sizes[count] / (1 + added)


def steps(drift, count, rest=1.0, token=1.0, drafter=1.0, extra=1.0, lengths=(2, 4, 8), plain_every=4):
    """Steps of a machine that differs from the profile by the given factors; one in `plain_every` drafts nothing."""
    for i in range(count):
        drafts = i % plain_every != 0
        tokens = TOKEN * lengths[i % len(lengths)] * drafts
        took = (PLAIN + token * tokens) * rest * (extra if drafts else 1.0)
        observe(drift, took, DRAFTER * drafter * drafts, PLAIN, PLAIN + tokens, DRAFTER * drafts)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_each_part_is_followed_and_leaves_the_others_alone(factor):
    for part in ("rest", "token", "drafter"):
        drift = CostDrift()
        steps(drift, 400, **{part: factor})
        expected = {"rest": 1.0, "token": 1.0, "drafter": 1.0, part: factor}
        assert drift.rest == pytest.approx(expected["rest"], rel=0.15)
        for length in (2, 4, 8):
            added = TOKEN * length / PLAIN
            assert drift.drafts(1).ratio(added, length) == pytest.approx(1 + expected["token"] * added, rel=0.05)
        assert drift.draft == pytest.approx(expected["drafter"], rel=0.05)


@pytest.mark.parametrize("extra", [0.85, 1.15])
@pytest.mark.parametrize("lengths", [(4,), (2, 4, 8)])
def test_a_profile_that_is_off_at_one_size_is_mended_there(lengths, extra):
    """Each size is measured in a moment of its own, so a step without drafts may look cheap beside all with some."""
    drift = CostDrift()
    steps(drift, 600, extra=extra, lengths=lengths)
    for length in lengths:
        added = TOKEN * length / PLAIN
        assert drift.drafts(1).ratio(added, length) == pytest.approx(max(1.0, (1 + added) * extra), rel=0.03)
    assert drift.drafts(1).ratio(0.0, 0) == 1.0
    assert (drift.drafts(8).more, drift.drafts(8).extra) == (1.0, 1.0)  # other sizes may be right


@pytest.mark.parametrize("seed", range(4))
def test_a_single_size_that_a_profile_has_wrong_is_told_from_its_neighbours(seed):
    """Such as one that was measured while the machine was busy; with a tenth of noise, in a few hundred steps."""
    chance, drift, true = random.Random(seed), CostDrift(), {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.9, 4: 1.0, 5: 1.05}
    for i in range(800):
        length = 0 if i % 50 == 0 else chance.choice([1, 2, 2, 3, 3, 4, 5])
        predicted = PLAIN + TOKEN * length
        observe(drift, predicted * true[length] * chance.gauss(1, 0.1), 0.0, PLAIN, predicted, 0.0)
    sizes = [over_profile(drift, n) for n in range(1, 6)]
    assert sizes[2] < min(sizes[:2] + sizes[3:]) - 0.04 and sizes[4] == max(sizes)
    assert len(drift.drafts(1).sizes) == 1 + MAX_DRAFT  # as many as a plan may ask for
    assert drift.drafts(8).sizes == ()  # of several requests steps come in too many sizes


def test_a_machine_without_a_profile_learns_from_steps_alone():
    drift = CostDrift(known=False)
    for i in range(16):
        drift.learn_drafts(i, 4, 14.0 if i % 2 else 10.0, 0.0, i % 2)
    assert drift.drafts(4).ratio(0.0, 1) == pytest.approx(1.4, rel=0.03)


@pytest.mark.parametrize("true", [0.9, 1.0])
def test_drafts_that_cost_nothing_do_not_run_away(true):
    """A step with drafts takes no longer than one without: what is learnt stays near, to be left again."""
    drift, chance = CostDrift(), random.Random(1)
    for i in range(4000):
        drift.learn_drafts(i, 1, (true if i % 2 else 1.0) * chance.gauss(1, 0.05), 0.0, i % 2)
    cost = drift.drafts(1)
    assert cost.ratio(0.0, 1) < 1.02 and cost.extra * cost.sizes[1] == pytest.approx(true, rel=0.05)


def test_a_price_that_nobody_pays_goes_back_to_the_profile():
    """Or a price that was too high would keep drafts away, and so itself, for ever."""
    drift = CostDrift()
    steps(drift, 600, extra=1.2)
    assert over_profile(drift, 4) > 1.15
    for _ in range(3 * AGE):
        observe(drift, PLAIN, 0.0, PLAIN, PLAIN, 0.0)
    assert over_profile(drift, 4) < 1.02
    steps(drift, 60)
    assert over_profile(drift, 4) == pytest.approx(1.0, rel=0.02)


def test_single_hiccups_change_little():
    drift = CostDrift()
    steps(drift, 200)
    for _ in range(2):
        observe(drift, 100 * PLAIN, 0.0, PLAIN, PLAIN, 0.0)
        observe(drift, PLAIN + 4 * TOKEN, DRAFTER, PLAIN, PLAIN + 4 * TOKEN, DRAFTER)
    assert 0.5 < drift.drafts(1).more < 1.5 and 0.95 < over_profile(drift, 4) < 1.05


@pytest.mark.parametrize("gap", ["a prompt", "other rows"])
def test_only_steps_in_a_row_make_a_pair(gap):
    """With a prompt read in between, or other requests, more differs than the draft tokens."""
    drift = CostDrift()
    for i in range(200):
        drafts = i % 2 == 1
        rows = 9 if gap == "other rows" and drafts else 8
        drift.learn_drafts(2 * i if gap == "a prompt" else i, rows, 5.0 if drafts else 1.0, 0.3 * drafts, int(drafts))
    assert drift.drafts(8).more == drift.drafts(8).extra == 1.0


def test_noise_larger_than_what_tokens_cost_cancels():
    drift = CostDrift()
    for i in range(1200):
        drafts, noise = i % 4 != 0, 1.15 if i % 8 < 4 else 1 / 1.15
        predicted = PLAIN + TOKEN * drafts
        observe(drift, predicted * (noise if drafts else 1.0), 0.0, PLAIN, predicted, 0.0)
    assert drift.drafts(1).ratio(TOKEN / PLAIN, 1) == pytest.approx(1 + TOKEN / PLAIN, rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_a_machine_whose_speed_wanders_is_not_blamed_on_drafts(seed):
    """One plain step in 17, drafts of 1 to 8 tokens, a speed that jumps by a quarter now and then, and noise."""
    chance, drift, speed, off = random.Random(seed), CostDrift(), 1.0, []
    for i in range(2000):
        if chance.random() < 0.05:
            speed = chance.uniform(0.8, 1.25)
        length = 0 if i % 17 == 0 else chance.randint(1, 8)
        predicted = PLAIN + TOKEN * length
        observe(drift, predicted * speed * chance.gauss(1, 0.08), 0.0, PLAIN, predicted, 0.0)
        ratios = {n: drift.drafts(1).ratio(n * TOKEN / PLAIN, n) / (1 + n * TOKEN / PLAIN) for n in (1, 4, 8)}
        off.append(max(abs(math.log(ratio)) for ratio in ratios.values()))
    assert max(off) < 0.2 and max(off[1000:]) < 0.1


def test_a_machine_that_got_slower_between_plain_steps_is_not_blamed_on_drafts():
    drift = CostDrift()
    steps(drift, 100)
    for _ in range(400):
        observe(drift, 1.6 * (PLAIN + 4 * TOKEN), DRAFTER, PLAIN, PLAIN + 4 * TOKEN, DRAFTER)
    steps(drift, 100, rest=1.6)
    assert drift.drafts(1).ratio(0.4, 4) == pytest.approx(1.4, rel=0.03)
    assert drift.rest == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_drafter_not_used_since_gets_faster_and_slower_with_the_machine(factor):
    drift = CostDrift()
    steps(drift, 300, rest=factor, drafter=factor)
    assert drift.draft == pytest.approx(factor, rel=0.05)
    for _ in range(300):
        observe(drift, PLAIN, 0.0, PLAIN, PLAIN, 0.0)
    assert drift.rest == pytest.approx(1.0, rel=0.05) and drift.draft == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("part", "wrong"), [("rest", False), ("token", True), ("drafter", True)])
def test_a_profile_is_to_be_measured_anew_when_proportions_are_wrong(part, wrong):
    drift = CostDrift()
    steps(drift, 400, **{part: 1.5 if part == "rest" else 4.0})
    assert drift.wrong is wrong


def test_a_step_without_a_prediction_teaches_nothing():
    drift = CostDrift()
    drift.observe(10.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    drift.learn_drafts(0, 1, 0.0, 0.0, 0)
    drift.learn_drafts(1, 1, 1.0, 0.2, 2)
    assert (drift.draft, drift.rest, drift.drafts(1).more, drift.wrong) == (1.0, 1.0, 1.0, False)


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

    def chosen() -> int:
        cost = drift.drafts(1)
        factors = {"more_drift": cost.more, "extra_drift": cost.extra, "size_drifts": cost.sizes}
        return best_length(said, chances, rest_drift=drift.rest, **factors)

    for i in range(300):
        length = chosen() if i % 4 else 0
        observe(drift, PLAIN + TOKEN * length, 0.0, PLAIN, PLAIN + TOKEN * length / factor, 0.0)
    assert abs(chosen() - right) <= 1
