"""GGUF files: the same weights, tokens and chat as the Hugging Face folder they were made from; or one sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import ModelError
from dspark.target import PassRow, Tokenizer, load_target, resolve_model
from tests.sentences import assert_one_sentence
from tests.target.gguf_files import USER_TOKEN, as_stored, write_gguf, write_merging_model

pytestmark = pytest.mark.usefixtures("cache")

CPU = torch.device("cpu")
TEXTS = [
    "",
    "hello the hell of it",
    "Grüße, 世界 🙂!\n\n\tx  = 12 * 345",
    f"call {USER_TOKEN}{USER_TOKEN} and <|start|>user\nhe<|end|>",
]
# Largest error of a weight that rounding to a type may leave: half a step of a block whose values lie within +-0.75.
HALF_STEP = {"F32": 4e-4, "F16": 4e-4, "Q8_0": 0.75 / 127, "Q4_1": 1.5 / 15, "Q4_0": 0.75 / 8 * 2}


@pytest.fixture
def folder(tmp_path):
    return write_merging_model(tmp_path / "model")


@torch.no_grad()
def logits(target):
    ids = torch.randint(0, target.spec.vocab_size, (40,), generator=torch.Generator().manual_seed(3))
    hidden, _ = target.decoder.run(ids, [PassRow(0, 0, len(ids))], target.decoder.new_pool(64))
    return target.decoder.logits(hidden)


def refusal(path, *names):
    with pytest.raises(ModelError) as error:
        resolve_model(str(path))
    assert_one_sentence(error.value, [str(path), *names])


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *(("llama", kind) for kind in HALF_STEP),
        *(("qwen3", kind) for kind in HALF_STEP),
        ("qwen2", "F16"),
        ("qwen3-wide-heads", "Q8_0"),
    ],
)
def test_converted_file_gives_the_folders_logits(shape, kind, tmp_path):
    folder = write_merging_model(tmp_path / "model", shape)
    original = load_file(folder / "model.safetensors")
    path = write_gguf(tmp_path / "toy.gguf", folder, kind)
    save_file(
        {name: as_stored(t, kind) if t.dim() == 2 else t for name, t in original.items()},
        folder / "model.safetensors",
    )
    converted, expected = load_target(str(path), CPU, "float32"), load_target(str(folder), CPU, "float32")
    assert (logits(converted) - logits(expected)).abs().max() < 1e-5
    # Independent of the gguf package: every weight is where it was, up to the type's rounding.
    stored = load_file(converted.folder / "model.safetensors")
    assert stored.keys() == original.keys()
    assert max((stored[name].float() - t).abs().max().item() for name, t in original.items()) < HALF_STEP[kind]


def test_half_precision_files_stay_close_to_the_unrounded_model(folder, tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", folder, "F32")
    exact, rounded = load_target(str(folder), CPU, "float32"), load_target(str(path), CPU, "float32")
    assert (logits(exact) - logits(rounded)).abs().max() < 0.05


def test_same_tokens_and_chat_as_the_folder(folder, tmp_path):
    ours = Tokenizer.from_folder(resolve_model(str(write_gguf(tmp_path / "toy.gguf", folder))))
    theirs = Tokenizer.from_folder(folder)
    assert ours.encode("hell") == [260]  # merges are at work
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "system", "content": "Kurz."}, {"role": "user", "content": "he <b>&amp;</b>"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)
    assert ours.special_id("eos_token") == theirs.special_id("eos_token") == 257


def test_config_of_a_converted_file(folder, tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", folder)
    ours, theirs = load_target(str(path), CPU).spec, load_target(str(folder), CPU).spec
    assert ours == theirs


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        ({}, [258]),
        ({"tokenizer.ggml.add_bos_token": True}, [256, 258]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [256, 258]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [258]),
    ],
)
def test_bos_goes_before_the_text_where_the_file_says_so(metadata, ids, folder, tmp_path):
    changes = {name.replace(".", "__"): value for name, value in metadata.items()}
    path = write_gguf(tmp_path / "toy.gguf", folder, **changes)
    tokenizer = Tokenizer.from_folder(resolve_model(str(path)))
    assert tokenizer.encode("he") == ids
    assert tokenizer.encode("he", add_special_tokens=False) == [258]


def test_linear_rope_scaling_is_kept(tmp_path):
    folder = write_merging_model(tmp_path / "model", rope_scaling={"rope_type": "linear", "factor": 2.0})
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
    converted = load_target(str(write_gguf(tmp_path / "toy.gguf", folder, **scaling)), CPU).spec
    assert converted.rope_scaling == load_target(str(folder), CPU).spec.rope_scaling
    assert (converted.rope_scaling.kind, converted.rope_scaling.factor) == ("linear", 2.0)


def test_llama3_rope_scaling_is_read_back_from_its_factors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = write_merging_model(tmp_path / "plain", rope_theta=500000.0)
    folder = write_merging_model(tmp_path / "model", rope_theta=500000.0, rope_scaling=scaling)
    expected = load_target(str(folder), CPU).spec
    factors = load_target(str(plain), CPU).spec.inv_freq() / expected.inv_freq()
    assert factors.max() > 7 and factors.min() == 1
    path = write_gguf(tmp_path / "toy.gguf", folder, extra={"rope_freqs.weight": factors})
    assert load_target(str(path), CPU).spec.rope_scaling == expected.rope_scaling
    refusal(
        write_gguf(tmp_path / "odd.gguf", folder, extra={"rope_freqs.weight": factors.flip(0)}), "rope_freqs.weight"
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kind": "Q5_0"}, ["Q5_0", "Q4_1"]),
        ({"architecture": "gpt2"}, ["'gpt2'", "llama"]),
        ({"tokenizer__ggml__pre": "gemma4"}, ["'gemma4'", "gpt-2"]),
        ({"tokenizer__ggml__model": "llama"}, ["'llama'", "gpt2"]),
        ({"tokenizer__ggml__merges": None}, ["tokenizer.ggml.merges"]),
        ({"llama__attention__head_count": None}, ["llama.attention.head_count"]),
        ({"extra": {"blk.0.ffn_gate_inp.weight": torch.zeros(4, 64)}}, ["blk.0.ffn_gate_inp.weight"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_named(options, names, folder, tmp_path, cache):
    refusal(write_gguf(tmp_path / "toy.gguf", folder, **options), *names)
    assert not list(cache.glob("models/*"))


def test_weight_beyond_half_precision_is_refused(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -1e6
    save_file(tensors, folder / "model.safetensors")
    refusal(write_gguf(tmp_path / "toy.gguf", folder, "F32"), "1e+06", "blk.1.ffn_up.weight", "--dtype float32")


def test_truncated_file_is_refused_wherever_it_ends(folder, tmp_path, cache):
    whole = write_gguf(tmp_path / "whole.gguf", folder).read_bytes()
    cut = tmp_path / "cut.gguf"
    ends = [0, 3, 10, 30, *range(100, 8000, 633), len(whole) // 2, len(whole) - 100]
    for end in ends:
        cut.write_bytes(whole[:end])
        refusal(cut)
    assert not list(cache.glob("models/*"))


@pytest.mark.parametrize("content", [b"not a model at all" * 20, json.dumps({"a": 1}).encode(), b"GGUF" + b"\xff" * 60])
def test_something_else_with_the_suffix_is_refused(content, tmp_path):
    path = tmp_path / "toy.gguf"
    path.write_bytes(content)
    refusal(path, "GGUF")
