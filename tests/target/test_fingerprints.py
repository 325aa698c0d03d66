"""What identifies a target: its weights, its tokenizer, its template, each apart."""

import shutil
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.target import load, load_target
from tests.folders import UP, WEIGHTS, edit_json, edit_tensor, edit_tensors, other_tokenizer
from tests.toy_models import CHAT_TEMPLATE, write_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def weights_fingerprint(folder):
    with ExitStack() as files:
        return load.SafetensorsFolder(folder, files).fingerprint()


def test_fingerprint_of_the_same_folder_is_the_same(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    first, second = load_target(str(folder), CPU), load_target(str(copy), CPU, "float32")
    assert first.fingerprint.matches(second.fingerprint)
    assert first.fingerprint.template == second.fingerprint.template


def test_every_tensor_counts_in_the_fingerprint(folder):
    before, original = weights_fingerprint(folder), load_file(folder / WEIGHTS)
    seen = {before}
    for name, tensor in original.items():
        changed = tensor.clone()
        changed[0] += 1
        save_file(original | {name: changed}, folder / WEIGHTS)
        seen.add(weights_fingerprint(folder))
    assert len(seen) == 1 + len(original)
    save_file(original, folder / WEIGHTS)
    assert weights_fingerprint(folder) == before


def test_fingerprint_looks_beyond_the_first_row(folder):
    """Fine-tuned embeddings change in the rows of the tokens that were seen: any eighth of them shows."""
    before, original = weights_fingerprint(folder), load_file(folder / WEIGHTS)
    name = "model.embed_tokens.weight"
    rows = original[name].shape[0]
    for begin in range(1, rows - rows // 8, rows // 8):
        changed = original[name].clone()
        changed[begin : begin + rows // 8] += 1
        save_file(original | {name: changed}, folder / WEIGHTS)
        assert weights_fingerprint(folder) != before, begin


def test_odd_tensors_have_a_fingerprint(folder):
    edit_tensors(folder, lambda every: every.update(scalar=torch.tensor(1.0), empty=torch.zeros(0, 4)))
    first = weights_fingerprint(folder)
    edit_tensors(folder, lambda every: every.update(scalar=torch.tensor(2.0)))
    assert weights_fingerprint(folder) != first


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (edit_tensor(UP, lambda t: t * 1.01), "weights"),
        (other_tokenizer, "tokenizer"),
        (
            lambda f: edit_json(f / "tokenizer_config.json", chat_template="{{ bos_token }}" + CHAT_TEMPLATE),
            "template",
        ),
    ],
    ids=["weights", "tokenizer", "template"],
)
def test_a_change_shows_in_its_part_only(change, part, folder):
    before = load_target(str(folder), CPU).fingerprint.to_dict()
    change(folder)
    after = load_target(str(folder), CPU).fingerprint.to_dict()
    assert [name for name in before if before[name] != after[name]] == [part]
