"""Settings, devices, drafters and drafting models that do not fit are refused in one sentence."""

import logging
import shutil

import pytest
import torch

from dspark.drafter import random_tensors
from dspark.drafter.checkpoint import save_drafter
from dspark.errors import DrafterError, SettingsError
from dspark.target import load_target
from tests.engine.support import CPU, drafter_config
from tests.folders import WEIGHTS, edit_tensors, engine, other_tokenizer, refused
from tests.sentences import assert_one_sentence
from tests.toy_models import write_model


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"bogus": 1}, ["'bogus'", "kv_gb"]),
        ({"proposer": "magic"}, ["'magic'", "lookup"]),
        ({"proposer": "model:"}, ["model:PATH"]),
        ({"policy": "sometimes"}, ["'sometimes'", "fixed:4"]),
        ({"policy": "fixed:99"}, ["'fixed:99'", "16"]),
        ({"device": "tpu"}, ["'tpu'", "cuda"]),
        ({"dtype": "int8"}, ["'int8'", "float32"]),
        ({"acceptance": "always"}, ["'always'", "coupled"]),
        ({"kv_gb": float("nan")}, ["nan", "kv_gb"]),
        ({"threads": 0}, ["threads", "0"]),
        ({"drafter": "none", "proposer": "dspark"}, ["'none'", "'dspark'"]),
        ({"drafter": "some/folder", "proposer": "lookup"}, ["'some/folder'", "'lookup'"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_setting(settings, names):
    refused(SettingsError, lambda: engine("never loaded", **settings), *names)


def test_device_that_is_not_there(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(SettingsError, lambda: engine(folder, device="cuda"), "'cuda'", "--device cpu")


def test_infinite_cache_is_a_full_batch(folder):
    assert engine(folder, kv_gb=float("inf"), max_batch=2).loop.batcher.slots.capacity >= 2 * 512


def test_drafting_model_with_another_tokenizer(folder, tmp_path):
    other = write_model(tmp_path / "small", seed=4)
    assert engine(folder, proposer=f"model:{other}").proposer.name == f"model:{other}"
    other_tokenizer(other)
    refused(DrafterError, lambda: engine(folder, proposer=f"model:{other}"), str(other), str(folder), "tokenizer")


@pytest.fixture
def drafter(folder, tmp_path):
    """A drafter folder for the model of `folder`."""
    made_for = drafter_config(load_target(str(folder), CPU))
    save_drafter(tmp_path / "drafter", made_for, random_tensors(made_for, seed=1))
    return tmp_path / "drafter"


def test_drafter_of_this_target_loads_without_a_word(folder, drafter, caplog):
    with caplog.at_level(logging.WARNING, "dspark"):
        assert engine(folder, drafter=str(drafter)).proposer.name == "auto"
        assert engine(folder, drafter=str(drafter), proposer="dspark").proposer.name == "dspark"
    assert not caplog.records


def test_drafter_of_another_tokenizer_is_refused(folder, drafter):
    other_tokenizer(folder)
    refused(DrafterError, lambda: engine(folder, drafter=str(drafter)), "tokenizer", str(folder))


def test_drafter_of_other_weights_is_a_warning_that_names_both(folder, drafter, caplog):
    theirs = load_target(str(folder), CPU).fingerprint.weights
    write_model(folder, seed=8)
    with caplog.at_level(logging.WARNING, "dspark"):
        ours = engine(folder, drafter=str(drafter)).target.fingerprint.weights
    (record,) = caplog.records
    assert_one_sentence(record.getMessage(), ["weights", ours, theirs, str(folder)])


def test_drafter_folder_that_lacks_something(folder, drafter, tmp_path):
    asked = {"drafter": str(drafter), "proposer": "dspark"}
    edit_tensors(drafter, lambda every: every.pop("fc.weight"))
    refused(DrafterError, lambda: engine(folder, **asked), "fc.weight")
    (drafter / WEIGHTS).unlink()
    refused(DrafterError, lambda: engine(folder, **asked), str(drafter), ".safetensors")
    (drafter / "config.json").unlink()
    refused(DrafterError, lambda: engine(folder, **asked), str(drafter), "config.json")


def test_no_drafter_where_one_is_asked_for(folder, cache):
    refused(DrafterError, lambda: engine(folder, proposer="dspark"), str(folder), "--drafter", "lookup")


def test_auto_finds_the_drafter_of_this_target_and_passes_over_broken_ones(folder, drafter, cache, caplog):
    shelf = cache / "drafters"
    shutil.copytree(drafter, shelf / "mine")
    (shelf / "damaged").mkdir()
    (shelf / "damaged" / "config.json").write_text("{")
    with caplog.at_level(logging.WARNING, "dspark"):
        assert engine(folder).proposer.name == "auto"
    assert "damaged" in caplog.text
    write_model(folder, seed=8)
    assert engine(folder).proposer.name == "lookup"
