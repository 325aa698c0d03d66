"""Which call sizes give a row the same bits here? Measured on this machine when exact mode starts, not assumed.

Matrix kernels work through rows in groups and take other kernels, with another order of additions, for what is left
over. With FBGEMM on AVX2 that is the case at 1, 2, 7, 14, 31, 32, 37, 38... rows; with MKL on AVX2 at whatever is not
a multiple of 4, on AVX-512 below 2 to 16 rows, depending on the number of inputs. Exact mode pads a call to the next
size at which no row meets such a kernel.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from functools import lru_cache

import torch
from torch import Tensor

from dspark.errors import ModelError

MAX_ROWS = 512
_MARGIN = 64  # sizes beyond MAX_ROWS that padding may reach, and rows behind a row that is surely not left over
_EVERY, _THEN = 128, 4  # every size up to the first is tried, beyond it multiples of the second
_OUT = 96  # outputs are independent of each other, so a few stand for all
_REFUSAL = "Exact mode is not possible here: no {} sizes give a row the same bits on this CPU; leave --exact out."

Run = Callable[[Tensor], Tensor]


class InvariantSizes:
    """Sizes of a call at which every row has the bits it has in any other of these sizes."""

    def __init__(self, sizes: Collection[int], what: str = "matrix"):
        self._sizes, self._what = sorted(sizes), what
        self.pad(MAX_ROWS)

    def pad(self, rows: int) -> int:
        """The smallest of the sizes that holds `rows`. Raises ModelError when there is none."""
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes):
            raise ModelError(_REFUSAL.format(self._what))
        return self._sizes[index]


def invariant_sizes(run: Run, width: int, dtype: torch.dtype) -> set[int]:
    """Those of `run`, a function of rows [n, width] that treats each alike."""
    rows = torch.randn(MAX_ROWS + 2 * _MARGIN, width, dtype=dtype, generator=torch.Generator().manual_seed(0))
    largest = MAX_ROWS + _MARGIN
    # The bits of rows amid many others, taken from several calls so that no row is anywhere near the end.
    amid = torch.cat(
        [run(rows[: begin + 2 * _MARGIN])[begin : begin + _MARGIN] for begin in range(0, largest, _MARGIN)]
    )
    tried = [*range(1, _EVERY), *range(_EVERY, largest + 1, _THEN)]
    return {n for n in tried if torch.equal(run(rows[:n]), amid[:n])}


@lru_cache(maxsize=8)
def linear_sizes(
    make: Callable[[Tensor, None], Run], dtype: torch.dtype, shapes: frozenset[tuple[int, int]]
) -> InvariantSizes:
    """Row counts at which all linear layers that `make` packs are invariant, for activations of `dtype`.

    `shapes` are the layers' (out, in): which kernel takes left-over rows depends on the number of inputs too.

    Raises:
        ModelError: there are too few.
    """
    generator = torch.Generator().manual_seed(1)
    common: set[int] = set(range(1, MAX_ROWS + _MARGIN + 1))
    for out, width in sorted({(min(out, _OUT), width) for out, width in shapes}):
        weight = torch.randn(out, width, dtype=dtype, generator=generator)
        common &= invariant_sizes(make(weight, None), width, dtype)
    return InvariantSizes(common)


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
        scores = torch.baddbmm(mask[:count], query[:, :count], key.transpose(1, 2))
        return torch.bmm(torch.softmax(scores, -1), value)

    amid = run(rows)
    for multiple in (1, 2, 4, 8, 16):
        if all(torch.equal(run(n), amid[:, :n]) for n in range(multiple, 97, multiple)):
            return multiple
    raise ModelError(_REFUSAL.format("attention"))
