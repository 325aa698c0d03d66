"""Toy model folders that a test damages, and the sentence that must follow."""

import json

import pytest
from safetensors.torch import load_file, save_file

from dspark.engine import Engine
from tests.sentences import assert_one_sentence
from tests.toy_models import byte_tokenizer

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"  # a matrix that every toy model has


def engine(folder, **settings):
    return Engine.from_pretrained(str(folder), **{"kv_gb": 0.02, "dtype": "float32", "profile": "none", **settings})


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_tensor(name, change):
    """Replace a tensor by what `change` makes of it; None drops it."""

    def edit(every):
        new = change(every.pop(name))
        if new is not None:
            every[name] = new

    return lambda folder: edit_tensors(folder, edit)


def refused(kind, call, *names):
    with pytest.raises(kind) as error:
        call()
    assert_one_sentence(error.value, names)


def other_tokenizer(folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(folder / "tokenizer.json"))
