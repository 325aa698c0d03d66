"""The one decode loop: draft, verify, commit. Plain decoding is the proposer that proposes nothing."""

import time
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from dspark.config import Commit, Draft, RowRecord, SlotRule, StepRecord, StepTimes, Streams
from dspark.engine.batcher import Batcher, Row
from dspark.engine.proposer import Proposer
from dspark.engine.request import Request, TokenLogprobs
from dspark.engine.scheduler import Scheduler
from dspark.errors import RequestError
from dspark.target import KvPool, Target
from dspark.verify import accept, processed_probs

_NO_DRAFT: tuple[str, int, list[float]] = ("none", 0, [])


class DecodeLoop:
    """Moves every running request on by one pass. Holds the target's cache; the proposer holds its own."""

    def __init__(self, target: Target, proposer: Proposer, scheduler: Scheduler, batcher: Batcher, pool: KvPool):
        self.target, self.proposer, self.scheduler, self.batcher = target, proposer, scheduler, batcher
        self._pool = pool
        self._device = target.decoder.device
        self._finished: list[Request] = []
        self._steps = 0

    @torch.inference_mode()
    def step(self) -> StepRecord | None:
        """One pass; None when no request is waiting or running."""
        clock = _Clock(self._device)
        rows = self.batcher.next_rows(self.scheduler.most)
        if not rows:
            return None
        sampling = [row for row in rows if row.samples]
        streams = _streams(sampling)
        lens = self.scheduler.draft_lens(rows)
        clock.lap("host")
        drafted = self.proposer.propose(sampling, lens, streams)
        clock.lap("draft")
        draft = drafted.truncate(self.scheduler.verify_lens(drafted))
        for row, ids, length in zip(sampling, draft.ids.tolist(), draft.lens, strict=True):
            row.draft_ids = ids[:length]
        context = max(row.request.kv_len for row in rows)
        logits, taps = self._score(rows)
        clock.lap("verify")
        commits = self._commit(sampling, draft, streams, logits)
        self._keep(rows, commits, taps, clock)
        clock.lap("host")
        record = self._record(rows, commits, drafted, context, clock.times())
        self.scheduler.observe(record)
        return record

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call; the caller removes them."""
        finished, self._finished = self._finished, []
        return finished

    def remove(self, request: Request) -> None:
        """Forget a request; its cache stays as a prefix for others, or its slots are free."""
        if self.batcher.remove(request):
            self.proposer.retire(request)
        else:
            self.proposer.release(request)
        self.scheduler.release(request)

    def _score(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
        """The target's pass: logits [N, V] at every sampled position, and the taps of every token."""
        tokens = torch.tensor([t for row in rows for t in row.tokens + row.draft_ids], device=self._device)
        sampled, first = [], 0
        for row in rows:
            end = first + len(row.tokens) + len(row.draft_ids)
            if row.samples:
                sampled.append(torch.arange(first + len(row.tokens) - 1, end))
            first = end
        decoder = self.target.decoder
        hidden, taps = decoder.run(tokens, [row.pass_row() for row in rows], self._pool, self.proposer.taps)
        if not sampled:
            return hidden.new_zeros(0, self.target.spec.vocab_size), taps
        return decoder.logits(hidden[torch.cat(sampled).to(self._device)]), taps

    def _commit(self, sampling: Sequence[Row], draft: Draft, streams: Streams, logits: Tensor) -> dict[int, Commit]:
        """Decide, then append to each request what plain decoding would have; by request id."""
        if not sampling:
            return {}
        rules = [row.request.slot_rule(row.draft_ids[:k]) for row in sampling for k in range(len(row.draft_ids) + 1)]
        try:
            probs = processed_probs(logits, rules)
        except RequestError:
            probs = self._probs_row_by_row(sampling, logits, rules)
        verdict = accept(draft, probs, streams)
        commits, first = {}, 0
        for row, accepted, next_id in zip(sampling, verdict.num_accepted, verdict.next_ids, strict=True):
            request, drafted = row.request, len(row.draft_ids)
            if request.error is None:
                commit = request.commit(row.draft_ids[:accepted] + [next_id], accepted, drafted)
                if request.params.logprobs is not None:
                    count = len(commit.token_ids)
                    request.logprobs += _token_logprobs(logits[first : first + count], commit, request.params.logprobs)
                commits[request.id] = commit
            first += drafted + 1
        return commits

    def _probs_row_by_row(self, sampling: Sequence[Row], logits: Tensor, rules: Sequence[SlotRule]) -> Tensor:
        """Find the requests whose masks leave no token and end them alone."""
        probs, first = torch.zeros_like(logits), 0
        for row in sampling:
            end = first + len(row.draft_ids) + 1
            try:
                probs[first:end] = processed_probs(logits[first:end], rules[first:end])
            except RequestError as error:
                row.request.error, row.request.finish_reason = str(error), "error"
                probs[first:end, 0] = 1.0  # never committed
            first = end
        return probs

    def _keep(self, rows: Sequence[Row], commits: dict[int, Commit], taps: Tensor | None, clock: "_Clock") -> None:
        """State how much of the pass stays cached, show it to the proposer, and hand out the text."""
        first = 0
        for row in rows:
            request, ran = row.request, len(row.tokens) + len(row.draft_ids)
            commit = commits.get(request.id)
            # A prompt chunk stays whole; of a decoding row stay the anchor and the accepted drafts.
            kept = len(row.tokens) if row.prefill or commit is None else len(commit.token_ids)
            request.kv_len += kept
            if request.finish_reason:
                self._finished.append(request)
            if request.error is None:  # a request that ends well may be the prefix of another
                clock.lap("host")
                self.proposer.observe(row, None if taps is None else taps[first : first + kept], kept)
                clock.lap("draft")
            if commit:
                request.emit(token_ids=commit.token_ids)
            request.steps += row.samples
            first += ran

    def _record(
        self, rows: Sequence[Row], commits: dict[int, Commit], drafted: Draft, context: int, times: StepTimes
    ) -> StepRecord:
        confidences = repeat([]) if drafted.confidence is None else drafted.confidence.tolist()
        drafts = zip(drafted.sources, drafted.lens, confidences, strict=False)
        records = []
        for row in rows:
            source, length, confidence = next(drafts, _NO_DRAFT) if row.samples else _NO_DRAFT
            record = _row_record(row, commits.get(row.request.id), source, length, confidence)
            row.request.stats.add(record, times)
            records.append(record)
        self._steps += 1
        tokens = sum(len(row.tokens) + len(row.draft_ids) for row in rows)
        return StepRecord(self._steps, tokens, context, times, tuple(records))


class _Clock:
    """Splits a step's time into parts; waits for the device where work runs asynchronously."""

    def __init__(self, device: torch.device):
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else None
        self._parts = {"draft": 0.0, "verify": 0.0, "host": 0.0}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        if self._synchronize:
            self._synchronize()
        now = time.perf_counter()
        self._parts[part] += (now - self._last) * 1e3
        self._last = now

    def times(self) -> StepTimes:
        return StepTimes(self._parts["draft"], self._parts["verify"], self._parts["host"])


def _streams(rows: Sequence[Row]) -> Streams:
    requests = [row.request for row in rows]
    return Streams(
        tuple(r.coupled for r in requests),
        tuple(r.key for r in requests),
        tuple(r.num_tokens for r in requests),
        tuple(r.steps for r in requests),
    )


def _row_record(row: Row, commit: Commit | None, source: str, drafted: int, confidence: Sequence[float]) -> RowRecord:
    verified = len(row.draft_ids)
    accepted = commit.num_accepted if commit else 0
    return RowRecord(
        request_id=row.request.id,
        source=source,
        drafted=drafted,
        verified=verified,
        accepted=accepted,
        committed=len(commit.token_ids) if commit else 0,
        truncated=commit.truncated if commit else 0,
        prefill=len(row.tokens) if row.prefill else 0,
        slot_accepted=tuple(slot < accepted for slot in range(verified)),
        confidence=tuple(confidence[:verified]),
    )


def _token_logprobs(logits: Tensor, commit: Commit, top: int) -> list[TokenLogprobs]:
    """Log-probabilities of committed tokens under the target's unprocessed distribution; logits [committed, V]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    best = torch.topk(logprobs, max(top, 1), dim=-1)
    result = []
    for i, token_id in enumerate(commit.token_ids):
        pairs = zip(best.indices[i, :top].tolist(), best.values[i, :top].tolist(), strict=True)
        result.append(TokenLogprobs(token_id, logprobs[i, token_id].item(), tuple(pairs)))
    return result
