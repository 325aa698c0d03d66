"""The plan is the best there is, given what it may know."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.schedule import Choice, RowView, StepView, planner
from dspark.schedule.planner import LEAST_GAIN, PASS_GAIN, plan_drafts, plan_verification, rank, table
from tests.schedule import machines as m

CHANCE = st.floats(0.01, 1.0)
ROWS = st.lists(st.lists(CHANCE, max_size=3), min_size=1, max_size=3)
# Rising staircases: each token adds nothing, or a step.
TABLE = st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 2.0]), min_size=14, max_size=14).map(
    lambda rises: [10 + sum(rises[:i]) for i in range(len(rises))]
)


@pytest.fixture(params=["lists", "arrays"])
def small(request, monkeypatch):
    """Few candidates are planned with lists, many with arrays; both must do the same."""
    monkeypatch.setattr(planner, "SMALL", 16 if request.param == "lists" else 0)
    monkeypatch.setattr(planner, "_TOGETHER", 2)


NO_HEALTH_CHECK = {"suppress_health_check": [HealthCheck.function_scoped_fixture], "deadline": None}


def tokens_per_ms(step, lens, rows, costs, draft_ms=0.0):
    kept = sum(sum(m.survivals(chances)[:n]) for chances, n in zip(rows, lens, strict=True))
    time = costs.step_times(step.tokens, sum(lens), step.pass_rows, step.context)[sum(lens)] + draft_ms
    return (len(rows) + kept) / time


def best_rate(step, rows, costs, draft_ms=0.0):
    everything = product(*(range(len(chances) + 1) for chances in rows))
    return max(tokens_per_ms(step, lens, rows, costs, draft_ms) for lens in everything)


@given(ROWS, TABLE)
@settings(max_examples=200, **NO_HEALTH_CHECK)
def test_what_is_verified_equals_brute_force_where_everything_may_be_known(small, rows, table):
    step, costs = m.step_of(rows), m.curves(table)
    lens = plan_verification(step, m.whole(step), [len(r) for r in rows], rows, costs)
    assert tokens_per_ms(step, lens, rows, costs) == pytest.approx(best_rate(step, rows, costs))


@given(ROWS, TABLE)
@settings(max_examples=100, **NO_HEALTH_CHECK)
def test_what_is_drafted_equals_brute_force_over_what_the_past_expects(rows, table):
    step, costs = m.step_of(rows, free=False), m.curves(table)
    lens = [choice.length for choice in plan_drafts(step, costs)]
    best, plain = best_rate(step, rows, costs), tokens_per_ms(step, [0] * len(rows), rows, costs)
    least = plain * (1 + LEAST_GAIN if len(rows) > 1 else 1)
    if any(lens):
        assert tokens_per_ms(step, lens, rows, costs) == pytest.approx(best) and best > least
    else:
        assert best <= least * (1 + 1e-9)


@given(st.lists(CHANCE, min_size=1, max_size=8), TABLE, st.floats(0, 20), st.booleans())
@settings(max_examples=200, **NO_HEALTH_CHECK)
def test_the_draft_planned_for_one_request_is_worth_verifying_whole(chances, table, draft_ms, drafter_pass):
    """Where no confidences come with it, nothing is new after drafting."""
    step, costs = m.step_of([chances], drafter_pass=drafter_pass), m.curves(table, draft_ms)
    (choice,) = choices = plan_drafts(step, costs)
    assert plan_verification(step, choices, [choice.length], [[]], costs) == (choice.length,)
    spent = draft_ms if choice.length and drafter_pass else 0.0
    rates = [tokens_per_ms(step, [n], [chances], costs, spent) for n in range(choice.length + 1)]
    assert rates[-1] == pytest.approx(max(rates))


@given(st.lists(CHANCE, min_size=1, max_size=4), TABLE, st.floats(0, 20))
@settings(max_examples=100, **NO_HEALTH_CHECK)
def test_a_drafter_pass_is_asked_for_where_it_pays(chances, table, draft_ms):
    step, costs = m.step_of([chances], drafter_pass=True), m.curves(table, draft_ms)
    (choice,) = plan_drafts(step, costs)
    drafting = max(tokens_per_ms(step, [n], [chances], costs, draft_ms) for n in range(1, len(chances) + 1))
    plain = tokens_per_ms(step, [0], [chances], costs)
    if choice.length:
        planned = tokens_per_ms(step, [choice.length], [chances], costs, draft_ms)
        assert planned == pytest.approx(drafting) and planned > plain * (1 + PASS_GAIN)
    else:
        assert drafting <= plain * (1 + PASS_GAIN) * (1 + 1e-9)


OFFERED = st.lists(st.tuples(*[st.lists(CHANCE, max_size=3)] * 2), min_size=2, max_size=5)


@given(OFFERED, TABLE, st.floats(0, 2), st.floats(0, 1), st.floats(0.5, 2), st.floats(0.6, 1.6), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_plans_with_and_without_a_drafter_equal_brute_force(offered, table, draft, slot, drift, extra, prompt):
    """Several requests, each with a look-up, a drafter or both: no prefixes of their drafts bring more tokens per ms,
    with the drafter run for the 0, 1, 2, 4 or all rows that gain most from it, as long as its longest draft."""
    costs = m.curves(table, draft, slot)
    views = tuple(
        RowView(10, 3, False, offers=tuple(m.one_offer(c, own, own) for own, c in enumerate(both) if c))
        for both in offered
    )
    drifts = {"draft_drift": drift, "more_drift": 1 / drift, "rest_drift": drift, "extra_drift": extra}
    step = StepView(views, len(views) + prompt, len(views) + bool(prompt), 100, **drifts)
    times = planner._step_times(step, costs, 3 * len(views))
    least = len(views) / times[0] * (1 + LEAST_GAIN)

    def rate(kept, tokens, drafting):
        return (len(views) + kept) / (times[tokens] + drafting * drift)

    best = least
    survivals = [[m.survivals(chances) for chances in both] for both in offered]
    order = sorted(
        (i for i, (_, own) in enumerate(survivals) if own), key=lambda i: sum(survivals[i][0]) - sum(survivals[i][1])
    )
    for n in {0, 1, 2, 4, len(order)} & {*range(len(order) + 1)}:
        own = [survivals[i][i in order[:n]] for i in range(len(views))]
        for lens in product(*(range(len(s) + 1) for s in own)):
            depth = max((min(lens[i] + 2, len(own[i])) for i in order[:n] if lens[i]), default=1)
            drafting = draft + slot * depth if n else 0.0
            best = max(best, rate(sum(sum(s[:k]) for s, k in zip(own, lens, strict=True)), sum(lens), drafting))

    choices = plan_drafts(step, costs)
    if not any(choice.length for choice in choices):
        assert best == pytest.approx(least)
        return
    passes = [i for i, choice in enumerate(choices) if choice.length and choice.offer.drafter_pass]
    assert set(passes) <= set(order)
    # The drafter goes two slots beyond the plan, or as far as it can, so a plan is one of a few.
    planned = []
    for short in product(*(range(3) if i in passes else (0,) for i in range(len(views)))):
        lens = [choice.length - cut for choice, cut in zip(choices, short, strict=True)]
        if min((lens[i] for i in passes), default=1) >= 1 and all(
            min(lens[i] + 2, len(choices[i].offer.survival)) == choices[i].length for i in passes
        ):
            kept = sum(c.offer.kept(n) for c, n in zip(choices, lens, strict=True) if c.offer)
            depth = max((choices[i].length for i in passes), default=0)
            planned.append(rate(kept, sum(lens), draft + slot * depth if passes else 0.0))
    assert max(planned) == pytest.approx(best)


@pytest.mark.parametrize(("draft", "numbers"), [(2.0, 7), (1000.0, 1)])
def test_numbers_of_rows_that_the_drafter_cannot_pay_for_are_not_planned(monkeypatch, draft, numbers):
    """None, and 1, 2, 4, 8, 16 and 32 rows, each of which may gain two tokens."""
    searched, search = [], planner._best_lens
    monkeypatch.setattr(planner, "_best_lens", lambda *args: searched.append(args) or search(*args))
    plan_drafts(m.step_of([[1.0, 1.0]] * 32, drafter_pass=True), m.curves(lambda tokens: 60 + 1.7 * tokens, draft))
    assert len(searched) == numbers


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("extra", "drafts"), [(0.5, True), (1.0, True), (1.2, True), (1.5, False)])
def test_what_a_step_with_any_draft_costs_more_decides_whether_there_is_one(extra, drafts, rows):
    """Drafts of 0.6 and a pass of 1 ms a token beside 10: tokens per ms are 1.6 / (12 * extra) with one request, plain
    1 / 11; never cheaper than without drafts."""
    step = m.step_of([[0.6]] * rows)
    step = replace(step, tokens=rows, pass_rows=rows, extra_drift=extra)
    choices = plan_drafts(step, m.curves(lambda tokens: 10.0 + tokens))
    assert [choice.length for choice in choices] == [int(drafts)] * rows
    pays = planner.gain(step, choices, rows * drafts, rows * drafts, m.curves(lambda tokens: 10.0 + tokens))
    plain, full = 10 + rows, max(10 + rows, (10 + 2 * rows) * extra)
    assert pays == pytest.approx(2 * plain / full - 1 if drafts else 0.0)


@pytest.mark.parametrize(("accepted", "expected"), [(0, 10 / 16), (2, 2 * 10 / 16), (6, 4 * 10 / 16)])
def test_what_a_step_gained_is_its_tokens_for_its_time(accepted, expected):
    """Two requests, six tokens verified at 0.5 ms each, and drafting that takes 3 ms."""
    step = m.step_of([[0.5] * 3] * 2, drafter_pass=True)
    costs = m.curves(lambda tokens: 9 + 0.5 * tokens, draft=3.0)
    assert planner.gain(step, m.whole(step), 6, accepted, costs) == pytest.approx(expected - 1)


def opened_one_by_one(step, expected, reveal, costs):
    """The same plan by a reader who sees a confidence only after admitting every token before it."""
    lens, survival, base = [0] * len(step.rows), {}, len(step.rows)
    foreseen = sorted((s for row in expected for s in m.survivals(row)), reverse=True)
    times = costs.step_times(step.tokens, len(foreseen), step.pass_rows, step.context)
    kept = base
    while True:
        front = []
        for r, row in enumerate(expected):
            if lens[r] < len(row):
                before = survival.get((r, lens[r] - 1), 1.0)
                survival[r, lens[r]] = before * reveal(r, lens[r])
                front.append((-survival[r, lens[r]], lens[r], r))
        if not front:
            return tuple(lens)
        value, _, r = min(front)
        admitted = sum(lens)
        scale = -value / max(foreseen[admitted], 1e-9)
        further = [
            (kept + scale * sum(max(s, 1e-9) for s in foreseen[admitted:end])) / times[end]
            for end in range(admitted + 1, len(foreseen) + 1)
        ]
        if max(further) <= kept / times[admitted] + 1e-15:
            return tuple(lens)
        kept += -value
        lens[r] += 1


@given(ROWS, TABLE, st.data())
@settings(max_examples=150, **NO_HEALTH_CHECK)
def test_sampled_rows_are_opened_one_by_one(small, rows, table, data):
    """The whole-batch plan is what a reader gets who cannot look ahead, and looks at nothing it has not opened."""
    now = [[data.draw(CHANCE) for _ in row] for row in rows]
    step, costs = m.step_of(rows, free=False), m.curves(table)
    lens = plan_verification(step, m.whole(step), [len(r) for r in rows], now, costs)
    seen = set()

    def reveal(r, slot):
        seen.add((r, slot))
        return now[r][slot]

    assert lens == opened_one_by_one(step, rows, reveal, costs)
    assert all(slot <= lens[r] for r, slot in seen)


@given(ROWS, TABLE, st.data())
@settings(max_examples=150, **NO_HEALTH_CHECK)
def test_nothing_behind_the_first_slot_left_out_matters(small, rows, table, data):
    """Neither later confidences nor where the drafter stopped because of a token."""
    now = [[data.draw(CHANCE) for _ in row] for row in rows]
    step, costs = m.step_of(rows, free=False), m.curves(table)
    lens = plan_verification(step, m.whole(step), [len(r) for r in rows], now, costs)
    other, ends = [], []
    for row, n in zip(now, lens, strict=True):
        known = row[: n + 1]
        other.append(known + [data.draw(CHANCE) for _ in row[n + 1 :]])
        ends.append(data.draw(st.integers(min(n + 1, len(row)), len(row))))
    assert plan_verification(step, m.whole(step), ends, other, costs) == lens


@given(ROWS, TABLE, st.data())
@settings(max_examples=100, **NO_HEALTH_CHECK)
def test_rows_known_as_a_whole_do_not_open_the_others(rows, table, data):
    """In a mixed batch the count may look at greedy and coupled rows, and at nothing of the sampled ones."""
    free = [data.draw(st.booleans()) for _ in rows]
    now = [[data.draw(CHANCE) for _ in row] for row in rows]
    step, costs = m.step_of(rows, free=free), m.curves(table)
    lens = plan_verification(step, m.whole(step), [len(r) for r in rows], now, costs)
    other = [
        row if f else row[: n + 1] + [data.draw(CHANCE) for _ in row[n + 1 :]]
        for row, n, f in zip(now, lens, free, strict=True)
    ]
    assert plan_verification(step, m.whole(step), [len(r) for r in rows], other, costs) == lens


STAIRCASE = [10.0] + [18.0] * 8 + [40.0] * 8


def test_a_staircase_is_climbed_to_its_far_end():
    chances = [0.6] * 12
    step, costs = m.step_of([chances]), m.curves(STAIRCASE)
    one = tokens_per_ms(step, [1], [chances], costs)
    assert one < tokens_per_ms(step, [0], [chances], costs)  # whoever stops at the first fall never leaves plain
    assert plan_verification(step, m.whole(step), [12], [chances], costs) == (8,)
    sampled = m.step_of([chances], free=False)
    assert plan_verification(sampled, m.whole(sampled), [12], [chances], costs) == (8,)
    assert plan_drafts(sampled, costs)[0].length == 8


def test_ties_go_to_the_smaller_slot_and_then_to_the_earlier_row():
    ranked = rank(table([[0.5, 0.5], [0.9, 0.5], [0.5]]))
    assert list(zip(ranked.row.tolist(), ranked.slot.tolist(), strict=True)) == [(1, 0), (0, 0), (2, 0), (0, 1), (1, 1)]


def test_verify_lengths_fall_as_rows_share_the_pass():
    """On a machine whose pass costs by the token, a crowd leaves no room for unlikely tokens."""
    costs = m.curves(lambda tokens: 10 + max(0, tokens - 8))
    lengths = []
    for rows in (1, 4, 8, 32):
        step = m.step_of([[0.7] * 8] * rows)
        lengths.append(sum(plan_verification(step, m.whole(step), [8] * rows, [[0.7] * 8] * rows, costs)) / rows)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_a_trial_is_verified_whole_and_leaves_the_others_their_plan():
    costs = m.curves(lambda tokens: 10 + tokens)
    step = m.step_of([[0.9, 0.9], [0.1, 0.1]])
    first, second = m.whole(step)
    lens = plan_verification(
        step, [first, Choice(second.offer, 2, trial=True)], [2, 2], [[0.9, 0.9], [0.1, 0.1]], costs
    )
    assert lens == (2, 2)
    assert plan_verification(step, [first, second], [2, 2], [[0.9, 0.9], [0.1, 0.1]], costs) == (2, 0)


def test_each_row_gets_the_source_that_pays_more():
    cheap, good = m.one_offer([0.5]), m.one_offer([0.9, 0.9, 0.9], drafter_pass=True, confident=True)
    rows = (RowView(5, 8, True, offers=(cheap, good)), RowView(5, 8, True, offers=(cheap,)), RowView(5, 0, True))
    step = StepView(rows, 3, 3, 50)
    assert [c.offer for c in plan_drafts(step, m.curves([10.0], draft=1.0))] == [good, cheap, None]
    assert [c.offer for c in plan_drafts(step, m.curves([10.0], draft=100.0))] == [cheap, cheap, None]


@pytest.mark.parametrize("order", [1, -1])
def test_a_pass_for_one_request_has_to_promise_more_than_a_draft_without(order):
    """The better of two estimates is the one that is more likely too good."""
    cheap, costs = m.one_offer([0.5]), m.curves([10.0], draft=2.0)

    def chosen(chance):
        passed = m.one_offer([chance], drafter_pass=True)
        row = RowView(5, 8, True, offers=(cheap, passed)[::order])
        return plan_drafts(StepView((row,), 1, 1, 50), costs)[0].offer.drafter_pass

    even = 1.2 * 1.5 - 1  # as many tokens per ms as the other
    assert not chosen(even + 0.01) and not chosen((1 + even) * (1 + PASS_GAIN) - 1 - 0.01)
    assert chosen((1 + even) * (1 + PASS_GAIN) - 1 + 0.01)


def test_what_a_size_was_found_to_take_decides_for_one_request():
    step, costs = m.step_of([[0.8] * 4]), m.curves(lambda tokens: 10.0 + tokens)
    assert plan_drafts(step, costs)[0].length == 4
    dear = replace(step, size_drifts=(1.0, 1.0, 1.0, 1.0, 1.3))
    assert plan_drafts(dear, costs)[0].length == 3
    assert plan_verification(dear, m.whole(step), [4], [[0.8] * 4], costs) == (3,)


def test_costs_that_grew_since_the_profile_count():
    step = m.step_of([[0.6]], drafter_pass=True)
    costs = m.curves([10.0], draft=4.0)
    assert plan_drafts(step, costs)[0].length == 1
    slower = StepView(step.rows, step.tokens, step.pass_rows, step.context, draft_drift=2.0)
    assert plan_drafts(slower, costs)[0].length == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_the_time_of_prompts_does_not_make_poor_drafts_look_worth_it(rows):
    """A draft token costs a tenth of a decoding step; beside a prompt of 100 tokens, a hundredth of the step."""
    costs, chances = m.curves(lambda tokens: 9.0 + 1.0 * tokens), [[0.05]] * rows
    plain = m.step_of(chances)
    reading = StepView(plain.rows, rows + 100, rows + 1, 100)
    assert [choice.length for choice in plan_drafts(plain, costs)] == [0] * rows
    assert [choice.length for choice in plan_drafts(reading, costs)] == [0] * rows
    good = m.step_of([[0.9]] * rows)
    assert all(c.length for c in plan_drafts(StepView(good.rows, rows + 100, rows + 1, 100), costs))
