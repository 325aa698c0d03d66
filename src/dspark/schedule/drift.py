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
WANDERS = 2048  # pairs of steps after which as much is unknown again
LARGEST = 0.5  # surprise, as a logarithm, that a single pair may be


class DraftCost:
    """What draft tokens add to a step without the drafter's pass, learnt from steps in a row of which one has more of
    them than the other: between those the machine is as fast as it was, however it wanders otherwise.

    Two numbers correct the prediction: `more` is what a token costs over it, `extra` what a step with any draft token
    does, since sizes that a profile measured in different moments are off against each other. Both are what a Kalman
    filter makes of the pairs: as sure as there are pairs for it, and the profile's word before.
    """

    def __init__(self, error: float = STEP_ERROR):
        self._token, self._step = 0.0, 0.0  # more - 1 and log(extra)
        self._first = (TOKEN_ERROR**2, error**2)
        self._var, self._cov = self._first, 0.0

    @property
    def more(self) -> float:
        """Cost of a draft token over its prediction."""
        return min(max(1 + self._token, 1 / MOST), MOST)

    @property
    def extra(self) -> float:
        """Time of a step with draft tokens over what `more` leads to expect."""
        return math.exp(self._step)

    def ratio(self, added: float, drafts: bool) -> float:
        """Time of a step over that of one without draft tokens, from what the profile says they add, in such steps."""
        return max(1.0, (1 + self.more * added) * self.extra) if drafts else 1.0

    def learn(self, change: float, before: tuple[float, bool], after: tuple[float, bool]) -> None:
        """`change` is the logarithm of a step's time over the time of the one before; of both: what the profile says
        their draft tokens add, and whether they had any."""
        token = self._slope(after[0]) - self._slope(before[0])
        step = float(after[1]) - float(before[1])
        surprise = change - math.log(self.ratio(*after) / self.ratio(*before))
        surprise = min(max(surprise, -LARGEST), LARGEST)
        (var_token, var_step), cov = self._var, self._cov
        gain_token, gain_step = var_token * token + cov * step, cov * token + var_step * step
        total = gain_token * token + gain_step * step + NOISE**2
        self._token = min(max(self._token + gain_token / total * surprise, 1 / MOST - 1), MOST - 1)
        self._step += gain_step / total * surprise
        self._cov = cov - gain_token * gain_step / total
        left = var_token - gain_token**2 / total, var_step - gain_step**2 / total
        self._var = (
            min(left[0] + TOKEN_ERROR**2 / WANDERS, self._first[0]),
            min(left[1] + STEP_ERROR**2 / WANDERS, self._first[1]),
        )

    def _slope(self, added: float) -> float:
        return added / (1 + self.more * added)


class CostDrift:
    """Measured over predicted times of late, by part of a step.

    `draft` is the drafter's pass, `rest` a step without it and without draft tokens, and `drafts` what these add to
    the rest: a profile that is wrong about them would verify too many or too few for ever.
    """

    def __init__(self) -> None:
        self.draft = self.rest = 1.0
        self._costs: dict[int, DraftCost] = {}  # by requests, to the power of two: sizes are off each in its own way
        self._last: tuple[DraftCost, float, tuple[float, bool]] | None = None
        self._draft_steps = 0
        self._whole = ProfileDrift()

    def drafts(self, rows: int, known: bool = True) -> DraftCost:
        """What draft tokens cost in steps of about that many rows; `known`: there is a profile to correct."""
        load = rows.bit_length()
        if load not in self._costs:
            self._costs[load] = DraftCost() if known else DraftCost(math.log(MOST))
        return self._costs[load]

    @property
    def wrong(self) -> bool:
        """Whether the profile should be measured anew; see `ProfileDrift.needs_refresh`."""
        return self._whole.needs_refresh

    def learn_drafts(self, cost: DraftCost, ms: float, added: float, drafts: bool) -> None:
        """A finished step that read no prompt took `ms` in units of what it would have taken without its draft tokens,
        as far as that is known; these `added` so much by the profile."""
        if ms <= 0:
            return
        last, self._last = self._last, (cost, ms, (added, drafts))
        if last is not None and last[0] is cost and last[2] != (added, drafts):
            cost.learn(math.log(ms / last[1]), last[2], (added, drafts))

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
