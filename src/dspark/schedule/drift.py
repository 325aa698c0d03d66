"""How measured step times differ from a profile's: what plans correct at once, and whether it has to be measured anew.

Everything here comes from finished steps, which is past information under any rule (docs/exactness.md, clause 4).
"""

import math

from dspark.schedule.policy import MAX_DRAFT
from dspark.schedule.profile import ProfileDrift

MEMORY = 32  # steps after which an older one counts 1/e
MOST = 4.0  # factor by which one step may differ from what was expected of it, and what draft tokens cost from it
# Of the logarithm of one step's time over the step's before it, on a shared machine; a plain step alone among others
# makes two pairs, and its noise counts in both.
NOISE = 0.15
# How far off a profile is: in what draft tokens cost each, in a step with any over one without, and in a size of a
# step of one request over the others.
TOKEN_ERROR, STEP_ERROR, SIZE_ERROR = 0.3, 0.05, 0.05
UNKNOWN = 0.5  # in a step with any, where there is no profile
SIZES = 8  # numbers of draft tokens that are told apart; more are rare
AGE, AGE_EVERY = 8192, 256  # steps after which what was learnt counts 1/e; after which that is worked out at the latest
LARGEST = 0.5  # surprise, as a logarithm, that a single pair may be


class DraftCost:
    """What draft tokens add to a step without the drafter's pass, learnt from steps in a row of which one has more of
    them than the other: between those the machine is as fast as it was, however it wanders otherwise.

    Two numbers correct the prediction: `more` is what a token costs over it, `extra` what a step with any draft token
    does, since sizes that a profile measured in different moments are off against each other. With `sizes` there is one
    more for each number of draft tokens up to it, the last for all beyond: a step of one request has one of a few
    sizes, which come often enough to tell each from its neighbours. All are what a Kalman filter makes of the pairs,
    and go back to the profile's word with the steps that bring none: a price that was too high keeps drafts, and so
    pairs, from being made.
    """

    def __init__(self, error: float, sizes: int = 0):
        self._off = [0.0] * (2 + sizes)  # more - 1, log(extra), and of each size the logarithm of what is left
        self._first = [TOKEN_ERROR**2, error**2, *(SIZE_ERROR**2,) * sizes]  # variances before anything is learnt
        self._cov = [[var * (i == k) for k in range(2 + sizes)] for i, var in enumerate(self._first)]
        self._steps = 0  # since the last pair

    @property
    def more(self) -> float:
        """Cost of a draft token over its prediction."""
        return 1 + self._off[0]

    @property
    def extra(self) -> float:
        """Time of a step with draft tokens over what `more` leads to expect."""
        return math.exp(self._off[1])

    @property
    def sizes(self) -> tuple[float, ...]:
        """The same over that, by number of draft tokens from 0 on; () where sizes are not told apart."""
        own = [math.exp(off) for off in self._off[2:]]
        return (1.0, *own, *own[-1:] * (MAX_DRAFT - len(own))) if own else ()

    def ratio(self, added: float, count: int) -> float:
        """Time of a step with `count` draft tokens over that of one without, if they add `added` by the profile."""
        return max(1.0, math.exp(self._log(added, count)))

    def passed(self) -> None:
        """One more step."""
        self._steps += 1
        if self._steps >= AGE_EVERY:
            self._age()

    def learn(self, change: float, before: tuple[float, int], after: tuple[float, int]) -> None:
        """`change` is the logarithm of a step's time over the time of the one before; of both: what the profile says
        their draft tokens add, and how many these are."""
        self._age()
        differs = self._parts(*after)
        for i, part in self._parts(*before).items():
            differs[i] = differs.get(i, 0.0) - part
        parts = [(i, part) for i, part in differs.items() if part]
        surprise = min(max(change - self._log(*after) + self._log(*before), -LARGEST), LARGEST)
        gain = [sum(row[i] * part for i, part in parts) for row in self._cov]
        total = sum(gain[i] * part for i, part in parts) + NOISE**2
        moved = [off + own * surprise / total for off, own in zip(self._off, gain, strict=True)]
        limit = math.log(MOST)
        self._off = [min(max(moved[0], 1 / MOST - 1), MOST - 1), *(min(max(x, -limit), limit) for x in moved[1:])]
        for row, own in zip(self._cov, gain, strict=True):
            share = own / total
            row[:] = [cov - share * other for cov, other in zip(row, gain, strict=True)]

    def _age(self) -> None:
        """Bring what is known to the present step."""
        left, self._steps = math.exp(-self._steps / AGE), 0
        self._off = [left * off for off in self._off]
        kept = left**2
        for i, row in enumerate(self._cov):
            row[:] = [kept * cov for cov in row]
            row[i] += (1 - kept) * self._first[i]

    def _log(self, added: float, count: int) -> float:
        if not count:
            return 0.0
        own = self._off[self._place(count)] if len(self._off) > 2 else 0.0
        return math.log(1 + self.more * added) + self._off[1] + own

    def _parts(self, added: float, count: int) -> dict[int, float]:
        """What each number that matters changes of the logarithm of such a step's time, by its place."""
        if not count:
            return {}
        parts = {0: added / (1 + self.more * added), 1: 1.0}
        if len(self._off) > 2:
            parts[self._place(count)] = 1.0
        return parts

    def _place(self, count: int) -> int:
        return min(1 + count, len(self._off) - 1)


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
        self._last: tuple[int, int, float, tuple[float, int]] | None = None  # step, rows, time, draft tokens
        self._draft_steps = 0
        self._whole = ProfileDrift()

    def drafts(self, rows: int) -> DraftCost:
        """What draft tokens cost in steps of about that many rows."""
        load = rows.bit_length()
        if load not in self._costs:
            sizes = SIZES if self._known and rows == 1 else 0
            self._costs[load] = DraftCost(STEP_ERROR if self._known else UNKNOWN, sizes)
        return self._costs[load]

    @property
    def wrong(self) -> bool:
        """Whether the profile should be measured anew; see `ProfileDrift.needs_refresh`."""
        return self._whole.needs_refresh

    def learn_drafts(self, step: int, rows: int, ms: float, added: float, count: int) -> None:
        """Step number `step` read no prompt and took `ms`, in units of what it would have taken without its `count`
        draft tokens as far as that is known; these `added` so much by the profile."""
        cost, last = self.drafts(rows), self._last
        cost.passed()
        self._last = (step, rows, ms, (added, count))
        if last is None or last[:2] != (step - 1, rows) or min(ms, last[2]) <= 0 or last[3] == (added, count):
            return
        cost.learn(math.log(ms / last[2]), last[3], (added, count))

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
