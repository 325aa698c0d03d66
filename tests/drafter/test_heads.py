"""Sequential and confidence heads: step by step = teacher-forced = slow loops; shapes of a step carried correctly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.drafter import ConfidenceHead, build_head
from dspark.target.linear import PlainLinear

from .toys import HIDDEN, VOCAB, lively_tensors, make_config

KINDS = ["none", "markov", "gated", "rnn"]


def head_of(kind: str, **changes: object):
    none = {"markov_rank": 0, "confidence": False} if kind == "none" else {}
    config = make_config(head=kind, **none, **changes)
    tensors = lively_tensors(config)
    return build_head(config, tensors, PlainLinear), tensors


def sig(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def slow_bias(kind: str, w: dict, previous: list[int], hidden: torch.Tensor) -> torch.Tensor:
    """[K, V_draft] of one block, straight from the formulas of docs/checkpoints.md."""
    if kind == "none":
        return torch.zeros(len(previous), VOCAB, dtype=hidden.dtype)
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    state, rows = torch.zeros(w1.shape[1], dtype=hidden.dtype), []
    for token, h in zip(previous, hidden, strict=True):
        e = w1[token]
        if kind == "markov":
            rows.append(w2 @ e)
        if kind == "gated":
            gate = sig(w["markov_head.gate_proj.weight"] @ torch.cat((h, e)) + w["markov_head.gate_proj.bias"])
            rows.append(w2 @ (gate * e))
        if kind == "rnn":
            mapped = w["markov_head.joint_proj.weight"] @ torch.cat((state, e, h)) + w["markov_head.joint_proj.bias"]
            g, c, o = mapped.split(len(e))
            state = sig(g) * state + (1 - sig(g)) * torch.tanh(c)
            rows.append(w2 @ torch.tanh(o))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 3), slots=st.integers(1, 5), seed=st.integers(0, 2**20))
def test_steps_are_the_teacher_forced_block_are_the_formula(kind, batch, slots, seed):
    head, tensors = head_of(kind)
    g = torch.Generator().manual_seed(seed)
    previous = torch.randint(VOCAB, (batch, slots), generator=g)
    hidden = torch.randn(batch, slots, HIDDEN, generator=g, dtype=torch.float64)
    block = head.block_bias(head.embed(previous, like=hidden), hidden)
    slow = torch.stack([slow_bias(kind, tensors, p.tolist(), h) for p, h in zip(previous, hidden, strict=True)])
    torch.testing.assert_close(block, slow)
    state = head.start(hidden[:, 0])
    for k in range(slots):
        bias, state = head.step(state, head.embed(previous[:, k], like=hidden), hidden[:, k])
        torch.testing.assert_close(bias, slow[:, k])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_shifted_previous_tokens_would_be_caught(kind):
    head, tensors = head_of(kind)
    previous, hidden = torch.tensor([3, 4, 5]), torch.randn(3, HIDDEN, dtype=torch.float64)
    shifted = head.block_bias(head.embed(previous.roll(1), like=hidden), hidden)
    assert (shifted - slow_bias(kind, tensors, previous.tolist(), hidden)).abs().amax() > 1e-3


def test_rnn_carries_state_and_the_others_do_not():
    """Changing the first token of a block changes a later slot's bias only through a state."""
    hidden = torch.randn(3, HIDDEN, dtype=torch.float64)
    for kind in KINDS:
        head, _ = head_of(kind)
        a, b = (head.block_bias(head.embed(torch.tensor([x, 4, 5]), like=hidden), hidden) for x in (1, 2))
        assert bool((a[2] - b[2]).abs().amax() > 1e-6) == (kind == "rnn")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_head_tensor_gets_a_gradient_through_the_block(kind):
    config = make_config(head=kind)
    tensors = {n: t.requires_grad_() for n, t in lively_tensors(config).items() if n.startswith("markov_head")}
    head = build_head(config, tensors, PlainLinear)
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    previous = torch.randint(VOCAB, (2, 3))
    head.block_bias(head.embed(previous, like=hidden), hidden).square().sum().backward()
    for name, tensor in tensors.items():
        assert tensor.grad is not None and tensor.grad.abs().sum() > 0, name
    assert (hidden.grad is None) == (kind == "markov")


def test_bias_covers_the_draft_vocabulary_and_previous_tokens_the_full_one():
    head, tensors = head_of("markov", draft_vocab_size=10)
    hidden = torch.zeros(1, HIDDEN, dtype=torch.float64)
    last = torch.tensor([VOCAB - 1])
    bias = head.block_bias(head.embed(last, like=hidden), hidden)
    expected = tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][-1]
    torch.testing.assert_close(bias[0], expected)
    assert bias.shape == (1, 10)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_the_formula(with_markov):
    hidden, embedded = torch.randn(2, 3, HIDDEN).double(), torch.randn(2, 3, 5).double()
    weight = torch.randn(1, HIDDEN + 5 * with_markov).double()
    head = ConfidenceHead(weight, torch.tensor([0.3]).double(), with_markov)
    for b in range(2):
        for k in range(3):
            features = torch.cat((hidden[b, k], embedded[b, k])) if with_markov else hidden[b, k]
            expected = sig(weight[0] @ features + 0.3)
            torch.testing.assert_close(head(hidden, embedded)[b, k], expected)
    if not with_markov:
        assert torch.equal(head(hidden), head(hidden, embedded))
