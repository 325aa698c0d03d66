"""Policies read their spelling, and decide from what a row's past says."""

import pytest

from dspark.errors import SettingsError
from dspark.schedule import Choice, Offer, RowView, StepView, check_policy, is_adaptive, parse_policy
from tests.schedule import machines as m
from tests.sentences import assert_one_sentence


@pytest.mark.parametrize("text", ["fixed:1", "fixed:16", "length", "history", "threshold:0", "threshold:0.95", "auto"])
def test_policies_that_need_no_costs(text):
    assert 1 <= parse_policy(text).most <= 16


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("never", ["'never'", "fixed:N", "threshold:c", "auto"]),
        ("", ["''", "fixed:N"]),
        ("fixed", ["'fixed'", "1 to 16"]),
        ("fixed:0", ["'fixed:0'", "1 to 16"]),
        ("fixed:17", ["'fixed:17'", "1 to 16"]),
        ("fixed:²", ["1 to 16"]),
        ("fixed:4.0", ["'fixed:4.0'", "1 to 16"]),
        ("threshold", ["'threshold'", "0 up to"]),
        ("threshold:1", ["'threshold:1'", "0 up to"]),
        ("threshold:-0.1", ["'threshold:-0.1'", "0 up to"]),
        ("threshold:nan", ["'threshold:nan'", "0 up to"]),
        ("history:3", ["'history:3'", "no value"]),
        ("auto:", ["'auto:'", "no value"]),
    ],
)
def test_other_spellings_are_refused(text, names):
    with pytest.raises(SettingsError) as caught:
        check_policy(text)
    assert_one_sentence(str(caught.value), names)


def test_scheduled_needs_a_profile_and_auto_does_without():
    with pytest.raises(SettingsError) as caught:
        parse_policy("scheduled")
    assert_one_sentence(str(caught.value), ["dspark profile", "auto"])
    costs = m.curves([10.0])
    assert parse_policy("auto", costs) == parse_policy("scheduled", costs)
    assert parse_policy("auto") == parse_policy("history")


def test_only_policies_that_look_for_what_pays_may_be_paused():
    assert [is_adaptive(text) for text in ("fixed:4", "length", "threshold:0.3")] == [False] * 3
    assert [is_adaptive(text) for text in ("history", "scheduled", "auto")] == [True] * 3


def lengths(policy, *rows):
    step = StepView(tuple(rows), len(rows), len(rows), 100)
    return [choice.length for choice in parse_policy(policy).draft_lens(step)]


def row(chances, committed=10, room=16):
    return RowView(committed, room, True, offers=(m.one_offer(chances),))


def test_fixed_drafts_n_or_what_there_is_room_for():
    assert lengths("fixed:4", row([0.1] * 8), row([0.9] * 8, room=2), row([0.9] * 3), row([0.9], room=0)) == [
        4,
        2,
        3,
        0,
    ]


def test_length_drafts_short_until_64_tokens_are_committed():
    rows = [row([0.5] * 12, committed) for committed in (1, 63, 64, 500)] + [row([0.5] * 16, 64)]
    assert lengths("length", *rows) == [4, 4, 12, 12, 16]


def test_history_drafts_as_far_as_acceptance_reaches_and_at_least_one():
    assert lengths("history", row([0.95] * 8), row([0.6] * 8), row([0.01] * 8)) == [8, 2, 1]


def verified(policy, lens, confidence):
    step = m.step_of([[0.5] * 8] * len(lens))
    return parse_policy(policy).verify_lens(step, m.whole(step), lens, confidence)


def test_threshold_stops_before_the_first_confidence_under_it():
    chances = [[0.9, 0.6, 0.3, 0.9], [0.2, 0.9, 0.9, 0.9], [0.9] * 4, []]
    assert verified("threshold:0.5", [4, 4, 4, 3], chances) == (2, 0, 4, 3)
    assert verified("threshold:0", [4, 4, 4, 3], chances) == (4, 4, 4, 3)


@pytest.mark.parametrize("policy", ["fixed:4", "length", "history"])
def test_policies_without_a_second_decision_verify_what_was_drafted(policy):
    assert verified(policy, [4, 0, 2], [[0.0] * 4, [], [0.0] * 2]) == (4, 0, 2)


def test_between_sources_the_one_with_more_tokens_for_its_time_is_drafted_from():
    lookup, drafter = Offer("lookup", m.survivals([0.6] * 4)), Offer("dspark", m.survivals([0.8] * 4), cost=0.1)
    slow = Offer("dspark", drafter.survival, cost=0.9)
    for offers, wanted in [((lookup, drafter), drafter), ((lookup, slow), lookup), ((slow,), slow), ((), None)]:
        step = StepView((RowView(10, 4, True, offers=offers),), 1, 1, 10)
        (choice,) = parse_policy("fixed:4").draft_lens(step)
        assert choice == (Choice(wanted, 4) if wanted else Choice())
