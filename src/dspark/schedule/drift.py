"""How measured step times differ from a profile's: what plans correct at once, and whether it has to be measured anew.

Everything here comes from finished steps, which is past information under any rule (docs/exactness.md, clause 4).
"""

import math

from dspark.schedule.profile import ProfileDrift

MEMORY = 32  # steps after which an older one counts 1/e
MOST = 4.0  # factor by which one step may differ from what was expected of it, and what draft tokens cost from it
# Of the logarithm of one step's time over the step's before it, on a shared machine; a plain step alone among others
# makes two pairs, and its noise counts in both.
NOISE = 0.15
# How far off a profile is: in what draft tokens cost each, and in a step with any over one without.
TOKEN_ERROR, STEP_ERROR = 0.3, 0.05
UNKNOWN = 0.5  # the latter where there is no profile
AGE, AGE_EVERY = 8192, 256  # steps after which what was learnt counts 1/e; after which that is worked out at the latest
LARGEST = 0.5  # surprise, as a logarithm, that a single pair may be


class DraftCost:
    """What draft tokens add to a step without the drafter's pass, learnt from steps in a row of which one has more of
    them than the other: between those the machine is as fast as it was, however it wanders otherwise.

    Two numbers correct the prediction: `more` is what a token costs over it, `extra` what a step with any draft token
    does, since sizes that a profile measured in different moments are off against each other. Both are what a Kalman
    filter makes of the pairs, and go back to the profile's word with the steps that bring none: a price that was too
    high keeps drafts, and so pairs, from being made.
    """

    def __init__(self, error: float):
        self._token, self._step = 0.0, 0.0  # more - 1 and log(extra)
        self._first = (TOKEN_ERROR**2, error**2)
        self._var, self._cov = self._first, 0.0
        self._steps = 0  # since the last pair

    @property
    def more(self) -> float:
        """Cost of a draft token over its prediction."""
        return 1 + self._token

    @property
    def extra(self) -> float:
        """Time of a step with draft tokens over what `more` leads to expect."""
        return math.exp(self._step)

    def ratio(self, added: float, drafts: bool) -> float:
        """Time of a step over that of one without draft tokens, from what the profile says they add, in such steps."""
        return max(1.0, math.exp(self._log(added, drafts)))

    def passed(self) -> None:
        """One more step."""
        self._steps += 1
        if self._steps >= AGE_EVERY:
            self._age()

    def learn(self, change: float, before: tuple[float, bool], after: tuple[float, bool]) -> None:
        """`change` is the logarithm of a step's time over the time of the one before; of both: what the profile says
        their draft tokens add, and whether they had any."""
        self._age()
        token = self._slope(after[0]) - self._slope(before[0])
        step = float(after[1]) - float(before[1])
        surprise = min(max(change - self._log(*after) + self._log(*before), -LARGEST), LARGEST)
        (var_token, var_step), cov = self._var, self._cov
        gain_token, gain_step = var_token * token + cov * step, cov * token + var_step * step
        total = gain_token * token + gain_step * step + NOISE**2
        self._token = min(max(self._token + gain_token / total * surprise, 1 / MOST - 1), MOST - 1)
        self._step = min(max(self._step + gain_step / total * surprise, -math.log(MOST)), math.log(MOST))
        self._var = var_token - gain_token**2 / total, var_step - gain_step**2 / total
        self._cov = cov - gain_token * gain_step / total

    def _age(self) -> None:
        """Bring what is known to the present step."""
        left, self._steps = math.exp(-self._steps / AGE), 0
        self._token, self._step, self._cov = left * self._token, left * self._step, left**2 * self._cov
        first, var = self._first, self._var
        self._var = first[0] + left**2 * (var[0] - first[0]), first[1] + left**2 * (var[1] - first[1])

    def _log(self, added: float, drafts: bool) -> float:
        return math.log(1 + self.more * added) + self._step if drafts else 0.0

    def _slope(self, added: float) -> float:
        return added / (1 + self.more * added)


class CostDrift:
    """Measured over predicted times of late, by part of a step.

    `draft` is the drafter's pass, `rest` a step without it and without draft tokens, and `drafts` what these add to
    the rest: a profile that is wrong about them would verify too many or too few for ever. `known`: there is a profile
    to correct; without one only `drafts` are learnt.
    """

    def __init__(self, known: bool = True) -> None:
        self._known = known
        self.draft = self.rest = 1.0
        self._costs: dict[int, DraftCost] = {}  # by requests, to the power of two: sizes are off each in its own way
        self._last: tuple[int, int, float, tuple[float, bool]] | None = None  # step, rows, time, draft tokens
        self._draft_steps = 0
        self._whole = ProfileDrift()

    def drafts(self, rows: int) -> DraftCost:
        """What draft tokens cost in steps of about that many rows."""
        load = rows.bit_length()
        if load not in self._costs:
            self._costs[load] = DraftCost(STEP_ERROR if self._known else UNKNOWN)
        return self._costs[load]

    @property
    def wrong(self) -> bool:
        """Whether the profile should be measured anew; see `ProfileDrift.needs_refresh`."""
        return self._whole.needs_refresh

    def learn_drafts(self, step: int, rows: int, ms: float, added: float, drafts: bool) -> None:
        """Step number `step` read no prompt and took `ms`, in units of what it would have taken without its draft
        tokens as far as that is known; these `added` so much by the profile."""
        cost, last = self.drafts(rows), self._last
        cost.passed()
        self._last = (step, rows, ms, (added, drafts))
        if last is None or last[:2] != (step - 1, rows) or min(ms, last[2]) <= 0 or last[3] == (added, drafts):
            return
        cost.learn(math.log(ms / last[2]), last[3], (added, drafts))

    def observe(
        self, rest_ms: float, draft_ms: float, plain_ms: float, full_ms: float, drafting_ms: float, ratio: float
    ) -> None:
        """A finished step that read no prompt.

        Args:
            rest_ms: time outside the drafter.
            draft_ms: time of drafting.
            plain_ms: what the profile says the step would have taken without draft tokens.
            full_ms: what it says the step's pass and host work take.
            drafting_ms: what it says of the drafter's pass; 0 where no model drafted.
            ratio: of the step's time over `plain_ms`, by what draft tokens are known to cost.
        """
        if not (rest_ms > 0 and plain_ms > 0):
            return
        before, self.rest = self.rest, _followed(self.rest, rest_ms / (plain_ms * ratio))
        if drafting_ms > 0 and draft_ms > 0:
            self._follow_draft(draft_ms / drafting_ms)
        else:  # a machine that has become faster or slower at the one has so at the other
            self.draft *= self.rest / before
        # A profile's error is what it says, not what plans make of it: no correction here.
        self._whole = self._whole.observe(
            rest_ms + draft_ms, full_ms + drafting_ms, full_ms > plain_ms or drafting_ms > 0
        )

    def _follow_draft(self, ratio: float) -> None:
        """A drafter that is thought too dear is seen in rare trials only, so the first of them count for more where
        they are faster than expected: nothing but a wrong profile makes a pass faster, while much makes it slower."""
        self._draft_steps += 1
        memory = min(self._draft_steps, MEMORY) if ratio < self.draft else MEMORY
        self.draft = _followed(self.draft, ratio, memory)


def _followed(now: float, ratio: float, memory: int = MEMORY) -> float:
    ratio = min(max(ratio, now / MOST), now * MOST)
    return now + (ratio - now) / memory
