"""Drafter folders: round trips under every naming, head rebuilt from the target, and every damaged folder named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dspark.artifacts import Fingerprint
from dspark.drafter import (
    DrafterConfig,
    build_drafter,
    check_identity,
    check_tensors,
    load_drafter,
    random_drafter,
    random_tensors,
    read_tensors,
    save_drafter,
    tensor_shapes,
)
from dspark.errors import DrafterError
from dspark.target.linear import Fp16PackedLinear, PlainLinear, fp16_packing_works

from .test_config import IDENTITY, speculators_values
from .test_proposal import draft_of
from .toys import lively_tensors, make_config, make_drafter, make_target

SETTINGS = [
    {},
    {"head": "gated", "draft_vocab_size": 9},
    {"head": "rnn", "confidence_with_markov": False, "token_free_confidence": True},
    {"head": "none", "markov_rank": 0, "confidence": False, "confidence_with_markov": False},
]


def same_drafts(a, b) -> None:
    """Every part of two drafters agrees (to fp64 rounding: where a tensor lies in memory moves the last bit)."""
    one, two = draft_of(a, (7, 8), (9, 20)), draft_of(b, (7, 8), (9, 20))
    assert torch.equal(one.ids, two.ids)
    torch.testing.assert_close(one.probs, two.probs, rtol=1e-9, atol=1e-12)
    if a.config.confidence:
        torch.testing.assert_close(one.confidence, two.confidence, rtol=1e-9, atol=1e-12)
    if a.config.token_free_confidence:
        hidden = torch.randn(3, 16).double()
        torch.testing.assert_close(a.token_free(hidden), b.token_free(hidden))


def load(folder, target, identity=IDENTITY, **kwargs):  # noqa: B008
    return load_drafter(folder, target, identity, dtype="float64", **kwargs)


@pytest.mark.parametrize("changes", SETTINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, changes, tied):
    target, config = make_target(tied), make_config(**changes)
    tensors = lively_tensors(config)
    save_drafter(tmp_path / "new", config, tensors)
    loaded = load(tmp_path / "new", target)
    assert loaded.config == config
    same_drafts(loaded, build_drafter(config, tensors, target, PlainLinear))
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_kept(tmp_path, dtype):
    config = make_config(draft_vocab_size=9)
    tensors = {n: t if n == "d2t" else t.to(dtype) for n, t in lively_tensors(config).items()}
    save_drafter(tmp_path, config, tensors)
    stored = read_tensors(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor)


def test_contract_names():
    """docs/checkpoints.md, spelled out."""
    assert tensor_shapes(make_config(num_layers=1, draft_vocab_size=9)) == {
        "layers.0.self_attn.q_proj.weight": (24, 16),
        "layers.0.self_attn.k_proj.weight": (12, 16),
        "layers.0.self_attn.v_proj.weight": (12, 16),
        "layers.0.self_attn.o_proj.weight": (16, 24),
        "layers.0.self_attn.q_norm.weight": (6,),
        "layers.0.self_attn.k_norm.weight": (6,),
        "layers.0.mlp.gate_proj.weight": (20, 16),
        "layers.0.mlp.up_proj.weight": (20, 16),
        "layers.0.mlp.down_proj.weight": (16, 20),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
        "fc.weight": (16, 48),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "markov_head.markov_w1.weight": (40, 5),
        "markov_head.markov_w2.weight": (9, 5),
        "confidence_head.proj.weight": (1, 21),
        "confidence_head.proj.bias": (1,),
        "d2t": (9,),
    }


def test_deepspec_folder_with_copies_of_the_target(tmp_path):
    """DeepSpec stores the frozen embedding and head too: equal ones are shared, others are honoured."""
    target, config = make_target(False), make_config()
    tensors = lively_tensors(config)
    copies = {"embed_tokens.weight": target.embedding.clone(), "lm_head.weight": target.head_weight.clone()}
    save_drafter(tmp_path, config, tensors | copies)
    loaded = load(tmp_path, target)
    assert loaded.embedding is target.embedding and loaded.lm_head is target.head
    own = {name: tensor + 0.5 for name, tensor in copies.items()}
    save_drafter(tmp_path, config, tensors | own)
    loaded = load(tmp_path, target)
    ids, hidden = torch.tensor([3, 4]), torch.randn(2, 16).double()
    assert torch.equal(loaded.embed(ids), own["embed_tokens.weight"][ids])
    torch.testing.assert_close(loaded.base_logits(hidden), hidden @ own["lm_head.weight"].T)


def speculators_folder(folder, target, config, split=False):
    tensors = lively_tensors(config)
    ids = torch.arange(9) + tensors["d2t"]
    t2d = torch.zeros(40, dtype=torch.bool)
    t2d[ids] = True
    extra = {"t2d": t2d, "lm_head.weight": target.head_weight[ids], "verifier_norm.weight": torch.ones(16)}
    (folder / "config.json").write_text(json.dumps(speculators_values(draft_vocab_size=9)))
    if split:
        names = sorted(tensors)
        save_file({n: tensors[n] for n in names[::2]}, folder / "model-00001-of-00002.safetensors")
        save_file({n: tensors[n] for n in names[1::2]} | extra, folder / "model-00002-of-00002.safetensors")
    else:
        save_file(tensors | extra, folder / "model.safetensors")


@pytest.mark.parametrize("split", [False, True])
def test_speculators_folder_drafts_the_same(tmp_path, split):
    target, config = make_target(False), make_config(draft_vocab_size=9)
    speculators_folder(tmp_path, target, config, split)
    same_drafts(load(tmp_path, target), build_drafter(config, lively_tensors(config), target, PlainLinear))


def test_prefixed_names(tmp_path, target):
    config = make_config()
    save_file({f"model.{n}": t for n, t in lively_tensors(config).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    same_drafts(load(tmp_path, target), make_drafter(target))


def test_d2t_of_zeros_with_the_whole_vocabulary(tmp_path, target):
    config = make_config()
    tensors = lively_tensors(config) | {"d2t": torch.zeros(40, dtype=torch.long)}
    save_drafter(tmp_path, config, tensors)
    loaded = load(tmp_path, target)
    assert loaded.vocabulary is None
    same_drafts(loaded, make_drafter(target))


# --- damaged folders ------------------------------------------------------------------------------------------------


def broken(config: DrafterConfig, name: str, value) -> dict:
    return lively_tensors(config) | {name: value}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("fc.weight", torch.ones(16, 32), r"fc.weight has shape \(16, 32\); config.json asks for \(16, 48\)"),
        ("markov_head.markov_w2.weight", torch.ones(40, 5), r"markov_w2.weight has shape \(40, 5\).*\(9, 5\)"),
        ("lm_head.weight", torch.ones(40, 16), r"lm_head.weight has shape \(40, 16\).*\(9, 16\)"),
        ("layers.2.input_layernorm.weight", torch.ones(16), "tensor layers.2.input_layernorm.weight that its config"),
        ("norm.weight", torch.full((16,), float("nan")), "norm.weight holds infinite or undefined numbers"),
        ("norm.weight", torch.ones(16, dtype=torch.int8), "norm.weight is of type torch.int8"),
        ("d2t", torch.full((9,), 32), "d2t leads to token id 40"),
        ("d2t", torch.tensor([3, 1, 0, 0, 0, 0, 0, 0, 0]), "target ids must ascend"),
    ],
)
def test_bad_tensors_are_one_sentence(tmp_path, target, name, value, says):
    config = make_config(draft_vocab_size=9)
    tensors = broken(config, name, value)
    with pytest.raises(DrafterError, match=says):
        save_drafter(tmp_path / "refused", config, tensors)
    assert not (tmp_path / "refused").exists()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match=says) as caught:
        load(tmp_path, target)
    assert "\n" not in str(caught.value)


def test_missing_tensors_are_named():
    config = make_config(draft_vocab_size=9)
    for name in tensor_shapes(config):
        tensors = lively_tensors(config)
        del tensors[name]
        with pytest.raises(DrafterError, match=f"has no tensor {name};"):
            check_tensors(config, tensors)
    with pytest.raises(
        DrafterError, match="no tensor confidence_head.proj.bias, confidence_head.proj.weight, d2t and 27 more;"
    ):
        check_tensors(config, {})


@pytest.mark.parametrize("damage", ["truncate", "garbage", "absent"])
def test_corrupt_files(tmp_path, target, damage):
    config = make_config()
    save_drafter(tmp_path, config, lively_tensors(config))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"not a tensor file at all")
    says = "no .safetensors file" if damage == "absent" else "is not a readable safetensors file"
    with pytest.raises(DrafterError, match=says):
        load(tmp_path, target)


def test_what_is_saved_can_be_read_by_whoever_the_folder_is_for(tmp_path):
    save_drafter(tmp_path, make_config(), lively_tensors(make_config()))
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_failed_save_leaves_the_old_folder(tmp_path, target, monkeypatch):
    config = make_config()
    save_drafter(tmp_path, config, lively_tensors(config))

    write = Path.write_bytes

    def fails(path, content):
        write(path, content[: len(content) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(tmp_path, config, lively_tensors(config, seed=2))
    same_drafts(load(tmp_path, target), make_drafter(target))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_drafter_of_another_target_is_refused(tmp_path):
    config = make_config()
    save_drafter(tmp_path, config, lively_tensors(config))
    with pytest.raises(DrafterError, match="vocabulary size 40, this target has 48"):
        load(tmp_path, make_target(vocab_size=48))
    with pytest.raises(DrafterError, match="padding token"):
        load(tmp_path, make_target(), pad_id=39)


# --- identity -------------------------------------------------------------------------------------------------------


def test_the_right_target_has_no_warnings():
    config = make_config(target=IDENTITY)
    assert check_identity(config, IDENTITY) == []
    assert check_identity(config, replace(IDENTITY, name="another name, the same model")) == []


@pytest.mark.parametrize(("part", "says"), [("weights", "weights"), ("template", "chat template")])
def test_changed_target_is_a_warning_that_names_both(tmp_path, target, part, says):
    config = make_config(target=IDENTITY)
    other = replace(IDENTITY, name="toy-v2", **{part: "changed"})
    [warning] = check_identity(config, other)
    for text in (says, "toy", getattr(IDENTITY, part), "toy-v2", "changed"):
        assert text in warning
    save_drafter(tmp_path, config, lively_tensors(config))
    assert load(tmp_path, target, other).warnings == (warning,)
    assert load(tmp_path, target, IDENTITY).warnings == ()


def test_another_tokenizer_is_an_error(tmp_path, target):
    config = make_config(target=IDENTITY)
    save_drafter(tmp_path, config, lively_tensors(config))
    with pytest.raises(DrafterError, match=r"tokenizer of toy \(t1\), but other has another \(t9\)"):
        load(tmp_path, target, Fingerprint("w1", "t9", "c1", "other"))


def test_a_drafter_that_does_not_say_is_a_warning():
    [warning] = check_identity(make_config(), IDENTITY)
    assert "does not say which target" in warning


# --- random drafters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SETTINGS)
def test_random_drafters_are_whole_and_repeatable(target, changes):
    config = make_config(**changes)
    tensors = random_tensors(config, seed=4)
    check_tensors(config, tensors)
    again, other = random_tensors(config, seed=4), random_tensors(config, seed=5)
    assert all(torch.equal(t, again[n]) for n, t in tensors.items())
    assert not torch.equal(tensors["fc.weight"], other["fc.weight"])
    draft = draft_of(random_drafter(config, target, seed=4, dtype="float64"))
    assert draft.probs.sum(-1).allclose(torch.ones(1, 4).double())


def test_random_drafter_must_fit():
    with pytest.raises(DrafterError, match="hidden size"):
        random_drafter(make_config(hidden_size=20), make_target())


@pytest.mark.skipif(not fp16_packing_works(), reason="this torch has no FBGEMM")
@pytest.mark.parametrize("changes", SETTINGS)
def test_packed_drafters_serve(changes):
    """fp16-packed like the engine's default on CPU: every linear of every head takes the packed path."""
    target, config = make_target(dtype="float32"), make_config(**changes)
    tensors = {n: t if n == "d2t" else t.float() for n, t in lively_tensors(config).items()}
    packed = build_drafter(config, tensors, target, Fp16PackedLinear)
    plain = build_drafter(config, tensors, target, PlainLinear)
    one, two = (draft_of(drafter, lens=(2,)) for drafter in (packed, plain))
    assert torch.equal(one.ids, two.ids) and one.probs.dtype == torch.float32
    torch.testing.assert_close(one.probs, two.probs, rtol=0.05, atol=1e-3)
