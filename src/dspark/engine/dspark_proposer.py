"""Drafts from a trained block drafter that reads the target's tapped layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.config import Draft, SlotRule, Streams
from dspark.drafter import Drafter, propose_block
from dspark.engine.batcher import Row
from dspark.engine.prefix import Prefix
from dspark.engine.proposer import Outlook, no_draft, spread, streams_of
from dspark.engine.request import Request
from dspark.schedule import Offer
from dspark.schedule.calibration import Calibration
from dspark.target import PassRow


class DsparkProposer:
    """Keeps the drafter's context cache at the target's slots, and proposes blocks.

    Taps of committed positions wait raw and are projected in one pass when a draft is next wanted, so that a request
    that is not drafted for costs no drafter pass.
    """

    name = "dspark"

    def __init__(self, drafter: Drafter, calibration: Calibration | None = None):
        self._drafter, self.calibration = drafter, calibration
        self.most = drafter.config.block_size
        self.shape: object = drafter.config
        self.taps = drafter.config.target_layer_ids
        self.slack = drafter.config.block_size
        config = drafter.config
        self.kv_token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * drafter.dtype.itemsize
        self._waiting: dict[int, list[Tensor]] = {}
        self._context_len: dict[int, int] = {}

    def open_pool(self, slots: int, device: torch.device) -> None:
        self._pool = self._drafter.new_pool(slots)

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        confident = self._drafter.confidence is not None or self._drafter.token_free is not None
        return (Offer(self.name, outlook.survival(self.name, self.most), True, confident, outlook.draft_cost),)

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        lens = [min(n, self._drafter.config.block_size) for n in lens]
        active = [i for i, n in enumerate(lens) if n]
        if not active:
            return no_draft(len(rows))
        requests = [rows[i].request for i in active]
        self._catch_up(requests)
        block = self._drafter.config.block_size
        anchors = torch.tensor([r.output_ids[-1] for r in requests], device=self._drafter.device)

        def rules_at(slot: int, drafted: Tensor) -> list[SlotRule]:
            return [r.slot_rule(ids) for r, ids in zip(requests, drafted.tolist(), strict=True)]

        draft = propose_block(
            self._drafter,
            anchors,
            [PassRow(r.start, r.kv_len, block) for r in requests],
            self._pool,
            [lens[i] for i in active],
            rules_at,
            streams_of(streams, active),
        )
        return spread(draft, active, len(rows))

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        assert taps is not None
        self._waiting.setdefault(row.request.id, []).append(taps.clone())

    def release(self, request: Request) -> None:
        self.forget(request.id)

    def retire(self, request: Request) -> None:
        pass

    def adopt(self, request: Request, source: Prefix, length: int) -> None:
        done = min(self._context_len.get(source.owner, 0), length)
        self._pool.copy(source.start, request.start, done)
        self._context_len[request.id] = done
        self._waiting[request.id] = _first(self._waiting.get(source.owner, []), length - done)

    def forget(self, owner: int) -> None:
        self._waiting.pop(owner, None)
        self._context_len.pop(owner, None)

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


def _first(chunks: Sequence[Tensor], count: int) -> list[Tensor]:
    """The first `count` positions of taps that came in chunks."""
    taken: list[Tensor] = []
    for chunk in chunks:
        if count <= 0:
            break
        taken.append(chunk[:count])
        count -= len(taken[-1])
    assert count <= 0, "taps of committed positions are missing"
    return taken
