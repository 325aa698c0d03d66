"""The state behind the plans: estimates, measured drift, pauses and trials. The decisions are `dspark.schedule`'s."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from dspark.config import Draft, StepRecord
from dspark.engine.batcher import Row
from dspark.engine.guard import Guard, Trials
from dspark.engine.proposer import Outlook, Proposer
from dspark.engine.request import Request
from dspark.schedule import (
    NO_DRAFT,
    Choice,
    CostCurves,
    Estimates,
    FixedPolicy,
    MixedPolicy,
    Policy,
    RowView,
    StepView,
)
from dspark.schedule.calibration import BUCKETS, RULES, Calibration, bucket_of
from dspark.schedule.drift import CostDrift
from dspark.schedule.planner import PlannedPolicy, drafting_ms, gain

_PAUSED = FixedPolicy(0)
TRIAL_LENGTH = 4
LOOK_COST = 1.5  # of a look over what is timed of it: the pass after it meets colder caches


class Scheduler:
    """Says how much to draft and to verify in each step, and learns from its record.

    Draft lengths come from older steps only; what verify lengths may know is the policy's business. `guard` is for
    policies that may stop drafting where it does not pay.
    """

    def __init__(
        self,
        policy: Policy,
        proposer: Proposer,
        costs: CostCurves | None = None,
        calibration: Calibration | None = None,
        guard: Guard | None = None,
    ):
        self._policy, self._proposer, self._costs, self._guard = policy, proposer, costs, guard
        self._plans = isinstance(policy, PlannedPolicy)
        self._calibration = calibration or Calibration({})
        self._estimates = Estimates(self._first_chance)
        self._trials = Trials()
        self._drift = CostDrift(known=costs is not None)
        self._on_wrong_costs: Callable[[], None] | None = None
        self._own: dict[int, Policy] = {}  # of requests that have one, by request id
        self._step: StepView | None = None  # None: nothing could be drafted
        self._sampling: list[Row] = []
        self._choices: tuple[Choice, ...] = ()
        self._look_ms = 0.0  # of the step
        self._claims: list[tuple[list[float], list[float]]] = []  # per row: calibrated confidences, and corrected
        self._kinds: dict[int, str] = {}  # by request id; see `_kind`

    @property
    def most(self) -> int:
        """Longest draft that can come up."""
        return min(max(self._policy.most, *(p.most for p in self._own.values()), 0), self._proposer.most)

    def prefer(self, request: Request, policy: Policy) -> None:
        """Plan this request by a policy of its own, which the guard does not pause."""
        self._own[request.id] = policy

    def when_costs_are_wrong(self, call: Callable[[], None]) -> None:
        """`call` once, after a step that shows that costs have to be measured anew; plans go on with corrected ones."""
        self._on_wrong_costs = call

    def draft_lens(self, rows: Sequence[Row]) -> list[int]:
        """Tokens to draft for each sampling row of the pass; the source goes to `row.source`."""
        began = time.perf_counter()
        drafted_before = self._drafted
        self._sampling = [row for row in rows if row.samples]
        self._choices, self._step = (NO_DRAFT,) * len(self._sampling), None
        if not self.most or not any(row.max_draft for row in self._sampling):
            return [0] * len(self._sampling)
        # Rows that are about to decode count too: a pause holds while one of the places is filled again.
        sampling = len(self._sampling)
        comparable = not any(row.prefill or row.request.id in self._own for row in rows)
        allowed = self._guard is None or self._guard.allows(sampling, comparable)
        # A pause costs nothing: neither a look at what could be drafted, nor learning what plain steps take where no
        # step with drafts is beside them.
        if not (allowed or self._own or drafted_before or (self._guard and self._guard.wants_plain)):
            return [0] * sampling
        self._step = step = self._view(rows, looks=allowed or bool(self._own))
        if allowed:
            choices = self._mixed(self._policy).draft_lens(step)
            if self._guard is not None and not self._plans:
                ratio = self._guard.ratio(sampling)
                choices = tuple(
                    choice if row.request.id in self._own else _worthwhile(choice, ratio)
                    for row, choice in zip(self._sampling, choices, strict=True)
                )
            self._choices = self._with_trials(step, choices)
        elif self._own:
            self._choices = self._mixed(_PAUSED).draft_lens(step)
        for row, choice in zip(self._sampling, self._choices, strict=True):
            row.source = choice.source
        self._look_ms = (time.perf_counter() - began) * 1e3
        return [choice.length for choice in self._choices]

    def verify_lens(self, draft: Draft) -> tuple[int, ...]:
        """How many of each row's drafted tokens the target is to see."""
        self._claims = self._confidences(draft)
        if self._step is None or not any(draft.lens):
            return draft.lens
        # A threshold is the user's word about confidences as they are; a plan wants the best estimate there is.
        confidence = [
            corrected if self._plans and row.request.id not in self._own else stated
            for row, (stated, corrected) in zip(self._sampling, self._claims, strict=True)
        ]
        lens = self._mixed(self._policy).verify_lens(self._step, self._choices, draft.lens, confidence)
        return tuple(
            drafted if choice.trial else n for choice, drafted, n in zip(self._choices, draft.lens, lens, strict=True)
        )

    def observe(self, record: StepRecord) -> None:
        """Learn from the step just made."""
        if self._drafted:
            self._learn(record)
        self._measure(record)

    @property
    def _drafted(self) -> bool:
        """Whether a draft was asked for in the latest step."""
        return any(choice.length for choice in self._choices)

    def release(self, request: Request) -> None:
        """The request has ended."""
        self._estimates.release(request.id)
        self._trials.release(request.id)
        if self._guard is not None:
            self._guard.release()
        self._own.pop(request.id, None)
        self._kinds.pop(request.id, None)

    def _mixed(self, common: Policy) -> Policy:
        """The policy of the pass: `common`, except for rows that have one of their own."""
        if not self._own:
            return common
        ids = (row.request.id for row in self._sampling)
        own = {place: self._own[request_id] for place, request_id in enumerate(ids) if request_id in self._own}
        return MixedPolicy(common, own) if own else common

    # Views ------------------------------------------------------------------------------------------------------

    def _view(self, rows: Sequence[Row], looks: bool) -> StepView:
        """The step to plan; without its rows where nobody looks at them."""
        tokens, context = sum(len(row.tokens) for row in rows), sum(row.request.kv_len for row in rows) // len(rows)
        sampled = sum(not row.request.params.greedy for row in self._sampling)
        views: tuple[RowView, ...] = ()
        if looks:
            share = self._draft_share(tokens, len(rows), context, sampled)
            views = tuple(self._row_view(row, share) for row in self._sampling)
        drift, cost = self._drift, self._drift.drafts(len(self._sampling))
        return StepView(
            views, tokens, len(rows), context, drift.draft, drift.rest, cost.more, cost.extra, sampled, cost.sizes
        )

    def _row_view(self, row: Row, draft_share: float) -> RowView:
        request = row.request
        # The target adds a token of its own, so the last token of a request is never worth a draft.
        most = min(row.max_draft, self._own.get(request.id, self._policy).most)
        room = max(0, min(most, request.remaining - 1)) if request.speculate else 0
        free = request.params.greedy or request.coupled
        if not room:
            return RowView(len(request.output_ids), 0, free, not request.params.greedy)
        survival: Callable[[str, int], tuple[float, ...]] = partial(
            self._estimates.survival, request.id, self._kind(request)
        )
        offers = self._proposer.offers(row, Outlook(survival, draft_share))
        return RowView(len(request.output_ids), room, free, not request.params.greedy, offers)

    def _draft_share(self, tokens: int, rows: int, context: int, sampled: int) -> float:
        """Drafting a block for all sampling rows, as a share of the step without it."""
        if self._costs is None:
            return 0.0
        plain = self._costs.step_times(tokens, 0, rows, context, sampled)[0] * self._drift.rest
        return self._costs.draft_times(len(self._sampling), sampled)[self.most] * self._drift.draft / plain

    # Pauses and trials ------------------------------------------------------------------------------------------

    def _with_trials(self, step: StepView, choices: Sequence[Choice]) -> tuple[Choice, ...]:
        """Sources nobody chose are tried now and then: on one row where no row uses them, else row by row."""
        planned = list(choices)
        steps = 1 if self._guard is None else self._guard.looks.steps
        chosen = {(c.source, self._kind(row.request)) for row, c in zip(self._sampling, choices, strict=True)}
        for key in chosen:
            self._trials.used(key)
        tried = set(chosen)
        for i, (row, view, choice) in enumerate(zip(self._sampling, step.rows, choices, strict=True)):
            for offer in view.offers:
                if offer.watched:
                    continue
                key = (offer.source, self._kind(row.request))
                if offer.source == choice.source:
                    self._trials.used((row.request.id, offer.source))
                    continue
                if key in chosen:
                    due = self._trials.due((row.request.id, offer.source), offer.cost, steps)
                elif key not in tried:
                    tried.add(key)
                    due = self._trials.due(key, offer.cost, steps)
                else:
                    continue
                if due:
                    planned[i] = Choice(offer, min(TRIAL_LENGTH, view.room, len(offer.survival)), trial=True)
        return tuple(planned)

    # Learning ---------------------------------------------------------------------------------------------------

    def _confidences(self, draft: Draft) -> list[tuple[list[float], list[float]]]:
        """Per row: calibrated confidences of its drafted slots, and the same as outcomes correct them."""
        nothing: tuple[list[float], list[float]] = ([], [])
        if draft.confidence is None:
            return [nothing] * len(draft.lens)
        claims = []
        for row, choice, length, stated in zip(
            self._sampling, self._choices, draft.lens, draft.confidence.tolist(), strict=True
        ):
            if not length or choice.offer is None or not choice.offer.confident:
                claims.append(nothing)
                continue
            request = row.request
            scaling = self._calibration.scaling(_rule(request), request.params.temperature)
            chances = scaling.apply_to(stated[:length])
            claims.append((chances, self._estimates.correct(choice.source, self._kind(request), chances)))
        return claims

    def _learn(self, record: StepRecord) -> None:
        """What the step's drafts were worth."""
        done = {row.request_id: row for row in record.rows}
        used = {
            (choice.source, self._kind(row.request))
            for row, choice in zip(self._sampling, self._choices, strict=True)
            if not choice.trial
        }
        for row, choice, (claimed, corrected) in zip(self._sampling, self._choices, self._claims, strict=True):
            result = done[row.request.id]
            if result.source == "none" or not result.committed or choice.offer is None or choice.offer.watched:
                continue
            source, kind = result.source, self._kind(row.request)
            if choice.trial:
                # What is known of a source that other rows use is of today.
                self._estimates.fade(row.request.id, source, kind, shared=(source, kind) not in used)
                if result.accepted:
                    self._trials.won((source, kind))
                    self._trials.won((row.request.id, source))
            self._estimates.observe(row.request.id, source, kind, result.verified, result.accepted, claimed, corrected)

    def _measure(self, record: StepRecord) -> None:
        """How far measured times are from predicted ones; and what the guard has to know."""
        step, times = self._step, record.times
        if step is None or any(row.prefill for row in record.rows):
            return
        verified, plain, full, drafting = record.tokens - step.tokens, 1.0, 1.0, 0.0
        if self._costs is not None:
            curve = self._costs.step_times(step.tokens, verified, step.pass_rows, step.context, step.sampled_rows)
            plain, full = curve[0], curve[verified]
            drafting = drafting_ms(step, self._costs, self._choices) / step.draft_drift
        added, rows = full / plain - 1, len(self._sampling)
        rest_ms = times.verify_ms + times.host_ms
        # With costs, what a pass of the drafter takes is predicted, and what lookup takes is part of a look.
        known = self._costs is not None
        look_ms = LOOK_COST * (self._look_ms + (times.draft_ms if known and not drafting else 0.0))
        decoding_ms = rest_ms - self._look_ms + (0.0 if known else times.draft_ms)
        self._drift.learn_drafts(record.step, rows, decoding_ms / plain, added, verified)
        ratio = self._drift.drafts(rows).ratio(added, verified)
        tried = any(choice.trial for choice in self._choices)
        if self._guard is not None and not tried and not any(row.request_id in self._own for row in record.rows):
            plain_ms = plain * self._drift.rest if known else max(decoding_ms, 1e-9) / ratio
            look = look_ms / plain_ms
            cost = ratio + look + drafting * step.draft_drift / plain_ms
            self._guard.observe(record, cost, look, self._gain(step, record) if step.rows else 0.0)
        if known:
            self._drift.observe(rest_ms, times.draft_ms, plain, full, drafting, ratio)
            if self._on_wrong_costs is not None and self._drift.wrong:
                call, self._on_wrong_costs = self._on_wrong_costs, None
                call()

    def _gain(self, step: StepView, record: StepRecord) -> float:
        """What the step's drafts brought, as a share of a step without them. Where costs are unknown, drafts are taken
        to cost nothing: what they do is for the guard to measure."""
        verified, accepted = (sum(getattr(row, name) for row in record.rows) for name in ("verified", "accepted"))
        if self._costs is None:
            return accepted / len(record.rows)
        return gain(step, self._choices, verified, accepted, self._costs)

    def _first_chance(self, kind: str) -> tuple[float, ...]:
        """What the drafter's slots were worth when it was calibrated."""
        rule, _, bucket = kind.rpartition(" ")
        return self._calibration.chance(rule or RULES[0], BUCKETS[bucket])

    def _kind(self, request: Request) -> str:
        """What requests must share for one to learn from another: rule and range of temperature."""
        kind = self._kinds.get(request.id)
        if kind is None:
            bucket = bucket_of(request.params.temperature)
            kind = self._kinds[request.id] = bucket if bucket == "greedy" else f"{_rule(request)} {bucket}"
        return kind


def _worthwhile(choice: Choice, ratio: float | None) -> Choice:
    """Pause a request whose draft is not expected to bring what drafting steps have been measured to cost."""
    if ratio is None or choice.offer is None or 1 + choice.offer.kept(choice.length) >= ratio:
        return choice
    return NO_DRAFT


def _rule(request: Request) -> str:
    return "coupled" if request.coupled else "rejection"
