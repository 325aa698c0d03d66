"""Results on disk come back as they were, and others are refused."""

import json

import pytest

from dspark.errors import DataError
from dspark.measure.bench.records import BenchResult, Cell, Group
from tests.measure.bench.made_up import made_up
from tests.sentences import assert_one_sentence


def test_a_result_survives_json(tmp_path):
    result = made_up()
    result.write(tmp_path / "bench.json")
    assert BenchResult.read(tmp_path / "bench.json") == result


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda v: v | {"format": "other"}, ["not a benchmark result"]),
        (lambda v: v | {"format_version": 99}, ["99", "version 1"]),
        (lambda v: v | {"surprise": 1}, ["surprise"]),
        (lambda v: {k: x for k, x in v.items() if k != "rows"}, ["rows"]),
        (lambda v: [v], ["not a benchmark result"]),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path, change, names):
    path = tmp_path / "bench.json"
    made_up().write(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError) as error:
        BenchResult.read(path)
    assert_one_sentence(error.value, names)


def test_missing_and_torn_files_are_refused_in_one_sentence(tmp_path):
    for text in (None, '{"format": '):
        path = tmp_path / "bench.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(DataError) as error:
            BenchResult.read(path)
        assert_one_sentence(error.value, ["bench.json"])


def test_a_nested_record_with_an_odd_key_is_refused():
    values = {"mode": "m", "group": Group("code", 0.0, 1).to_dict() | {"odd": 1}, "round": 0, "seconds": 1.0}
    with pytest.raises(DataError, match="odd"):
        Cell.from_dict({**values, "requests": []})


def test_a_group_reads_well():
    assert str(Group("code", 0.7, 4)) == "code, T=0.7, 4 at a time"
    assert str(Group("code", 0.0, 4, depth=512, rate=0.5)) == "code, T=0, 0.5 arrivals/s, depth 512"
