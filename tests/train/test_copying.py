"""Heads that begin by finding where the text has been before: on features that say which tokens stand where, first
weights alone draft what followed there."""

import pytest
import torch

from dspark.drafter import random_tensors
from dspark.drafter.backbone import Backbone
from dspark.target.layers import rms_norm
from dspark.target.linear import PlainLinear
from dspark.train import FeatureStore
from dspark.train.copying import LOOK_BACK, Evidence, copying_tensors, has_room, read_evidence
from tests.drafter.toys import make_config
from tests.train.toys import make_corpus

WIDTH, VOCAB, MASK = 576, 400, 399
LENGTH, PERIOD = 120, 24  # a text that goes round


@pytest.fixture(scope="module")
def config():
    torch.set_num_threads(1)
    return make_config(
        hidden_size=WIDTH, num_heads=9, num_kv_heads=9, head_dim=64, num_layers=2, vocab_size=VOCAB,
        mask_token_id=MASK, block_size=4, rope_theta=1e5, ffn_size=8, draft_vocab_size=None, head="none", markov_rank=0,
        confidence_with_markov=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def embedding():
    make = torch.Generator().manual_seed(1)
    return 0.1 * (torch.randn(VOCAB, WIDTH, generator=make) + torch.randn(WIDTH, generator=make))  # as real ones share


def features(ids, embedding, taps):
    """Taps that mix the tokens there and before, and what a target would say that knows the next one."""
    make = torch.Generator().manual_seed(2)
    normed = rms_norm(embedding, torch.ones(WIDTH), 1e-6)
    mixes = [torch.randn(WIDTH, taps * WIDTH, generator=make) * WIDTH**-0.5 for _ in range(LOOK_BACK)]
    constant = 2 * torch.randn(taps * WIDTH, generator=make)
    told = [normed[ids.roll(back)] @ mix for back, mix in enumerate(mixes)]
    return torch.stack(told).sum(0) + constant, normed[ids.roll(-1)]


@pytest.fixture(scope="module")
def evidence(config, embedding):
    ids = torch.randint(0, VOCAB - 1, (4000,), generator=torch.Generator().manual_seed(3))
    taps, hidden = features(ids, embedding, len(config.target_layer_ids))
    rows = torch.arange(LOOK_BACK, len(ids) - 1)
    kept = torch.stack([ids.roll(back) for back in range(LOOK_BACK)], dim=1)
    return Evidence(taps, kept, hidden[rows], rows)


def drafts(config, tensors, embedding, anchors):
    """Per slot, the share of anchors in a text that goes round where the best token is the one that follows."""
    once = torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(4))[:PERIOD]
    ids = once.repeat(LENGTH // PERIOD)
    taps, _ = features(ids, embedding, len(config.target_layer_ids))
    backbone = Backbone(config, tensors, PlainLinear, torch.float32, torch.device("cpu"), 2 * LENGTH)
    blocks = embedding[MASK].expand(len(anchors), config.block_size, -1).clone()
    blocks[:, 0] = embedding[ids[anchors]]
    with torch.no_grad():
        logits = backbone.block_hidden(taps, blocks, anchors) @ embedding.T
    # A block's input still shows in its output, which the sequential head makes up for.
    logits.scatter_(2, ids[anchors][:, None, None].expand(-1, config.block_size, 1), -float("inf"))
    return [
        float((logits[:, slot].argmax(-1) == ids[anchors + slot + 1]).float().mean())
        for slot in range(config.block_size)
    ]


def test_first_weights_draft_what_followed_before(config, embedding, evidence):
    usual = random_tensors(config, seed=5) | {"norm.weight": torch.ones(WIDTH)}
    for name in usual:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            usual[name] = torch.zeros_like(usual[name])
    anchors = torch.arange(2 * PERIOD, 4 * PERIOD)
    several = [
        usual | copying_tensors(config, usual, evidence, embedding, torch.ones(WIDTH), seed=seed)
        for seed in range(6, 10)
    ]
    # Over several draws of the codes: a text of 24 tokens has 24 different anchors.
    right = torch.tensor([drafts(config, weights, embedding, anchors) for weights in several]).mean(0)
    assert right[0] > 0.7 and right[1] > 0.08  # chance is 0.0025
    assert max(drafts(config, usual, embedding, anchors)[:2]) < 0.02
    first_time = torch.arange(LOOK_BACK, PERIOD - config.block_size)
    assert drafts(config, several[0], embedding, first_time)[0] < 0.2  # nothing to be found yet


def test_only_attention_fc_and_norm_are_new_and_of_the_same_shapes(config, embedding, evidence):
    usual = random_tensors(config, seed=5)
    found = copying_tensors(config, usual, evidence, embedding, torch.ones(WIDTH), seed=6)
    assert {name.split(".")[2] for name in found if name.startswith("layers")} == {"self_attn"}
    assert all(found[name].shape == usual[name].shape for name in found)
    again = copying_tensors(config, usual, evidence, embedding, torch.ones(WIDTH), seed=6)
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_small_drafters_have_no_room(config):
    assert has_room(config) and not has_room(make_config())


def test_evidence_is_what_stands_where(target):
    """Also in texts whose prompts are short; those too short to look back in are left out."""
    texts = [list(range(40 + i, 60 + i)) for i in range(4)]
    corpus = make_corpus(texts, [1, 3, 8, 12])
    store = FeatureStore(target.decoder, (0, 1), corpus, 1e9)
    found = read_evidence(store, corpus, torch.ones(store[1].taps.shape[1]))
    assert all(ids.tolist() == [ids[0], ids[0] - 1, ids[0] - 2] for ids in found.ids)
    features = {int(text[j]): store[i].taps[j] for i, text in enumerate(texts) if i for j in range(3, 19)}
    last = {int(ids[0]): taps for ids, taps in zip(found.ids, found.taps, strict=True)}
    assert torch.equal(last[61], features[61].float())
    assert found.ids[found.rows, 0].tolist() == [t for i in (1, 2, 3) for t in texts[i][corpus.prompt_lens[i] : -1]]
    short = make_corpus(texts, [1, 2, 1, 2])
    assert read_evidence(store, short, torch.ones(1)) is None
