"""Keys and values of all requests in one preallocated token pool.

A request owns one contiguous range of slots, so that attention reads its keys without a copy. Rolling back is stating
a shorter length: what lies behind it is never read unmasked and is overwritten by the next pass.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Ranges are whole key blocks; exact mode reads keys in multiples of it, so that padding stays inside the range.
KEY_BLOCK = 128
ALIGNMENT = 64  # bytes


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class KvPool:
    """Keys and values of `layers` layers for `slots` token slots.

    Per layer one tensor [slots, 2 * kv_heads, head_dim], keys first: what one request fills lies together, so a pool
    that is mostly unused costs little memory even where the system hands it out in large pages.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, device: torch.device):
        shape = (slots, 2 * kv_heads, head_dim)
        self.caches: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(layers)]
        self._keys: list[Tensor] = [cache[:, :kv_heads] for cache in self.caches]
        self._values: list[Tensor] = [cache[:, kv_heads:] for cache in self.caches]
        self.slots, self.layers = slots, layers

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] at pool slots [T]."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of one request's keys [kv_heads, head_dim, length] and values [kv_heads, length, head_dim].

        Laid out as the two products of `attend` take them, and made in one call each: with many requests these views
        are a good part of a pass.
        """
        cache = self.caches[layer]
        _, heads, head_dim = cache.shape
        token, first = heads * head_dim, start * heads * head_dim
        keys = cache.as_strided((heads // 2, head_dim, length), (head_dim, 1, token), first)
        values = cache.as_strided((heads // 2, length, head_dim), (head_dim, token, 1), first + token // 2)
        return keys, values

    def copy(self, source: int, start: int, length: int) -> None:
        """Copy `length` slots from `source` on to `start` on; the two ranges may overlap."""
        if not length or source == start:
            return
        overlap = abs(source - start) < length
        for cache in self.caches:
            taken = cache[source : source + length]
            cache[start : start + length] = taken.clone() if overlap else taken


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost memory only where they are written (CPU); torch.zeros writes every page.

    Zeros, not just any memory: masked keys are multiplied by exactly 0, which must not meet a NaN. Aligned like torch's
    own tensors, because matrix kernels may round differently at other alignments.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[skip : skip + size]).view(dtype).view(shape)


@dataclass
class _Range:
    start: int
    size: int


class SlotRanges:
    """Which slots of the pool are taken: first-fit contiguous ranges, sizes rounded up to whole key blocks."""

    def __init__(self, slots: int):
        self.capacity = slots // KEY_BLOCK * KEY_BLOCK
        self._free = [_Range(0, self.capacity)] if self.capacity else []
        self._taken: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return sum(r.size for r in self._free)

    def size_of(self, starts: Iterable[int]) -> int:
        """Slots of the taken ranges that begin at `starts`."""
        return sum(self._taken[start] for start in starts)

    def fits_when_empty(self, length: int) -> bool:
        return round_up(length, KEY_BLOCK) <= self.capacity

    def take(self, length: int) -> int | None:
        """Reserve `length` slots; the first slot, or None when no gap is large enough now."""
        size = round_up(length, KEY_BLOCK)
        for i, gap in enumerate(self._free):
            if gap.size >= size:
                start = gap.start
                gap.start, gap.size = gap.start + size, gap.size - size
                if not gap.size:
                    del self._free[i]
                self._taken[start] = size
                return start
        return None

    def give_back(self, start: int) -> None:
        """Free the range that begins at `start` and join it with free neighbours."""
        self._release(start, self._taken.pop(start))

    def shrink(self, start: int, length: int) -> None:
        """Keep only the first `length` slots (whole key blocks) of the range that begins at `start`."""
        size = round_up(length, KEY_BLOCK)
        if (extra := self._taken[start] - size) > 0:
            self._taken[start] = size
            self._release(start + size, extra)

    def _release(self, start: int, size: int) -> None:
        self._free.append(_Range(start, size))
        self._free.sort(key=lambda r: r.start)
        joined: list[_Range] = []
        for gap in self._free:
            if joined and joined[-1].start + joined[-1].size == gap.start:
                joined[-1].size += gap.size
            else:
                joined.append(gap)
        self._free = joined
