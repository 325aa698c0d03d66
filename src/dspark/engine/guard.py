"""When drafting pauses because it does not pay, and when it is tried again.

Everything here looks at older steps, measured times included; which is past information under any rule.
"""

from dataclasses import dataclass, field

from dspark.config import StepRecord

# A trial costs about as much as the plain steps it is charged: the first wait keeps trials near 1 % of the time.
FIRST_WAIT, LONGEST_WAIT = 128, 4096
FOLLOW_UPS = 2  # further trials at once, as long as they win
JUDGED_AFTER, RETRIED_FOR = 48, 4  # drafting steps between judgements, and after a pause
GROSS_AFTER, GROSS = 12, 0.85  # a loss of more than 15 % is judged after this many
FIRST_PAUSE, LONGEST_PAUSE = 64, 8192  # plain steps
PLAIN_EVERY = 128  # drafting steps after which one plain step refreshes what plain decoding costs
PLAIN_MEMORY, DRAFTING_MEMORY = 4.0, 64.0
OUTLIER = 3.0  # a step that took this many times the mean counts as that many: the machine was busy

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
        self._clocks[key] = _TrialClock()

    def due(self, key: Key, cost: float = 1.0) -> bool:
        """The source was not chosen in this step; whether it is tried nevertheless, at `cost` plain steps."""
        clock = self._clocks.setdefault(key, _TrialClock())
        clock.idle += 1
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

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, self.memory)


@dataclass(slots=True)
class _Load:
    """What steps of about this many rows took and brought."""

    plain_ms: _Mean = field(default_factory=lambda: _Mean(PLAIN_MEMORY))
    drafting_ms: _Mean = field(default_factory=lambda: _Mean(DRAFTING_MEMORY))
    kept: _Mean = field(default_factory=lambda: _Mean(DRAFTING_MEMORY))  # tokens per row of a drafting step
    since_plain: int = 0
    judged_after: int = JUDGED_AFTER
    tested: int = 0
    pause: int = FIRST_PAUSE
    left: int = 0  # plain steps of the running pause still to come


class Guard:
    """Compares measured drafting steps with measured plain ones, and pauses drafting where plain decoding is faster.

    Steps are kept apart by their number of rows, to the power of two. A pause ends after a number of steps that
    doubles with each loss; a few drafting steps then decide again.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def allows(self, rows: int, reads_prompts: bool) -> bool:
        """Whether the step to come, of `rows` decoding rows, may draft. Call it once per step."""
        load = self._load(rows)
        if load.left:
            load.left -= 1
            return False
        if reads_prompts:  # no measure of plain decoding
            return True
        unknown = load.plain_ms.count < 2 and load.drafting_ms.count >= RETRIED_FOR
        return not unknown and load.since_plain < PLAIN_EVERY

    def ratio(self, rows: int) -> float | None:
        """Time of a drafting step over that of a plain one; None until both are known."""
        load = self._load(rows)
        if not load.plain_ms.count or not load.drafting_ms.count:
            return None
        return load.drafting_ms.value / load.plain_ms.value

    def observe(self, record: StepRecord) -> None:
        """Learn from a finished step; steps that read prompts are no measure of either kind."""
        if not record.rows or any(row.prefill for row in record.rows):
            return
        load = self._load(len(record.rows))
        if not any(row.drafted for row in record.rows):
            load.plain_ms.add(_usual(record.times.step_ms, load.plain_ms))
            load.since_plain = 0
            return
        load.since_plain += 1
        load.drafting_ms.add(_usual(record.times.step_ms, load.drafting_ms))
        load.kept.add(sum(row.accepted + 1 for row in record.rows) / len(record.rows))
        load.tested += 1
        ratio = self.ratio(len(record.rows))
        if ratio is None:
            return
        gross = load.tested >= GROSS_AFTER and load.kept.value < GROSS * ratio
        if gross or load.tested >= load.judged_after:
            self._judge(load, load.kept.value >= ratio)

    def _judge(self, load: _Load, pays: bool) -> None:
        load.tested = 0
        if pays:
            load.judged_after, load.pause = JUDGED_AFTER, FIRST_PAUSE
            return
        load.left, load.judged_after = load.pause, RETRIED_FOR
        load.pause = min(2 * load.pause, LONGEST_PAUSE)
        # The steps that will decide about the end of the pause shall weigh as much as all before it.
        load.kept.count, load.drafting_ms.count = RETRIED_FOR, RETRIED_FOR

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault(rows.bit_length(), _Load())


def _usual(step_ms: float, mean: _Mean) -> float:
    return min(step_ms, OUTLIER * mean.value) if mean.count else step_ms
