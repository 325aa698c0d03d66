"""Counting a corpus table: exactly the most frequent continuations, and the most useful ones when room is short."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.artifacts import Fingerprint
from dspark.artifacts.table import context_keys, read_table, write_table
from dspark.data import Corpus
from dspark.data.table import TableSettings, count_table
from dspark.errors import DataError, SettingsError
from tests.sentences import assert_one_sentence

TARGET = Fingerprint("w1", "t1", "c1", "toy")


def corpus(*texts: tuple[list[int], list[int]]) -> Corpus:
    """Of (prompt, response) pairs."""
    ids = [token for prompt, response in texts for token in (*prompt, *response)]
    offsets = (0, *np.cumsum([len(prompt) + len(response) for prompt, response in texts]).tolist())
    count = len(texts)
    return Corpus(torch.tensor(ids), offsets, tuple(len(p) for p, _ in texts), (0.0,) * count, ("chat",) * count)


def count(texts: Corpus, **changes):
    return count_table(texts, TableSettings(**({"min_count": 1} | changes)), TARGET)


def reference(texts: Corpus, chosen: TableSettings) -> dict[tuple[int, ...], tuple[int, int, int]]:
    """context -> (next id, seen, total), the slow and obvious way."""
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for i in range(len(texts)):
        ids = texts.sequence(i).tolist()
        for place in range(texts.prompt_lens[i], len(ids)):
            for order in range(chosen.shortest, min(chosen.longest, place) + 1):
                followers[tuple(ids[place - order : place])][ids[place]] += 1
    best = {}
    for context, counts in followers.items():
        token_id, seen = min(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        if seen >= chosen.min_count:
            best[context] = (token_id, seen, counts.total())
    return best


def test_by_hand():
    table = count(corpus(([9, 1], [2, 1, 3]), ([1], [2, 1, 2])), longest=2)
    assert table.find([1]) == (2, 3, 4, 1)  # 2, 3, 2, 2
    assert table.find([2]) == (1, 2, 2, 1)
    assert table.find([9, 1]) == (2, 1, 1, 2)  # a context may reach into the prompt
    assert table.find([2, 1]) == (2, 1, 2, 2)  # of 2 and 3, both seen once, the smaller id
    assert table.find([9]) is None  # 1 followed it, but in the prompt
    assert table.find([3]) is None  # nothing follows: sequences do not run into each other
    assert table.target == TARGET
    assert table.counted["sequences"] == 2 and table.counted["response_tokens"] == 6


token_ids = st.integers(0, 3)
texts = st.lists(
    st.tuples(st.lists(token_ids, min_size=1, max_size=4), st.lists(token_ids, min_size=1, max_size=12)), min_size=1
).map(lambda pairs: corpus(*pairs))
ranges = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


@given(texts, ranges, st.integers(1, 3), st.lists(st.lists(token_ids, max_size=6), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_every_continuation_is_that_of_the_slow_way(written, orders, min_count, histories):
    chosen = TableSettings(*orders, min_count)
    expected = reference(written, chosen)
    if not expected:
        with pytest.raises(DataError):
            count_table(written, chosen, TARGET)
        return
    table = count_table(written, chosen, TARGET)
    assert len(table) == len(expected)
    for history in histories:
        ends = [tuple(history[-order:]) for order in range(min(len(history), chosen.longest), 0, -1)]
        known = next((end for end in ends if end in expected), None)
        assert table.find(history) == (None if known is None else (*expected[known], len(known)))


@pytest.fixture(scope="module")
def crowded() -> Corpus:
    """Far more contexts than 10 kB hold."""
    make = torch.Generator().manual_seed(1)
    return corpus(
        *(([1], torch.randint(0, 40, (400,), generator=make).square().div(40).long().tolist()) for _ in "abcdef")
    )


def test_what_is_right_most_often_stays(crowded, tmp_path):
    everything, small = count(crowded), count(crowded, max_mb=0.01)
    write_table(tmp_path / "a.dspt", small)
    assert 5_000 < (tmp_path / "a.dspt").stat().st_size <= 10_000
    kept, dropped = [], []
    for order, rows in everything.orders.items():
        stays = np.isin(rows.keys, small.orders[order].keys)
        assert stays.sum() == len(small.orders[order])
        kept += rows.counts[stays].tolist()
        dropped += rows.counts[~stays].tolist()
    assert min(kept) >= max(dropped) and len(dropped) > len(kept)


def test_of_equals_those_that_the_shorter_context_gets_wrong_stay(crowded):
    expected = reference(crowded, TableSettings(min_count=1))
    small = count(crowded, max_mb=0.01)
    least = min(int(rows.counts.min()) for rows in small.orders.values())
    gains = {True: [], False: []}  # of contexts at the brink, by whether they stayed
    for context, (token_id, seen, _) in expected.items():
        if seen == least and len(context) > 1:
            stayed = context_keys(context, 4)[-1] in small.orders[len(context)].keys
            gains[bool(stayed)].append(token_id != expected[context[1:]][0])
    assert all(gains[True]) or not any(gains[False])
    assert gains[True] and gains[False]


def test_pruned_tables_are_read_again(crowded, tmp_path):
    small = count(crowded, max_mb=0.01)
    write_table(tmp_path / "a.dspt", small)
    again = read_table(tmp_path / "a.dspt", 40, "t1")
    assert [again.find([a, b]) for a in range(40) for b in range(40)] == [
        small.find([a, b]) for a in range(40) for b in range(40)
    ]


def test_ids_beyond_sixteen_bits():
    table = count(corpus(([100_000], [100_001, 100_000, 100_001])))
    assert table.find([100_000]) == (100_001, 2, 2, 1)


def test_texts_shorter_than_the_longest_context():
    table = count(corpus(([1], [2])), longest=8)
    assert len(table) == 1 and table.find([1]) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"shortest": 0}, ["orders", "0-4"]),
        ({"shortest": 3, "longest": 2}, ["3-2"]),
        ({"longest": 9}, ["1-9", "8"]),
        ({"min_count": 0}, ["min_count", "0"]),
        ({"max_mb": 0.0}, ["max_mb", "0.0"]),
        ({"max_mb": float("nan")}, ["max_mb", "nan"]),
    ],
)
def test_settings_out_of_range(changes, names):
    with pytest.raises(SettingsError) as caught:
        TableSettings(**changes)
    assert_one_sentence(caught.value, names)


def test_nothing_seen_often_enough():
    with pytest.raises(DataError) as caught:
        count(corpus(([1], [2, 3])), min_count=2)
    assert_one_sentence(caught.value, ["2 times"])
