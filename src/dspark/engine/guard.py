"""When drafting pauses because it does not pay, and when it is tried again.

Everything here looks at older steps, measured times included; which is past information under any rule.
"""

import math
from dataclasses import dataclass, field

from dspark.config import StepRecord

# A trial costs about as much as the plain steps it is charged: the first wait keeps trials near 1 % of the time.
FIRST_WAIT, LONGEST_WAIT = 128, 4096
FOLLOW_UPS = 2  # further trials at once, as long as they win
JUDGED_AFTER = 48  # drafting steps between judgements; with several requests fewer, see MOST_WEIGHT
RETRIED_FOR = 4  # drafting steps after a pause, however many requests
GROSS_AFTER, GROSS = 12, 0.85  # a loss of more than 15 % is judged after this many
MOST_WEIGHT = 3  # of a step in these counts: one of many requests says as much as several of one
# Gain that drafting has to show; after a pause few steps decide, so that less would be chance.
MARGIN, RETRY_MARGIN = 0.01, 0.02
FIRST_PAUSE, LONGEST_PAUSE = 64, 8192  # plain steps
CUT = 4  # a pause is that much shorter after the end of all its requests: the next ones' text may be of another kind
FIRST_PLAIN = 4  # plain steps at the start, every other one
# Drafting steps after which one plain step tells what drafts cost, and the same per gain and per squared gain: where
# drafts gain little, it has to be known well and costs little to find out.
PLAIN_EVERY, RAREST_PLAIN, EVERY_PER_GAIN, EVERY_PER_SQUARE = 16, 512, 320, 800
DRAFTING_MEMORY, GAIN_MEMORY = 48.0, 16.0
# Plain steps that looks for drafts may cost more than these save, before half as many are made; as many as a find of
# late has saved, where that is more.
LOOK_BUDGET = 0.1
RAREST_LOOK = 16  # steps
# What looks bring is averaged over so many steps, as few as tell code from chat: where text changes to one that is not
# worth drafting, looks go on until it is forgotten what they brought before. A rare look counts a few steps at most.
BROUGHT_MEMORY, MOST_BROUGHT = 24.0, 4
OUTLIER = 3.0  # a step that cost this many times the mean counts as that many: the machine was busy
FIRST_STALE = 256  # steps without a draft after which what drafts cost is measured again; then after twice as many

Key = tuple[int | str, str]  # (request, source), or (source, kind of request)


@dataclass(slots=True)
class _TrialClock:
    idle: int = 0  # steps since the source was last used or tried
    wait: int = FIRST_WAIT
    wins: int = 0  # trials won in a row
    follow_up: bool = False


class Trials:
    """Sources that nobody chose are tried again: after some steps, and twice as many after each time.

    A trial that wins is followed up at once, a few times; if the source is worth choosing, estimates show it then.
    Deterministic: the same steps give the same trials.
    """

    def __init__(self) -> None:
        self._clocks: dict[Key, _TrialClock] = {}

    def used(self, key: Key) -> None:
        """The source was chosen on its merits."""
        self._clocks.pop(key, None)  # a clock is made when the source is next left out

    def due(self, key: Key, cost: float = 1.0, steps: int = 1) -> bool:
        """The source was not chosen in these last steps; whether it is tried nevertheless, at `cost` plain steps."""
        clock = self._clocks.get(key)
        if clock is None:
            clock = self._clocks[key] = _TrialClock()
        clock.idle += steps
        if clock.follow_up:
            clock.follow_up = False
            return True
        if clock.idle < clock.wait * max(cost, 1.0):
            return False
        clock.idle, clock.wait, clock.wins = 0, min(2 * clock.wait, LONGEST_WAIT), 0
        return True

    def won(self, key: Key) -> None:
        """A trial had a token accepted."""
        clock = self._clocks.setdefault(key, _TrialClock())
        clock.wins += 1
        clock.follow_up = clock.wins <= FOLLOW_UPS

    def release(self, owner: int) -> None:
        """The request has ended."""
        for key in [key for key in self._clocks if key[0] == owner]:
            del self._clocks[key]


@dataclass(slots=True)
class _Mean:
    """Running mean; old values count 1/e after `memory` later ones."""

    memory: float
    count: int = 0
    value: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.value += (value - self.value) * min(1.0, times / min(self.count, self.memory))

    def doubt(self, count: int) -> None:
        """Let what is known weigh no more than `count` values."""
        self.count = min(self.count, count)


class Looks:
    """Looking for drafts costs host time; where that is more than the drafts found have saved of late, it is done every
    other step, then every fourth, and so on."""

    def __init__(self) -> None:
        self._debt = 0.0  # plain steps that looks have cost more than they brought
        self._since = 0
        self._gain = _Mean(GAIN_MEMORY)  # of looks that found drafts
        # Of all looks, by the steps they stand for. Each find by itself would set what is owed back to nothing, also
        # where finds are too rare to pay for the looks between them.
        self._brought = _Mean(BROUGHT_MEMORY)
        self.steps = 1  # that the look under way stands for

    def due(self) -> bool:
        """Whether to look in this step. Call it once per step."""
        self._since += 1
        if self._since < min(RAREST_LOOK, 1 << int(self._debt / self._budget)):
            return False
        self.steps, self._since = self._since, 0
        return True

    def looked(self, cost: float, gain: float | None) -> None:
        """What the look cost, and what the drafts it found saved, None if there were none: shares of a plain step."""
        brought = 0.0
        if gain is not None:
            self._gain.add(gain)
            # Drafts that lose are the guard's business; to stop looking would keep them from being judged.
            brought = max(0.0, self._gain.value)
        self._brought.add(brought, min(self.steps, MOST_BROUGHT))
        debt = self._debt + (cost - self._brought.value) * self.steps
        self._debt = min(max(0.0, debt), self._budget * RAREST_LOOK.bit_length())

    @property
    def _budget(self) -> float:
        return max(LOOK_BUDGET, self._gain.value)


@dataclass(slots=True)
class _Load:
    """What steps of about this many rows cost, in plain steps, and brought."""

    plain: int = 0  # steps that looked for no draft
    drafting: _Mean = field(default_factory=lambda: _Mean(DRAFTING_MEMORY))  # of steps with a draft
    looking: _Mean = field(default_factory=lambda: _Mean(DRAFTING_MEMORY))  # of steps with a draft or a look for one
    kept: _Mean = field(default_factory=lambda: _Mean(DRAFTING_MEMORY))  # tokens per row of those
    since_plain: int = 0
    since_draft: int = 0
    stale: int = FIRST_STALE
    judged_after: int = JUDGED_AFTER
    tested: int = 0
    pause: int = FIRST_PAUSE
    left: int = 0  # plain steps of the running pause still to come
    looks: Looks = field(default_factory=Looks)


class Guard:
    """Holds what steps with drafts, and with looks for them, bring against what they have been measured to cost, in
    steps that do neither, and pauses drafting where it is less. Sees to it that there are plain steps to measure by.

    Steps are kept apart by their number of rows, to the power of two. A pause ends after a number of steps that
    doubles with each loss; a few drafting steps then decide again.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._rests = False  # in the step under way
        self.wants_plain = False  # the step under way is plain in order to be measured
        self.looks = Looks()  # those of the load of the step under way

    def allows(self, rows: int, measures: bool) -> bool:
        """Whether the step to come, of `rows` sampling rows, may draft; `measures` says that it is told to `observe`
        and can be compared with others. Call it once per step."""
        load = self._load(rows)
        self.looks = load.looks
        paused = load.left > 0
        load.left -= paused
        self.wants_plain = not paused and self._wants_plain(load, measures)
        self._rests = paused or self.wants_plain or not self.looks.due()
        return not self._rests

    def release(self) -> None:
        """A request has ended: of several that ran together, it takes only its share of a pause with it."""
        for size, load in self._loads.items():
            fewest = max(1, (1 << size) // 2)  # rows of this load
            load.left -= math.ceil(load.left * (1 - 1 / CUT) / fewest)

    def ratio(self, rows: int) -> float | None:
        """Cost of a drafting step in plain ones; None until it is known."""
        load = self._load(rows)
        if not load.plain or load.drafting.count < RETRIED_FOR:
            return None
        return load.drafting.value

    def observe(self, record: StepRecord, cost: float, look: float = 0.0, gain: float = 0.0) -> None:
        """Learn from a finished step; steps that read prompts are no measure.

        Args:
            cost: of the step, in plain ones, by what steps like it have been measured to cost of late.
            look: the part of it that was looking for its drafts.
            gain: how much faster than plain decoding the drafts that it verified made it, as a share.
        """
        drafted = any(row.drafted for row in record.rows)
        if not self._rests:
            self.looks.looked(look, gain * cost if drafted else None)
        if not record.rows or any(row.prefill for row in record.rows):
            return
        load = self._load(len(record.rows))
        if self._rests and not drafted:
            load.plain += 1
            load.since_plain = 0
            if load.plain == FIRST_PLAIN:  # what steps before cost was a guess
                load.looking.doubt(1)
                load.drafting.doubt(1)
            return
        load.since_plain += 1
        load.looking.add(_usual(cost, load.looking))
        load.kept.add(sum(row.accepted + 1 for row in record.rows) / len(record.rows))
        if not drafted:
            load.since_draft += 1
            if load.since_draft >= load.stale:  # another moment of the machine may have left this behind
                load.drafting, load.since_draft = _Mean(DRAFTING_MEMORY), 0
                load.stale = min(2 * load.stale, LONGEST_PAUSE)
            return
        load.since_draft = 0
        load.drafting.add(_usual(cost, load.drafting))
        weight = min(len(record.rows), MOST_WEIGHT)
        load.tested += weight
        if load.plain:
            self._judge(load, weight)

    def _wants_plain(self, load: _Load, measures: bool) -> bool:
        # A rest is held against drafts made since the last one, in steps that can be compared.
        if not measures or load.since_draft >= load.since_plain:
            return False
        if load.plain < FIRST_PLAIN and load.drafting.count >= RETRIED_FOR:
            return True
        gain = max(0.0, load.kept.value / load.looking.value - 1) if load.looking.count else 0.0
        every = max(PLAIN_EVERY, EVERY_PER_GAIN * gain, EVERY_PER_SQUARE * gain**2)
        return load.since_plain >= min(every, RAREST_PLAIN)

    def _judge(self, load: _Load, weight: int) -> None:
        """Go on or pause, once enough steps have been seen; one step counts `weight`."""
        ratio = load.looking.value
        gross = load.tested >= GROSS_AFTER and load.kept.value < GROSS * ratio
        if not gross and load.tested < load.judged_after:
            return
        margin = MARGIN if load.judged_after == JUDGED_AFTER else RETRY_MARGIN
        load.tested = 0
        if load.kept.value >= ratio * (1 + margin):
            load.judged_after, load.pause, load.stale = JUDGED_AFTER, FIRST_PAUSE, FIRST_STALE
            return
        # The steps that will decide about the end of the pause shall weigh as much as all before it.
        load.left, load.judged_after = load.pause, RETRIED_FOR * weight
        load.pause = min(2 * load.pause, LONGEST_PAUSE)
        for mean in (load.kept, load.looking, load.drafting):
            mean.doubt(RETRIED_FOR)

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault(rows.bit_length(), _Load())


def _usual(cost: float, mean: _Mean) -> float:
    return min(cost, OUTLIER * mean.value) if mean.count else cost
