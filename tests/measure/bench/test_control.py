"""Which differences are real, on made-up cells: a slowed mode is found, equal modes are not told apart."""

import random

import pytest

from dspark.measure.bench.control import control_summary, noise_of, pace, ratios, spread, verdict
from dspark.measure.bench.records import CONTROL, PLAIN, Cell, Group, RequestRecord, Spread

CODE, CHAT = Group("code", 0.0, 1), Group("chat", 0.0, 1)


def cell(mode, number, seconds, group=CODE, latency=1.0):
    request = RequestRecord(0, 10, 100, latency, 0.1, (), "length", "same")
    return Cell(mode, group, number, seconds, (request,))


def run(seed, factor, rounds=5, jitter=0.01, groups=(CODE, CHAT)):
    """Three modes whose rounds are off by a normal error; "mode" takes `factor` times plain's time."""
    chance = random.Random(seed)
    return [
        cell(mode, number, 10 * slower * chance.gauss(1, jitter), group)
        for number in range(rounds)
        for group in groups
        for mode, slower in ((PLAIN, 1.0), (CONTROL, 1.0), ("mode", factor))
    ]


def verdicts(factor, rounds=5, tries=200):
    said = []
    for seed in range(tries):
        cells = run(seed, factor, rounds)
        noise = noise_of(ratios(cells, CONTROL))
        said.append(verdict(spread(ratios(cells, "mode")[CODE]), noise[CODE]))
    return said


@pytest.mark.parametrize("rounds", [3, 5, 9])
def test_equal_modes_are_not_told_apart(rounds):
    said = verdicts(1.0, rounds)
    assert said.count("none") >= 190


@pytest.mark.parametrize(("factor", "wanted"), [(1.05, "slower"), (0.95, "faster")])
def test_a_mode_that_was_slowed_or_sped_up_is_found(factor, wanted):
    said = verdicts(factor)
    assert said.count(wanted) >= 190 and set(said) <= {wanted, "none"}


def test_a_slow_minute_of_the_machine_cancels_out():
    cells = [cell(m, n, 10 * (1 + n)) for n in range(3) for m in (PLAIN, CONTROL, "mode")]
    assert ratios(cells, "mode") == {CODE: [1.0, 1.0, 1.0]}


def test_ratios_pair_rounds_and_leave_out_what_has_no_partner():
    cells = [cell(PLAIN, 0, 10.0), cell("mode", 0, 5.0), cell("mode", 1, 5.0), cell(PLAIN, 1, 2.5, CHAT)]
    assert ratios(cells, "mode") == {CODE: [2.0]}


def test_two_rounds_are_too_few_for_a_verdict():
    assert verdict(Spread(2.0, 2.0, 2.0, 2), 0.01) == "none"
    assert verdict(Spread(2.0, 1.9, 2.1, 3), 0.01) == "faster"


def test_a_verdict_needs_the_quartile_beyond_the_noise():
    assert verdict(Spread(1.05, 1.02, 1.08, 5), 0.03) == "none"
    assert verdict(Spread(0.95, 0.90, 0.96, 5), 0.03) == "slower"


def test_a_quiet_group_has_at_least_the_noise_of_all_groups():
    control = {CODE: [1.0, 1.0, 1.0], CHAT: [0.8, 0.9, 1.1, 1.2]}
    noise = noise_of(control)
    assert noise == {CODE: pytest.approx(0.05), CHAT: pytest.approx(0.125)}


@pytest.mark.parametrize(("jitter", "restless"), [(0.004, False), (0.1, True)])
def test_a_control_that_varies_voids_the_run(jitter, restless):
    summary = control_summary(run(1, 1.0, rounds=8, jitter=jitter))
    assert summary is not None and summary.restless is restless and summary.ratio.rounds == 16


def test_a_control_that_is_always_off_voids_the_run():
    cells = [cell(m, n, 10.0 if m == PLAIN else 9.0) for n in range(4) for m in (PLAIN, CONTROL)]
    summary = control_summary(cells)
    assert summary is not None and summary.spread == 0 and summary.restless


def test_without_a_control_there_is_no_noise():
    assert control_summary([cell(PLAIN, 0, 1.0)]) is None and noise_of({}) == {}


def test_in_open_loop_waiting_is_compared():
    arrivals = Group("code", 0.0, 4, rate=2.0)
    assert pace(cell(PLAIN, 0, 10.0, arrivals, latency=4.0)) == pytest.approx(0.25)
    cells = [cell(PLAIN, 0, 10.0, arrivals, latency=4.0), cell("mode", 0, 10.0, arrivals, latency=1.0)]
    assert ratios(cells, "mode") == {arrivals: [4.0]}


def test_quartiles_of_one_round_are_that_round():
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
