"""Readers of prompts: every format, and one sentence for everything else."""

import json
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.data import read_prompts
from dspark.data.sources import parse_record, prompts_digest
from dspark.errors import DataError
from tests.sentences import assert_one_sentence

USER = {"role": "user", "content": "Why?"}
CHAT = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "So."}]


def jsonl(path, *records):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return str(path)


def refused(call, *names):
    with pytest.raises(DataError) as error:
        call()
    assert_one_sentence(error.value, names)


@pytest.mark.parametrize(
    ("record", "messages", "kind"),
    [
        ({"messages": CHAT, "kind": "chat"}, CHAT[:2], "chat"),
        ({"messages": [*CHAT, USER, CHAT[2], CHAT[2]]}, [*CHAT, USER], "own"),
        (
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], "cat": "math"},
            [USER],
            "math",
        ),
        ({"prompt": "Why?", "response": "So."}, [USER], "own"),
        ({"prompt": [USER]}, [USER], "own"),
        ({"turns": ["Why?", "And then?"], "kind": 3}, [USER], "own"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]}, [USER], "own"),
    ],
)
def test_formats(record, messages, kind):
    prompt = parse_record(record, "x", "own")
    assert list(prompt.messages) == messages and prompt.kind == kind


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ([1], ["not a JSON object"]),
        ({"text": "hi"}, ["no known format", "text", "messages"]),
        ({"turns": []}, ["no known format"]),
        ({"messages": "hi"}, ["not a list"]),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, ["role", "wizard"]),
        ({"conversations": [{"from": "human", "value": 3}]}, ["value", "not text"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["content", "not text"]),
        ({"messages": [CHAT[0]]}, ["no user message"]),
        ({"prompt": " "}, ["no user message"]),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, record, names):
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "fine"}, record)
    refused(lambda: read_prompts([path]), f"{path}, line 2", *names)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "conversations", "prompt", "turns", "role", "content", "from", "value"]), inner
        )
    ),
    max_leaves=8,
)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=3)})


@settings(deadline=None, max_examples=60)
@given(JSON | st.fixed_dictionaries({"messages": st.lists(TURN, max_size=4)}))
def test_any_json_is_a_prompt_or_one_sentence(record):
    try:
        prompt = parse_record(record, "line 1", "own")
    except DataError as error:
        assert str(error).startswith("line 1 ") and str(error).endswith(".")
    else:
        assert prompt.messages[-1]["role"] == "user" and prompt.messages[-1]["content"].strip()


def test_files_folders_limits_and_kinds(tmp_path):
    jsonl(tmp_path / "b.jsonl", {"prompt": "one"}, {"prompt": "two\u2028and"}, {"prompt": "three"})
    jsonl(tmp_path / "a.jsonl", {"turns": ["zero"]})
    (tmp_path / "notes.txt").write_text("no")
    prompts = read_prompts([str(tmp_path), str(tmp_path / "b.jsonl")], limit=3)
    assert [p.messages[0]["content"] for p in prompts] == [
        "zero",
        "one",
        "two\u2028and",
        "one",
        "two\u2028and",
        "three",
    ]
    assert [p.kind for p in prompts] == ["a", "b", "b", "b", "b", "b"]
    assert prompts_digest(prompts) != prompts_digest(prompts[::-1])


def test_sources_without_prompts(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    refused(lambda: read_prompts([str(empty)]), str(empty), "no prompts")
    refused(lambda: read_prompts([str(tmp_path / "none")]), "none", "does not exist")
    empty.write_bytes(b"\xff\xfe")
    refused(lambda: read_prompts([str(empty)]), "UTF-8")
    empty.write_text("{")
    refused(lambda: read_prompts([str(empty)]), "line 1", "not JSON")


def test_data_sets(monkeypatch):
    asked = []

    def load_dataset(name, subset, split, streaming):
        asked.append((name, subset, split, streaming))
        if split == "nope":
            raise ValueError('Unknown split "nope".\nShould be one of ["train"].')
        return iter([{"messages": CHAT}, {"prompt": "b"}, {"x": 1}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    prompts = read_prompts(["hf:owner/talk"], limit=2, split="test", subset="en")
    assert [p.kind for p in prompts] == ["talk", "talk"] and asked == [("owner/talk", "en", "test", True)]
    refused(lambda: read_prompts(["hf:owner/talk"]), "hf:owner/talk, record 3,")
    refused(lambda: read_prompts(["hf:owner/talk"], split="nope"), "owner/talk", "Unknown split", "--split")


def test_data_sets_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(lambda: read_prompts(["hf:owner/talk"]), "hf:owner/talk", "dspark[data]")
