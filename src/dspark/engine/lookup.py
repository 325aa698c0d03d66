"""Drafts by looking up: what followed the same last tokens earlier in this request."""

from collections.abc import Sequence
from typing import Protocol

from dspark.config import Draft, Streams
from dspark.engine.batcher import Row
from dspark.engine.proposer import StatelessProposer, point_masses
from dspark.engine.request import Request

# On this project's small target a one-token match costs more to verify than it brings; longer than four adds nothing.
MIN_ORDER, MAX_ORDER = 2, 4


class ContinuationTable(Protocol):
    """A corpus table: the likely continuation of some last tokens."""

    def continuation(self, last_ids: Sequence[int], length: int) -> list[int]:
        """At most `length` ids, empty when the table has nothing."""
        ...


class NgramIndex:
    """For every n-gram of a growing token list, the position after its latest occurrence."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_ORDER + 1)]

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            position = len(self._ids)
            for order in range(MIN_ORDER, min(MAX_ORDER, position) + 1):
                self._after[order][tuple(self._ids[position - order :])] = position
            self._ids.append(token_id)

    def continuation(self, length: int) -> list[int]:
        """What followed the longest earlier match of the last tokens; a match that runs into the end repeats itself."""
        for order in range(min(MAX_ORDER, len(self._ids)), MIN_ORDER - 1, -1):
            found = self._after[order].get(tuple(self._ids[-order:]))
            if found is not None:
                period = self._ids[found:]
                return [period[i % len(period)] for i in range(length)]
        return []


class LookupProposer(StatelessProposer):
    """N-gram lookup in the request's own prompt and output, then in an optional corpus table."""

    name = "lookup"

    def __init__(self, table: ContinuationTable | None = None):
        self._table = table
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        guesses = [self._guess(r.request, n) if n else [] for r, n in zip(rows, lens, strict=True)]
        return point_masses(guesses, self.name)

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _guess(self, request: Request, length: int) -> list[int]:
        index = self._indexes.setdefault(request.id, NgramIndex())
        index.extend(request.tokens(len(index)))
        guess = index.continuation(length)
        if not guess and self._table is not None:
            guess = self._table.continuation(request.tokens(max(0, request.num_tokens - MAX_ORDER)), length)
        return guess
