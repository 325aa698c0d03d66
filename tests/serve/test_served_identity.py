"""benchmarks/served_identity.py on a toy: finds nothing where nothing is, and finds what is put in."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "served_identity.py"
# A fixed length is drafted whatever the toy's steps take; `auto` may find that it does not pay.
SERVED = ["--kv-gb", "0.02", "--threads", "1", "--proposer", "lookup", "--policy", "fixed:4"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("served_identity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["served_identity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["served_identity"]


def compare(script, running, target):
    return script.compare(running.url, str(target.folder), script.choose(None, 4), max_tokens=24, exact=True)


def test_a_server_that_is_right_says_the_same(script, running, target):
    found = compare(script, running, target)
    assert [c.name for c in found] == ["greedy", "seeded, T=1"]
    assert [fault for c in found for fault in c.faults()] == []
    text = script.report(found, "the command")
    assert "`the command`" in text and text.count("| 4 of 4 |") == 2 and "FAULT" not in text
    assert any(len(answer.tokens) > 10 for answer in found[0].fast)


def test_answers_that_drafts_change_are_found(script, running, target, monkeypatch):
    real = running.engine.add

    def add(prompt, params, choice, on_chunk, speculate, policy):
        """Wrong: drafts change what is said."""
        return real(prompt, replace(params, seed=params.seed + speculate), choice, on_chunk, speculate, policy)

    monkeypatch.setattr(running.engine, "add", add)
    greedy, seeded = compare(script, running, target)
    assert greedy.faults() == [] and len(seeded.parted) == 4
    assert all(d.gap > 0 and not d.is_tie for d in seeded.parted)
    for d, fast, plain in zip(seeded.parted, seeded.fast, seeded.plain, strict=True):
        assert fast.tokens[: d.position] == plain.tokens[: d.position]
    assert script.report([greedy, seeded], "").count("FAULT: seeded, T=1, prompt ") == 4


def test_a_run_without_drafts_compares_nothing(script):
    numbers = {"accepted": 0, "verified": 0, "drafted": 9, "steps": 9, "committed": 9}
    answer = script.Answer("x", (b"x",), "length", 1, numbers)
    faults = script.Comparison("greedy", [answer], [answer], []).faults()
    assert len(faults) == 2 and "nothing was drafted" in faults[0] and "has drafted" in faults[1]


def test_prompts_come_from_all_sets_in_turn(script, tmp_path):
    (tmp_path / "extra.jsonl").write_text(json.dumps({"turns": ["first", "second"]}) + "\n")
    texts = [prompt[-1]["content"] for prompt in script.choose(tmp_path, 9)]
    assert len(texts) == len(set(texts)) == 9 and texts[6] == "first"


def test_it_starts_a_server_of_its_own(script, target, capfd):
    with pytest.raises(SystemExit) as ended:
        script.main(["--model", str(target.folder), "--limit", "2", "--max-tokens", "40", "--exact", "--", *SERVED])
    out, err = capfd.readouterr()
    assert ended.value.code == 0 and out.count("| 2 of 2 |") == 2, out + err
    assert out.startswith("`python benchmarks/served_identity.py --model ")


def test_a_server_that_cannot_start_is_said(script, tmp_path):
    with pytest.raises(SystemExit) as ended:
        script.main(["--model", str(tmp_path / "nothing"), "--limit", "1"])
    assert "ended before it was ready" in str(ended.value.code)
