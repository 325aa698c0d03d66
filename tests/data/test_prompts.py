"""What is a good prompt, what is a duplicate, and that the order in which candidates are ready does not count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.data.openings import KINDS, OPENINGS, parse_kinds
from dspark.data.prompts import NEAR, SHINGLE, Chooser, Dedup, defect, normalise, quotas
from dspark.errors import SettingsError
from tests.sentences import assert_one_sentence

GOOD = "Write a function that adds two numbers."


@pytest.mark.parametrize(
    ("text", "ids", "ended", "why"),
    [
        (GOOD, range(8), True, None),
        ("Übersetze:\n\t猫は好きですか、それとも犬", range(8), True, None),
        (GOOD, range(8), False, "cut off"),
        ("Write.", range(8), True, "too short"),
        (GOOD, [], True, "too short"),
        (GOOD + "\x07", range(8), True, "not printable"),
        (GOOD + "\ufffd", range(8), True, "not printable"),
        (GOOD, [1, 2, 3, 4, 5, 6] * 3, True, "loops"),
        (GOOD, [1, 2, 3, 4, 5, 6] * 2, True, None),
    ],
)
def test_defects(text, ids, ended, why):
    assert defect(text, list(ids), ended) == why


def test_duplicates_and_near_duplicates():
    seen = Dedup()
    assert seen.add("Write a Python function that returns the largest number in a list of integers.")
    assert not seen.add("write a python function, that returns\nthe largest number in a list of integers")
    assert not seen.add("Write a Python function that returns the largest number in a list of floats.")
    assert seen.add("Write a Python function that returns the shortest word of a sentence.")
    assert not seen.add("?!")
    assert seen.add("Say hi") and not seen.add("say HI!") and seen.add("Say hi there")


WORDS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(WORDS, max_size=15))
def test_the_index_finds_what_comparing_with_everything_finds(texts):
    seen, kept = Dedup(), []
    for text in texts:
        words = normalise(text)
        pieces = {words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1))}
        new = all(
            words != other and len(pieces & theirs) < NEAR * max(len(pieces), len(theirs)) for other, theirs in kept
        )
        assert seen.add(text) == new
        if new:
            kept.append((words, pieces))


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=12, max_size=60), st.randoms(use_true_random=False), st.integers(1, 9))
def test_the_choice_does_not_depend_on_which_is_ready_first(texts, random, count):
    candidates = [(f"text {byte % 23}", "loops" if byte % 3 == 0 else None) for byte in texts]

    def chosen(order):
        chooser = Chooser(("a", "b", "c"), quotas(count, 3), (len(candidates) // 3, 0))
        for index in order:
            if not chooser.done:
                chooser.offer(index, *candidates[index])
        return chooser

    order = list(range(len(candidates) // 3 * 3))
    straight = chosen(order)
    random.shuffle(order)
    mixed = chosen(order)
    assert straight.done and mixed.done  # by quota or by tries
    assert mixed.chosen == straight.chosen and mixed.rejected == straight.rejected
    kinds = [straight.kind(index) for index, _ in straight.chosen]
    missing = straight.shortfall()
    assert {kind: kinds.count(kind) + missing.get(kind, 0) for kind in "abc"} == dict(
        zip("abc", quotas(count, 3), strict=True)
    )
    assert mixed.filled == len(straight.chosen)


def test_a_kind_is_given_up_when_too_little_of_it_is_good():
    chooser = Chooser(("a", "b"), (3, 3), patience=(4, 2))
    for index in range(100):
        if not chooser.done:
            chooser.offer(index, f"good {index}", None if index in (0, 9) else "loops")
    # one of a's first four was good, so it got two more; b had four, and the good one came later
    assert chooser.chosen == [(0, "good 0")] and chooser.rejected == {"loops": 9}
    assert chooser.shortfall() == {"a": 2, "b": 3}


def test_each_kind_has_many_openings_and_no_two_are_alike():
    assert set(KINDS) == {"code", "math", "chat", "writing", "extraction", "translation"}
    for kind, openings in OPENINGS.items():
        assert len(openings) >= 30, kind
        assert len(set(map(str.casefold, openings))) == len(openings), kind


def test_kinds_by_name():
    assert parse_kinds(None) == KINDS
    assert parse_kinds("math, code,math") == ("math", "code")
    with pytest.raises(SettingsError) as error:
        parse_kinds("math,poetry")
    assert_one_sentence(error.value, ["poetry", "writing"])
