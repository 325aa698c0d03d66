"""Ratios of paired runs, on hand-made cells."""

import pytest

from dspark.measure.paired import Cell, Mode, median_speed, ratio, run_paired


def cells(mode, seconds, work="same", group="code"):
    return [Cell(mode, group, number, s, 100, work) for number, s in enumerate(seconds)]


def test_ratio_is_the_median_over_rounds_of_paired_speeds():
    runs = cells("plain", [10.0, 20.0, 10.0]) + cells("fast", [5.0, 10.0, 8.0])
    result = ratio(runs, "fast", "plain")
    assert (result.median, result.low, result.high, result.same_work) == (2.0, 1.25, 2.0, True)
    assert str(result) == "2.00x (1.25-2.00)"
    assert median_speed(runs, "plain") == 10.0


def test_a_slow_round_of_the_machine_does_not_change_a_ratio():
    runs = cells("plain", [10.0, 30.0, 10.0]) + cells("again", [10.0, 30.0, 10.0])
    assert ratio(runs, "again", "plain").median == pytest.approx(1.0)


def test_groups_count_by_their_tokens_and_seconds_together():
    runs = cells("plain", [10.0]) + cells("plain", [30.0], group="chat")
    runs += cells("fast", [5.0]) + cells("fast", [30.0], group="chat")
    assert ratio(runs, "fast", "plain").median == pytest.approx(40 / 35)
    assert ratio(runs, "fast", "plain", "chat").median == pytest.approx(1.0)


def test_unequal_answers_are_said():
    runs = cells("plain", [10.0]) + cells("fast", [5.0], work="other")
    assert str(ratio(runs, "fast", "plain")).endswith("answers differ)")


def test_modes_take_turns_in_rotating_order_after_a_warm_up():
    calls = []

    def mode(name):
        return Mode(name, lambda prompts: (calls.append((name, len(prompts))), [[1, 2]] * len(prompts))[1])

    result = list(run_paired([mode("a"), mode("b")], {"g": [[1], [2], [3]]}, rounds=2))
    assert calls == [("a", 1), ("b", 1), ("a", 3), ("b", 3), ("b", 3), ("a", 3)]
    assert [(c.mode, c.round, c.tokens) for c in result] == [("a", 0, 6), ("b", 0, 6), ("b", 1, 6), ("a", 1, 6)]
    assert len({c.work for c in result}) == 1
