"""What need not be run again: cache ranges of ended requests stay in the pool until their room is needed.

A request that begins like a kept or a running one gets its own range, and the shared part is copied into it: target
cache and proposer's context alike. Copying a token costs next to nothing beside running it, and ranges stay contiguous.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import Protocol

from dspark.engine.request import Request
from dspark.target import KvPool, SlotRanges


@dataclass(frozen=True, eq=False)
class Prefix:
    """Committed tokens whose keys and values lie in the pool from slot `start` on; request `owner` has run them."""

    owner: int
    token_ids: Sequence[int]
    start: int


class ContextKeeper(Protocol):
    """What a proposer does so that its context goes with the target's; see `Proposer`."""

    def adopt(self, request: Request, source: Prefix, length: int) -> None: ...

    def forget(self, owner: int) -> None: ...


class PrefixCache:
    """Hands out the pool's ranges, and keeps those of ended requests, least recently used first.

    Only positions below an ended request's kv_len are kept: what rejected drafts wrote behind them is not text.
    """

    def __init__(self, slots: SlotRanges, pool: KvPool, keeper: ContextKeeper, enabled: bool = True):
        self.slots, self.enabled = slots, enabled
        self._pool, self._keeper = pool, keeper
        self._kept: list[Prefix] = []

    @property
    def kept(self) -> tuple[Prefix, ...]:
        """Ranges no request owns; the first is the next to go."""
        return tuple(self._kept)

    def admit(self, request: Request, length: int, running: Sequence[Request]) -> bool:
        """Give a request `length` slots, with what is cached of its prompt in them; False when it must wait.

        Kept ranges go where room is needed, oldest first; if even the one to copy from must go, it is copied from its
        old slots before anything else can write there.
        """
        source = self._longest(request, running)
        victims = self._victims(length, source)
        if victims is None:
            return False
        for prefix in victims:
            self._kept.remove(prefix)
            self.slots.give_back(prefix.start)
        start = self.slots.take(length)
        assert start is not None
        request.start = start
        self._adopt(request, source)
        for prefix in victims:
            self._keeper.forget(prefix.owner)
        return True

    def extend(self, request: Request, running: Sequence[Request]) -> None:
        """Take over what others have run of this request's prompt since it was admitted."""
        self._adopt(request, self._longest(request, running))

    def keep(self, request: Request) -> bool:
        """Keep an ended request's range for others; False when it is of no use and the caller frees it."""
        if not self.enabled or request.error is not None or not request.kv_len:
            return False
        token_ids = request.tokens(0)[: request.kv_len]
        for prefix in self._kept:
            if shared_length(prefix.token_ids, token_ids) == len(token_ids):
                self._touch(prefix)
                return False
        # An earlier turn of the same conversation says nothing this one does not.
        for prefix in self.kept:
            if shared_length(prefix.token_ids, token_ids) == len(prefix.token_ids):
                self._drop(prefix)
        self.slots.shrink(request.start, request.kv_len)
        self._kept.append(Prefix(request.id, token_ids, request.start))
        return True

    def clear(self) -> None:
        """Free every kept range."""
        for prefix in self.kept:
            self._drop(prefix)

    def _longest(self, request: Request, running: Sequence[Request]) -> Prefix | None:
        """Who has run most of the prompt, if that is more than the request's own range holds."""
        if not self.enabled:
            return None
        others = [Prefix(r.id, r.tokens(0)[: r.kv_len], r.start) for r in running if r is not request and r.kv_len]
        return max(
            (prefix for prefix in (*self._kept, *others) if _usable(prefix, request) > request.kv_len),
            key=lambda prefix: _usable(prefix, request),
            default=None,
        )

    def _adopt(self, request: Request, source: Prefix | None) -> None:
        if source is None:
            return
        length = _usable(source, request)
        self._pool.copy(source.start, request.start, length)
        self._keeper.adopt(request, source, length)
        request.kv_len = request.stats.cached_tokens = length
        if source in self._kept:
            self._touch(source)

    def _victims(self, length: int, source: Prefix | None) -> list[Prefix] | None:
        """Kept ranges to free so that `length` slots lie together; None when all of them would not be enough."""
        trial, victims = deepcopy(self.slots), []
        candidates = [p for p in self._kept if p is not source] + [p for p in self._kept if p is source]
        while trial.take(length) is None:
            if not candidates:
                return None
            victims.append(candidates.pop(0))
            trial.give_back(victims[-1].start)
        return victims

    def _touch(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self._kept.append(prefix)

    def _drop(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self.slots.give_back(prefix.start)
        self._keeper.forget(prefix.owner)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two texts have in common."""
    return next(compress(count(), map(ne, one, other)), min(len(one), len(other)))


def _usable(prefix: Prefix, request: Request) -> int:
    """Prompt tokens that need not be run; the last one always is, because its logits are needed."""
    return min(shared_length(prefix.token_ids, request.prompt_ids), len(request.prompt_ids) - 1)
