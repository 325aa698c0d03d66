"""The arithmetic of `dspark plan`, against brute force, limits and hand-made machines."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config import RowRecord, StepRecord, StepTimes
from dspark.errors import DataError, SettingsError
from dspark.measure.advice import advice, cost_advice, cost_summary
from dspark.measure.observe import check_profile, read_survival, survival_of
from dspark.measure.plan import (
    Load,
    Survival,
    article_latency_ms,
    best_block,
    break_even,
    latency_ms,
    plan,
    speedups,
    step_parts,
)
from dspark.schedule.profile import NOTHING, Curve, Profile
from tests.sentences import assert_one_sentence

shares = st.floats(0, 1)
acceptances = st.lists(shares, min_size=1, max_size=6)
ONE = Load(1, 100)


def machine(draft=4.0, slot=0.2, token=1.0, row=0.5, attention=0.001, host=1.0, block=7) -> Profile:
    """20 ms for a pass of one token, then straight lines."""
    return Profile(
        tokens=Curve((1, 101), (20.0, 20.0 + 100 * token)),
        rows=Curve((1, 101), (0.0, 100 * row)),
        attention=Curve((1, 2), (attention, attention)),
        base_context=0,
        block=block,
        draft=Curve((1, 2), (draft, draft)) if block else NOTHING,
        draft_slot=Curve((1, 2), (slot, slot)),
        draft_sampled_ms=0.5,
        host=Curve((1, 2), (host, host)),
        host_token_ms=0.0,
        host_token_sampled_ms=0.0,
        host_sampled_ms=1.0,
    )


def expected_tokens(acceptance, block):
    """By going through every way a block can end."""
    total = 0.0
    for kept in product((True, False), repeat=block):
        chance = 1.0
        for a, yes in zip(acceptance, kept, strict=False):
            chance *= a if yes else 1 - a
        first_error = next((i for i, yes in enumerate(kept) if not yes), block)
        total += chance * (first_error + 1)
    return total


# Expected speed ---------------------------------------------------------------------------------------------------


@given(acceptances)
def test_expected_tokens_by_brute_force(acceptance):
    survival = Survival.of_slots(acceptance)
    for block in range(1, len(acceptance) + 1):
        assert survival.kept(block) == pytest.approx(expected_tokens(acceptance, block))


@given(acceptances, st.integers(1, 32), st.booleans())
def test_speed_is_tokens_over_time_and_the_best_block_is_the_fastest(acceptance, rows, sampled):
    profile, survival, load = machine(), Survival.of_slots(acceptance), Load(rows, 100, sampled)
    found = speedups(profile, load, survival)
    draws = rows if sampled else 0
    by_hand = [
        survival.kept(k) * profile.step_ms(rows, 0, 100, draws) / profile.step_ms(rows, k, 100, draws)
        for k in range(1, len(acceptance) + 1)
    ]
    assert found == pytest.approx(by_hand)
    fastest = max(by_hand)
    best = best_block(found)
    assert (best == 0) == (max(found) <= 1)
    assert not best or found[best - 1] == pytest.approx(fastest)


def test_nothing_kept_means_no_drafts():
    (row,) = plan(machine(), Survival.constant(0, 5), [1], 100)
    assert row.best == 0 and row.best_speedup == 1 and max(row.speedup) < 1
    assert row.parts == step_parts(machine(), ONE, 0)


def test_everything_kept_pays_in_full():
    (row,) = plan(machine(), Survival.constant(1, 7), [1], 100)
    plain, drafted = step_parts(machine(), ONE, 0).total, step_parts(machine(), ONE, 7).total
    assert row.best == 7 and row.best_speedup == pytest.approx(8 * plain / drafted)
    assert row.ours_ms == pytest.approx(drafted / 8) and row.plain_ms == pytest.approx(plain)


@given(acceptances, shares)
def test_steps_without_a_draft_are_plain_steps(acceptance, coverage):
    survival = Survival.of_slots(acceptance, coverage)
    block = len(acceptance)
    plain, drafted = step_parts(machine(), ONE, 0).total, step_parts(machine(), ONE, block).total
    per_step = coverage * drafted + (1 - coverage) * plain
    assert latency_ms(machine(), ONE, survival, block) == pytest.approx(
        per_step / (coverage * survival.kept(block) + 1 - coverage)
    )


@given(st.floats(0, 40), st.integers(1, 64), st.integers(1, 8))
def test_break_even_is_where_drafts_begin_to_pay(draft, rows, slots):
    profile, load = machine(draft=draft), Load(rows, 100)

    def best(alpha):
        return max(speedups(profile, load, Survival.constant(alpha, slots)))

    needed = break_even(profile, load, slots)
    if needed is None:
        assert best(1.0) <= 1
    else:
        assert best(needed) > 1 and (needed < 2e-4 or best(needed - 2e-4) <= 1)


def test_both_latency_models_by_hand():
    profile, survival = machine(), Survival.constant(0.5, 4)
    # Draft 4.6, pass of 5 tokens 24 + 0.1 of attention, host 1; kept 1 + 0.5 + 0.25 + 0.125 + 0.0625.
    assert latency_ms(profile, ONE, survival, 4) == pytest.approx((4.6 + 24.1 + 1) / 1.9375)
    # A correction for 15 of 16 blocks, a plain pass of 20.1 each, over 4 drafted tokens; verifying 24.1 over 5.
    correction = 0.9375 * 20.1 / 4
    assert article_latency_ms(profile, ONE, survival, 4) == pytest.approx(4.6 / 4 + max(24.1 / 5, correction))
    assert article_latency_ms(profile, ONE, Survival.constant(1, 4), 4) == pytest.approx(4.6 / 4 + 24.1 / 5)
    assert article_latency_ms(profile, ONE, survival, 0) == pytest.approx(20.1)


def test_best_block_falls_as_the_pass_fills_up():
    rows = plan(machine(), Survival.constant(0.6, 7), [1, 2, 4, 8, 16, 32], 100)
    best = [row.best for row in rows]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]
    assert [row.concurrency for row in rows] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("changes", "rows", "dominant"),
    [
        ({}, 1, "weights"),
        ({"draft": 90.0}, 1, "draft"),
        ({"attention": 0.2}, 4, "attention"),
        ({"host": 80.0}, 1, "host"),
    ],
)
def test_what_dominates(changes, rows, dominant):
    parts = step_parts(machine(**changes), Load(rows, 500), 4)
    assert parts.dominant == dominant and parts.total == pytest.approx(
        parts.draft + parts.weights + parts.attention + parts.host
    )


@pytest.mark.parametrize(("slots", "coverage"), [((), 1.0), ((1.2,), 1.0), ((0.5, 0.6), 1.0), ((0.5,), -0.1)])
def test_impossible_acceptances_are_one_sentence(slots, coverage):
    with pytest.raises(SettingsError) as error:
        Survival(slots, coverage)
    assert_one_sentence(error.value)


# Advice -----------------------------------------------------------------------------------------------------------


def said(profile, survival, concurrency=(1,), kinds=None):
    rows = plan(profile, survival, list(concurrency), 100)
    return " ".join(advice(profile, survival, rows, 100, kinds))


def test_advice_names_the_reason():
    good = Survival.constant(0.7, 4)
    assert said(machine(), good) == ""
    assert "too slow" in said(machine(draft=60.0, slot=0.0), good) and "of its size" in said(machine(draft=60.0), good)
    weak = said(machine(), Survival.constant(0.05, 4))
    assert "too weak" in weak and "5%" in weak and "too slow" not in weak
    assert "one after the other" in said(machine(draft=1.0, slot=3.0), good)
    assert "With 64 requests" in said(machine(token=4.0), Survival.constant(0.5, 4), (1, 64))
    kinds = {"code": good, "chat": Survival.constant(0.05, 4)}
    assert "kind of text: chat." in said(machine(), good, kinds=kinds)


def test_what_costs_alone_say():
    assert cost_advice(machine()) == []
    assert "above" in cost_summary(machine()) and "with 32 at once" in cost_summary(machine())
    hopeless = machine(draft=2000.0)
    assert "would not pay" in cost_advice(hopeless)[0] and "never with 1 at once" in cost_summary(hopeless)


# Observations -----------------------------------------------------------------------------------------------------


def test_survival_from_counts():
    one = {"none": 10, "dspark": 10}
    assert survival_of([10, 8, 4], [5, 4, 0], 20, one) == Survival((0.5, 0.5, 0.0), 0.5)
    assert survival_of([10, 2], [4, 2], 10, {"dspark": 10}) == Survival((0.4, 0.4), 1.0)  # never rising
    assert survival_of([], [], 5, {}) is survival_of([0], [0], 5, one) is survival_of([1], [1], 0, {}) is None


def test_drafts_that_are_looked_up_take_no_pass():
    assert survival_of([8], [4], 10, {"none": 2, "lookup": 5, "table": 1, "dspark": 2}).passes == pytest.approx(0.25)
    assert survival_of([8], [4], 10, {"none": 2, "lookup": 8}).passes == 0.0
    one, half, none = (step_parts(machine(), ONE, 4, passes) for passes in (1.0, 0.5, 0.0))
    assert half.draft == pytest.approx(one.draft / 2) and none.draft == 0.0
    assert one.weights == half.weights == none.weights
    # Of eight requests half of which need the drafter, some nearly always do; the pass is for four of them.
    eight = step_parts(machine(), Load(8, 100), 4, 0.5)
    assert eight.draft == pytest.approx((1 - 0.5**8) * machine().draft_ms(4, 4))
    needed = [break_even(machine(draft=15.0), ONE, 4, passes=passes) for passes in (0.0, 0.3, 1.0)]
    assert needed == sorted(needed) and needed[0] < needed[-1]


def cell(name, temperature, verified, accepted, steps):
    return {
        "set": name,
        "temperature": temperature,
        "slot_verified": verified,
        "slot_accepted": accepted,
        "steps": steps,
        "sources": {"dspark": steps},
    }


def test_acceptance_counted_before(tmp_path):
    path = tmp_path / "acceptance.json"
    cells = [cell("code", 0.0, [10, 10], [8, 6], 10), cell("chat", 0.0, [10], [2], 30), cell("code", 1.0, [9], [1], 9)]
    path.write_text(json.dumps({"cells": cells}))
    together, kinds = read_survival(path, 0.0)
    assert together == Survival((0.5, 0.5), 0.5)  # 10 of 20, then 6 of 10 which cannot be more
    assert kinds == {"code": Survival((0.8, 0.6)), "chat": Survival((0.2,), 1 / 3)}
    with pytest.raises(DataError) as error:
        read_survival(path, 0.5)
    assert_one_sentence(error.value, ["0.5", "0, 1"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": [1]}', '{"cells": [{"set": "a", "temperature": 0}]}'])
def test_damaged_counts_are_one_sentence(tmp_path, text):
    path = tmp_path / "acceptance.json"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        read_survival(path, 0.0)
    assert_one_sentence(error.value, ["acceptance.json", "dspark acceptance"])
    with pytest.raises(DataError, match="cannot be read"):
        read_survival(tmp_path / "none.json", 0.0)


def test_a_check_separates_a_slower_moment_from_wrong_proportions():
    profile = machine()

    def record(rows, slots, factor):
        kept = tuple(RowRecord(i, "dspark" if slots else "none", slots, slots, 0, 1, 0) for i in range(rows))
        ms = factor * profile.step_ms(rows, slots, 50)
        return StepRecord(1, rows * (1 + slots), 50, StepTimes(0.0, ms, 0.0), kept)

    slower = check_profile(profile, [record(1, 0, 1.25), record(1, 4, 1.25), record(4, 4, 1.25)])
    assert slower.error == pytest.approx(0.2) and slower.factor == pytest.approx(1.25)
    assert slower.shape_error == pytest.approx(0, abs=1e-9)
    assert [(s.tokens, s.rows, s.steps) for s in slower.sizes] == [(1, 1, 1), (5, 1, 1), (20, 4, 1)]
    assert all(s.ratio == pytest.approx(0.8) for s in slower.sizes)
    bent = check_profile(profile, [record(1, 0, 1.0), record(1, 4, 1.5), record(1, 2, 2.0)])
    assert bent.shape_error > 0.1


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from dspark.measure.plan_plot import plot_plan

    rows = plan(machine(), Survival.constant(0.6, 4), [1, 4, 16], 100)
    plot_plan(rows, "toy", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SettingsError) as error:
        plot_plan(rows, "toy", tmp_path / "nowhere" / "plan.png")
    assert_one_sentence(error.value, ["plan.png"])
