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
        return no_draft(len(rows))


def no_draft(rows: int) -> Draft:
    """Nothing for any row."""
    return Draft(torch.zeros(rows, 0, dtype=torch.int64), (0,) * rows, sources=("none",) * rows)


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
        tuple(streams.coupled[i] for i in rows),
        tuple(streams.keys[i] for i in rows),
        tuple(streams.positions[i] for i in rows),
        tuple(streams.steps[i] for i in rows),
    )


def spread(draft: Draft, active: Sequence[int], total: int) -> Draft:
    """The draft of some rows, put back among all rows of the pass."""

    def among(values: Tensor | None) -> Tensor | None:
        if values is None or len(active) == total:
            return values
        everyone = values.new_zeros(total, *values.shape[1:])
        everyone[list(active)] = values
        return everyone

    lens, sources = [0] * total, ["none"] * total
    for i, length, source in zip(active, draft.lens, draft.sources, strict=True):
        lens[i], sources[i] = length, source if length else "none"
    ids = among(draft.ids)
    assert ids is not None
    return Draft(ids, tuple(lens), among(draft.probs), among(draft.confidence), tuple(sources))
