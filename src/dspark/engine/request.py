"""One request's state inside the engine, and what its caller gets."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dspark.config import Commit, RowRecord, SamplingParams, SlotRule, StepTimes
from dspark.engine.grammar import GrammarState
from dspark.engine.text import Piece, TextStream


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the target's unprocessed distribution: the token's own, and the best few."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class RequestStats:
    """Sums over one request's decoding steps; the token that ends the prompt's pass belongs to prefill.

    committed = accepted + steps - truncated. `cached_tokens` of the prompt were not run: the prefix cache had them.
    """

    cached_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    truncated: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    prefill_ms: float = 0.0
    slot_verified: list[int] = field(default_factory=list)
    slot_accepted: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per step, bonus and a final EOS included."""
        return self.committed / self.steps if self.steps else 0.0

    def add(self, row: RowRecord, times: StepTimes) -> None:
        if row.prefill:
            self.prefill_ms += times.step_ms
            return
        self.draft_ms += times.draft_ms
        self.verify_ms += times.verify_ms
        self.host_ms += times.host_ms
        self.steps += 1
        self.drafted += row.drafted
        self.verified += row.verified
        self.accepted += row.accepted
        self.committed += row.committed
        self.truncated += row.truncated
        self.sources[row.source] = self.sources.get(row.source, 0) + 1
        for slot, accepted in enumerate(row.slot_accepted):
            if slot == len(self.slot_verified):
                self.slot_verified.append(0)
                self.slot_accepted.append(0)
            self.slot_verified[slot] += 1
            self.slot_accepted[slot] += accepted


@dataclass(frozen=True)
class Output:
    """A finished answer. `finish_reason` is stop, length, abort or error; `error` says what went wrong."""

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Chunk:
    """What one step added to a streamed answer; the last chunk carries the whole output.

    `logprobs` go with the text handed out so far: those of tokens held back wait, those of tokens cut off never come.
    `offsets` say where in the whole text each of their tokens begins.
    """

    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    output: Output | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Request:
    """Tokens, cache position and stopping state of one running request.

    Between steps a decoding request has kv_len = num_tokens - 1; one in prefill has run `kv_len` prompt tokens.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        limit: int,
        end_ids: frozenset[int],
        text: TextStream,
        key: int,
        coupled: bool,
        on_chunk: Callable[[Chunk], None] | None = None,
        grammar: GrammarState | None = None,
    ):
        self.id = request_id
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.params = params
        self.limit = limit  # most tokens, prompt included, this request may have
        self.end_ids = end_ids
        self.text = text
        self.key = key
        self.coupled = coupled
        self.on_chunk = on_chunk
        self.grammar = grammar
        self.speculate = True
        self.start = -1  # first pool slot, -1 while waiting
        self.kv_len = 0
        self.steps = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.stats = RequestStats()
        self._logprobs_shown = 0
        self._plain_rule = SlotRule(params)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def in_prefill(self) -> bool:
        return not self.output_ids

    @property
    def remaining(self) -> int:
        return self.limit - self.num_tokens

    def tokens(self, start: int) -> list[int]:
        """Committed tokens from position `start` on."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[start:] + self.output_ids if start < prompt else self.output_ids[start - prompt :]

    def slot_rule(self, draft_ids: list[int]) -> SlotRule:
        """The rule for the token after `draft_ids`, with the history of that slot where the parameters look at it."""
        p = self.params
        mask = None
        if self.grammar is not None and self.error is None:
            mask = self.grammar.allowed(draft_ids)
            self._check_grammar()
        elif not (p.min_tokens or p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty):
            return self._plain_rule
        return SlotRule(p, self.prompt_ids, self.output_ids + draft_ids, tuple(self.end_ids), mask=mask)

    def commit(self, token_ids: list[int], num_accepted: int, drafted: int) -> Commit:
        """Append tokens one by one and stop exactly where plain decoding would."""
        for i, token_id in enumerate(token_ids):
            self.output_ids.append(token_id)
            stopped = token_id in self.end_ids
            if not stopped:
                may_stop = len(self.output_ids) >= self.params.min_tokens
                stopped = self.text.push(token_id, _kind(i, num_accepted, drafted), may_stop)
                if self.grammar is not None:
                    stopped |= self.grammar.push(token_id)
                    self._check_grammar()
            if stopped:
                self.finish_reason = self.finish_reason or "stop"
            elif self.num_tokens >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason:
                return Commit(tuple(token_ids[: i + 1]), num_accepted, len(token_ids) - i - 1, self.finish_reason)
        return Commit(tuple(token_ids), num_accepted, 0)

    def _check_grammar(self) -> None:
        """A grammar that cannot be followed any further ends its own request, and no other."""
        if self.grammar is not None and self.grammar.failure is not None:
            self.error, self.finish_reason = self.grammar.failure, "error"

    def emit(self, output: Output | None = None, token_ids: tuple[int, ...] = ()) -> None:
        """Hand the caller what is new; with `output` it is the last time."""
        if self.on_chunk is None:
            return
        pieces = tuple(self.text.take(finished=output is not None))
        if pieces or token_ids or output:
            begin, end = self._logprobs_shown, min(self.text.shown_tokens, len(self.logprobs))
            self._logprobs_shown = end
            self.on_chunk(
                Chunk(pieces, token_ids, output, tuple(self.logprobs[begin:end]), tuple(self.text.starts[begin:end]))
            )

    def output(self) -> Output:
        return Output(
            self.id,
            tuple(self.prompt_ids),
            tuple(self.output_ids),
            self.text.text,
            self.finish_reason or "abort",
            self.stats,
            tuple(self.logprobs) if self.params.logprobs is not None else None,
            self.error,
        )


def _kind(index: int, num_accepted: int, drafted: int) -> str:
    if index < num_accepted:
        return "accepted"
    if not drafted:
        return "plain"
    return "bonus" if num_accepted == drafted else "recovered"
