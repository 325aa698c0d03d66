"""What past steps lead to expect of a source."""

import pytest

from dspark.schedule import Estimates


def taught(estimates, accepted, steps, request=1, verified=4, **confidence):
    for _ in range(steps):
        estimates.observe(request, "toy", "greedy", verified, accepted, **confidence)


def expected(estimates, request=1, source="toy", slots=4):
    return estimates.survival(request, "greedy", source, slots)


def test_an_untried_source_is_hoped_for_and_never_rises():
    survival = expected(Estimates(), slots=8)
    assert 0.5 < survival[0] < 0.8 and list(survival) == sorted(survival, reverse=True)


def test_what_is_known_of_a_source_comes_first_and_outcomes_count_more():
    known = {"greedy": (0.4, 0.5)}
    estimates = Estimates(lambda kind: known.get(kind, ()))
    assert expected(estimates)[:2] == pytest.approx((0.4, 0.2))
    assert 0 < expected(estimates)[3] < expected(estimates)[2] < 0.2  # like the last slot that is known
    assert estimates.survival(1, "coupled high", "toy", 1) == Estimates().survival(1, "coupled high", "toy", 1)
    taught(estimates, accepted=4, steps=40)
    assert expected(estimates)[0] > 0.9


def test_a_faded_source_stays_as_hopeless_as_it_was():
    estimates = Estimates()
    taught(estimates, accepted=0, steps=300)
    before = estimates.survival(2, "greedy", "toy", 4)
    estimates.fade(2, "toy", "greedy")
    assert estimates.survival(2, "greedy", "toy", 4) == pytest.approx(before)


def test_survival_comes_to_what_outcomes_say():
    estimates = Estimates()
    for i in range(400):
        taught(estimates, accepted=(0, 4)[i % 2], steps=1)
    first, *_, last = expected(estimates)
    assert first == pytest.approx(0.5, abs=0.05) and last == pytest.approx(0.5, abs=0.06)


def test_slots_behind_a_rejection_say_nothing():
    estimates = Estimates()
    taught(estimates, accepted=1, steps=50)
    first, second, third, _ = expected(estimates)
    assert first > 0.9 and second < 0.1 and third <= second


def test_a_hopeless_source_is_found_out_once_not_once_per_request():
    estimates = Estimates()
    taught(estimates, accepted=0, steps=30)
    estimates.release(1)
    assert expected(estimates, request=2)[0] < 0.15
    assert expected(estimates, source="other")[0] > 0.5
    assert estimates.survival(2, "rejection high", "toy", 1)[0] > 0.5


def test_a_request_unlike_the_others_is_told_apart():
    estimates = Estimates()
    taught(estimates, accepted=4, steps=100)
    taught(estimates, accepted=0, steps=20, request=2)
    assert expected(estimates)[0] > 0.8 and expected(estimates, request=2)[0] < 0.4


def test_old_outcomes_are_forgotten():
    estimates = Estimates()
    taught(estimates, accepted=0, steps=600)
    taught(estimates, accepted=4, steps=600)
    assert expected(estimates)[0] > 0.85


def test_after_a_pause_a_few_trials_decide():
    forgetful, stubborn = Estimates(), Estimates()
    for estimates in (forgetful, stubborn):
        taught(estimates, accepted=0, steps=300)
    forgetful.fade(1, "toy", "greedy")
    for estimates in (forgetful, stubborn):
        taught(estimates, accepted=4, steps=8)
    assert expected(forgetful)[0] > 0.4 > expected(stubborn)[0]


def test_the_trial_of_one_request_leaves_alone_what_the_others_teach():
    estimates = Estimates()
    taught(estimates, accepted=4, steps=300)
    before = estimates.survival(3, "greedy", "toy", 4)
    estimates.fade(2, "toy", "greedy", shared=False)
    estimates.observe(2, "toy", "greedy", 4, 0)
    assert estimates.survival(3, "greedy", "toy", 4) == pytest.approx(before, abs=0.02)
    assert estimates.survival(2, "greedy", "toy", 4)[0] < 0.95 * before[0]


def test_confidences_are_taken_down_to_what_is_kept():
    estimates = Estimates()
    assert estimates.correct("toy", "greedy", [0.5, 0.9]) == [0.5, 0.9]
    taught(estimates, accepted=0, steps=60, claimed=[0.5] * 4)
    assert estimates.correct("toy", "greedy", [0.5, 0.9])[0] < 0.1
    honest = Estimates()
    for i in range(200):
        taught(honest, accepted=4 if i % 10 else 0, steps=1, claimed=[0.9] * 4)
    assert honest.correct("toy", "greedy", [0.9])[0] == pytest.approx(0.9, abs=0.03)
    assert all(0 <= c <= 1 for c in honest.correct("toy", "greedy", [1.0, 1.0, 1.0, 1.0, 1.0]))


def test_a_slot_left_out_for_its_low_confidence_does_not_look_good():
    """Only hopeful slots are verified, and all of them are kept: the others still count, by their confidence."""
    fair, fooled = Estimates(), Estimates()
    for i in range(200):
        hopeful = i % 2
        chances = [0.95, 0.9 if hopeful else 0.1]
        fair.observe(1, "toy", "greedy", 1 + hopeful, 1 + hopeful, chances, chances)
        fooled.observe(1, "toy", "greedy", 1 + hopeful, 1 + hopeful, chances)
    assert expected(fooled, slots=2)[1] > 0.85
    assert 0.4 < expected(fair, slots=2)[1] < 0.65
