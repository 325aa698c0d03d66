"""Pauses and trials, on steps whose times the test makes up."""

import math
import random
from itertools import groupby

import pytest

from dspark.config import RowRecord, StepRecord, StepTimes
from dspark.engine.guard import (
    FIRST_WAIT,
    FOLLOW_UPS,
    JUDGED_AFTER,
    LOOK_BUDGET,
    MOST_WEIGHT,
    RAREST_LOOK,
    RETRIED_FOR,
    Guard,
    Looks,
    Trials,
)
from dspark.schedule.drift import CostDrift

PLAIN_MS = 10.0


def record(drafted: bool, accepted: int, ms: float, rows: int = 1, prefill: int = 0) -> StepRecord:
    verified = 4 if drafted else 0
    each = [
        RowRecord(i, "toy" if drafted else "none", verified, verified, accepted, accepted + 1, 0, prefill)
        for i in range(rows)
    ]
    return StepRecord(0, rows * (1 + verified), 10, StepTimes(0.0, ms, 0.0), tuple(each))


class Watched(Guard):
    """A guard that is told what steps cost as the scheduler finds it out, from their times."""

    def __init__(self):
        super().__init__()
        self._drift, self._steps = CostDrift(known=False), 0

    def took(self, record: StepRecord, plain_ms: float = PLAIN_MS, look_ms: float = 0.0, gain: float = 0.0) -> None:
        """`plain_ms`: what such a step takes without drafts."""
        ms, rows, count = record.times.step_ms - look_ms, len(record.rows), sum(row.verified for row in record.rows)
        self._steps += 1
        if not any(row.prefill for row in record.rows):
            self._drift.learn_drafts(self._steps, rows, ms / plain_ms, 0.0, count)
        ratio = self._drift.drafts(rows).ratio(0.0, count)
        self.observe(record, ratio * (1 + look_ms / ms), ratio * look_ms / ms, gain)


def run(guard, steps, drafting_ms, accepted, rows=1) -> tuple[list[bool], float]:
    """Which steps drafted, and the time lost or won against plain decoding, in plain steps."""
    drafted, balance = [], 0.0
    for i in range(steps):
        may = guard.allows(rows, True)
        kept = accepted(i) if may else 0
        ms = drafting_ms if may else PLAIN_MS
        guard.took(record(may, kept, ms, rows))
        drafted.append(may)
        balance += (1 + kept) - ms / PLAIN_MS
    return drafted, balance


def test_a_draft_that_pays_goes_on_and_a_few_plain_steps_keep_the_comparison_fresh():
    drafted, balance = run(Watched(), 2000, 15.0, lambda i: 2)
    assert 0.985 < sum(drafted) / len(drafted) < 1
    assert balance > 0.98 * 2000 * 1.5


def test_a_hopeless_draft_is_paused_and_stays_so_at_bounded_cost():
    guard = Watched()
    drafted, _ = run(guard, 400, 20.0, lambda i: 0)
    assert sum(drafted) < 70
    drafted, balance = run(guard, 8000, 20.0, lambda i: 0)
    assert sum(drafted) > 0  # it is tried again
    assert -balance < 0.02 * 8000
    resumed = [i for i in range(1, len(drafted)) if drafted[i] and not drafted[i - 1]]
    waits = [b - a for a, b in zip(resumed, resumed[1:], strict=False)]
    assert waits == sorted(waits) and waits[-1] > 1.8 * waits[0]


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_as_many_steps_decide_about_the_end_of_a_pause_however_many_requests_there_are(rows):
    guard = Watched()
    run(guard, 400, 20.0, lambda i: 0, rows)
    drafted, _ = run(guard, 8000, 20.0, lambda i: 0, rows)
    retried = [len(list(steps)) for may, steps in groupby(drafted) if may]
    assert len(retried) > 2
    assert set(retried) == {RETRIED_FOR}


def test_a_pause_ends_when_drafts_pay_again():
    guard = Watched()
    run(guard, 200, 15.0, lambda i: 0)
    assert not guard.allows(1, True)
    drafted, _ = run(guard, 3000, 15.0, lambda i: 3)
    assert sum(drafted[2000:]) > 980


def until_retried(guard):
    """Steps to the end of the pause the guard is in."""
    return next(i for i in range(10_000) if guard.allows(1, True))


def test_a_pause_is_cut_when_a_request_ends_but_a_hopeless_draft_stays_cheap():
    """The next request's text may be of another kind."""
    waits = []
    for ends in (0, 1):
        guard = Watched()
        run(guard, 2000, 20.0, lambda i: 0)
        assert not guard.allows(1, True)
        for _ in range(ends):
            guard.release()
        waits.append(until_retried(guard))
    assert 0 < waits[1] <= waits[0] / 3
    guard, lost = Watched(), 0.0
    run(guard, 400, 20.0, lambda i: 0)
    for _ in range(40):
        lost -= run(guard, 200, 20.0, lambda i: 0)[1]
        guard.release()
    assert lost < 0.02 * 40 * 200


def test_requests_that_come_and_go_in_a_crowd_do_not_end_its_pause():
    guard, lost = Watched(), 0.0
    run(guard, 400, 20.0, lambda i: 0, rows=16)
    for _ in range(500):  # one of 16 ends every fourth step
        lost -= run(guard, 4, 20.0, lambda i: 0, rows=16)[1]
        guard.release()
    assert lost < 0.03 * 2000
    guard.allows(0, False)  # a step that only reads prompts
    guard.release()


@pytest.mark.parametrize(("kept", "most", "least"), [(0.7, 24, 8), (2, 6, 2)])
def test_plain_steps_are_the_rarer_the_more_drafts_gain(kept, most, least):
    """Drafts that gain an eighth, so that their price has to be known well, and ones that double the speed."""
    guard = Watched()
    run(guard, 200, 15.0, lambda i: kept)
    drafted, _ = run(guard, 1000, 15.0, lambda i: kept)
    assert least <= drafted.count(False) <= most


def test_no_rest_is_taken_where_it_would_measure_nothing():
    """Such as beside a request that drafts by a policy of its own: the rest that is due waits, and drafts go on."""
    guard = Watched()
    run(guard, 127, 15.0, lambda i: 2)
    while guard.allows(1, True):  # up to the rest that is due
        guard.took(record(True, 2, 15.0))
    assert all(guard.allows(1, False) for _ in range(300))


def test_what_drafts_cost_is_forgotten_when_nothing_was_drafted_for_long():
    guard = Watched()
    run(guard, 200, 15.0, lambda i: 2)
    assert guard.ratio(1) == pytest.approx(1.5, rel=0.02)
    for _ in range(300):  # nothing is worth it at that ratio
        assert guard.ratio(1) is None or guard.ratio(1) == pytest.approx(1.5, rel=0.02)
        guard.allows(1, True)
        guard.took(record(False, 0, PLAIN_MS))
    assert guard.ratio(1) is None
    run(guard, 100, 12.0, lambda i: 2)
    assert guard.ratio(1) < 1.35
    run(guard, 1000, 12.0, lambda i: 2)
    assert guard.ratio(1) < 1.25


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_gets_faster_and_slower_is_not_taken_for_drafts_that_pay(seed):
    """A speed that wanders by half within some hundred steps; eight requests, drafts of which too little is kept."""
    chance, guard, drafted = random.Random(seed), Watched(), []
    for i in range(3000):
        speed = 1 + 0.25 * math.sin(i / 60)
        may = guard.allows(8, True)
        kept = int(may and chance.random() < 0.1)
        guard.took(record(may, kept, PLAIN_MS * speed * (1.18 if may else 1.0) * chance.gauss(1, 0.05), rows=8))
        drafted.append(may)
    assert sum(drafted[300:]) < 0.1 * 2700


def test_loads_are_judged_apart():
    """What does not pay in a crowd may pay for one."""
    guard = Watched()
    run(guard, 200, 30.0, lambda i: 1, rows=32)
    assert guard.ratio(32) > 2
    drafted, _ = run(guard, 100, 12.0, lambda i: 1, rows=1)
    assert sum(drafted) > 90


def test_steps_that_read_prompts_decide_nothing():
    guard = Watched()
    run(guard, 100, 15.0, lambda i: 2)
    before = guard.ratio(1)
    guard.observe(record(True, 0, 500.0, prefill=100), 50.0)
    assert guard.ratio(1) == before


def test_a_single_hiccup_pauses_nothing():
    """Such as a pass of the drafter, or a look, in which the machine was busy."""
    guard = Watched()
    run(guard, 100, 15.0, lambda i: 2)
    before = guard.ratio(1)
    guard.observe(record(True, 2, 5000.0), 500.0)
    assert guard.ratio(1) < 1.2 * before and guard.allows(1, True)


def test_steps_are_compared_by_what_they_should_take():
    """The batch shrinks: drafting steps of few requests are quicker than plain ones of many, and still do not pay."""
    guard = Watched()
    allowed = []
    for i in range(400):
        plain_ms = 20.0 - i / 40  # the same power of two all along
        may = guard.allows(1, True)
        guard.took(record(may, 0, plain_ms * (1.3 if may else 1.0)), plain_ms)
        allowed.append(may)
    assert guard.ratio(1) > 1.25 and sum(allowed[100:]) < 30


@pytest.mark.parametrize(("look", "pays"), [(0.06, False), (0.0, True)])
def test_what_looking_for_drafts_costs_counts(look, pays):
    """Drafts that pay for themselves, and not for the looks that find none."""
    guard = Watched()
    allowed, looks = [], 0
    for _ in range(3000):
        may = guard.allows(32, True)
        looks += may
        drafts = may and looks % 20 == 0
        guard.took(
            record(drafts, int(drafts), PLAIN_MS * (1 + look * may), rows=32), look_ms=look * PLAIN_MS * may, gain=2.0
        )
        allowed.append(may)
    assert (sum(allowed[1000:]) > 1500) == pays and (pays or sum(allowed[1000:]) < 300)


COST = 0.01  # of a look, in plain steps


def looks_taken(looks, steps, gain_of=lambda look: None, cost=COST):
    """(step, steps that the look stands for) of every look; `gain_of` says what the n-th brought, if it found any."""
    taken = []
    for i in range(steps):
        if looks.due():
            looks.looked(cost, gain_of(len(taken)))
            taken.append((i, looks.steps))
    return taken


def test_looks_grow_rare_while_they_find_nothing():
    taken = looks_taken(Looks(), 600)
    often = int(LOOK_BUDGET / COST)
    assert [n for _, n in taken[:often]] == [1] * often and taken[-1][1] == RAREST_LOOK
    assert sum(n for _, n in taken) >= 600 - RAREST_LOOK  # looks tell how many steps they stand for


@pytest.mark.parametrize(("every", "gain", "rare"), [(8, 0.04, True), (2, 0.04, False), (20, 0.5, False), (2, 0, True)])
def test_looks_stay_frequent_where_drafts_pay_for_them(every, gain, rare):
    looks = Looks()
    taken = looks_taken(looks, 2000, lambda look: gain if look % every == 0 else None)
    assert (len(taken) < 600) == rare
    assert rare or len(taken) == 2000
    back = looks_taken(looks, 300, lambda look: 0.1)
    assert back[-20:] == [(i, 1) for i in range(280, 300)]  # at every step again where drafts are found


@pytest.mark.parametrize("seed", range(4))
def test_finds_that_pay_for_less_than_the_looks_between_them_leave_looks_rare(seed):
    """Each by itself repays three looks and, where these are rare, as many times the steps they stand for."""
    chance, looks = random.Random(seed), Looks()
    taken = looks_taken(looks, 2000, lambda look: 0.13 if chance.random() < 0.25 else None, cost=0.043)
    assert len(taken) < 700
    back = looks_taken(looks, 300, lambda look: 0.3 if chance.random() < 0.8 else None, cost=0.043)
    assert back[-200:] == [(i, 1) for i in range(100, 300)]


@pytest.mark.parametrize("seed", range(4))
def test_looks_follow_a_change_of_text(seed):
    """From text that pays for every look to one where hardly any finds a draft, and back."""
    chance, looks = random.Random(seed), Looks()

    def finds(share, gain):
        return lambda look: gain if chance.random() < share else None

    looks_taken(looks, 400, finds(0.7, 0.2), cost=0.05)
    assert len(looks_taken(looks, 200, finds(0.04, 0.1), cost=0.05)) < 90
    assert len(looks_taken(looks, 200, lambda look: None, cost=0.05)) <= 200 // RAREST_LOOK + 1
    assert len(looks_taken(looks, 400, finds(0.7, 0.2), cost=0.05)) > 250


def test_a_draft_that_loses_does_not_keep_the_next_from_being_found():
    """Whether drafts lose on average is for the guard to judge, which has to see some."""
    looks = Looks()
    taken = looks_taken(looks, 24, lambda look: -0.4)
    assert len(taken) >= JUDGED_AFTER / MOST_WEIGHT


def test_what_few_requests_find_does_not_make_many_look():
    guard = Watched()

    def looked(rows, steps, drafted):
        count = 0
        for _ in range(steps):
            may = guard.allows(rows, True)
            guard.took(record(may and drafted, 4, PLAIN_MS, rows=rows), PLAIN_MS, COST * PLAIN_MS, 0.5)
            count += may
        return count

    looked(32, 200, drafted=False)
    looked(1, 20, drafted=True)
    assert looked(32, 64, drafted=False) <= 64 // RAREST_LOOK


def due_steps(trials, key, steps):
    return [i for i in range(steps) if trials.due(key)]


def test_trials_grow_rare_while_they_lose():
    steps = due_steps(Trials(), ("toy", "greedy"), 20000)
    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] >= 16 * FIRST_WAIT
    assert len(steps) / 20000 < 0.001


def test_a_win_is_followed_up_a_few_times_and_no_more():
    """A source may be right and still not worth its price; then trials that win must not go on for ever."""
    trials, key, tried = Trials(), ("toy", "greedy"), 0
    for _ in range(20000):
        if trials.due(key):
            tried += 1
            trials.won(key)
    assert tried == (1 + FOLLOW_UPS) * len(due_steps(Trials(), key, 20000))


def test_a_loss_ends_the_follow_up():
    trials, key = Trials(), ("toy", "greedy")
    due_steps(trials, key, FIRST_WAIT)
    trials.won(key)
    assert trials.due(key) and not trials.due(key)


def test_use_resets_the_wait():
    trials, key = Trials(), ("toy", "greedy")
    due_steps(trials, key, 5000)
    trials.used(key)
    assert due_steps(trials, key, 3 * FIRST_WAIT) == [FIRST_WAIT - 1, 3 * FIRST_WAIT - 1]


def test_a_trial_that_costs_more_waits_longer():
    trials = Trials()
    assert next(i for i in range(2000) if trials.due(("toy", "greedy"), 5.0)) == 5 * FIRST_WAIT - 1


def test_a_released_request_is_forgotten_and_sources_are_not():
    trials = Trials()
    due_steps(trials, (7, "toy"), 100)
    due_steps(trials, ("toy", "greedy"), 100)
    trials.release(7)
    assert due_steps(trials, (7, "toy"), 200)[0] == FIRST_WAIT - 1
    assert due_steps(trials, ("toy", "greedy"), 200)[0] == FIRST_WAIT - 101
