"""Matrix products in bfloat16 over float32 masters: half the work or less on CPUs with AVX512-BF16 or AMX, and on GPUs.

Inputs, weights and gradients are rounded to bfloat16 on their way into a product and sums are kept in float32 inside
it; everything else (norms, attention, losses, weights, optimiser) stays float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class Bf16Linear:
    """`y = x W^T + b` in float32, multiplied in bfloat16. Gradients reach `weight` where it asks for them."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None):
        self._weight, self._bias = weight, bias
        self._half = weight.detach().bfloat16()  # once for all calls: weights change between steps only

    def __call__(self, x: Float[Tensor, "T in"]) -> Float[Tensor, "T out"]:
        y = _Product.apply(x, self._weight, self._half)
        return y if self._bias is None else y + self._bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, half: Tensor) -> Tensor:
        narrow = x.bfloat16()
        ctx.save_for_backward(narrow, half)
        return F.linear(narrow, half).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, half = ctx.saved_tensors
        grad = grad.bfloat16()
        of_input = (grad @ half).float() if ctx.needs_input_grad[0] else None
        of_weight = (grad.T @ x).float() if ctx.needs_input_grad[1] else None
        return of_input, of_weight, None
