"""Where drafts come from: the interface, and the proposer that proposes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.config import Draft, Streams
from dspark.engine.batcher import Row
from dspark.engine.prefix import Prefix
from dspark.engine.request import Request
from dspark.schedule import MAX_DRAFT, Offer
from dspark.schedule.calibration import Calibration


@dataclass(frozen=True, slots=True)
class Outlook:
    """What older steps let one request expect of a source."""

    survival: Callable[[str, int], tuple[float, ...]]  # (source, slots): expected survival of its draft tokens
    draft_cost: float = 0.0  # a drafter pass as a share of the step without it; 0 where unknown


class Proposer(Protocol):
    """Guesses tokens for the sampling rows of a pass and keeps whatever state it needs per request."""

    name: str
    most: int  # longest draft it can give
    taps: tuple[int, ...]  # target layers whose outputs `observe` wants; () costs nothing
    slack: int  # slots it writes behind a request's last token
    kv_token_bytes: int  # cache it keeps per token
    shape: object  # what the cost of its model's passes depends on; None: it runs no model
    calibration: Calibration | None  # of its confidences

    def open_pool(self, slots: int, device: torch.device) -> None:
        """Allocate its cache; slot numbers are the target pool's."""

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        """What it could draft for a row now; no token may have been drawn for it."""
        ...

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        """At most `lens[r]` tokens per row, from the source `row.source` where it has several."""
        ...

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        """After a pass: `kept` of the row's positions were committed; `taps` [kept, L*D] are their layer outputs."""

    def release(self, request: Request) -> None:
        """The request has ended, and its slots are free."""

    def retire(self, request: Request) -> None:
        """The request has ended; what is cached of its first kv_len positions stays at its slots until `forget`."""

    def adopt(self, request: Request, source: Prefix, length: int) -> None:
        """The request begins with `length` tokens of another one, running or retired: copy what is cached of them.

        The source's slots may be handed out right after, and may overlap the request's. Nothing else of the request
        has been observed, or what was is overwritten.
        """

    def forget(self, owner: int) -> None:
        """A retired request's slots are free."""


class StatelessProposer:
    """Defaults for proposers that keep no cache and need no taps."""

    name = "none"
    most = MAX_DRAFT
    drafter_pass = False
    taps: tuple[int, ...] = ()
    slack = 0
    kv_token_bytes = 0
    shape: object = None
    calibration: Calibration | None = None

    def open_pool(self, slots: int, device: torch.device) -> None:
        pass

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        survival = outlook.survival(self.name, self.most)
        cost = outlook.draft_cost if self.drafter_pass else 0.0
        return (Offer(self.name, survival, self.drafter_pass, cost=cost),)

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def retire(self, request: Request) -> None:
        self.release(request)

    def adopt(self, request: Request, source: Prefix, length: int) -> None:
        pass

    def forget(self, owner: int) -> None:
        pass


class NoneProposer(StatelessProposer):
    """Plain decoding: no draft, ever."""

    most = 0

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
