"""Corpus tables on disk: what is written is read, mapped rather than copied, and damage is one sentence."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark.artifacts import Fingerprint
from dspark.artifacts.table import (
    VERSION,
    CorpusTable,
    TableOrder,
    context_keys,
    extend_keys,
    read_table,
    read_table_target,
    write_table,
)
from dspark.errors import DataError
from tests.sentences import assert_one_sentence

TARGET = Fingerprint("w1", "t1", "c1", "toy")
VOCAB = 50


def rows(entries: dict[tuple[int, ...], tuple[int, int, int]]) -> TableOrder:
    """From context -> (next id, seen, total)."""
    ranked = sorted((context_keys(context, len(context))[-1], values) for context, values in entries.items())
    nexts, counts, totals = zip(*(values for _, values in ranked), strict=True)
    keys = np.array([key for key, _ in ranked], np.uint64)
    return TableOrder(keys, np.array(nexts, np.uint16), np.array(counts, np.uint8), np.array(totals, np.uint16))


def toy_table(target: Fingerprint = TARGET) -> CorpusTable:
    one, two = {(1,): (2, 3, 700), (7,): (9, 1, 1)}, {(3, 1): (4, 2, 2), (1, 3): (5, 6, 8)}
    return CorpusTable({1: rows(one), 2: rows(two)}, target, {"sequences": 3})


@pytest.fixture
def path(tmp_path) -> Path:
    write_table(tmp_path / "new" / "a.dspt", toy_table())
    return tmp_path / "new" / "a.dspt"


def refused(path: Path, *names: str, vocab: int = VOCAB, tokenizer: str | None = "t1") -> None:
    with pytest.raises(DataError) as caught:
        read_table(path, vocab, tokenizer)
    assert_one_sentence(caught.value, [path.name, *names])


def test_the_longest_known_context_answers():
    table = toy_table()
    assert table.find([3, 1]) == (4, 2, 2, 2)
    assert table.find([8, 3, 1]) == (4, 2, 2, 2)
    assert table.find([9, 1]) == table.find([1]) == (2, 3, 700, 1)
    assert table.find([1, 7]) == (9, 1, 1, 1)
    assert table.find([1, 8]) is None and table.find([]) is None
    assert table.longest == 2 and len(table) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 1000])
def test_every_context_of_a_table_is_found_and_no_other(size):
    entries = {(token,): (token % VOCAB, 1 + token % 3, 9) for token in range(size)}
    table = CorpusTable({1: rows(entries)}, TARGET)
    assert [table.find([token]) for token in range(size)] == [(*values, 1) for values in entries.values()]
    assert not any(table.find([token]) for token in range(size, 3 * size))


def test_keys_of_many_contexts_are_those_of_each():
    contexts = np.random.default_rng(0).integers(0, 200_000, (100, 5))
    keys = np.zeros(100, np.uint64)
    for order in range(1, 6):
        keys = extend_keys(keys, contexts[:, -order])
        assert keys.tolist() == [context_keys(context, 5)[order - 1] for context in contexts.tolist()]
    assert len(set(keys.tolist())) == 100


def test_what_is_written_is_read(path):
    table, again = toy_table(), read_table(path, VOCAB, "t1")
    assert again.target == TARGET and again.counted == {"sequences": 3}
    assert read_table_target(path) == TARGET
    for order, expected in table.orders.items():
        found = again.orders[order]
        for column in ("keys", "next_ids", "counts", "totals"):
            assert getattr(found, column).tolist() == getattr(expected, column).tolist()
    assert again.find([3, 1]) == (4, 2, 2, 2)
    assert os.listdir(path.parent) == ["a.dspt"]


def test_another_target_with_the_same_tokenizer_may_use_it(path):
    assert read_table(path, VOCAB, "t1").target.weights == "w1"
    assert len(read_table(path, VOCAB)) == 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_file_is_mapped(path):
    table = read_table(path, VOCAB)
    assert str(path) in Path("/proc/self/maps").read_text()
    path.unlink()  # the mapping outlives the name, so a table can be replaced while an engine uses it
    assert table.find([1, 3]) == (5, 6, 8, 2)


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DataError) as caught:
        write_table(path, toy_table())
    assert_one_sentence(caught.value, ["a.dspt", "No space left"])
    assert path.read_bytes() == before and os.listdir(path.parent) == ["a.dspt"]


def test_missing_empty_and_other_files(tmp_path):
    refused(tmp_path / "no.dspt", "does not exist", "dspark data table")
    refused(tmp_path, "does not exist")
    (tmp_path / "empty.dspt").write_bytes(b"")
    refused(tmp_path / "empty.dspt", "cut short")
    (tmp_path / "text.dspt").write_text("no table " * 40)
    refused(tmp_path / "text.dspt", "of another kind")
    save_file({"x": np.ones(3)}, tmp_path / "other.dspt")
    refused(tmp_path / "other.dspt", "of another kind")


def test_a_file_cut_anywhere_is_refused(path):
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        refused(path, "copy it again")


def test_another_tokenizer_is_named(path):
    refused(path, "toy", "t1", "t2", tokenizer="t2")


def test_ids_outside_the_vocabulary(path):
    refused(path, "9", "0 to 8", vocab=9)


def rewrite(path: Path, about: dict[str, str] | None = None, **columns) -> None:
    """Change metadata and columns (`two_keys` is column 2.keys; None drops it) behind the writer's back."""
    stored = load_file(path)
    metadata = {"format": "dspark corpus table", "version": str(VERSION), "target": json.dumps(TARGET.to_dict())}
    for name, value in columns.items():
        order, column = name.split("_", 1)
        stored[f"{({'one': 1, 'two': 2, 'three': 3})[order]}.{column}"] = value
    kept = {name: value for name, value in stored.items() if value is not None}
    save_file(kept, path, metadata=metadata | (about or {}))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"about": {"version": "7"}}, ["version 7", str(VERSION)]),
        ({"about": {"format": "else"}}, ["another kind"]),
        ({"about": {"target": "{}"}}, ["metadata"]),
        ({"about": {"target": "no json"}}, ["metadata"]),
        ({"about": {"counted": "[1"}}, ["metadata"]),
        ({"two_keys": None}, ["other arrays"]),
        ({"two_counts": None}, ["order 2", "incomplete"]),
        ({"three_keys": np.zeros(1, np.uint64)}, ["order 3", "incomplete"]),
        ({"two_counts": np.ones(3, np.uint8)}, ["order 2", "fit together"]),
        ({"two_counts": np.ones((2, 1), np.uint8)}, ["order 2", "fit together"]),
        ({"two_next_ids": np.ones(2, np.int32)}, ["order 2", "fit together"]),
        ({"two_keys": np.array([5, 4], np.uint64)}, ["order 2", "ascend"]),
        ({"two_keys": np.array([4, 4], np.uint64)}, ["order 2", "ascend"]),
        ({"two_keys": np.array([4, 5], np.uint32)}, ["order 2", "ascend"]),
        ({"one_counts": np.array([0, 1], np.uint8)}, ["order 1", "count"]),
        ({"one_totals": np.array([1, 0], np.uint8)}, ["order 1", "count"]),
    ],
)
def test_damage_is_named(path, changes, names):
    rewrite(path)
    assert len(read_table(path, VOCAB, "t1")) == 4
    rewrite(path, **changes)
    refused(path, *names)
