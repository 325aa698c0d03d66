"""`dspark profile`, `dspark plan`, and what `dspark doctor` makes of a cached profile, on a toy model."""

import json
import os

import pytest

from dspark.artifacts.profile import read_profile, write_profile
from dspark.drafter import random_tensors
from dspark.drafter.checkpoint import save_drafter
from dspark.engine import profiling
from tests.engine.support import drafter_config
from tests.sentences import assert_one_sentence

COMMON = ["--dtype", "float32", "--threads", "1"]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(autouse=True)
def hurry(monkeypatch, shared_cache):
    """Once through all jobs, one cache for all tests: profiles of the toys are measured once each."""
    monkeypatch.setattr(profiling, "BUDGET_S", 0.0)
    monkeypatch.setenv("DSPARK_CACHE", str(shared_cache))


@pytest.fixture(scope="session")
def drafter(engine, tmp_path_factory):
    """A folder with random weights for the toy."""
    folder = tmp_path_factory.mktemp("drafter")
    config = drafter_config(engine.target)
    save_drafter(folder, config, random_tensors(config, 3))
    return str(folder)


@pytest.fixture
def dspark(run, model):
    """A command on the toy target."""

    def call(command, *args, lookup=True):
        return run(command, "--target", model, *COMMON, *(["--proposer", "lookup"] if lookup else []), *args)

    return call


def test_profile_prints_writes_and_remembers(dspark, drafter, tmp_path, caplog):
    caplog.set_level("INFO", "dspark")
    out = tmp_path / "profile.json"
    first = dspark("profile", "--drafter", drafter, "--out", str(out), lookup=False)
    assert first.code == 0, first.err
    assert "tokens" in first.out and "draft ms" in first.out and "1.00x" in first.out
    assert [m.split()[0] for m in caplog.messages[:2]] == ["Measuring", "Measured"]
    said = len(caplog.messages)
    assert read_profile(out).drafter_name == "dspark"
    again = dspark("profile", "--drafter", drafter, lookup=False)
    assert again.out == first.out and len(caplog.messages) == said
    assert dspark("profile", "--drafter", drafter, "--force", lookup=False).code == 0
    assert len(caplog.messages) > said


def test_check_compares_step_times(dspark):
    result = dspark("profile", "--check")
    assert result.code == 0, result.err
    assert "predicted ms" in result.out and "steps on prompts not used before" in result.out
    sizes = [line.split()[:2] for line in result.out[result.out.index("predicted ms") :].splitlines()[1:-1]]
    assert ["1", "1"] in sizes and any(rows == "8" for _, rows in sizes)


def test_plan_from_a_stated_acceptance(dspark, drafter, tmp_path):
    plot = tmp_path / "plan.png"
    args = ["--drafter", drafter, "--alpha", "0.6", "--concurrency", "1,8", "--context", "100"]
    result = dspark("plan", *args, "--plot", str(plot), lookup=False)
    assert result.code == 0, result.err
    assert "pays above" in result.out and "best length" in result.out and "step over kept" in result.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    data = json.loads(dspark("plan", *args, "--json", lookup=False).out)
    assert data["survival"]["slots"] == pytest.approx([0.6**k for k in range(1, 7)])
    assert [row["concurrency"] for row in data["rows"]] == [1, 8]
    assert all(row["measured_ms"] is None for row in data["rows"])
    assert data["advice"] or all(row["best"] for row in data["rows"])


def test_plan_measures_acceptance_and_latency(dspark):
    result = dspark("plan", "--concurrency", "2", "--measure", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert "Measuring acceptance" in result.err
    assert len(data["survival"]["slots"]) == 8 and set(data["kinds"]) <= {"code", "math", "chat"}
    assert data["rows"][0]["measured_ms"] > 0


def test_a_load_that_cannot_be_reached_is_said(dspark, monkeypatch):
    # Answers of one token end before anything decodes.
    monkeypatch.setattr("dspark.cli.plan._MEASURED_TOKENS", 1)
    text = " ".join(dspark("plan", "--alpha", "0.5", "--concurrency", "1,2", "--measure").out.split())
    assert "Not measured with 1, 2 requests" in text and " - " in text


def test_plan_from_counts_and_without_hope(dspark, tmp_path):
    path = tmp_path / "acceptance.json"
    lost = {"set": "code", "temperature": 0.0, "slot_verified": [9, 9], "slot_accepted": [0, 0], "steps": 9}
    lost["sources"] = {"dspark": 9}
    path.write_text(json.dumps({"cells": [lost]}))
    result = dspark("plan", "--from", str(path), "--concurrency", "1")
    assert result.code == 0 and "plain" in result.out and "too weak" in result.out


def test_a_profile_from_elsewhere_is_one_line(dspark, tmp_path):
    path = tmp_path / "profile.json"
    assert dspark("profile", "--out", str(path)).code == 0
    assert dspark("plan", "--alpha", "0.5", "--profile", str(path)).code == 0
    result = dspark("plan", "--alpha", "0.5", "--profile", str(path), "--exact")
    assert result.code == 2 and result.out == ""
    assert_one_sentence(result.err.strip(), ["exact", str(path)])


def test_doctor_reads_cached_profiles(run, dspark, shared_cache):
    dspark("profile")
    assert "drafts pay" in " ".join(run("doctor").out.split())
    (path, *_) = sorted((shared_cache / "profiles").glob("*.json"))
    stored = read_profile(path)
    damaged = path.with_name("damaged.json")
    write_profile(damaged, stored)
    damaged.write_text(damaged.read_text()[:100])
    assert str(damaged) in run("doctor").out
    os.remove(damaged)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["plan", "--alpha", "2"], ["acceptance", "2"]),
        (["plan", "--acceptance", "0.5,x"], ["--acceptance", "x"]),
        (["plan", "--acceptance", "0.5", "--alpha", "0.5"], ["--acceptance", "--alpha"]),
        (["plan", "--alpha", "0.5", "--concurrency", "1,0"], ["--concurrency", "1,0"]),
        (["plan", "--alpha", "0.5", "--context", "-1"], ["--context", "-1"]),
        (["plan", "--from", "/nowhere"], ["/nowhere"]),
        (["plan", "--alpha", "0.5", "--profile", "/nowhere"], ["/nowhere"]),
        (["profile", "--out", "/"], ["--out", "/"]),
        (["profile", "--threads", "0"], ["threads", "0"]),
    ],
)
def test_mistakes_are_one_line(run, model, args, names):
    result = run(args[0], "--target", model, "--proposer", "lookup", *args[1:])
    assert result.code == 2 and result.out == ""
    (line,) = [line for line in result.err.strip().splitlines() if "error:" in line]
    assert_one_sentence(line, names)
