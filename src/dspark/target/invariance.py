"""Which call sizes give a row the same bits here? Measured on this machine when exact mode starts, not assumed.

Matrix kernels work through rows in groups and take other kernels, with another order of additions, for what is left
over. With FBGEMM on AVX2 that is the case at 1, 2, 7, 14, 31, 32, 37, 38... rows, with MKL at whatever is not a
multiple of 4. Exact mode pads a call to the next size at which no row meets such a kernel.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from dspark.errors import ModelError

MAX_ROWS = 512
_MARGIN = 64  # sizes beyond MAX_ROWS that padding may reach, and rows behind a row that is surely not left over
_OUT, _IN = 96, 64
_REFUSAL = "Exact mode is not possible here: no {} sizes give a row the same bits on this CPU; leave --exact out."


class InvariantSizes:
    """The sizes, in rising order, at which every row of a call has the bits it has in any other of these sizes."""

    def __init__(self, run: Callable[[Tensor], Tensor], what: str, dtype: torch.dtype):
        rows = torch.randn(MAX_ROWS + 2 * _MARGIN, _IN, dtype=dtype, generator=torch.Generator().manual_seed(0))
        largest = MAX_ROWS + _MARGIN
        # The bits of rows amid many others, taken from several calls so that no row is anywhere near the end.
        amid = torch.cat(
            [run(rows[: begin + 2 * _MARGIN])[begin : begin + _MARGIN] for begin in range(0, largest, _MARGIN)]
        )
        self._sizes = [n for n in range(1, largest + 1) if torch.equal(run(rows[:n]), amid[:n])]
        if self.pad(MAX_ROWS, what) > largest:
            raise ModelError(_REFUSAL.format(what))

    def pad(self, rows: int, what: str = "matrix") -> int:
        """The smallest of the sizes that holds `rows`."""
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes):
            raise ModelError(_REFUSAL.format(what))
        return self._sizes[index]


@lru_cache(maxsize=8)
def linear_sizes(make: Callable[[Tensor, None], Callable[[Tensor], Tensor]], dtype: torch.dtype) -> InvariantSizes:
    """Invariant row counts of linear layers that `make` packs, for activations of `dtype`."""
    weight = torch.randn(_OUT, _IN, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return InvariantSizes(make(weight, None), "matrix", dtype)


@lru_cache(maxsize=8)
def attention_multiple(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Smallest m such that attention over any multiple of m query rows gives a row the same bits.

    Raises:
        ModelError: none up to 16 does.
    """
    make = torch.Generator().manual_seed(2)
    rows, keys = 160, 256
    query, key, value = (torch.randn(kv_heads, n, head_dim, dtype=dtype, generator=make) for n in (rows, keys, keys))
    mask = torch.zeros(rows, keys, dtype=dtype)

    def run(count: int) -> Tensor:
        scores = torch.baddbmm(mask[:count], query[:, :count], key.transpose(1, 2), alpha=0.125)
        return torch.bmm(torch.softmax(scores, -1), value)

    amid = run(rows)
    for multiple in (1, 2, 4, 8, 16):
        if all(torch.equal(run(n), amid[:, :n]) for n in range(multiple, 97, multiple)):
            return multiple
    raise ModelError(_REFUSAL.format("attention"))
