"""Rows with a policy of their own in a batch that has another."""

import pytest

from dspark.errors import SettingsError
from dspark.schedule import NO_DRAFT, FixedPolicy, MixedPolicy, RowView, StepView, parse_policy, parse_row_policy
from tests.schedule import machines as m
from tests.sentences import assert_one_sentence

SURE, DOUBTFUL = [0.9] * 12, [0.05] * 12
COSTS = m.curves([10.0 + 0.5 * k for k in range(64)])


def row(chances, room=16):
    return RowView(10, room, True, offers=(m.one_offer(chances),))


def step_of(*rows):
    return StepView(rows, len(rows), len(rows), 100)


@pytest.mark.parametrize("common", ["fixed:4", "history", "threshold:0.5", "scheduled"])
def test_each_row_follows_its_policy(common):
    policy = parse_policy(common, COSTS)
    step = step_of(row(SURE), row(SURE, room=3), row(DOUBTFUL), row(SURE))
    own = {1: FixedPolicy(7), 2: FixedPolicy(2)}
    mixed = MixedPolicy(policy, own)
    choices = mixed.draft_lens(step)
    assert [choices[i].length for i in own] == [3, 2]
    unmixed = policy.draft_lens(step_of(*(row(c, r) for c, r in ((SURE, 16), ([], 0), ([], 0), (SURE, 16)))))
    assert [choices[i] for i in (0, 3)] == [unmixed[i] for i in (0, 3)] and choices[0].length > 2
    lens = tuple(choice.length for choice in choices)
    planned = mixed.verify_lens(step, choices, lens, [[0.9] * n for n in lens])
    assert [planned[i] for i in own] == [3, 2] and all(n <= most for n, most in zip(planned, lens, strict=True))


def test_a_row_of_its_own_is_cut_by_its_own_confidences():
    mixed = MixedPolicy(FixedPolicy(4), {1: parse_policy("threshold:0.5")})
    step = step_of(row(SURE), row(SURE))
    choices = mixed.draft_lens(step)
    confidence = [[0.1] * 4, [0.9, 0.8, 0.2, 0.9]]
    assert mixed.verify_lens(step, choices, (4, 4), confidence) == (4, 2)
    assert mixed.most == 16


def test_the_common_policy_may_be_to_draft_nothing():
    choices = MixedPolicy(FixedPolicy(0), {0: FixedPolicy(3)}).draft_lens(step_of(row(SURE), row(SURE)))
    assert choices[0].length == 3 and choices[1] == NO_DRAFT


def test_policies_of_the_whole_batch_are_nobodys_own():
    for text in ("scheduled", "auto"):
        with pytest.raises(SettingsError) as caught:
            parse_row_policy(text)
        assert_one_sentence(str(caught.value), [f"policy is '{text}'", "fixed:N"])
    with pytest.raises(SettingsError, match="1 to 16"):
        parse_row_policy("fixed:17")
    assert parse_row_policy("history") == parse_policy("history")
