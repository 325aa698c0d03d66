"""`dspark data`: prompts, responses and a look at them, killed and gone on with, and refused in one sentence."""

import json
import signal
import subprocess
import sys

import pytest

from tests.data.support import write_writer
from tests.sentences import assert_one_sentence

QUICK = ["--dtype", "float32", "--kv-gb", "0.02", "--threads", "1"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return str(write_writer(tmp_path_factory.mktemp("writer")))


@pytest.fixture
def synth(run, writer):
    def call(out, *args):
        limits = ["--kinds", "code,chat", "--max-tokens", "60", "--top-p", "1"]
        return run("data", "synth", "--target", writer, *QUICK, "--out", str(out), *limits, *args)

    return call


@pytest.fixture
def respond(run, writer):
    def call(prompts, out, *args):
        return run(
            *("data", "respond", "--target", writer, *QUICK, "--max-tokens", "40"),
            *("--prompts", str(prompts), "--out", str(out), *args),
        )

    return call


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Question {i}"}) + "\n" for i in range(6)))
    return path


def refused(result, *names):
    assert result.code == 2 and result.out == ""
    assert_one_sentence(result.err.strip().splitlines()[-1], names)


def test_from_nothing_to_a_packed_file(synth, respond, run, writer, tmp_path):
    prompts, packed = tmp_path / "prompts.jsonl", tmp_path / "data"
    made = synth(prompts, "--count", "6")
    assert made.code == 0 and f"6 prompts are in {prompts}" in made.err, made.err
    answered = respond(prompts, packed, "--temperatures", "0,1", "--weights", "1,3")
    assert answered.code == 0 and "chat" in answered.out and "code" in answered.out, answered.err
    assert [f.name for f in packed.iterdir()] == ["responses.npz"]
    shown = run("data", "inspect", str(packed / "responses.npz"), "--target", writer, "--show", "2")
    assert shown.code == 0 and "temperatures [0.0, 1.0]" in shown.out and "<|start|>assistant" in shown.out
    again = respond(prompts, packed, "--temperatures", "0,1", "--weights", "1,3")
    assert again.code == 0 and "is complete" in again.err
    refused(respond(prompts, packed, "--temperatures", "0,1"), "weights", "--out")
    refused(synth(prompts, "--count", "7"), "count", "6", "7", "--out")


KILLED = """
import os, signal, sys
from dspark.cli.main import main
from dspark.data import Journal
add, kept = Journal.add, []
def add_and_die(journal, index, value):
    add(journal, index, value)
    kept.append(index)
    if len(kept) == 3:
        os.write(journal._file, b'{"i":77,"v"')
        os.kill(os.getpid(), signal.SIGKILL)
Journal.add = add_and_die
main()
"""


def test_killed_with_9_and_gone_on_with(respond, writer, questions, tmp_path):
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    assert respond(questions, whole).code == 0
    command = ["data", "respond", "--target", writer, *QUICK, "--max-tokens", "40", "--prompts", str(questions)]
    died = subprocess.run([sys.executable, "-c", KILLED, *command, "--out", str(broken)], capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert not broken.exists()
    refused(respond(questions, broken, "--seed", "1"), "seed", "--out")
    result = respond(questions, broken)
    assert result.code == 0 and "3 of 6 responses are there" in result.err, result.err
    assert broken.read_bytes() == whole.read_bytes()


def test_ctrl_c_keeps_what_is_finished(respond, questions, tmp_path, monkeypatch):
    from dspark.data import Journal

    add = Journal.add

    def add_and_interrupt(journal, index, value):
        add(journal, index, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_and_interrupt)
        result = respond(questions, tmp_path / "r.npz")
    assert result.code == 130 and "same command" in result.err and "Traceback" not in result.err
    assert "1 of 6 responses are there" in respond(questions, tmp_path / "r.npz").err


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--count", "0"], ["--count", "0"]),
        (["--count", "2", "--kinds", "poetry"], ["poetry", "math"]),
        (["--count", "2", "--temperature", "-1"], ["temperature", "-1"]),
        (["--count", "2", "--batch", "0"], ["max_batch", "0"]),
    ],
)
def test_synth_mistakes_are_one_line(synth, tmp_path, args, names):
    refused(synth(tmp_path / "p.jsonl", *args), *names)
    assert not list(tmp_path.glob("*p.jsonl*"))


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--temperatures", "0,-1"], ["temperature", "-1"]),
        (["--temperatures", "hot"], ["--temperatures", "hot"]),
        (["--temperatures", "0,1", "--weights", "1"], ["--weights"]),
        (["--limit", "0"], ["--limit", "0"]),
        (["--endpoint", "http://x/v1"], ["--endpoint-model"]),
        (["--endpoint-model", "m"], ["--endpoint"]),
        (["--endpoint", "http://x/v1", "--endpoint-model", "m", "--api-key-env", "NO_SUCH"], ["NO_SUCH"]),
        (["--endpoint", "http://127.0.0.1:1/v1", "--endpoint-model", "m"], ["127.0.0.1:1", "start the server"]),
    ],
)
def test_respond_mistakes_are_one_line(respond, questions, tmp_path, args, names):
    refused(respond(questions, tmp_path / "r.npz", *args), *names)
    assert not (tmp_path / "r.npz").exists()


def test_bad_files_are_one_line(respond, run, model, writer, questions, tmp_path):
    refused(respond(tmp_path / "none.jsonl", tmp_path / "r.npz"), "none.jsonl", "does not exist")
    questions.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    refused(respond(questions, tmp_path / "r.npz"), "line 2", "text", "messages")
    refused(run("data", "inspect", str(questions), "--target", writer), "questions.jsonl", "packed token file")
    questions.write_text('{"prompt": "a"}\n')
    assert respond(questions, tmp_path / "r.npz").code == 0
    refused(respond(questions, tmp_path / "r.npz", "--target", model), "target", "--out")  # another target's file
    refused(run("data", "inspect", str(tmp_path / "r.npz"), "--target", writer, "--show", "-1"), "--show")
