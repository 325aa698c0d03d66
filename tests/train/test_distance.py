"""Heads that begin by looking a fixed distance back, and the loss that pulls hidden states towards the target's."""

import pytest
import torch

from dspark.drafter import random_tensors
from dspark.drafter.backbone import Backbone
from dspark.target.layers import rms_norm
from dspark.target.linear import PlainLinear
from dspark.train import loss_sums, total_loss
from dspark.train.distance import distance_heads, steady_direction, usual_distances
from dspark.train.losses import Denominators
from tests.drafter.toys import make_config

LENGTH, ANCHOR = 40, 33


def samples(config, count: int, seed: int) -> torch.Tensor:
    """Inputs that share a direction, as hidden states and embeddings do."""
    make = torch.Generator().manual_seed(seed)
    common = torch.randn(config.hidden_size, generator=make)
    return torch.randn(count, config.hidden_size, generator=make) + 2 * common


def attention_reach(config, tensors, taps, embedded) -> list[int]:
    """Per slot, the context position whose features move the slot's attention most."""

    def hidden(features):
        backbone = Backbone(config, tensors, PlainLinear, torch.float32, torch.device("cpu"), 64)
        return backbone.block_hidden(features, embedded, torch.tensor([ANCHOR]))[0]

    before = hidden(taps)
    moved = []
    for position in range(ANCHOR):
        other = taps.clone()
        other[position] = taps[position].flip(0)
        moved.append((hidden(other) - before).norm(dim=-1))
    return torch.stack(moved).argmax(dim=0).tolist()


@pytest.mark.parametrize("distance", [1, 2])
def test_every_slot_looks_that_far_back_whatever_the_text_says(distance):
    config = make_config(num_layers=1, block_size=4, head_dim=16)
    tensors = random_tensors(config, seed=3)
    tensors["layers.0.mlp.down_proj.weight"].zero_()
    taps = samples(config, LENGTH, seed=1).repeat(1, len(config.target_layer_ids))
    context = rms_norm(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], config.rms_eps)
    embedded = samples(config, 4, seed=2)[None]
    found = distance_heads(config, tensors, context, embedded[0], (distance,) * config.num_kv_heads)
    reach = attention_reach(config, tensors | found, taps, embedded)
    for slot, position in enumerate(reach):
        if slot < distance:  # what lies in the block is not context
            assert position == ANCHOR + slot - distance
    assert attention_reach(config, tensors, taps, embedded) != reach  # random heads do not


def test_some_heads_stay_free_and_nothing_changes_without_a_steady_direction():
    config = make_config(num_layers=1)
    tensors = random_tensors(config, seed=3)
    context, embedded = samples(config, 64, seed=1), samples(config, 64, seed=2)
    found, name = distance_heads(config, tensors, context, embedded, (1,)), "layers.0.self_attn.k_proj.weight"
    rows = config.head_dim
    assert not torch.equal(found[name][:rows], tensors[name][:rows])
    assert torch.equal(found[name][rows:], tensors[name][rows:])
    assert [len(usual_distances(heads)) for heads in (1, 2, 3, 9, 18)] == [0, 1, 2, 7, 14]
    both_sides = torch.cat((context, -context))
    assert steady_direction(both_sides) is None
    assert distance_heads(config, tensors, both_sides, embedded) == {}


def test_the_hidden_term_is_the_weighted_cosine_distance():
    make = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 6, generator=make)
    ours = torch.randn(3, 5, generator=make, requires_grad=True)
    theirs = torch.randn(3, 5, generator=make)
    weights, labels = torch.tensor([1.0, 0.5, 0.25]), torch.tensor([0, 1, 2])
    probs, over = logits.softmax(-1), Denominators(1.75, 1.75)
    sums = loss_sums(logits, probs, labels, weights, hidden=(ours, theirs))
    cosines = [float(a @ b / a.norm() / b.norm()) for a, b in zip(ours.detach(), theirs, strict=True)]
    expected = sum(w * (1 - c) for w, c in zip(weights.tolist(), cosines, strict=True)) / 1.75
    found = total_loss(sums, over, hidden_weight=2.0) - total_loss(sums, over)
    assert float(found.detach()) == pytest.approx(2 * expected, rel=1e-5)
    found.backward()
    with torch.no_grad():
        closer = ours - 0.1 * ours.grad
    assert (torch.cosine_similarity(closer, theirs) > torch.tensor(cosines)).all()
