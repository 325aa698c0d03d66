"""A warm start is the target's own layer: same keys and values, same output where the input is the same."""

import pytest
import torch

from dspark.config import SamplingParams
from dspark.drafter import Backbone
from dspark.errors import TrainError
from dspark.target import PassRow, load_target
from dspark.target.layers import rms_norm
from dspark.target.linear import PlainLinear
from dspark.train import new_trainer
from dspark.train.start import FIRST_NORM, drafter_config
from dspark.train.warm import norm_gains, repeat_heads, warm_tensors
from tests.sentences import assert_one_sentence
from tests.toy_models import write_model
from tests.train.toys import CPU, make_corpus, toy_settings, toy_trainer

LAYERS, HIDDEN = 3, 64


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A target that normalises queries and keys, so that its layer is exactly what a drafter can hold."""
    return load_target(str(write_model(tmp_path_factory.mktemp("qwen"), "qwen3", scale=0.3)), CPU, "float32")


def warm_backbone(target, corpus, **changes):
    config = drafter_config(target, toy_settings(**changes), mask_token_id=259)
    tensors = warm_tensors(config, target, corpus)
    return config, tensors, Backbone(config, tensors, PlainLinear, torch.float32, CPU, 128)


def some_text(length=40):
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_one_layer_is_the_targets_last(qwen, kv_heads):
    """Given the hidden state that goes into the last layer in place of an embedding, the drafter says what the target
    says, up to the size of the final norm: its context keys and values are the target's, at the same positions."""
    ids = some_text()
    corpus = make_corpus([ids.tolist()], [1])
    _, _, backbone = warm_backbone(qwen, corpus, taps=(0, 1), kv_heads=kv_heads)
    hidden, taps = qwen.decoder.run(ids, [PassRow(0, 0, len(ids))], qwen.decoder.new_pool(128), (0, 1))
    anchors = torch.tensor([1, 17, 39])
    into_last = taps[anchors, None, HIDDEN:]
    found = backbone.block_hidden(taps, into_last, anchors)[:, 0] / FIRST_NORM
    expected = rms_norm(hidden[anchors], qwen.decoder.final_norm, qwen.spec.rms_eps)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    # One position off is another layer's output.
    shifted = backbone.block_hidden(taps[1:], into_last, anchors.clamp(max=38))[:, 0] / FIRST_NORM
    assert (shifted - expected).abs().max() > 0.05


def test_layers_taps_and_norms_come_from_their_places(qwen):
    config, tensors, _ = warm_backbone(qwen, make_corpus([[1, 2, 3]], [1]), taps=(-1, 0), layers=2, kv_heads=2)
    from safetensors.torch import load_file

    theirs = load_file(qwen.folder / "model.safetensors")
    for i in range(2):
        own = {n for n in theirs if n.startswith(f"model.layers.{i + 1}.")}
        assert own and all(torch.equal(tensors[f"layers.{i}.{n.split('.', 3)[3]}"], theirs[n]) for n in own)
    assert torch.equal(tensors["hidden_norm.weight"], theirs["model.layers.1.input_layernorm.weight"])
    taps = torch.arange(2 * HIDDEN, dtype=torch.float32)
    assert torch.equal(tensors["fc.weight"] @ taps, taps[HIDDEN:])
    assert config.num_layers == 2


def test_copied_heads_serve_the_same_queries():
    weight = torch.arange(2 * 3 * 5).float().view(6, 5)  # two heads of three rows
    copied = repeat_heads(weight, 2, 6).view(6, 3, 5)
    for head in range(6):  # as grouped queries find theirs
        assert torch.equal(copied[head], weight.view(2, 3, 5)[head // 3])


def test_gains_give_back_each_dimensions_size():
    make = torch.Generator().manual_seed(0)
    heads = torch.randn(200, 3, 8, generator=make) * torch.arange(1, 9)
    gains = norm_gains(heads, 1e-6)
    after = rms_norm(heads, gains, 1e-6)
    size = heads.square().mean((0, 1)).sqrt()
    torch.testing.assert_close(after.square().mean((0, 1)).sqrt(), size)
    # The sizes themselves as gains would count them twice.
    assert (rms_norm(heads, size, 1e-6).square().mean((0, 1)).sqrt() / size - 1).abs().max() > 0.3


def test_a_target_without_norms_has_its_gains_measured(target, corpus):
    _, tensors, _ = warm_backbone(target, corpus.subset([0]), taps=(0, 1))
    gains = tensors["layers.0.self_attn.q_norm.weight"]
    ids = corpus.sequence(0)
    pool = target.decoder.new_pool(128)
    _, taps = target.decoder.run(ids, [PassRow(0, 0, len(ids))], pool, (1,))
    normed = rms_norm(taps[1:], tensors["layers.0.input_layernorm.weight"], target.spec.rms_eps)
    queries = (normed @ tensors["layers.0.self_attn.q_proj.weight"].T).view(len(ids) - 1, -1, target.spec.head_dim)
    ours = rms_norm(queries, gains, target.spec.rms_eps).square().mean((0, 1)).sqrt()
    torch.testing.assert_close(ours, queries.square().mean((0, 1)).sqrt())


def test_it_trains_and_is_served(target, corpus, tmp_path):
    trainer = toy_trainer(target, corpus, warm_start=True, steps=3)
    assert all(report.loss > 0 for report in trainer.run())
    trainer.save(tmp_path)
    from dspark.engine import Engine

    engine = Engine.from_pretrained(str(target.folder), str(tmp_path), proposer="dspark", kv_gb=0.02, dtype="float32")
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].token_ids


@pytest.mark.parametrize(
    ("changes", "names"), [({"layers": 4}, ["4", "--layers"]), ({"kv_heads": 1}, ["1", "--kv-heads"])]
)
def test_what_cannot_be_copied_is_refused(target, corpus, changes, names):
    with pytest.raises(TrainError) as error:
        toy_trainer(target, corpus, warm_start=True, **changes)
    assert_one_sentence(error.value, names)


def test_a_warm_start_is_a_start(target, corpus, tmp_path):
    toy_trainer(target, corpus).save(tmp_path)
    with pytest.raises(TrainError) as error:
        new_trainer(target, corpus, toy_settings(warm_start=True), init_from=tmp_path)
    assert_one_sentence(error.value, ["warm start"])
