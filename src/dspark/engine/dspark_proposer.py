"""Drafts from a trained block drafter that reads the target's tapped layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.config import Draft, SlotRule, Streams
from dspark.drafter import Drafter, propose_block
from dspark.engine.batcher import Row
from dspark.engine.proposer import streams_of
from dspark.engine.request import Request
from dspark.target import PassRow


class DsparkProposer:
    """Keeps the drafter's context cache at the target's slots, and proposes blocks.

    Taps of committed positions wait raw and are projected in one pass when a draft is next wanted, so that a request
    that is not drafted for costs no drafter pass.
    """

    name = "dspark"

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self.taps = drafter.config.target_layer_ids
        self.slack = drafter.config.block_size
        self.kv_token_bytes = drafter.kv_token_bytes
        self._waiting: dict[int, list[Tensor]] = {}
        self._context_len: dict[int, int] = {}

    def open_pool(self, slots: int, device: torch.device) -> None:
        self._pool = self._drafter.new_pool(slots)

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        lens = [min(n, self._drafter.config.block_size) for n in lens]
        active = [i for i, n in enumerate(lens) if n]
        if not active:
            return Draft(torch.zeros(len(rows), 0, dtype=torch.int64), (0,) * len(rows), sources=("none",) * len(rows))
        requests = [rows[i].request for i in active]
        self._catch_up(requests)
        anchors = torch.tensor([r.output_ids[-1] for r in requests], device=self._pool.keys[0].device)
        block_rows = [PassRow(r.start, r.kv_len, self._drafter.config.block_size) for r in requests]

        def rules_at(slot: int, drafted: Sequence[Sequence[int]]) -> list[SlotRule]:
            return [r.slot_rule(list(ids)) for r, ids in zip(requests, drafted, strict=True)]

        draft = propose_block(
            self._drafter,
            anchors,
            block_rows,
            self._pool,
            [lens[i] for i in active],
            rules_at,
            streams_of(streams, active),
        )
        return _spread(draft, active, len(rows))

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        assert taps is not None
        self._waiting.setdefault(row.request.id, []).append(taps.clone())

    def release(self, request: Request) -> None:
        self._waiting.pop(request.id, None)
        self._context_len.pop(request.id, None)

    def _catch_up(self, requests: Sequence[Request]) -> None:
        rows, taps = [], []
        for request in requests:
            waiting = self._waiting.pop(request.id, [])
            done = self._context_len.get(request.id, 0)
            self._context_len[request.id] = request.kv_len
            if request.kv_len > done:
                rows.append(PassRow(request.start, done, request.kv_len - done))
                taps += waiting
        if rows:
            self._drafter.append_context(torch.cat(taps), rows, self._pool)


def _spread(draft: Draft, active: Sequence[int], total: int) -> Draft:
    """Put the drafts of some rows back among all rows of the pass."""
    if len(active) == total:
        return draft

    def among(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        spread = values.new_zeros(total, *values.shape[1:])
        spread[list(active)] = values
        return spread

    lens, sources = [0] * total, ["none"] * total
    for i, length in zip(active, draft.lens, strict=True):
        lens[i], sources[i] = length, "dspark"
    ids = among(draft.ids)
    assert ids is not None
    return Draft(ids, tuple(lens), among(draft.probs), among(draft.confidence), tuple(sources))
