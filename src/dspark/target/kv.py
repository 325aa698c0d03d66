"""Keys and values of all requests in one preallocated token pool.

A request owns one contiguous range of slots, so that attention reads its keys without a copy. Rolling back is stating
a shorter length: what lies behind it is never read unmasked and is overwritten by the next pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Ranges are whole key blocks; exact mode reads keys in multiples of it, so that padding stays inside the range.
KEY_BLOCK = 128


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class KvPool:
    """Keys and values of `layers` layers for `slots` token slots: per layer two tensors [kv_heads, slots, head_dim]."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, device: torch.device):
        shape = (kv_heads, slots, head_dim)
        # zeros, not empty: masked keys are multiplied by exactly 0, which must not meet a NaN. On CPU the pages are
        # only mapped, and cost memory when written.
        self.keys: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.slots = slots

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] at pool slots [T]."""
        self.keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, values.transpose(0, 1))

    def read(self, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [kv_heads, length, head_dim] of one request's keys and values."""
        return self.keys[layer].narrow(1, start, length), self.values[layer].narrow(1, start, length)


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
        self._free.append(_Range(start, self._taken.pop(start)))
        self._free.sort(key=lambda r: r.start)
        joined: list[_Range] = []
        for gap in self._free:
            if joined and joined[-1].start + joined[-1].size == gap.start:
                joined[-1].size += gap.size
            else:
                joined.append(gap)
        self._free = joined
