"""The backbone: slow loops = training pass = cached serving, at any context, chunking, batch and place in the pool."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.drafter import Drafter, build_drafter
from dspark.target.decoder import PassRow
from dspark.target.linear import Fp16PackedLinear, PlainLinear, fp16_packing_works

from .toys import MASK, RIGHT, Wrong, cached_hidden, lively_tensors, make_config, make_drafter, make_target, random_taps
from .toys import slow_hidden as slow

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CLEARLY = 1e-4  # a mistake shows at least this much; agreement is 1e-9


def slow_hidden(drafter: Drafter, taps: torch.Tensor, anchor: int, wrong: Wrong = RIGHT) -> torch.Tensor:
    block = drafter.embed(torch.tensor([anchor] + [MASK] * (drafter.config.block_size - 1)))
    return slow(drafter.config, lively_tensors(drafter.config), taps, block, wrong)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4}, {"block_size": 1}, {"num_layers": 1, "num_kv_heads": 1}])
@pytest.mark.parametrize("length", [1, 9])
def test_cached_block_is_the_slow_reference(target, changes, length):
    drafter = make_drafter(target, **changes)
    taps = random_taps(length)
    torch.testing.assert_close(cached_hidden(drafter, taps, 7), slow_hidden(drafter, taps, 7), **CLOSE)


def test_block_without_context(target):
    drafter = make_drafter(target)
    pool = drafter.new_pool(128)
    hidden = drafter.block_pass(drafter.masked_block(torch.tensor([7])), [PassRow(0, 0, 4)], pool)
    torch.testing.assert_close(hidden[0], slow_hidden(drafter, random_taps(0), 7), **CLOSE)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(block_shift=1),
        Wrong(block_shift=-1),
        Wrong(context_shift=1),
        Wrong(causal=True),
        Wrong(normed_context=True),
        Wrong(unnormed_keys=True),
        Wrong(context_cut=1),
    ],
    ids=str,
)
def test_each_misalignment_would_be_caught(target, wrong):
    drafter = make_drafter(target)
    taps = random_taps(9)
    difference = (cached_hidden(drafter, taps, 7) - slow_hidden(drafter, taps, 7, wrong)).abs().amax()
    assert difference > CLEARLY


@pytest.mark.parametrize("length", [5, 400])
def test_cached_serving_is_the_training_pass(target, length):
    drafter = make_drafter(target)
    taps = random_taps(length)
    blocks = drafter.embed(drafter.masked_block(torch.tensor([7])))
    trained = drafter.backbone.block_hidden(taps, blocks, torch.tensor([length]))
    torch.testing.assert_close(cached_hidden(drafter, taps, 7), trained[0], **CLOSE)


def test_a_block_at_the_targets_last_position(target):
    """Even of a drafter whose own stated context is shorter: rotary positions know no limit."""
    taps = random_taps(target.spec.context - 1)
    short, long = make_drafter(target, context=32), make_drafter(target, context=2048)
    torch.testing.assert_close(cached_hidden(short, taps, 7), cached_hidden(long, taps, 7), **CLOSE)


def test_anchors_of_one_text_do_not_see_each_other_or_their_future(target):
    drafter = make_drafter(target)
    taps, anchors, ids = random_taps(30), torch.tensor([0, 3, 3, 17, 30]), torch.tensor([4, 5, 6, 7, 8])
    blocks = drafter.embed(drafter.masked_block(ids))
    together = drafter.backbone.block_hidden(taps, blocks, anchors)
    for a, (anchor, token) in enumerate(zip(anchors.tolist(), ids.tolist(), strict=True)):
        alone = cached_hidden(drafter, taps[:anchor], token) if anchor else slow_hidden(drafter, taps[:0], token)
        torch.testing.assert_close(together[a], alone, **CLOSE)
    # The anchor's own feature would tell the drafter what the target made of it: it must not be context.
    leaked = cached_hidden(drafter, taps[:18], 7)
    assert (together[3] - leaked).abs().amax() > CLEARLY


def test_training_gradients_are_those_of_the_numbers(target):
    config = make_config(num_layers=1, block_size=2)
    weights = {n: t.requires_grad_(t.is_floating_point()) for n, t in lively_tensors(config).items()}
    drafter = build_drafter(config, weights, target, PlainLinear, share_head=False)
    taps, anchors = random_taps(6), torch.tensor([2, 5])
    blocks = drafter.embed(drafter.masked_block(torch.tensor([3, 4])))

    def loss() -> torch.Tensor:
        fresh = build_drafter(config, weights, target, PlainLinear, share_head=False)
        hidden = fresh.backbone.block_hidden(taps, blocks, anchors)
        return fresh.base_logits(hidden).log_softmax(-1)[..., 3].sum()

    loss().backward()
    backbone = [name for name in weights if not name.startswith(("markov", "confidence"))]
    for name in backbone:
        weight, grad = weights[name], weights[name].grad
        assert grad is not None, name
        at = grad.abs().argmax()
        with torch.no_grad():
            values, step = weight.view(-1), 1e-6
            values[at] += step
            up = loss()
            values[at] -= 2 * step
            down = loss()
            values[at] += step
        torch.testing.assert_close(grad.view(-1)[at], (up - down) / (2 * step), rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(not fp16_packing_works(), reason="this torch has no FBGEMM")
def test_training_does_not_share_a_packed_head():
    """Packed linears silently give no gradient; training beside a packed target gets its own head, same numbers."""
    target, config = make_target(dtype="float16"), make_config()
    weights = {n: t.float() for n, t in lively_tensors(config).items()}
    hidden = torch.randn(3, 16, requires_grad=True)
    serving = build_drafter(config, weights, target, PlainLinear)
    assert serving.lm_head is target.head
    training = build_drafter(config, weights, target, PlainLinear, share_head=False)
    logits = training.base_logits(hidden)
    torch.testing.assert_close(logits, serving.base_logits(hidden.detach()))
    logits.sum().backward()
    torch.testing.assert_close(hidden.grad, target.head_weight.float().sum(0).expand(3, 16))


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=6), start=st.sampled_from([0, 128, 640]))
def test_any_chunking_gives_the_same_context(cuts, start):
    drafter = make_drafter(make_target())
    taps = random_taps(40)
    edges = sorted({0, 40, *cuts})
    pool = drafter.new_pool(1024)
    for a, b in zip(edges, edges[1:], strict=False):
        drafter.append_context(taps[a:b], [PassRow(start, a, b - a)], pool)
    ids = drafter.masked_block(torch.tensor([7]))
    hidden = drafter.block_pass(ids, [PassRow(start, 40, 4)], pool)
    torch.testing.assert_close(hidden[0], cached_hidden(drafter, taps, 7), **CLOSE)


@pytest.mark.parametrize("starts", [(0, 128, 256), (512, 0, 256), (384, 768, 0)])
def test_batch_of_n_is_n_batches_of_one(target, starts):
    drafter = make_drafter(target)
    lengths, anchors = (3, 90, 17), torch.tensor([7, 8, 9])
    texts = [random_taps(n, seed=n) for n in lengths]
    pool = drafter.new_pool(1024)
    context = [PassRow(start, 0, n) for start, n in zip(starts, lengths, strict=True)]
    drafter.append_context(torch.cat(texts), context, pool)
    rows = [PassRow(start, n, 4) for start, n in zip(starts, lengths, strict=True)]
    hidden = drafter.block_pass(drafter.masked_block(anchors), rows, pool)
    for r, taps in enumerate(texts):
        torch.testing.assert_close(hidden[r], cached_hidden(drafter, taps, int(anchors[r])), **CLOSE)
    # By batch row instead of slot range: what a drafter that ignores `start` would read.
    swapped = [PassRow(starts[(r + 1) % 3], n, 4) for r, n in enumerate(lengths)]
    assert (drafter.block_pass(drafter.masked_block(anchors), swapped, pool) - hidden).abs().amax() > CLEARLY


def test_block_writes_only_its_own_scratch(target):
    drafter = make_drafter(target)
    pool = drafter.new_pool(512)
    for tensor in pool.caches:
        tensor.fill_(3.0)
    drafter.append_context(random_taps(20), [PassRow(128, 0, 20)], pool)
    before = [tensor.clone() for tensor in pool.caches]
    drafter.block_pass(drafter.masked_block(torch.tensor([7])), [PassRow(128, 20, 4)], pool)
    for old, new in zip(before, pool.caches, strict=True):
        changed = (old != new).any(dim=-1).any(dim=1).nonzero().squeeze(1)
        assert changed.tolist() == [148, 149, 150, 151]


@settings(max_examples=15, deadline=None)
@given(kept=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_scratch_never_leaks_into_later_context(kept):
    """Draft, keep some tokens, append their features, again and again: the cache is that of a fresh recompute."""
    drafter = make_drafter(make_target())
    taps, length = random_taps(40), 3
    pool = drafter.new_pool(256)
    drafter.append_context(taps[:length], [PassRow(128, 0, length)], pool)
    for n in kept:
        drafter.block_pass(drafter.masked_block(torch.tensor([n])), [PassRow(128, length, 4)], pool)
        drafter.append_context(taps[length : length + n], [PassRow(128, length, n)], pool)
        length += n
    fresh = drafter.new_pool(256)
    drafter.append_context(taps[:length], [PassRow(128, 0, length)], fresh)
    for ours, theirs in zip(pool.caches, fresh.caches, strict=True):
        torch.testing.assert_close(ours[128 : 128 + length], theirs[128 : 128 + length], **CLOSE)


def test_keeping_scratch_as_context_would_be_caught(target):
    drafter = make_drafter(target)
    taps = random_taps(12)
    pool = drafter.new_pool(128)
    drafter.append_context(taps[:10], [PassRow(0, 0, 10)], pool)
    drafter.block_pass(drafter.masked_block(torch.tensor([7])), [PassRow(0, 10, 4)], pool)
    stale = drafter.block_pass(drafter.masked_block(torch.tensor([8])), [PassRow(0, 12, 4)], pool)[0]
    assert (stale - cached_hidden(drafter, taps, 8)).abs().amax() > CLEARLY


@pytest.mark.skipif(not fp16_packing_works(), reason="this torch has no FBGEMM")
def test_packed_serving_is_close_to_plain():
    """fp16-packed linears change numbers by fp16 rounding, and nothing else."""
    target = make_target(dtype="float32")
    config = make_config()
    weights = {n: t.float() if n != "d2t" else t for n, t in lively_tensors(config).items()}
    packed = build_drafter(config, weights, target, Fp16PackedLinear)
    plain = build_drafter(config, weights, target, PlainLinear)
    taps = random_taps(9).float()
    torch.testing.assert_close(cached_hidden(packed, taps, 7), cached_hidden(plain, taps, 7), rtol=2e-2, atol=2e-2)
