"""`dspark data table`: from a packed file to a table that `generate` finds, and mistakes in one line."""

import pytest
import torch

from dspark.artifacts.table import read_table
from dspark.config import SamplingParams
from dspark.data import Corpus, Provenance, write_packed
from tests.sentences import assert_one_sentence
from tests.toy_models import VOCAB_SIZE

PROMPT = "Hi! "


@pytest.fixture(scope="session")
def data(engine, tmp_path_factory):
    """What the toy says to a prompt, twice."""
    (answer,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    ids = [*answer.prompt_ids, *answer.token_ids]
    corpus = Corpus(
        torch.tensor(ids * 2), (0, len(ids), 2 * len(ids)), (len(answer.prompt_ids),) * 2, (0.0,) * 2, ("a",) * 2
    )
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    write_packed(path, corpus, Provenance(engine.target.fingerprint, {"temperature": 0}))
    return path


@pytest.fixture
def make(run, model, data):
    def call(*args, files=None):
        return run("data", "table", "--target", model, *args, "--data", *(str(f) for f in (files or [data])))

    return call


def test_a_table_is_found_used_and_changes_nothing(make, run, model, tmp_path):
    out = tmp_path / "cache" / "tables" / "toy.dspt"
    made = make("--out", str(out))
    assert made.code == 0, made.err
    assert "toy.dspt" in made.err and "contexts" in made.err and made.out == ""
    common = ("generate", "--model", model, "--dtype", "float32", "--exact", "--raw", "--max-tokens", "20", PROMPT)
    drafted = run(*common, "--proposer", "lookup", "--stats")
    assert drafted.code == 0, drafted.err
    assert "table" in drafted.err
    assert drafted.out == run(*common, "--proposer", "none").out


def test_orders_and_counts_are_those_asked_for(make, engine, tmp_path, data):
    out = tmp_path / "a.dspt"
    assert make("--out", str(out), "--orders", "2-3", "--no-cut-loops", files=[data, data]).code == 0
    table = read_table(out, VOCAB_SIZE, engine.target.fingerprint.tokenizer)
    assert list(table.orders) == [2, 3]
    assert table.counted["sequences"] == 4 and table.target.weights == engine.target.fingerprint.weights
    assert make("--out", str(out), "--orders", "1").code == 0
    assert list(read_table(out, VOCAB_SIZE).orders) == [1]


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--orders", "x"], ["--orders", "'x'", "1-4"]),
        (["--orders", "0-4"], ["0-4"]),
        (["--orders", "4-2"], ["4-2"]),
        (["--max-mb", "0"], ["max_mb"]),
        (["--min-count", "0"], ["min_count"]),
        (["--min-count", "9"], ["9 times"]),
    ],
)
def test_mistakes_are_one_line(make, tmp_path, args, names):
    result = make("--out", str(tmp_path / "a.dspt"), *args)
    assert result.code == 2 and result.out == ""
    assert_one_sentence(result.err.strip().splitlines()[-1].removeprefix("dspark: error: "), names)
    assert not (tmp_path / "a.dspt").exists()


def test_a_damaged_file_is_one_line(make, tmp_path):
    (tmp_path / "bad.npz").write_text("no")
    result = make("--out", str(tmp_path / "a.dspt"), files=[tmp_path / "bad.npz"])
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["bad.npz"])
