"""Linear layers packed for a device, behind one small interface, so that faster kernels can come later."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dspark.errors import ModelError

FP16_MAX = 65504.0


class Linear(Protocol):
    """`y = x W^T + b` for x of shape [T, in]."""

    def __call__(self, x: Float[Tensor, "T in"]) -> Float[Tensor, "T out"]: ...


LinearFactory = Callable[[Tensor, Tensor | None], Linear]


class PlainLinear:
    """Weights as they are: fp32/fp64 on CPU, bf16/fp16 on CUDA."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Float[Tensor, "T in"]) -> Float[Tensor, "T out"]:
        return F.linear(x, self.weight, self.bias)


class Fp16PackedLinear:
    """FBGEMM: fp16 weights, fp32 arithmetic; half the memory traffic of fp32."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None):
        if weight.dtype != torch.float16 and (largest := weight.abs().max().item()) > FP16_MAX:
            raise ModelError(
                f"A weight of {largest:.3g} does not fit float16 (at most {FP16_MAX:.0f}); use --dtype float32."
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: Float[Tensor, "T in"]) -> Float[Tensor, "T out"]:
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def fp16_packing_works() -> bool:
    """Whether this build of torch has FBGEMM's fp16 linear (x86 with AVX2)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """Turn "auto" into the fastest lossless choice of this device: a torch dtype name."""
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return "float16" if fp16_packing_works() else "float32"


def activation_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Dtype of activations and cache: on CPU float16 weights are multiplied in float32."""
    if device.type == "cpu" and dtype in ("float16", "bfloat16"):
        return torch.float32
    return getattr(torch, dtype)


def linear_factory(dtype: str, device: torch.device) -> LinearFactory:
    """The packing that serves `dtype` on `device`.

    Raises:
        ModelError: the combination has no kernel here.
    """
    if device.type == "cpu" and dtype == "float16":
        if not fp16_packing_works():
            raise ModelError("dtype float16 needs FBGEMM, which this torch build lacks; use --dtype float32.")
        return Fp16PackedLinear
    if device.type == "cpu" and dtype == "bfloat16":
        raise ModelError("dtype bfloat16 is slow on CPUs and not offered there; use --dtype float16 or float32.")
    cast = getattr(torch, dtype)

    def plain(weight: Tensor, bias: Tensor | None = None) -> PlainLinear:
        return PlainLinear(weight.to(device, cast), None if bias is None else bias.to(device, cast))

    return plain
