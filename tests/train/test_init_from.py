"""Going on from a drafter: a run's folder or a shipped one, with other data, sizes taken from the folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafter import load_drafter
from dspark.errors import DrafterError, TrainError
from dspark.train import new_trainer, sizes_of
from tests.sentences import assert_one_sentence
from tests.train.toys import make_corpus, toy_settings, toy_trainer

SIZES = {"taps": (-1, 1), "layers": 2, "kv_heads": 2, "head": "gated", "rank": 6, "block_size": 3, "draft_vocab": 200}


@pytest.fixture(scope="module")
def shipped(target, corpus, tmp_path_factory):
    """What a package would hold: configuration and float16 weights, no head rows, no state."""
    torch.set_num_threads(1)
    trainer = toy_trainer(target, corpus, steps=4, **SIZES)
    for _ in trainer.run():
        pass
    run, folder = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("shipped")
    trainer.save(run)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / name, folder / name)
    assert {t.dtype for n, t in load_file(folder / "model.safetensors").items() if n != "d2t"} == {torch.float16}
    return folder


@pytest.fixture
def other_data():
    make = torch.Generator().manual_seed(9)
    return make_corpus([torch.randint(0, 120, (30,), generator=make).tolist() for _ in range(4)], [5] * 4)


def settings(folder, **changes):
    return toy_settings(**{**sizes_of(folder), "steps": 3, **changes})


def test_sizes_are_the_folders(shipped):
    assert sizes_of(shipped) == SIZES


def test_a_shipped_drafter_learns_from_other_data(target, shipped, other_data, tmp_path):
    trainer = new_trainer(target, other_data, settings(shipped), init_from=shipped)
    stored = load_file(shipped / "model.safetensors")
    assert trainer.tensors.keys() == stored.keys()
    assert all(torch.equal(t.to(stored[n].dtype), stored[n]) for n, t in trainer.plain_tensors().items())
    assert all(t.dtype == torch.float32 for t in trainer.weights.values())
    for report in trainer.run():
        assert report.loss > 0
    trainer.save(tmp_path)
    drafter = load_drafter(tmp_path, target.decoder, target.fingerprint)
    assert drafter.config.draft_vocab == 200 and torch.equal(trainer.tensors["d2t"], stored["d2t"])
    changed = [n for n, t in load_file(tmp_path / "model.safetensors").items() if not torch.equal(t, stored[n])]
    assert "fc.weight" in changed and "d2t" not in changed


def test_copies_of_the_targets_parts_are_the_targets(target, shipped, other_data, tmp_path):
    tensors = load_file(shipped / "model.safetensors")
    rows = tensors["d2t"] + torch.arange(200)
    copies = {"embed_tokens.weight": target.decoder.embedding, "lm_head.weight": target.decoder.head_weight[rows]}
    save_file(tensors | {n: t.half() + 1 for n, t in copies.items()}, tmp_path / "model.safetensors")
    shutil.copy(shipped / "config.json", tmp_path / "config.json")
    plain = new_trainer(target, other_data, settings(shipped), init_from=shipped)
    copied = new_trainer(target, other_data, settings(shipped), init_from=tmp_path)
    assert plain.gradients(0) == copied.gradients(0)


def test_a_drafter_without_the_token_free_head_gets_one(target, shipped, other_data, tmp_path):
    tensors = load_file(shipped / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if "token_free" not in n}
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((shipped / "config.json").read_text())
    del config["dspark"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    trainer = new_trainer(target, other_data, settings(shipped), init_from=tmp_path)
    assert trainer.tensors.keys() == tensors.keys() and trainer.config.target == target.fingerprint


def test_data_that_holds_the_mask_token_is_refused(target, shipped):
    mask = json.loads((shipped / "config.json").read_text())["mask_token_id"]
    with pytest.raises(TrainError) as error:
        new_trainer(target, make_corpus([[1, 2, mask, 4]], [1]), settings(shipped), init_from=shipped)
    assert_one_sentence(error.value, [str(mask), str(shipped)])


def test_a_drafter_of_another_tokenizer_is_refused(target, shipped, other_data, tmp_path):
    shutil.copytree(shipped, tmp_path / "other")
    config = json.loads((shipped / "config.json").read_text())
    config["dspark"]["target"]["tokenizer"] = "0123456789abcdef"
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError) as error:
        new_trainer(target, other_data, settings(shipped), init_from=tmp_path / "other")
    assert_one_sentence(error.value, ["tokenizer"])


def test_sizes_against_the_folders_are_refused(target, shipped, other_data):
    with pytest.raises(TrainError) as error:
        new_trainer(target, other_data, settings(shipped, layers=1), init_from=shipped)
    assert_one_sentence(error.value, ["num_hidden_layers", "1", "2"])
