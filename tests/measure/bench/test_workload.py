"""What is asked: the same for every mode, padded to a depth, by kind."""

import json
from itertools import islice

import pytest
import torch

from dspark.errors import DataError, SettingsError
from dspark.measure.bench.records import Group, Settings
from dspark.measure.bench.workload import Workload, built_in, from_sources, padded, render
from dspark.measure.workloads import WORKLOADS
from dspark.target import load_target
from tests.sentences import assert_one_sentence
from tests.toy_models import write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("toy"), "qwen3")
    return load_target(str(folder), torch.device("cpu"), "float32").tokenizer


def question(text):
    return ({"role": "user", "content": text},)


def workload(tokenizer, questions, **changes):
    values = {"temperatures": (0.0,), "concurrencies": (1,), "depths": (0,), "max_tokens": 8, **changes}
    return Workload(tokenizer, questions, Settings("toy", (), tuple(questions), **values))


def test_requests_repeat_from_mode_to_mode_and_never_end(tokenizer):
    work = workload(tokenizer, {"code": [question("one"), question("two")]}, seed=3)
    group = Group("code", 0.5, 1)
    first, again = (list(islice(work.asks(group), 5)) for _ in "12")
    assert first == again and [ask.prompt for ask in first] == [0, 1, 0, 1, 0]
    assert len({ask.params.seed for ask in first}) == 5, "a prompt that comes again is sampled anew"
    assert {ask.params.temperature for ask in first} == {0.5} and {ask.params.max_tokens for ask in first} == {8}


def test_padding_reaches_the_depth_and_keeps_the_question(tokenizer):
    filler = ["some", "words", "of", "other", "texts"]
    deep = padded(tokenizer, question("What now?"), 300, filler)
    assert 290 <= len(render(tokenizer, deep)) <= 300
    assert deep[-1]["content"].endswith("\n\nWhat now?") and "some words of other" in deep[-1]["content"]
    assert padded(tokenizer, deep, 100, filler) == deep, "long enough as it is"


def test_prompts_without_room_are_left_out(tokenizer):
    work = workload(tokenizer, {"code": [question("x" * 200), question("short")]})
    work.with_room(150)
    (ask,) = islice(work.asks(Group("code", 0.0, 1)), 1)
    assert ask.messages == question("short")
    with pytest.raises(DataError) as error:
        work.with_room(20)
    assert_one_sentence(error.value, ["code", "--max-tokens", "20"])


def test_built_in_prompts_by_kind():
    assert list(built_in()) == list(WORKLOADS)
    assert [len(several) for several in built_in(["math", "chat"], limit=2).values()] == [2, 2]
    with pytest.raises(SettingsError) as error:
        built_in(["poems"])
    assert_one_sentence(error.value, ["poems", "code", "--prompts"])


def test_own_prompts_by_their_kind_or_file(tmp_path):
    lines = [{"turns": ["a", "b"], "kind": "riddles"}, {"messages": [{"role": "user", "content": "c"}]}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert from_sources([str(tmp_path)]) == {"riddles": [question("a")], "mine": [question("c")]}
    assert list(from_sources([str(tmp_path)], ["mine"], limit=1)) == ["mine"]
    with pytest.raises(DataError) as error:
        from_sources([str(tmp_path)], ["poems"])
    assert_one_sentence(error.value, ["poems", "riddles, mine"])
