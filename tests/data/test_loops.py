"""Where a response begins to loop, against counting by hand."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.data import loop_start


def slow_loop_start(ids, ngram, repeats):
    """The longest prefix in which no n-gram stands more than `repeats` times."""
    for length in range(len(ids), -1, -1):
        grams = Counter(tuple(ids[i : i + ngram]) for i in range(length - ngram + 1))
        if max(grams.values(), default=0) <= repeats:
            return length
    raise AssertionError


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_it_is_the_longest_prefix_without_a_loop(ids, ngram, repeats):
    assert loop_start(ids, ngram, repeats) == slow_loop_start(ids, ngram, repeats)


def test_a_loop_in_otherwise_fresh_text():
    ids = list(range(100)) + list(range(200, 220)) * 5
    # The first 16-gram of the repeated piece is complete for the fourth time after three whole pieces and 16 tokens.
    assert loop_start(ids) == 100 + 3 * 20 + 15
