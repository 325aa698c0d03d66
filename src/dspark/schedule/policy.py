"""Policies: how many tokens to draft and to verify. One interface, no state, past information only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

POLICIES = ("fixed:N", "length", "history", "threshold:c", "scheduled", "auto")
MAX_DRAFT = 16
SHORT, LONG_FROM = 4, 64  # `length`: draft tokens of a young request, and the committed tokens at which it is old
HISTORY_FLOOR = 0.3  # `history`: chance of being kept below which a draft token is not worth its place in the pass


@dataclass(frozen=True, slots=True)
class Offer:
    """A source that can draft for a row now, and how far its tokens are expected to survive.

    `survival[k]` is the probability that draft tokens 0..k are all kept, as the past has it: nothing of it may depend
    on tokens drawn in this step. `cost` is the drafter's time as a share of the step without it, 0 where unknown.
    `confident` says that the drafted tokens will come with confidences; `watched` that the source learns from every
    step what its tokens are worth, also where they were not used, so that it need not be tried.
    """

    source: str
    survival: tuple[float, ...]
    drafter_pass: bool = False
    confident: bool = False
    cost: float = 0.0
    watched: bool = False

    def kept(self, length: int) -> float:
        """Expected draft tokens kept when `length` are verified."""
        return sum(self.survival[:length])

    def worth(self, length: int) -> float:
        """Tokens a step commits with this draft, per time of a step without it."""
        return (1 + self.kept(length)) / (1 + self.cost)


@dataclass(frozen=True, slots=True)
class RowView:
    """What a policy may know of one request that samples in this pass.

    `free` says that any plan is lossless for it: it is greedy or decided by rule `coupled`. `sampled` rows draw their
    draft tokens, which takes longer than choosing the likeliest.
    """

    committed: int  # output tokens so far
    room: int  # most draft tokens: what the pass and the request's own end leave
    free: bool
    sampled: bool = False
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class StepView:
    """The pass to plan: its sampling rows, its size without drafts, and measured over predicted times of late."""

    rows: tuple[RowView, ...]
    tokens: int  # anchors and prompt chunks
    pass_rows: int  # requests in the pass, those that only read their prompt included
    context: int  # cached positions of a request, on average
    draft_drift: float = 1.0
    rest_drift: float = 1.0
    more_drift: float = 1.0  # of what draft tokens add to the rest
    extra_drift: float = 1.0  # of the rest of a step with any, over what that leads to expect
    sampled_rows: int = 0  # sampling rows that are not greedy
    size_drifts: tuple[float, ...] = ()  # of a step with 0, 1, ... draft tokens, over all that; () where unknown


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a row's draft comes from and how long it is to be; a trial is verified whole, to learn from it."""

    offer: Offer | None = None
    length: int = 0
    trial: bool = False

    @property
    def source(self) -> str:
        return self.offer.source if self.offer and self.length else "none"


NO_DRAFT = Choice()


class Policy(Protocol):
    """Two decisions per step for the whole batch; see docs/exactness.md, clause 4, for what each may know."""

    @property
    def most(self) -> int:
        """Longest draft it may ask for."""
        ...

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        """Before drafting: a source and a length for every row."""
        ...

    def verify_lens(
        self, step: StepView, choices: Sequence[Choice], lens: Sequence[int], confidence: Sequence[Sequence[float]]
    ) -> tuple[int, ...]:
        """After drafting: how many of each row's `lens` drafted tokens the target sees.

        `confidence` holds the calibrated chance of each drafted slot, given that all before it are kept; an empty row
        means that its source states none.
        """
        ...


class _VerifyAll:
    """Policies that decide before drafting and change nothing after it."""

    __slots__ = ()

    def verify_lens(
        self, step: StepView, choices: Sequence[Choice], lens: Sequence[int], confidence: Sequence[Sequence[float]]
    ) -> tuple[int, ...]:
        return tuple(lens)


@dataclass(frozen=True, slots=True)
class FixedPolicy(_VerifyAll):
    """`fixed:N`: always N, fewer only where the request ends before."""

    length: int

    @property
    def most(self) -> int:
        return self.length

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        return tuple(best_source(row, self.length) for row in step.rows)


@dataclass(frozen=True, slots=True)
class LengthPolicy(_VerifyAll):
    """`length`: short drafts until the answer has found its way, then as long as the drafter goes."""

    most: int = MAX_DRAFT

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        return tuple(best_source(row, SHORT if row.committed < LONG_FROM else self.most) for row in step.rows)


@dataclass(frozen=True, slots=True)
class HistoryPolicy(_VerifyAll):
    """`history`: as far as the request's own acceptance lets a token hope to be kept, at least one."""

    most: int = MAX_DRAFT

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        return tuple(map(self._choice, step.rows))

    def _choice(self, row: RowView) -> Choice:
        offer = best_source(row, self.most).offer
        if offer is None:
            return NO_DRAFT
        hopeful = sum(survival >= HISTORY_FLOOR for survival in offer.survival)
        return Choice(offer, min(max(hopeful, 1), row.room))


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """`threshold:c`: drafts whole blocks and verifies up to the first confidence under c.

    Slot k's confidence depends on the tokens before k only, so stopping before k is lossless under both rules.
    """

    least: float
    most: int = MAX_DRAFT

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        return tuple(best_source(row, self.most) for row in step.rows)

    def verify_lens(
        self, step: StepView, choices: Sequence[Choice], lens: Sequence[int], confidence: Sequence[Sequence[float]]
    ) -> tuple[int, ...]:
        ends = []
        for length, chances in zip(lens, confidence, strict=True):
            under = (k for k, chance in enumerate(chances[:length]) if chance < self.least)
            ends.append(next(under, length))
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class MixedPolicy:
    """One policy for the batch and others for single rows of it, which the common one sees as rows without an offer.

    Rows of their own have policies that look at one row at a time.
    """

    common: Policy
    own: Mapping[int, Policy]  # by place in the batch

    @property
    def most(self) -> int:
        return max(self.common.most, *(policy.most for policy in self.own.values()))

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        rows = [replace(row, room=0, offers=()) if i in self.own else row for i, row in enumerate(step.rows)]
        choices = list(self.common.draft_lens(replace(step, rows=tuple(rows))))
        for i, policy in self.own.items():
            choices[i] = policy.draft_lens(_alone(step, i))[0]
        return tuple(choices)

    def verify_lens(
        self, step: StepView, choices: Sequence[Choice], lens: Sequence[int], confidence: Sequence[Sequence[float]]
    ) -> tuple[int, ...]:
        common_choices, common_lens = list(choices), list(lens)
        for i in self.own:
            common_choices[i], common_lens[i] = NO_DRAFT, 0
        planned = list(self.common.verify_lens(step, common_choices, common_lens, confidence))
        for i, policy in self.own.items():
            planned[i] = policy.verify_lens(
                _alone(step, i), choices[i : i + 1], lens[i : i + 1], confidence[i : i + 1]
            )[0]
        return tuple(planned)


def _alone(step: StepView, row: int) -> StepView:
    return replace(step, rows=step.rows[row : row + 1])


def best_source(row: RowView, length: int) -> Choice:
    """The offer worth most at `length` tokens, the first of equals; no draft where nothing is offered."""
    length = min(length, row.room)
    if length < 1 or not row.offers:
        return NO_DRAFT
    offer = max(row.offers, key=lambda offer: offer.worth(length))
    return Choice(offer, min(length, len(offer.survival)))
