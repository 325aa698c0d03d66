"""Lookup or the neural drafter, row by row and step by step."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config import Draft, Streams
from dspark.engine.batcher import Row
from dspark.engine.lookup import LookupProposer
from dspark.engine.prefix import Prefix
from dspark.engine.proposer import Outlook, Proposer, no_draft, streams_of
from dspark.engine.request import Request
from dspark.schedule import Offer


class AutoProposer:
    """Offers what both offer, and drafts a row's chain from the source that the plan chose for it.

    The plan chooses by expected tokens per millisecond, before any draft token is drawn; a record names the source.
    """

    name = "auto"

    def __init__(self, lookup: LookupProposer, neural: Proposer):
        self.lookup, self.neural = lookup, neural
        self.most = max(lookup.most, neural.most)
        self.taps, self.slack, self.shape = neural.taps, neural.slack, neural.shape
        self.kv_token_bytes, self.calibration = neural.kv_token_bytes, neural.calibration

    def open_pool(self, slots: int, device: torch.device) -> None:
        self.neural.open_pool(slots, device)

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        return self.lookup.offers(row, outlook) + self.neural.offers(row, outlook)

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        drafts = []
        for proposer, mine in self._shares(rows, lens):
            part = [rows[i] for i in mine]
            drafts.append((mine, proposer.propose(part, [lens[i] for i in mine], streams_of(streams, mine))))
        return merged(drafts, len(rows))

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        self.lookup.observe(row, taps, kept)
        self.neural.observe(row, taps, kept)

    def release(self, request: Request) -> None:
        self.lookup.release(request)
        self.neural.release(request)

    def retire(self, request: Request) -> None:
        self.lookup.retire(request)
        self.neural.retire(request)

    def adopt(self, request: Request, source: Prefix, length: int) -> None:
        self.lookup.adopt(request, source, length)
        self.neural.adopt(request, source, length)

    def forget(self, owner: int) -> None:
        self.lookup.forget(owner)
        self.neural.forget(owner)

    def _shares(self, rows: Sequence[Row], lens: Sequence[int]) -> list[tuple[Proposer, list[int]]]:
        wanted = [i for i, length in enumerate(lens) if length]
        looked_up = [i for i in wanted if rows[i].source in self.lookup.sources]
        neural = [i for i in wanted if rows[i].source == self.neural.name]
        shares: list[tuple[Proposer, list[int]]] = [(self.lookup, looked_up), (self.neural, neural)]
        return [(proposer, mine) for proposer, mine in shares if mine]


def merged(drafts: Sequence[tuple[Sequence[int], Draft]], total: int) -> Draft:
    """One draft of `total` rows from drafts of some of them; rows nobody drafted for stay empty.

    Where one part states distributions, the guesses of a part without become point masses on their ids.
    """
    drafts = [(rows, draft) for rows, draft in drafts if any(draft.lens)]
    if not drafts:
        return no_draft(total)
    width = max(draft.ids.shape[1] for _, draft in drafts)
    device = next((d.probs.device for _, d in drafts if d.probs is not None), drafts[0][1].ids.device)
    sized = next((d.probs for _, d in drafts if d.probs is not None), None)
    ids = torch.zeros(total, width, dtype=torch.int64, device=device)
    probs = None if sized is None else sized.new_zeros(total, width, sized.shape[2])
    confidence = None
    if any(d.confidence is not None for _, d in drafts):
        confidence = torch.zeros(total, width, device=device)
    lens, sources = [0] * total, ["none"] * total
    for rows, draft in drafts:
        index, here = torch.tensor(rows, device=device), draft.ids.shape[1]
        ids[index, :here] = draft.ids.to(device)
        if probs is not None:
            masses = F.one_hot(draft.ids.to(device), probs.shape[2]) if draft.probs is None else draft.probs
            probs[index, :here] = masses.to(probs)
        if confidence is not None and draft.confidence is not None:
            confidence[index, :here] = draft.confidence.to(confidence)
        for i, length, source in zip(rows, draft.lens, draft.sources, strict=True):
            lens[i], sources[i] = length, source if length else "none"
    return Draft(ids, tuple(lens), probs, confidence, tuple(sources))
