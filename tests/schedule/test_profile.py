"""The cost lookup: exact where measured, staircases kept, sane in between, and what it refuses."""

import json
import math
import random
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config import RowRecord, StepRecord, StepTimes
from dspark.errors import ProfileError
from dspark.schedule.profile import NOTHING, Curve, Profile, ProfileDrift
from dspark.schedule.profile_fit import (
    attention_curve,
    curve,
    fit_profile,
    residual,
    rising,
    smoothed,
    steady_medians,
)
from tests.sentences import assert_one_sentence

ROWS, TOKENS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 8, 16, 64)
costs = st.floats(0, 1000, allow_nan=False)
measured = st.dictionaries(st.integers(2, 300), costs, max_size=12).flatmap(
    lambda more: costs.map(lambda first: {1: first, **more})
)


def stairs(tokens: int) -> float:
    """A machine that works through tokens in groups of four."""
    return 20.0 + 5.0 * math.ceil(tokens / 4)


def true_pass(tokens: int, rows: int, context: int) -> float:
    """What passes cost on an invented machine of the form a profile has."""
    return stairs(tokens) + 0.8 * (rows - 1) + rows * (0.004 + 0.001 * tokens / rows) * (context - 64)


@pytest.fixture
def profile() -> Profile:
    passes = {(n, 1, 64): true_pass(n, 1, 64) for n in TOKENS}
    passes |= {(r, r, 64): true_pass(r, r, 64) for r in ROWS[1:]}
    passes |= {(32, 1, 64): true_pass(32, 1, 64)}
    passes |= {(n, 1, 2048): true_pass(n, 1, 2048) for n in (1, 2, 4, 16)}
    drafts = {(r, 1, False): 3.0 + 0.1 * r for r in ROWS} | {(r, 5, False): 5.0 + 0.3 * r for r in (1, 8)}
    drafts |= {(r, 5, True): drafts[r, 5, False] + 5 * r * 0.25 for r in (1, 8)}
    hosts = {(r, 0, False): 1.0 + 0.1 * r for r in (1, 8, 32)} | {(8, 5, False): 1.8 + 40 * 0.02}
    hosts |= {(8, 0, True): 1.8 + 8 * 0.5, (8, 5, True): 1.8 + 40 * 0.02 + 8 * 0.5}
    return fit_profile(passes, drafts, hosts, block=5)


# Curves -----------------------------------------------------------------------------------------------------------


@given(measured)
def test_a_curve_meets_its_points_and_never_falls(points):
    made = curve(points)
    assert [made(n) for n in made.at] == list(made.ms)
    values = [made(n / 2) for n in range(2, 2 * made.at[-1] + 40)]
    assert values == sorted(values) or all(b - a > -1e-9 for a, b in zip(values, values[1:], strict=False))
    for n in range(1, made.at[-1]):  # between its neighbours, nowhere above or below both
        low = max(at for at in made.at if at <= n)
        high = min(at for at in made.at if at >= n)
        assert made(low) - 1e-9 <= made(n) <= made(high) + 1e-9


def test_a_step_stays_a_step():
    made = curve({n: stairs(n) for n in range(1, 17)})
    assert [made(n) for n in range(1, 17)] == [stairs(n) for n in range(1, 17)]
    assert made(12) == 35 and made(13) == 40 and made(12.5) == 37.5


def test_beyond_the_last_point_and_below_the_first():
    made = Curve((1, 4, 8), (10.0, 13.0, 21.0))
    assert made(0) == 0 and made(16) == 37 and made(2) == 11
    assert NOTHING(1) == NOTHING(64) == 0


@given(st.lists(costs, min_size=1, max_size=20))
def test_noise_is_averaged_and_order_is_left_alone(values):
    calm = rising(values)
    assert all(b - a > -1e-9 for a, b in zip(calm, calm[1:], strict=False))
    assert sum(calm) == pytest.approx(sum(values))
    assert rising(sorted(values)) == sorted(values)


@given(st.dictionaries(st.sampled_from((2, 4, 8, 16)), costs), costs)
def test_attention_never_gets_cheaper_by_splitting_tokens_among_more_requests(points, first):
    made = attention_curve({1: first, **points})
    totals = [rows * made(64 / rows) for rows in (1, 2, 3, 4, 5, 8, 16, 32, 64)]
    assert all(b >= a - 1e-6 * (1 + a) for a, b in zip(totals, totals[1:], strict=False))


@pytest.mark.parametrize(
    ("at", "ms"),
    [((), ()), ((2, 3), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1, 2), (2.0, 1.0))]
    + [((1,), (-1.0,)), ((1,), (math.nan,)), ((1, 2), (1.0, math.inf))],
)
def test_impossible_curves_are_refused(at, ms):
    with pytest.raises(ProfileError) as error:
        Curve(at, ms)
    assert_one_sentence(error.value)


# Profiles ---------------------------------------------------------------------------------------------------------


def test_fit_recovers_a_machine_of_its_form(profile):
    held_out = {(n, rows, context): true_pass(n, rows, context) for n, rows, context in [(8, 2, 512), (16, 4, 1000)]}
    assert {point: profile.pass_ms(*point) for point in held_out} == pytest.approx(held_out)
    assert residual(profile, held_out) < 1e-9
    assert residual(profile, {(8, 2, 512): 2 * true_pass(8, 2, 512)}) == pytest.approx(0.5)
    assert profile.draft_ms(1) == pytest.approx(5.3) and profile.draft_ms(8, 1) == pytest.approx(3.8)
    assert profile.draft_ms(8, 3) == pytest.approx((profile.draft_ms(8, 1) + profile.draft_ms(8, 5)) / 2)
    assert profile.draft_ms(4, 5, sampled_rows=4) == pytest.approx(profile.draft_ms(4, 5) + 20 * 0.25)
    assert profile.host_ms(8) == pytest.approx(1.8) and profile.host_ms(8, 48) == pytest.approx(2.6)
    assert profile.host_ms(8, 48, sampled_rows=2) == pytest.approx(2.6 + 1.0)


def test_costs_rise_with_tokens_rows_and_context(profile):
    def rises(values):
        return all(b >= a for a, b in zip(values, values[1:], strict=False)) and values[-1] > values[0]

    assert rises([profile.pass_ms(n, 1, 300) for n in range(1, 200)])
    assert rises([profile.pass_ms(64, rows, 300) for rows in range(1, 65)])
    assert rises([profile.pass_ms(16, 4, context) for context in range(0, 3000, 50)])
    assert rises([profile.draft_ms(rows) for rows in range(1, 65)])
    assert rises([profile.host_ms(rows) for rows in range(1, 65)])


def test_nothing_costs_nothing(profile):
    assert profile.pass_ms(0, 0, 0) == profile.draft_ms(0) == profile.draft_ms(4, 0) == profile.host_ms(0) == 0
    weights, attention = profile.pass_parts(8, 2, 512)
    assert weights == stairs(8) and weights + attention == profile.pass_ms(8, 2, 512)


def test_without_a_drafter_drafting_is_free():
    bare = fit_profile({(1, 1, 64): 20.0, (4, 1, 64): 25.0}, {}, {(1, 0, False): 1.0}, block=4)
    assert bare.block == 0 and bare.draft_ms(8) == 0 and bare.pass_ms(4, 1, 4000) == 25


@given(st.floats(0.2, 5))
def test_a_uniformly_slower_moment_changes_no_ratio(factor):
    bare = fit_profile({(1, 1, 64): 20.0, (4, 1, 64): 25.0}, {(1, 1, False): 2.0}, {(1, 0, False): 1.0}, block=1)
    slow = bare.scaled(factor)
    assert slow.step_ms(1, 3, 100) == pytest.approx(factor * bare.step_ms(1, 3, 100))
    assert slow.block == bare.block and slow.base_context == bare.base_context


def test_round_trip_through_json(profile):
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tokens": None}, ["tokens"]),
        ({"tokens": {"at": [1, 2.5], "ms": [1, 2]}}, ["tokens"]),
        ({"rows": {"at": [1, 2], "ms": [1, "2"]}}, ["rows"]),
        ({"host": {"at": [1, 2], "ms": [2, 1]}}, ["2.0, 1.0"]),
        ({"host_token_ms": -1}, ["host_token_ms", "-1"]),
        ({"block": 1.5}, ["block", "1.5"]),
        ({"surprise": 1}, ["surprise"]),
    ],
)
def test_damaged_costs_are_one_sentence(profile, change, names):
    with pytest.raises(ProfileError) as error:
        Profile.from_dict({**profile.to_dict(), **change})
    assert_one_sentence(error.value, names)
    with pytest.raises(ProfileError, match="attention"):
        Profile.from_dict({k: v for k, v in profile.to_dict().items() if k != "attention"})


def test_a_step_is_predicted_from_its_record(profile):
    def row(drafted, verified):
        return RowRecord(0, "dspark" if drafted else "none", drafted, verified, 0, 1, 0)

    record = StepRecord(1, 6, 300, StepTimes(1, 2, 3), (row(5, 3), row(0, 0), row(0, 0)))
    expected = profile.pass_ms(6, 3, 300) + profile.draft_ms(1, 5) + profile.host_ms(3, 6)
    assert profile.predict_ms(record) == profile.predict_ms(record, drafter="dspark") == expected
    assert profile.predict_ms(record, drafter="other") == expected - profile.draft_ms(1, 5)
    assert profile.step_ms(3, 0, 300) == profile.predict_ms(StepRecord(1, 3, 300, StepTimes(1, 2, 3), (row(0, 0),) * 3))


# Drift ------------------------------------------------------------------------------------------------------------


def drifted(*steps: tuple[float, bool]) -> ProfileDrift:
    drift = ProfileDrift()
    for ratio, drafted in steps:
        drift = drift.observe(ratio * 40, 40, drafted)
    return drift


def test_factor_follows_the_machine():
    assert ProfileDrift().factor == 1
    assert drifted(*[(1.5, False), (1.5, True)] * 100).factor == pytest.approx(1.5, rel=0.01)
    assert drifted(*[(1.0, False)] * 100, *[(1.5, False)] * 100).factor == pytest.approx(1.5, rel=0.02)


def test_one_hiccup_hardly_counts():
    steady = [(1.0, False)] * 200
    assert drifted(*steady, (100.0, False)).factor < 1.05
    assert ProfileDrift().observe(0, 40, False) == ProfileDrift().observe(40, 0, True) == ProfileDrift()


@pytest.mark.parametrize(
    ("plain", "drafted_", "refresh"),
    [(1.0, 1.0, False), (1.4, 1.4, False), (1.0, 1.5, True), (1.5, 1.0, True), (2.5, 2.5, True)],
)
def test_refresh_when_proportions_change_not_when_all_is_slower(plain, drafted_, refresh):
    pairs = [(plain, False), (drafted_, True)]
    assert drifted(*pairs * 60).needs_refresh is refresh
    assert not drifted(*pairs * 20).needs_refresh


def test_a_wandering_machine_does_not_bend_costs():
    """It gets slower by a half and faster again, and every eighth run is disturbed on top; medians are 5 % off."""
    costs = {n: 10.0 + n for n in range(1, 17)} | {32: 100.0}
    samples = []
    for _ in range(12):
        for point, ms in costs.items():
            moment = len(samples)
            samples.append((point, ms * (1.25 + 0.25 * math.sin(moment / 30)) * (1.6 if moment % 8 == 3 else 1.0)))
    found, _ = steady_medians(samples)
    scale = statistics.median(found[n] / ms for n, ms in costs.items())
    assert all(found[n] / scale == pytest.approx(ms, rel=0.015) for n, ms in costs.items())


def test_one_sample_a_point_is_taken_as_it_is():
    assert steady_medians([(1, 5.0), (2, 9.0)]) == ({1: 5.0, 2: 9.0}, {})
    assert steady_medians([]) == ({}, {})


# Noise against stairs ----------------------------------------------------------------------------------------------

SIZES = (*range(1, 17), 20, 24, 28, 32, 48)


def test_errors_follow_the_scatter_and_the_number_of_samples():
    noise = random.Random(5)
    samples = []
    for turn in range(64):
        for point in range(20):
            if point < 10 or turn % 4 == 0:
                samples.append((point, (10 + point) * math.exp(noise.gauss(0, 0.1))))
    _, errors = steady_medians(samples)
    often, rarely = (statistics.median(errors[p] for p in range(*of)) for of in ((0, 10), (10, 20)))
    assert often == pytest.approx(1.25 * 0.1 / 8, rel=0.2) and rarely == pytest.approx(2 * often)


def test_a_stair_that_is_there_stays_and_where_nothing_is_known_of_errors_costs_stay_as_they_are():
    stairs = {n: 20.0 if n <= 8 else 32.0 for n in SIZES}
    found = smoothed(stairs, dict.fromkeys(SIZES, 0.005))
    assert all(found[n] == pytest.approx(ms, rel=0.02) for n, ms in stairs.items())
    assert smoothed(stairs, {}) == smoothed(stairs, dict.fromkeys(SIZES, 0.0)) == stairs
    assert smoothed({1: 1.0, 2: 2.0}, {1: 0.1, 2: 0.1}) == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(("error", "left"), [(0.03, 0.6), (0.08, 0.25)])
def test_stairs_that_are_noise_are_spread_out(error, left):
    """What another token costs from one size to the next is nearer the truth; a size nobody has an error of is taken
    for the least sure."""
    costs = {n: 14 + 1.0 * n for n in SIZES}
    noise = random.Random(3)
    wrong = defaultdict(float)
    for _ in range(50):
        seen = {n: ms * math.exp(noise.gauss(0, error)) for n, ms in costs.items()}
        errors = dict.fromkeys(SIZES[1:], error)
        for name, found in (("seen", seen), ("smoothed", smoothed(seen, errors))):
            wrong[name] += sum(((found[b] - found[a]) / (b - a) - 1.0) ** 2 for a, b in pairwise(SIZES))
    assert wrong["smoothed"] < left * wrong["seen"]


def test_a_profile_takes_noise_out_of_passes_over_one_request_only():
    passes = {(n, 1, 64): 14.0 + n + 3 * (n == 4) for n in range(1, 9)} | {(2, 2, 64): 17.0}
    hosts = {(1, 0, False): 1.0}
    errors = dict.fromkeys(passes, 0.1)
    exact, fitted = (fit_profile(passes, {}, hosts, 4, which) for which in (None, errors))
    assert exact.tokens.ms[3] == pytest.approx(20.0, abs=1.0) and fitted.tokens.ms[3] < exact.tokens.ms[3] - 0.5
    assert fitted.pass_ms(2, 2, 64) == pytest.approx(17.0)


def test_sampled_draft_tokens_have_a_host_time_of_their_own():
    passes = {(1, 1, 64): 10.0, (2, 1, 64): 11.0}
    hosts = {(2, 0, False): 1.0, (2, 4, False): 1.8, (2, 0, True): 3.0, (2, 4, True): 5.4, (1, 0, False): 1.0}
    profile = fit_profile(passes, {}, hosts, 4)
    assert profile.host_token_ms == pytest.approx(0.1) and profile.host_token_sampled_ms == pytest.approx(0.2)
    assert profile.host_ms(2, 2 + 8, sampled_rows=2) == pytest.approx(5.4)
    assert profile.host_ms(2, 2 + 8) == pytest.approx(1.8)
