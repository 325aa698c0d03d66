"""What crosses rooms in one step: drafts, verdicts, commits, and the record others read."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Guessed tokens of a batch, one row per request.

    A row r holds `lens[r]` guesses `ids[r, :lens[r]]`; the rest is padding. `probs` is the distribution each id was
    actually drawn from; None means point masses (lookup, greedy). `parents` is None for chains; for trees it holds
    each slot's parent slot in the row, -1 for children of the anchor.
    """

    ids: Int[Tensor, "B K"]
    lens: tuple[int, ...]
    probs: Float[Tensor, "B K V"] | None = None
    confidence: Float[Tensor, "B K"] | None = None
    sources: tuple[str, ...] = ()
    parents: Int[Tensor, "B K"] | None = None

    def truncate(self, lens: Sequence[int]) -> "Draft":
        """The same draft with rows of at most `lens` guesses."""
        return replace(self, lens=tuple(min(pair) for pair in zip(self.lens, lens, strict=True)))


@dataclass(frozen=True)
class Streams:
    """Where the randomness of a batch comes from; see `dspark.verify.noise`.

    `keys` are 64-bit integers made from (seed, choice index). `positions` is the absolute position of the first token
    this step may commit. `steps` counts the request's decoding steps, so that no draw of rule `rejection` is ever
    used twice.
    """

    coupled: tuple[bool, ...]
    keys: tuple[int, ...]
    positions: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """Per row: how many leading draft tokens stay, and the token after them (recovered or bonus)."""

    num_accepted: tuple[int, ...]
    next_ids: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """Tokens one row adds in one step, after the cut at EOS, stop strings and limits."""

    token_ids: tuple[int, ...]
    num_accepted: int  # draft tokens the verdict kept, before the cut
    truncated: int  # tokens of the verdict that the cut removed
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"


@dataclass(frozen=True)
class RowRecord:
    """What one request did in one step. committed = accepted + 1 - truncated for every decoding step."""

    request_id: int
    source: str  # the proposer the draft came from; "none" without a draft
    drafted: int
    verified: int
    accepted: int
    committed: int
    truncated: int
    prefill: int = 0  # prompt tokens run in this step
    slot_accepted: tuple[bool, ...] = ()  # per verified slot
    confidence: tuple[float, ...] = ()  # per verified slot, as the drafter says it; empty without a confidence head


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step by part; `host_ms` is everything outside model passes."""

    draft_ms: float
    verify_ms: float
    host_ms: float

    @property
    def step_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.host_ms


@dataclass(frozen=True)
class StepRecord:
    """One pass of the engine's loop: its rows, its size and its times."""

    step: int
    tokens: int  # tokens in the target pass
    context: int  # largest number of cached positions among the rows
    times: StepTimes
    rows: tuple[RowRecord, ...] = field(default=())
