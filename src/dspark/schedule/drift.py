"""How measured step times differ from a profile's: what plans correct at once, and whether it has to be measured anew.

Everything here comes from finished steps, which is past information under any rule (docs/exactness.md, clause 4).
"""

from dspark.schedule.profile import ProfileDrift

MEMORY = 32  # steps after which an older one counts 1/e
TOKEN_MEMORY = 256  # the same of pairs of steps: what draft tokens cost is a small difference of two noisy times
MOST = 4.0  # factor by which one step may differ from what was expected of it
DOUBT = 1.5  # predicted difference of such pairs, in plain steps, squared and summed, before it is doubted
DEAD_ZONE = 1.25  # smaller differences of what draft tokens cost are within a profile's own error


class CostDrift:
    """Measured over predicted times of late, by part of a step.

    `draft` is the drafter's pass, `rest` everything else of a step, and `more` what draft tokens add to the rest, in
    units of `rest`: a profile that is wrong about them would verify too many or too few for ever.
    """

    def __init__(self) -> None:
        self.draft = self.rest = 1.0
        self._over = self._seen = 0.0  # over pairs of steps: sums of (not predicted * predicted) and of predicted ** 2
        self._last: tuple[float, float] | None = None  # time of the last step and of its draft tokens, in plain steps
        self._draft_steps = 0
        self._whole = ProfileDrift()

    @property
    def more(self) -> float:
        """What draft tokens cost over what was predicted; 1 while the difference is small."""
        ratio = max(1 + self._over / (self._seen + DOUBT), 1 / MOST)
        return 1.0 if 1 / DEAD_ZONE < ratio < DEAD_ZONE else ratio

    @property
    def wrong(self) -> bool:
        """Whether the profile should be measured anew; see `ProfileDrift.needs_refresh`."""
        return self._whole.needs_refresh

    def observe(self, rest_ms: float, draft_ms: float, plain_ms: float, full_ms: float, drafting_ms: float) -> None:
        """A finished step that read no prompt.

        Args:
            rest_ms: time outside the drafter.
            draft_ms: time of drafting.
            plain_ms: what the profile says the step would have taken without draft tokens.
            full_ms: what it says the step's pass and host work take.
            drafting_ms: what it says of the drafter's pass; 0 where no model drafted.
        """
        if not (rest_ms > 0 and plain_ms > 0):
            return
        self._learn_more(rest_ms / plain_ms, full_ms / plain_ms - 1)
        before, self.rest = self.rest, _followed(self.rest, rest_ms / (plain_ms + self.more * (full_ms - plain_ms)))
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

    def _learn_more(self, took: float, added: float) -> None:
        """From two steps in a row with different numbers of draft tokens, between which the machine is as fast as it
        was: a straight line through pairs. `added` is what was predicted for the draft tokens, both in plain steps."""
        last, self._last = self._last, (took, added)
        if last is None or last[1] == added:
            return
        change, more = added - last[1], self.more
        speed = (took / (1 + more * added) + last[0] / (1 + more * last[1])) / 2
        # Bounded as far above as below: noise, which is often larger than what is looked for, shall cancel.
        over = min(max((took - last[0]) / speed - change, -MOST * abs(change)), MOST * abs(change))
        keep = 1 - 1 / TOKEN_MEMORY
        self._over, self._seen = self._over * keep + over * change, self._seen * keep + change * change


def _followed(now: float, ratio: float, memory: int = MEMORY) -> float:
    ratio = min(max(ratio, now / MOST), now * MOST)
    return now + (ratio - now) / memory
