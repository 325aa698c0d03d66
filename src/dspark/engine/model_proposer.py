"""Drafts from an independent smaller language model with the same tokenizer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspark.config import Draft, SlotRule, Streams
from dspark.engine.batcher import Row
from dspark.engine.prefix import Prefix
from dspark.engine.proposer import Outlook, StatelessProposer, no_draft, streams_of
from dspark.engine.request import Request
from dspark.errors import DrafterError
from dspark.schedule import Offer
from dspark.target import PassRow, Target
from dspark.verify import processed_probs, sample_draft

CATCH_UP_TOKENS = 512  # per pass


class ModelProposer(StatelessProposer):
    """Runs a small causal LM token by token, with its own cache at the same slots as the target's."""

    drafter_pass = True

    def __init__(self, model: Target, target: Target):
        if model.fingerprint.tokenizer != target.fingerprint.tokenizer:
            raise DrafterError(
                f"The drafting model {model.name} has another tokenizer than {target.name}; "
                "use a smaller model of the same family."
            )
        self.name = f"model:{model.name}"
        self._decoder = model.decoder
        self._vocab_size = target.spec.vocab_size
        self._context = model.spec.context
        self.shape: object = model.spec
        self._valid: dict[int, int] = {}  # per request, cached positions that hold committed tokens
        self.kv_token_bytes = model.decoder.kv_token_bytes

    def open_pool(self, slots: int, device: torch.device) -> None:
        self._pool = self._decoder.new_pool(slots)

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        """Nothing beyond the model's own context."""
        (offer,) = super().offers(row, outlook)
        room = max(0, self._context - row.request.num_tokens)
        return (replace(offer, survival=offer.survival[:room]),) if room else ()

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        active = [i for i, n in enumerate(lens) if n]
        if not active:
            return no_draft(len(rows))
        longest = max(lens)
        greedy = all(rows[i].request.params.greedy for i in active)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        probs = None if greedy else torch.zeros(len(rows), longest, self._vocab_size)
        logits = self._catch_up([rows[i].request for i in active])
        drafted: list[list[int]] = [[] for _ in rows]
        for slot in range(longest):
            if slot:
                still = [i for i in active if lens[i] > slot]
                logits = self._advance([(rows[i].request, drafted[i]) for i in still])
                active = still
            q = self._slot_probs(logits, [rows[i].request.slot_rule(drafted[i]) for i in active])
            chosen = sample_draft(q, streams_of(streams, active), slot)
            ids[active, slot] = chosen.cpu()
            if probs is not None:
                probs[active, slot] = q.to(probs)
            for i, token_id in zip(active, chosen.tolist(), strict=True):
                drafted[i].append(token_id)
        return Draft(ids, tuple(lens), probs, sources=tuple(self.name if n else "none" for n in lens))

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        # Draft tokens are cached up to the last but one; those the verdict dropped are stale.
        if row.request.id in self._valid:
            self._valid[row.request.id] = min(self._valid[row.request.id], row.request.kv_len)

    def release(self, request: Request) -> None:
        self.forget(request.id)

    def retire(self, request: Request) -> None:
        pass

    def adopt(self, request: Request, source: Prefix, length: int) -> None:
        valid = min(self._valid.get(source.owner, 0), length)
        self._pool.copy(source.start, request.start, valid)
        self._valid[request.id] = valid

    def forget(self, owner: int) -> None:
        self._valid.pop(owner, None)

    def _slot_probs(self, logits: Tensor, rules: list[SlotRule]) -> Tensor:
        width = logits.shape[1]
        if width < self._vocab_size:
            logits = torch.nn.functional.pad(logits, (0, self._vocab_size - width), value=float("-inf"))
        return processed_probs(logits[:, : self._vocab_size], rules)

    def _catch_up(self, requests: list[Request]) -> Tensor:
        """Run the committed tokens each cache lacks, in passes of bounded size; logits after each last token."""
        last: dict[int, Tensor] = {}
        behind = list(requests)
        while behind:
            rows, tokens, ends, room = [], [], [], CATCH_UP_TOKENS
            for request in behind:
                valid = self._valid.get(request.id, 0)
                chunk = request.tokens(valid)[:room]
                if not chunk:
                    continue
                room -= len(chunk)
                rows.append(PassRow(request.start, valid, len(chunk)))
                tokens += chunk
                ends.append((request, len(tokens) - 1))
                self._valid[request.id] = valid + len(chunk)
            hidden, _ = self._decoder.run(torch.tensor(tokens, device=self._decoder.device), rows, self._pool)
            last.update({request.id: hidden[end] for request, end in ends})
            behind = [r for r in behind if self._valid.get(r.id, 0) < r.num_tokens]
        return self._decoder.logits(torch.stack([last[r.id] for r in requests]))

    def _advance(self, drafts: list[tuple[Request, list[int]]]) -> Tensor:
        """Run each row's newest draft token; logits after it."""
        rows, tokens = [], []
        for request, drafted in drafts:
            position = request.num_tokens + len(drafted) - 1
            rows.append(PassRow(request.start, position, 1))
            tokens.append(drafted[-1])
            self._valid[request.id] = position + 1
        hidden, _ = self._decoder.run(torch.tensor(tokens, device=self._decoder.device), rows, self._pool)
        return self._decoder.logits(hidden)
