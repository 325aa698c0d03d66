"""Products in bfloat16 over float32 weights."""

import pytest
import torch

from dspark.train.mixed import Bf16Linear
from tests.train.toys import same_weights, toy_trainer


def test_it_is_a_linear_map_with_gradients_up_to_rounding():
    make = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=make, requires_grad=True) for n in (5, 7))
    bias = torch.randn(7, generator=make, requires_grad=True)
    y = Bf16Linear(weight, bias)(x)
    pull = torch.randn(5, 7, generator=make)
    found = torch.autograd.grad(y, (x, weight, bias), pull)
    expected_y = torch.nn.functional.linear(x, weight, bias)
    expected = torch.autograd.grad(expected_y, (x, weight, bias), pull)
    for ours, theirs in zip((y, *found), (expected_y, *expected), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.05)
    assert not torch.equal(y, expected_y)  # it does round


def test_small_whole_numbers_are_exact():
    x = torch.arange(-8.0, 8.0).view(2, 8)
    weight = torch.arange(24.0).view(3, 8).remainder(5)
    assert torch.equal(Bf16Linear(weight)(x), x @ weight.T)


def test_a_frozen_weight_gets_no_gradient():
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4)
    Bf16Linear(weight)(x).sum().backward()
    assert weight.grad is None and torch.equal(x.grad, torch.full((2, 4), 3.0))


def test_a_run_takes_nearly_the_same_steps_and_keeps_float32_masters(target, corpus):
    exact, mixed = toy_trainer(target, corpus), toy_trainer(target, corpus, bf16=True)
    losses = [[report.loss for report in trainer.run()] for trainer in (exact, mixed)]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)
    assert all(t.dtype == torch.float32 for t in mixed.weights.values())
    assert not same_weights(exact.weights, mixed.weights)
