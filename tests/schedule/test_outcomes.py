"""Online acceptance rates: conditional per slot, smoothed by a prior, slowly forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.schedule.outcomes import LAST_SLOT, PRIOR_WEIGHT, OutcomeRates

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
