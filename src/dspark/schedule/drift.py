"""How measured step times differ from a profile's: what plans correct at once, and whether it has to be measured anew.

Everything here comes from finished steps, which is past information under any rule (docs/exactness.md, clause 4).
"""

from dspark.schedule.profile import ProfileDrift

MEMORY = 32  # steps after which an older one counts 1/e
TOKEN_MEMORY = 96  # the same of steps with draft tokens: what these cost is a small difference of two noisy times
MOST = 4.0  # factor by which one step may differ from what was expected of it
SAME_MOMENT = 16  # steps for which the machine is taken to be as fast as it was
FEWEST, PLAIN_MEMORY, PLAIN_MOST = 2, 8, 1.5  # the steps without drafts of a moment, which the others are held to
DOUBT = 0.5  # time of draft tokens, in plain steps, before what was predicted for them is doubted
DEAD_ZONE = 1.25  # smaller differences of what draft tokens cost are within a profile's own error


class CostDrift:
    """Measured over predicted times of late, by part of a step.

    `draft` is the drafter's pass, `rest` everything else of a step, and `more` what draft tokens add to the rest, in
    units of `rest`: a profile that is wrong about them would verify too many or too few for ever.
    """

    def __init__(self) -> None:
        self.draft = self.rest = 1.0
        self._added, self._predicted = 0.0, 0.0  # by draft tokens, in plain steps
        self._draft_steps = 0
        self._since_plain = SAME_MOMENT + 1
        self._plain, self._plain_steps = 1.0, 0  # measured over predicted in the steps without drafts of this moment
        self._whole = ProfileDrift()

    @property
    def more(self) -> float:
        """What draft tokens cost over what was predicted; 1 while the difference is small."""
        ratio = (max(self._added, 0.0) + DOUBT) / (self._predicted + DOUBT)
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
        verified = full_ms > plain_ms
        if not verified and not drafting_ms:
            self._learn_plain(rest_ms / plain_ms)
        else:
            self._since_plain += 1
        if verified and self._since_plain <= SAME_MOMENT and self._plain_steps >= FEWEST:
            added, predicted = rest_ms / self._plain / plain_ms - 1, full_ms / plain_ms - 1
            keep = 1 - 1 / TOKEN_MEMORY
            # Bounded as far above as below: noise, which is often larger than what is looked for, shall cancel.
            self._added = self._added * keep + min(max(added, (2 - MOST) * predicted), MOST * predicted)
            self._predicted = self._predicted * keep + predicted
        before, self.rest = self.rest, _followed(self.rest, rest_ms / (plain_ms + self.more * (full_ms - plain_ms)))
        if drafting_ms > 0 and draft_ms > 0:
            self._follow_draft(draft_ms / drafting_ms)
        else:  # a machine that has become faster or slower at the one has so at the other
            self.draft *= self.rest / before
        # A profile's error is what it says, not what plans make of it: no correction here.
        self._whole = self._whole.observe(rest_ms + draft_ms, full_ms + drafting_ms, verified or drafting_ms > 0)

    def _follow_draft(self, ratio: float) -> None:
        """A drafter that is thought too dear is seen in rare trials only, so the first of them count for more where
        they are faster than expected: nothing but a wrong profile makes a pass faster, while much makes it slower."""
        self._draft_steps += 1
        memory = min(self._draft_steps, MEMORY) if ratio < self.draft else MEMORY
        self.draft = _followed(self.draft, ratio, memory)

    def _learn_plain(self, ratio: float) -> None:
        if self._since_plain > SAME_MOMENT:  # those before are of another moment
            self._plain_steps = 0
        elif self._plain_steps:
            ratio = min(max(ratio, self._plain / PLAIN_MOST), self._plain * PLAIN_MOST)
        self._since_plain, self._plain_steps = 0, self._plain_steps + 1
        self._plain += (ratio - self._plain) / min(self._plain_steps, PLAIN_MEMORY)


def _followed(now: float, ratio: float, memory: int = MEMORY) -> float:
    ratio = min(max(ratio, now / MOST), now * MOST)
    return now + (ratio - now) / memory
