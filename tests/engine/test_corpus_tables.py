"""Which corpus table an engine uses, and what it refuses."""

import logging
from dataclasses import replace

import pytest
import torch

from dspark.artifacts.table import write_table
from dspark.config import EngineConfig
from dspark.data import Corpus
from dspark.data.table import TableSettings, count_table
from dspark.engine.tables import find_table
from dspark.errors import DataError, SettingsError
from dspark.target import load_target
from tests.engine.support import CPU, greedy
from tests.folders import engine, refused
from tests.toy_models import write_model


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def target(folder):
    return load_target(str(folder), CPU)


def write(path, target, next_id: int = 5, then: int | None = None, **changes):
    """A table that says `next_id` after 4, or with two ids the second after the first."""
    corpus = Corpus(torch.tensor([4, next_id] if then is None else [next_id, then]), (0, 2), (1,), (0.0,), ("chat",))
    write_table(path, count_table(corpus, TableSettings(min_count=1), replace(target.fingerprint, **changes)))
    return path


def found(target, **changes):
    """What the table an engine would use says after 4, None without a table."""
    table = find_table(EngineConfig(**({"model": "toy", "proposer": "lookup"} | changes)), target)
    return None if table is None else table.find([4]).token_id


def test_without_a_table(target, cache):
    assert found(target) is None


def test_a_file_or_none(target, cache, tmp_path):
    path = write(tmp_path / "mine.dspt", target)
    write(cache / "tables" / "other.dspt", target, 6)
    assert found(target, corpus_table=str(path)) == 5
    assert found(target, corpus_table="none") is None
    assert found(target) == 6


def test_auto_looks_beside_drafters_then_among_tables(target, cache, tmp_path):
    write(cache / "tables" / "a.dspt", target, 6)
    assert found(target) == 6
    write(cache / "drafters" / "one" / "table.dspt", target, 7)
    assert found(target) == 7
    write(tmp_path / "run" / "table.dspt", target, 8)
    assert found(target, proposer="auto", drafter=str(tmp_path / "run")) == 8


def test_auto_prefers_the_targets_own_text_and_never_takes_another_tokenizers(target, cache, caplog):
    tables = cache / "tables"
    with caplog.at_level(logging.WARNING, "dspark"):
        write(tables / "a.dspt", target, 6, tokenizer="other")
        assert found(target) is None
        write(tables / "b.dspt", target, 7, weights="other")
        assert found(target) == 7
        write(tables / "c.dspt", target, 8)
        assert found(target) == 8
    assert not caplog.records


def test_auto_passes_over_broken_ones_and_says_so(target, cache, caplog):
    broken = write(cache / "tables" / "a.dspt", target)
    broken.write_bytes(broken.read_bytes()[:-3])
    write(cache / "tables" / "b.dspt", target, 7)
    with caplog.at_level(logging.WARNING, "dspark"):
        assert found(target) == 7
    assert "a.dspt" in caplog.text


def test_a_table_that_was_named_must_fit(folder, target, tmp_path):
    refused(
        DataError, lambda: engine(folder, proposer="lookup", corpus_table="no.dspt"), "no.dspt", "dspark data table"
    )
    other = write(tmp_path / "other.dspt", target, tokenizer="t9")
    refused(DataError, lambda: engine(folder, proposer="lookup", corpus_table=str(other)), "t9", "tokenizer")


@pytest.mark.parametrize("proposer", ["none", "dspark", "model:x"])
def test_a_table_nobody_would_use_is_refused(proposer):
    refused(SettingsError, lambda: engine("x", proposer=proposer, corpus_table="a.dspt"), "'a.dspt'", repr(proposer))


def test_an_engine_uses_its_table_and_its_plain_twin_does_not(folder, target, tmp_path):
    plain = engine(folder, proposer="none", exact=True)
    expected = plain.generate([[1, 4]], greedy())[0].token_ids
    path = write(tmp_path / "a.dspt", target, *expected[:2])
    made = engine(folder, proposer="lookup", exact=True, corpus_table=str(path))
    (output,) = made.generate([[1, 4]], greedy())
    assert output.token_ids == expected and output.stats.sources["table"] and output.stats.accepted
    (twin,) = made.without_drafts().generate([[1, 4]], greedy())
    assert twin.token_ids == expected and set(twin.stats.sources) == {"none"}
