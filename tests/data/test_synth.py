"""Prompts the target writes: filtered, spread over kinds, and the same file however often the run was killed."""

import json
from itertools import islice

import pytest

from dspark.data import Described, Journal, SynthPlan, journal_path, prompts_written, synthesise, write_prompts
from dspark.data.openings import OPENINGS
from dspark.errors import DataError, SettingsError
from tests.data.support import load_writer, write_writer, writer_engine
from tests.sentences import assert_one_sentence

PLAN = SynthPlan(count=12, kinds=("code", "math", "chat"), max_tokens=48, seed=4)


def make(target, out, plan=PLAN, batch=8, steps=None):
    """Run to the end, or `steps` engine steps and stop without writing."""
    settings = plan.settings(Described.of(target), "float32", True)
    with Journal(journal_path(out), settings) as journal:
        reports = synthesise(writer_engine(target, batch), plan, journal)
        list(islice(reports, steps))
        reports.close()
        if steps is None:
            content = journal.path.read_bytes()
            write_prompts(out, plan, settings, journal)
            journal.remove()
            return content
    return None


@pytest.fixture(scope="module")
def whole(writer, tmp_path_factory):
    """(the file's bytes, the journal's bytes) of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "p.jsonl"
    journal = make(writer, out)
    return out.read_bytes(), journal


def test_prompts_begin_as_openings_do_and_are_spread_over_kinds(whole, writer):
    records = [json.loads(line) for line in whole[0].decode().splitlines()]
    kinds = [record["kind"] for record in records]
    assert {kind: kinds.count(kind) for kind in PLAN.kinds} == {"code": 4, "math": 4, "chat": 4}
    for record in records:
        (message,) = record["messages"]
        assert message["role"] == "user"
        assert any(message["content"].startswith(opening.strip()) for opening in OPENINGS[record["kind"]])
        assert record["source"]["seed"] == 4 and record["source"]["target"]["weights"] == writer.fingerprint.weights
    assert len({record["messages"][0]["content"] for record in records}) == 12
    assert any(json.loads(line)["v"][1] == "cut off" for line in whole[1].splitlines()[1:])  # filters had work


def test_a_run_killed_anywhere_ends_with_the_same_file(whole, writer, tmp_path):
    content = whole[1]
    header = content.index(b"\n") + 1
    for share in (0.2, 0.7, 1):
        out = tmp_path / f"{share}.jsonl"
        journal_path(out).write_bytes(content[: header + int(share * (len(content) - header))])
        make(writer, out)
        assert out.read_bytes() == whole[0] and not journal_path(out).exists()


def test_neither_stops_nor_the_batch_size_change_the_file(whole, writer, tmp_path):
    out = tmp_path / "p.jsonl"
    make(writer, out, batch=3, steps=20)
    make(writer, out, batch=5, steps=30)
    make(writer, out, batch=4)
    assert out.read_bytes() == whole[0]


def test_a_complete_file_is_known_and_others_are_refused(whole, writer, tmp_path):
    out = tmp_path / "p.jsonl"
    settings = PLAN.settings(Described.of(writer), "float32", True)
    assert not prompts_written(out, settings)
    out.write_bytes(whole[0])
    assert prompts_written(out, settings)
    with pytest.raises(DataError) as error:
        prompts_written(out, settings | {"temperature": 0.5})
    assert_one_sentence(error.value, [str(out), "temperature", "1.0", "0.5"])
    out.write_text('{"prompt": "mine"}\n')
    with pytest.raises(DataError) as error:
        prompts_written(out, settings)
    assert_one_sentence(error.value, [str(out), "--out"])


def test_a_target_that_never_ends_gives_no_prompts_and_the_run_still_ends(tmp_path):
    target = load_writer(write_writer(tmp_path / "model", end_share=1e-9))
    with pytest.raises(DataError) as error:
        make(target, tmp_path / "p.jsonl", SynthPlan(count=1, kinds=("chat",), max_tokens=1), batch=16)
    assert_one_sentence(error.value, ["50 cut off", "--max-tokens"])
    assert not (tmp_path / "p.jsonl").exists()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"count": 0}, ["--count", "0"]),
        ({"seed": -1}, ["--seed", "-1"]),
        ({"temperature": -1.0}, ["temperature", "-1"]),
        ({"top_p": 2.0}, ["top_p", "2"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
    ],
)
def test_bad_plans(values, names):
    with pytest.raises(SettingsError) as error:
        SynthPlan(**({"count": 1} | values))
    assert_one_sentence(error.value, names)
