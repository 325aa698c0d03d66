"""How other engines are driven, with stand-ins for those that are not installed here."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dspark.config import SamplingParams
from dspark.errors import SettingsError
from dspark.measure.bench import baselines
from dspark.measure.bench.baselines import LOOKUP_TOKENS, Place, open_baseline
from dspark.measure.bench.drive import Ask, drive
from dspark.measure.bench.modes import parse_mode
from dspark.target import load_target
from tests.sentences import assert_one_sentence
from tests.toy_models import EOS_ID, write_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(write_model(tmp_path_factory.mktemp("toy"), "qwen3", layer_scale=0.06)), CPU, "float32")


@pytest.fixture
def place(target):
    return Place(target, context=100, at_once=2)


def asks(*prompts, max_tokens=6, temperature=0.0):
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=3)
    return [Ask(n, tuple(ids), ({"role": "user", "content": "?"},), params) for n, ids in enumerate(prompts)]


@pytest.fixture
def llama_cpp(monkeypatch):
    """Says the prompt's length, then counts up; stands in for the package llama_cpp."""
    calls = SimpleNamespace(made=None, resets=0, seeds=[], asked=[], closed=0)

    class Llama:
        def __init__(self, **settings):
            calls.made = settings

        def reset(self):
            calls.resets += 1

        def set_seed(self, seed):
            calls.seeds.append(seed)

        def generate(self, tokens, **sampling):
            calls.asked.append(sampling)
            try:
                token = len(tokens)
                while True:
                    yield token
                    token = EOS_ID if token == 12 else token + 1
            finally:
                calls.closed += 1

    module, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    module.Llama = Llama
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: ("lookup", num_pred_tokens)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return calls


def test_llama_cpp_stops_at_limits_and_end_tokens_and_keeps_nothing(llama_cpp, place, tmp_path):
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"")
    system = open_baseline(parse_mode(f"llama.cpp:{file}"), place)
    answers, _ = drive(system, asks([1, 2], [5] * 11, temperature=0.5), 1)
    assert [a.token_ids for a in answers] == [(2, 3, 4, 5, 6, 7), (11, 12, EOS_ID)]
    assert [a.record.finish_reason for a in answers] == ["length", "stop"]
    assert llama_cpp.resets == llama_cpp.closed == 2 and llama_cpp.seeds == [3, 3]
    assert llama_cpp.asked[0] == {"temp": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    assert llama_cpp.made["draft_model"] is None and llama_cpp.made["n_ctx"] >= place.context
    assert "toy.gguf" in system.note and all(a.record.ttft_s is not None for a in answers)


def test_llama_cpp_drafts_with_its_own_lookup(llama_cpp, place, tmp_path):
    (tmp_path / "toy.gguf").write_bytes(b"")
    open_baseline(parse_mode(f"llama.cpp-lookup:{tmp_path / 'toy.gguf'}"), place)
    assert llama_cpp.made["draft_model"] == ("lookup", LOOKUP_TOKENS)


def test_a_llama_cpp_that_crashes_does_not_take_the_run_with_it(llama_cpp, place, tmp_path, monkeypatch):
    (tmp_path / "toy.gguf").touch()
    monkeypatch.setattr(baselines, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(SettingsError) as error:
        open_baseline(parse_mode(f"llama.cpp:{tmp_path / 'toy.gguf'}"), place)
    assert_one_sentence(error.value, ["toy.gguf", "signal 11", "leave it out"])


def test_llama_cpp_needs_a_gguf_file(llama_cpp, place):
    with pytest.raises(SettingsError) as error:
        open_baseline(parse_mode("llama.cpp"), place)
    assert_one_sentence(error.value, ["GGUF", "llama.cpp:FILE.gguf"])


def test_an_engine_that_does_not_start_is_one_sentence(monkeypatch, place):
    module = ModuleType("vllm")
    module.EngineArgs = lambda **settings: 1 / 0
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(SettingsError) as error:
        open_baseline(parse_mode("vllm"), place)
    assert_one_sentence(error.value, ["vllm", "division by zero"])


def test_vllm_is_stepped_so_that_requests_join_and_leave(monkeypatch, place):
    made = {}

    class Engine:
        def __init__(self):
            self.running = {}

        @classmethod
        def from_engine_args(cls, arguments):
            made["arguments"] = arguments
            return cls()

        def add_request(self, name, prompt, sampling):
            assert prompt == {"prompt_token_ids": [1, 2]}
            self.running[name] = (sampling, [])
            made["most"] = max(made.get("most", 0), len(self.running))

        def step(self):
            outputs = []
            for name, (sampling, ids) in list(self.running.items()):
                ids += [9, 8]
                finished = len(ids) >= sampling.max_tokens
                answer = SimpleNamespace(token_ids=list(ids), finish_reason="length" if finished else None)
                outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=finished))
                if finished:
                    del self.running[name]
            return outputs

    module = ModuleType("vllm")
    module.EngineArgs, module.SamplingParams = SimpleNamespace, SimpleNamespace
    module.LLMEngine = Engine
    monkeypatch.setitem(sys.modules, "vllm", module)
    system = open_baseline(parse_mode("vllm"), place)
    answers, _ = drive(system, asks([1, 2], [1, 2], [1, 2]), 2)
    assert [a.token_ids for a in answers] == [(9, 8) * 3] * 3 and made["most"] == 2
    assert made["arguments"].enable_prefix_caching is False and made["arguments"].max_num_seqs == 2
    assert {len(a.record.gaps_ms) for a in answers} == {2}


def test_transformers_samples_repeatably_and_drafts_with_an_assistant(target, place):
    pytest.importorskip("transformers")
    several = asks([72, 105], [33, 34, 35], max_tokens=8)
    plain = open_baseline(parse_mode("transformers"), place)
    expected, _ = drive(plain, several, 1)
    assisted = open_baseline(parse_mode(f"transformers-assisted:{target.folder}"), place)
    answers, _ = drive(assisted, several, 1)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert all(len(a.record.gaps_ms) < len(e.record.gaps_ms) for a, e in zip(answers, expected, strict=True))
    sampled = asks([72, 105], temperature=1.0)
    first, again = (drive(plain, sampled, 1)[0][0].token_ids for _ in "12")
    assert first == again
