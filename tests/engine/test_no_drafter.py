"""Who has no drafter is told how to get one, in commands that exist and name the model."""

import json
import logging
import re
import shlex

import pytest
import typer

from dspark import Engine
from dspark.cli.main import app
from tests.toy_models import write_model


@pytest.fixture
def said(caplog, tmp_path, monkeypatch):
    """What an engine says while it loads this folder, line by line."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, logger="dspark")

    def load(folder, **settings):
        caplog.clear()
        assert Engine.from_pretrained(str(folder), kv_gb=0.02, profile="none", **settings).proposer.name == "lookup"
        return [line for record in caplog.records for line in record.getMessage().splitlines()]

    return load


def parsed(command):
    """The name of a dspark command and the values of its options; raises where it would be refused."""
    program, *words = shlex.split(command)
    assert program == "dspark"
    found = typer.main.get_command(app)
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    return found.name, found.make_context(found.name, words).params


def test_its_commands_lead_from_this_model_to_a_drafter(said, tmp_path):
    folder = write_model(tmp_path / "my model; it's mine")
    fact, commands = said(folder)
    assert "n-gram lookup is on" in fact
    estimate = re.search(r"\((dspark estimate .*) says how long\)", fact)[1]
    steps = dict(map(parsed, commands.split(" && ")))
    assert list(steps) == ["synth", "respond", "train"]
    name, timed = parsed(estimate)
    assert name == "estimate" and timed["data"] == steps["train"]["data"] == [steps["respond"]["out"]]
    assert steps["respond"]["prompts"] == [str(steps["synth"]["out"])]
    assert {given["target"] for given in (timed, *steps.values())} == {str(folder)}


def test_a_model_without_a_chat_template_is_not_sent_through_one(said, tmp_path):
    folder = write_model(tmp_path / "base")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (line,) = said(folder)
    assert "n-gram lookup is on" in line and "synth" not in line


def test_who_wants_none_is_told_nothing(said, tmp_path):
    folder = write_model(tmp_path / "model")
    assert said(folder, drafter="none") == []
    assert said(folder, proposer="lookup") == []
