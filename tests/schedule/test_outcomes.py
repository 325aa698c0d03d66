"""Online acceptance rates: conditional per slot, smoothed by a prior, slowly forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.schedule.outcomes import LAST_SLOT, PRIOR_WEIGHT, OutcomeRates, Shortfall

NEVER = 1e9  # a half-life under which nothing is forgotten


def halves(key, slot):
    return 0.5


def test_without_outcomes_it_is_the_prior():
    rates = OutcomeRates(lambda key, slot: 0.1 * key + 0.01 * slot)
    assert rates.rates([3, 3, 4]) == pytest.approx((0.3, 0.31, 0.42))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))))
def test_rates_are_smoothed_shares_of_decided_slots(outcomes):
    rates = OutcomeRates(halves, half_life=NEVER)
    for accepted, verified in outcomes:
        rates.observe("a", accepted, verified)
    for slot in range(LAST_SLOT):
        kept = sum(accepted > slot for accepted, _ in outcomes)
        decided = sum(accepted >= slot and verified > slot for accepted, verified in outcomes)
        assert rates.rate("a", slot) == pytest.approx((PRIOR_WEIGHT / 2 + kept) / (PRIOR_WEIGHT + decided))
    assert rates.rate("b", 0) == 0.5


def test_late_slots_share_their_counts():
    rates = OutcomeRates(halves)
    rates.observe("a", 20, 20)
    assert rates.rate("a", LAST_SLOT) == rates.rate("a", 15) > rates.rate("a", LAST_SLOT - 1) > 0.5


def test_slots_of_different_kinds():
    rates = OutcomeRates(halves)
    rates.observe_each(["a", "b", "c"], 1)
    assert rates.rate("a", 0) > 0.5 > rates.rate("b", 1)
    assert rates.rate("c", 2) == 0.5 == rates.rate("b", 0)


def test_old_outcomes_fade():
    rates = OutcomeRates(halves, half_life=10)
    for _ in range(200):
        rates.observe("a", 0, 1)
    low = rates.rate("a", 0)
    for _ in range(20):
        rates.observe("a", 1, 1)
    assert low < 0.25 and rates.rate("a", 0) > 0.6
    assert low > 0 and rates.rate("a", 0) < 1


def after(shortfall, owner, expected, kept, times):
    for _ in range(times):
        shortfall.observe(owner, [expected], kept)
    return shortfall.factor(owner)


def test_guesses_that_fail_are_believed_less_and_good_ones_no_more():
    assert Shortfall().factor(0) == 1
    low = after(Shortfall(), 0, 0.5, 0, times=200)
    assert 0 < low < 0.3
    assert after(Shortfall(), 0, 0.5, 1, times=200) == 1


def test_owners_differ_and_new_ones_begin_as_all_do_of_late():
    shortfall = Shortfall()
    after(shortfall, 1, 0.5, 1, times=40)
    bad = after(shortfall, 2, 0.5, 0, times=40)
    good, new = shortfall.factor(1), shortfall.factor(3)
    assert bad < new < good
    shortfall.release(2)
    assert shortfall.factor(2) == new


def test_a_shortfall_is_forgotten_when_guesses_are_right_again():
    shortfall = Shortfall()
    low = after(shortfall, 0, 0.5, 0, times=200)
    assert after(shortfall, 0, 0.5, 1, times=30) > 2 * low


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.floats(0, 1), max_size=4), st.integers(0, 4)), max_size=60))
def test_a_factor_stays_between_nothing_and_one(outcomes):
    shortfall = Shortfall()
    for owner, expected, accepted in outcomes:
        shortfall.observe(owner, expected, min(accepted, len(expected)))
        assert all(0 < shortfall.factor(owner) <= 1 for owner in range(4))
