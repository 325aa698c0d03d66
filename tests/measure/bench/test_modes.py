"""Spellings of modes, and what is said of wrong ones."""

import importlib.util

import pytest

from dspark.errors import SettingsError
from dspark.measure.bench.modes import Mode, check_installed, missing, parse_mode, parse_modes
from dspark.measure.bench.records import CONTROL, PLAIN
from tests.sentences import assert_one_sentence


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", Mode("plain", "ours")),
        ("none", Mode("plain", "ours")),
        ("lookup", Mode("lookup", "ours", "lookup")),
        ("lookup/fixed:4", Mode("lookup/fixed:4", "ours", "lookup", "fixed:4")),
        ("auto/auto", Mode("auto/auto", "ours", "auto", "auto")),
        ("dspark-random/auto", Mode("dspark-random/auto", "ours", "dspark", "auto", random=True)),
        ("model:./a/small", Mode("model:./a/small", "ours", "model:./a/small")),
        ("model:./a/small/fixed:2", Mode("model:./a/small/fixed:2", "ours", "model:./a/small", "fixed:2")),
        ("transformers-lookup", Mode("transformers-lookup", "transformers-lookup")),
        ("transformers-assisted:a/b", Mode("transformers-assisted:a/b", "transformers-assisted", argument="a/b")),
        ("llama.cpp", Mode("llama.cpp", "llama.cpp")),
        ("llama.cpp:x.gguf", Mode("llama.cpp:x.gguf", "llama.cpp", argument="x.gguf")),
        ("openai:http://host:1/v1", Mode("openai:http://host:1/v1", "openai", argument="http://host:1/v1")),
    ],
)
def test_spellings(text, wanted):
    assert parse_mode(text) == wanted


def test_plain_and_its_control_always_come_first_and_modes_come_once():
    names = [mode.name for mode in parse_modes(["lookup", "plain", "none", "lookup"])]
    assert names == [PLAIN, CONTROL, "lookup"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("magic", ["magic", "lookup/fixed:4", "openai:URL"]),
        ("lookup/sometimes", ["sometimes"]),
        ("lookup/fixed:0", ["fixed:0"]),
        ("none/auto", ["none/auto"]),
        ("lookup-random", ["lookup-random"]),
        ("model:", ["model:"]),
        ("transformers-assisted", ["transformers-assisted", "PATH"]),
        ("openai:", ["openai:", "URL"]),
        ("transformers:x", ["transformers:x", "nothing"]),
        ("llama.cpp:", ["llama.cpp:"]),
    ],
)
def test_mistakes_are_one_sentence(text, names):
    with pytest.raises(SettingsError) as error:
        parse_mode(text)
    assert_one_sentence(error.value, names)


def test_an_engine_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError) as error:
        check_installed(parse_mode("llama.cpp"))
    assert_one_sentence(error.value, ["llama-cpp-python", "dspark[llama]"])
    assert missing(parse_mode("lookup")) is None
