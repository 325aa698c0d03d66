"""Where drafts come from: the interface, and the proposer that proposes nothing."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark.config import Draft, Streams
from dspark.engine.batcher import Row
from dspark.engine.request import Request


class Proposer(Protocol):
    """Guesses tokens for the sampling rows of a pass and keeps whatever state it needs per request."""

    name: str
    taps: tuple[int, ...]  # target layers whose outputs `observe` wants; () costs nothing
    slack: int  # slots it writes behind a request's last token
    kv_token_bytes: int  # cache it keeps per token

    def open_pool(self, slots: int, device: torch.device) -> None:
        """Allocate its cache; slot numbers are the target pool's."""

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        """At most `lens[r]` tokens per row."""
        ...

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        """After a pass: `kept` of the row's positions were committed; `taps` [kept, L*D] are their layer outputs."""

    def release(self, request: Request) -> None:
        """The request has ended."""


class StatelessProposer:
    """Defaults for proposers that keep no cache and need no taps."""

    name = "none"
    taps: tuple[int, ...] = ()
    slack = 0
    kv_token_bytes = 0

    def open_pool(self, slots: int, device: torch.device) -> None:
        pass

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


class NoneProposer(StatelessProposer):
    """Plain decoding: no draft, ever."""

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        return point_masses([[] for _ in rows], self.name)


def point_masses(guesses: Sequence[Sequence[int]], source: str) -> Draft:
    """A draft of certain guesses: each token's distribution is the token itself."""
    lens = tuple(map(len, guesses))
    ids = torch.zeros(len(guesses), max(lens, default=0), dtype=torch.int64)
    for row, guess in enumerate(guesses):
        ids[row, : len(guess)] = torch.tensor(guess, dtype=torch.int64)
    return Draft(ids, lens, sources=tuple(source if n else "none" for n in lens))


def streams_of(streams: Streams, rows: Sequence[int]) -> Streams:
    """The streams of some of a batch's rows."""
    return Streams(
        *(tuple(part[i] for i in rows) for part in (streams.coupled, streams.keys, streams.positions, streams.steps))
    )
