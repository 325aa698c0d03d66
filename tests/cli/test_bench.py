"""`dspark bench` on a toy: what it writes and prints, what stops it, what it refuses."""

import json
from html.parser import HTMLParser

import pytest

from dspark.measure.bench import session
from dspark.measure.bench.records import BenchResult, Peaks
from dspark.measure.bench.runner import Runner
from tests.sentences import assert_one_sentence

FEW = ["--limit", "1", "--max-tokens", "8", "--min-tokens", "8", "--rounds", "1", "--kinds", "code"]


@pytest.fixture
def bench(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "measure_peaks", lambda device: Peaks(1e9, 1e9))
    monkeypatch.setenv("DSPARK_PROFILE", "none")

    def call(*args, out=tmp_path / "out"):
        common = ["--target", model, "--dtype", "float32", "--threads", "1", "--out", str(out)]
        return run("bench", *common, *FEW, *args)

    return call


def test_results_are_printed_and_written_in_three_forms(bench, tmp_path):
    result = bench("--quick", "--modes", "lookup/fixed:4", "--temperatures", "0,1")
    assert result.code == 0, result.err
    stored = BenchResult.read(tmp_path / "out" / "bench.json")
    assert stored.complete and stored.settings.temperatures == (0.0, 1.0) and stored.settings.kinds == ("code",)
    assert stored.command.startswith("dspark bench --target") and len(stored.rows) == 6
    assert result.out == (tmp_path / "out" / "bench.md").read_text() + "\n"
    assert "| plain again |" in result.out and "| lookup/fixed:4 |" in result.out
    page = (tmp_path / "out" / "bench.html").read_text()
    HTMLParser().feed(page)
    assert "lookup/fixed:4" in page and "bench.html" in result.err


def test_a_stopped_run_is_reported_and_resumed(bench, tmp_path, monkeypatch):
    whole = Runner._part

    def stopped(self, turn, *more):
        if turn.mode == "lookup":
            raise KeyboardInterrupt
        return whole(self, turn, *more)

    monkeypatch.setattr(Runner, "_part", stopped)
    args = ("--quick", "--modes", "lookup")
    result = bench(*args)
    assert result.code == 130 and "--resume" in result.err
    stored = BenchResult.read(tmp_path / "out" / "bench.json")
    assert not stored.complete and len(stored.cells) == 2
    monkeypatch.setattr(Runner, "_part", whole)
    assert bench(*args).code == 2, "without --resume nothing is overwritten"
    assert bench(*args, "--resume").code == 0
    again = BenchResult.read(tmp_path / "out" / "bench.json")
    assert again.complete and len(again.cells) == 3
    assert [cell.requests[:1] for cell in again.cells[:2]] == [cell.requests[:1] for cell in stored.cells]


def test_own_prompts_and_arrivals(bench, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"turns": ["Say something."]}) + "\n")
    args = ("--quick", "--prompts", str(file), "--kinds", "mine", "--modes", "plain", "--rate", "auto,40")
    result = bench(*args)
    assert result.code == 0, result.err
    stored = BenchResult.read(tmp_path / "out" / "bench.json")
    assert {group.kind for group in {row.group for row in stored.rows}} == {"mine"}
    assert len({row.group.rate for row in stored.rows}) == 3 and stored.settings.rate_share is not None


def test_two_results_are_compared(bench, run, tmp_path):
    for name in ("a", "b"):
        assert bench("--quick", "--modes", "plain", out=tmp_path / name).code == 0
    files = [str(tmp_path / name / "bench.json") for name in ("a", "b")]
    result = run("bench", "--compare", *files, "--out", str(tmp_path / "both"))
    assert result.code == 0, result.err
    assert "| plain |" in result.out and (tmp_path / "both" / "compare.html").exists()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--modes", "magic"], ["magic", "lookup/fixed:4"]),
        (["--kinds", "poems"], ["poems", "code"]),
        (["--temperatures", "-1"], ["-1"]),
        (["--temperatures", "warm"], ["warm"]),
        (["--concurrency", "0"], ["--concurrency", "0"]),
        (["--depths", "deep"], ["--depths", "deep"]),
        (["--rate", "0"], ["--rate", "0"]),
        (["--rate", "fast"], ["--rate", "fast"]),
        (["--rounds", "0"], ["--rounds"]),
        (["--seed", "-1"], ["--seed"]),
        (["--prompts", "/nowhere.jsonl"], ["/nowhere.jsonl"]),
        (["--acceptance", "strict"], ["strict", "coupled"]),
        (["--max-tokens", "500"], ["500", "512"]),
        (["--compare", "/no/a.json", "/no/b.json"], ["/no/a.json"]),
    ],
)
def test_mistakes_are_one_line(bench, args, names, tmp_path):
    result = bench("--quick", *args)
    assert result.code == 2 and result.out == ""
    assert_one_sentence(result.err.strip().splitlines()[-1], names)
    assert not (tmp_path / "out" / "bench.json").exists()
