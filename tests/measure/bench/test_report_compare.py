"""Two results side by side: what changed is found, what did not is not, and what cannot be compared is refused."""

from dataclasses import replace

import pytest

from dspark.errors import DataError
from dspark.measure.bench.records import Group
from dspark.measure.bench.report_compare import compare
from tests.measure.bench.made_up import FACTORS, made_up
from tests.measure.bench.test_report import Page, cells
from tests.sentences import assert_one_sentence


def verdicts(comparison):
    return {(pair.mode, pair.group): pair.speedup.verdict for pair in comparison.pairs if pair.speedup}


def test_a_slowed_mode_is_found_and_equal_ones_are_not():
    changes = verdicts(compare(made_up(seed=1), made_up({**FACTORS, "lookup": 1.2}, seed=2)))
    assert {verdict for (mode, _), verdict in changes.items() if mode == "lookup"} == {"slower"}
    assert {verdict for (mode, _), verdict in changes.items() if mode != "lookup"} == {"none"}


def test_a_quicker_mode_is_found():
    changes = verdicts(compare(made_up(seed=1), made_up({**FACTORS, "small model": 0.8}, seed=2)))
    assert {verdict for (mode, _), verdict in changes.items() if mode == "small model"} == {"faster"}


def test_a_change_inside_the_noise_of_one_run_is_none():
    loud = made_up(seed=1, jitter=0.2)
    changes = verdicts(compare(loud, made_up({**FACTORS, "lookup": 1.35}, seed=2)))
    assert set(changes.values()) == {"none"}


def test_too_few_rounds_change_nothing():
    few = made_up({**FACTORS, "lookup": 1.0}, rounds=2)
    assert set(verdicts(compare(made_up(), few)).values()) == {"none"}


def test_a_slower_machine_shows_in_speeds_but_not_in_speedups():
    slow = made_up({mode: factor / 2 for mode, factor in FACTORS.items()}, seed=2)
    comparison = compare(made_up(seed=1), slow)
    assert set(verdicts(comparison).values()) == {"none"}
    assert {pair.tok_per_s.verdict for pair in comparison.pairs} == {"slower"}
    assert "2 slower" in comparison.told()  # plain, on two kinds


def test_only_shared_cells_are_compared_and_the_control_is_not_one():
    other = made_up({"plain": 1.0, "plain again": 1.0, "lookup": 1.4, "new": 2.0}, (Group("code", 0.0, 1),))
    pairs = compare(made_up(), other).pairs
    assert [(pair.mode, pair.group.kind) for pair in pairs] == [("plain", "code"), ("lookup", "code")]


def test_the_table_and_the_page_show_both_runs():
    comparison = compare(made_up(seed=1), made_up({**FACTORS, "lookup": 1.2}, seed=2))
    text = comparison.markdown()
    assert cells(text)["group"][:5] == ["mode", "speed-up before", "after", "ratio", "by speed-up"]
    lookup = next(line for line in text.splitlines() if "code" in line and "| lookup |" in line)
    assert "0.86x | slower" in lookup
    found = Page(comparison.page("dspark bench --compare a.json b.json"))
    assert "0.86x" in found.said() and "dspark bench --compare a.json b.json" in found.said()
    assert all(link.startswith("#") for link in found.links)


def test_how_the_runs_themselves_differ_is_said():
    before, after = made_up(), made_up()
    after = replace(after, settings=replace(after.settings, max_tokens=64), machine=replace(after.machine, cpu="Other"))
    said = compare(before, after).markdown()
    assert "max_tokens, 256 before and 64 after" in said and "processor, Made-up CPU before and Other after" in said
    assert "Not the same" not in compare(before, before).markdown()


def test_results_of_different_targets_are_refused_in_a_sentence():
    with pytest.raises(DataError, match="Toy-1M and Other") as caught:
        compare(made_up(), made_up(target_name="Other"))
    assert_one_sentence(caught.value)


def test_results_without_a_common_cell_are_refused_in_a_sentence():
    with pytest.raises(DataError) as caught:
        compare(made_up(), made_up(groups=(Group("poems", 0.0, 1),)))
    assert_one_sentence(caught.value)
