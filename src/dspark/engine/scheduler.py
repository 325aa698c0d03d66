"""The state behind the plans: estimates, measured drift, pauses and trials. The decisions are `dspark.schedule`'s."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from dspark.config import Draft, StepRecord
from dspark.engine.batcher import Row
from dspark.engine.guard import Guard, Trials
from dspark.engine.proposer import Outlook, Proposer
from dspark.engine.request import Request
from dspark.schedule import NO_DRAFT, Choice, CostCurves, Estimates, Policy, RowView, StepView
from dspark.schedule.calibration import Calibration, bucket_of
from dspark.schedule.planner import PlannedPolicy, drafting_ms

DRIFT_MEMORY, MOST_DRIFT = 32, 4.0  # steps; factor by which one step may differ from its prediction
TRIAL_LENGTH = 4


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
        self._estimates = Estimates()
        self._trials = Trials()
        self._drift = {"draft": 1.0, "rest": 1.0}
        self._step: StepView | None = None  # None: nothing could be drafted
        self._sampling: list[Row] = []
        self._choices: tuple[Choice, ...] = ()
        self._claims: list[tuple[list[float], list[float]]] = []  # per row: calibrated confidences, and corrected

    @property
    def most(self) -> int:
        """Longest draft that can come up."""
        return min(self._policy.most, self._proposer.most)

    def draft_lens(self, rows: Sequence[Row]) -> list[int]:
        """Tokens to draft for each sampling row of the pass; the source goes to `row.source`."""
        self._sampling = [row for row in rows if row.samples]
        self._choices, self._step = (NO_DRAFT,) * len(self._sampling), None
        if not self.most or not any(row.max_draft for row in self._sampling):
            return [0] * len(self._sampling)
        self._step = step = self._view(rows)
        decoding = sum(not row.prefill for row in rows)
        if self._guard is None or self._guard.allows(decoding, decoding < len(rows)):
            choices = self._policy.draft_lens(step)
            if self._guard is not None and not self._plans:
                choices = tuple(_worthwhile(choice, self._guard.ratio(decoding)) for choice in choices)
            self._choices = self._with_trials(step, choices)
        for row, choice in zip(self._sampling, self._choices, strict=True):
            row.source = choice.source
        return [choice.length for choice in self._choices]

    def verify_lens(self, draft: Draft) -> tuple[int, ...]:
        """How many of each row's drafted tokens the target is to see."""
        self._claims = self._confidences(draft)
        if self._step is None or not any(draft.lens):
            return draft.lens
        # A threshold is the user's word about confidences as they are; a plan wants the best estimate there is.
        confidence = [corrected if self._plans else stated for stated, corrected in self._claims]
        lens = self._policy.verify_lens(self._step, self._choices, draft.lens, confidence)
        return tuple(
            drafted if choice.trial else n for choice, drafted, n in zip(self._choices, draft.lens, lens, strict=True)
        )

    def observe(self, record: StepRecord) -> None:
        """Learn from the step just made."""
        done = {row.request_id: row for row in record.rows}
        for row, choice, (claimed, corrected) in zip(self._sampling, self._choices, self._claims, strict=True):
            result = done[row.request.id]
            if result.source == "none" or not result.committed:
                continue
            source, kind = result.source, _kind(row.request)
            if choice.trial:
                self._estimates.fade(row.request.id, source, kind)
                if result.accepted:
                    self._trials.won((source, kind))
                    self._trials.won((row.request.id, source))
            self._estimates.observe(row.request.id, source, kind, result.verified, result.accepted, claimed, corrected)
        self._measure(record)

    def release(self, request: Request) -> None:
        """The request has ended."""
        self._estimates.release(request.id)
        self._trials.release(request.id)

    # Views ------------------------------------------------------------------------------------------------------

    def _view(self, rows: Sequence[Row]) -> StepView:
        tokens, context = sum(len(row.tokens) for row in rows), sum(row.request.kv_len for row in rows) // len(rows)
        share = self._draft_share(tokens, len(rows), context)
        views = tuple(self._row_view(row, share) for row in self._sampling)
        sampled = sum(view.sampled for view in views)
        return StepView(views, tokens, len(rows), context, self._drift["draft"], self._drift["rest"], sampled)

    def _row_view(self, row: Row, draft_share: float) -> RowView:
        request = row.request
        # The target adds a token of its own, so the last token of a request is never worth a draft.
        room = max(0, min(row.max_draft, request.remaining - 1)) if request.speculate else 0
        free = request.params.greedy or request.coupled
        if not room:
            return RowView(len(request.output_ids), 0, free, not request.params.greedy)
        survival: Callable[[str, int], tuple[float, ...]] = partial(
            self._estimates.survival, request.id, _kind(request)
        )
        offers = self._proposer.offers(row, Outlook(survival, draft_share))
        return RowView(len(request.output_ids), room, free, not request.params.greedy, offers)

    def _draft_share(self, tokens: int, rows: int, context: int) -> float:
        """Drafting a block for all sampling rows, as a share of the step without it."""
        if self._costs is None:
            return 0.0
        sampled = sum(not row.request.params.greedy for row in self._sampling)
        plain = float(self._costs.step_ms(tokens, 0, rows, context, sampled)[0]) * self._drift["rest"]
        return float(self._costs.draft_ms(len(self._sampling), sampled)[self.most]) * self._drift["draft"] / plain

    # Pauses and trials ------------------------------------------------------------------------------------------

    def _with_trials(self, step: StepView, choices: Sequence[Choice]) -> tuple[Choice, ...]:
        """Sources nobody chose are tried now and then: on one row where no row uses them, else row by row."""
        planned = list(choices)
        chosen = {(c.source, _kind(row.request)) for row, c in zip(self._sampling, choices, strict=True)}
        for key in chosen:
            self._trials.used(key)
        tried = set(chosen)
        for i, (row, view, choice) in enumerate(zip(self._sampling, step.rows, choices, strict=True)):
            for offer in view.offers:
                key = (offer.source, _kind(row.request))
                if offer.source == choice.source:
                    self._trials.used((row.request.id, offer.source))
                    continue
                if key in chosen:
                    due = self._trials.due((row.request.id, offer.source), offer.cost)
                elif key not in tried:
                    tried.add(key)
                    due = self._trials.due(key, offer.cost)
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
        chances = self._calibrated(draft.confidence).tolist()
        for row, choice, length, stated in zip(self._sampling, self._choices, draft.lens, chances, strict=True):
            if not length or choice.offer is None or not choice.offer.confident:
                claims.append(nothing)
                continue
            stated = stated[:length]
            claims.append((stated, self._estimates.correct(choice.source, _kind(row.request), stated)))
        return claims

    def _calibrated(self, confidence: Tensor) -> Tensor:
        if not self._calibration.scalings:
            return confidence
        calibrated = confidence.float().cpu().clone()
        groups: dict[tuple[str, float], list[int]] = {}
        for i, row in enumerate(self._sampling):
            groups.setdefault((_rule(row.request), row.request.params.temperature), []).append(i)
        for (rule, temperature), members in groups.items():
            calibrated[members] = self._calibration.apply(calibrated[members], rule, temperature)
        return calibrated

    def _measure(self, record: StepRecord) -> None:
        """How far measured times are from predicted ones; and what the guard has to know."""
        if any(choice.trial for choice in self._choices) or any(row.prefill for row in record.rows):
            return
        if self._guard is not None:
            self._guard.observe(record)
        step = self._step
        if self._costs is None or step is None:
            return
        verified = record.tokens - step.tokens
        curve = self._costs.step_ms(step.tokens, verified, step.pass_rows, step.context, step.sampled_rows)
        self._follow("rest", (record.times.verify_ms + record.times.host_ms) / float(curve[verified]))
        if predicted := drafting_ms(step, self._costs, self._choices):
            self._follow("draft", record.times.draft_ms * self._drift["draft"] / predicted)

    def _follow(self, part: str, ratio: float) -> None:
        now = self._drift[part]
        ratio = min(max(ratio, now / MOST_DRIFT), now * MOST_DRIFT)
        self._drift[part] = now + (ratio - now) / DRIFT_MEMORY


def _worthwhile(choice: Choice, ratio: float | None) -> Choice:
    """Pause a request whose draft is not expected to bring what drafting steps have been measured to cost."""
    if ratio is None or choice.offer is None or 1 + choice.offer.kept(choice.length) >= ratio:
        return choice
    return NO_DRAFT


def _rule(request: Request) -> str:
    return "coupled" if request.coupled else "rejection"


def _kind(request: Request) -> str:
    """What requests must share for one to learn from another: rule and range of temperature."""
    bucket = bucket_of(request.params.temperature)
    return bucket if bucket == "greedy" else f"{_rule(request)} {bucket}"
