"""Runs every mode on every group, in turns, and keeps each finished part of a cell in a journal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, count, groupby, islice
from operator import add
from typing import Any

from dspark.data.journal import Journal
from dspark.measure.bench.drive import Answer, Ask, System, drive, poisson, until
from dspark.measure.bench.machine import MemoryPeak
from dspark.measure.bench.records import PLAIN, Cell, Group, Settings
from dspark.measure.bench.workload import Workload

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Done:
    """A finished cell, or part of one, and its answers' ids in the order of its requests (None where only text is
    known)."""

    cell: Cell
    token_ids: tuple[tuple[int, ...] | None, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"cell": self.cell.to_dict(), "ids": self.token_ids}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Done":
        return cls(Cell.from_dict(values["cell"]), tuple(None if ids is None else tuple(ids) for ids in values["ids"]))


@dataclass(frozen=True, slots=True)
class Turn:
    """One cell of the plan."""

    round: int
    group: Group
    mode: str


def closed_groups(settings: Settings) -> list[Group]:
    """Every kind at every temperature, concurrency and depth."""
    return [
        Group(kind, temperature, concurrency, depth)
        for depth in settings.depths
        for temperature in settings.temperatures
        for concurrency in settings.concurrencies
        for kind in settings.kinds
    ]


def open_groups(settings: Settings, cells: Sequence[Cell]) -> list[Group]:
    """Every kind and temperature at every arrival rate, at the first depth and the largest concurrency.

    A rate that is a share of what plain sustains comes from plain's closed-loop `cells` of the same kind.
    """
    most, depth = max(settings.concurrencies), settings.depths[0]
    groups = []
    for temperature in settings.temperatures:
        for kind in settings.kinds:
            closed = Group(kind, temperature, most, depth)
            rates = list(settings.rates)
            if settings.rate_share is not None and (sustained := requests_per_s(cells, closed)):
                rates.append(float(f"{settings.rate_share * sustained:.3g}"))
            groups += [replace(closed, rate=rate) for rate in rates]
    return groups


def requests_per_s(cells: Sequence[Cell], group: Group) -> float | None:
    """What plain sustains: answers over seconds, over all rounds; None where it did not run."""
    own = [cell for cell in cells if cell.mode == PLAIN and cell.group == group]
    return sum(len(cell.requests) for cell in own) / sum(cell.seconds for cell in own) if own else None


def turns(groups: Sequence[Group], modes: Mapping[str, int | None], rounds: int) -> list[Turn]:
    """Round by round all groups, in each the modes in turn; the order rotates so that no mode always goes first.

    `modes`: name to the most requests it takes together; a mode is left out of groups that want more at once.
    Plain goes first in the first round, where it decides how many arrivals an open loop has.
    """
    found: list[Turn] = []
    for number in range(rounds):
        for group in groups:
            fitting = [name for name, most in modes.items() if most is None or most >= group.concurrency]
            for offset in range(len(fitting)):
                mode = fitting[(number + offset) % len(fitting)]
                found.append(Turn(number, group, mode))
    return found


class Runner:
    """Runs turns in order. Finished parts of cells come from the journal, the others from their systems.

    `done` grows as cells finish, so that it is what a run had when Ctrl-C ended it.
    """

    def __init__(
        self,
        systems: Mapping[str, System],
        workload: Workload,
        settings: Settings,
        journal: Journal,
        memory: MemoryPeak,
    ):
        self._systems, self._workload, self._settings = systems, workload, settings
        self._journal, self._memory = journal, memory
        self._warm: set[tuple[str, int]] = set()
        self._parts: dict[Group, int] = {}  # that bring the wanted tokens, as plain's first round had it
        self._open: dict[Group, int] = {}  # requests of an open loop, as plain's first round had it
        self._stored: dict[tuple[str, Group, int, int], Done] = {}
        for values in journal.entries.values():
            done = Done.from_dict(values)
            self._stored[done.cell.mode, done.cell.group, done.cell.round, values["part"]] = done
        self.done: list[Done] = []

    @property
    def cells(self) -> list[Cell]:
        return [done.cell for done in self.done]

    def run(self, plan: Sequence[Turn], before: Callable[[Turn], None] = lambda turn: None) -> Iterator[Cell]:
        """Yields the cells of a group and round once they are done; `before` is told which mode runs next."""
        for _, block in groupby(plan, key=lambda turn: (turn.round, turn.group)):
            yield from self._block(list(block), before)

    def _block(self, turns: Sequence[Turn], before: Callable[[Turn], None]) -> Iterator[Cell]:
        """All modes in turns on one short part of the work after the other, so that slow drifts of the machine hit
        them alike."""
        group = turns[0].group
        parts: dict[str, list[Done]] = {turn.mode: [] for turn in turns}
        try:
            for part in count():
                first = part % len(turns)
                for turn in (*turns[first:], *turns[:first]):
                    parts[turn.mode].append(self._part(turn, part, before))
                arrived = sum(done.cell.tokens for done in parts[PLAIN])
                if group not in self._parts and (group.rate is not None or arrived >= self._settings.min_tokens):
                    self._parts[group] = part + 1
                if self._parts.get(group) == part + 1:
                    break
        except KeyboardInterrupt:  # what all that have begun have done is a cell too
            begun = [several for several in parts.values() if several]
            self.done += [joined(several[: min(map(len, begun))]) for several in begun]
            raise
        for turn in turns:
            self.done.append(joined(parts[turn.mode]))
            yield self.done[-1].cell

    def _part(self, turn: Turn, part: int, before: Callable[[Turn], None]) -> Done:
        done = self._stored.get((turn.mode, turn.group, turn.round, part))
        if done is None:
            before(turn)
            done = self._run_part(turn, part)
            self._journal.add(len(self._journal.entries), {**done.to_dict(), "part": part})
        if turn.mode == PLAIN and turn.group.rate is not None:
            self._open[turn.group] = len(done.cell.requests)
        return done

    def _run_part(self, turn: Turn, part: int) -> Done:
        system = self._systems[turn.mode]
        self._warm_up(turn.mode, turn.group)
        system.counts()  # those of the warm-up
        self._memory.reset()
        answers, seconds = self._drive(system, turn.group, part)
        cell = Cell(
            mode=turn.mode,
            group=turn.group,
            round=turn.round,
            seconds=seconds,
            requests=tuple(answer.record for answer in answers),
            counts=system.counts(),
            peak_memory_bytes=self._memory.read(),
        )
        return Done(cell, tuple(answer.token_ids for answer in answers))

    def _drive(self, system: System, group: Group, part: int) -> tuple[list[Answer], float]:
        """One request, or two waves of them where several run together, since the last ones run with fewer beside
        them. Arrivals are not cut into parts; there as many as bring plain the wanted tokens."""
        asks, size = self._workload.asks(group), group.concurrency * (1 if group.concurrency == 1 else 2)
        if group.rate is None:
            return drive(system, islice(asks, part * size, (part + 1) * size), group.concurrency)
        arrivals, known = poisson(group.rate, self._settings.seed), self._open.get(group)
        if known is not None:
            return drive(system, islice(asks, known), group.concurrency, arrivals)
        return drive(system, asks, group.concurrency, arrivals, until(self._settings.min_tokens, size))

    def _warm_up(self, mode: str, group: Group) -> None:
        """A few tokens of as many requests as will run together, once."""
        if (mode, group.concurrency) not in self._warm:
            asks = [_short(ask) for ask in islice(self._workload.asks(group), group.concurrency)]
            drive(self._systems[mode], asks, group.concurrency)
            self._warm.add((mode, group.concurrency))


def joined(parts: Sequence[Done]) -> Done:
    """One cell out of its parts, as if they had run one right after the other."""
    cells = [part.cell for part in parts]
    counts = [cell.counts for cell in cells if cell.counts is not None]
    cell = replace(
        cells[-1],
        seconds=sum(cell.seconds for cell in cells),
        requests=tuple(chain.from_iterable(cell.requests for cell in cells)),
        counts=reduce(add, counts) if counts else None,
        peak_memory_bytes=max(cell.peak_memory_bytes or 0 for cell in cells) or None,
    )
    return Done(cell, tuple(chain.from_iterable(part.token_ids for part in parts)))


def _short(ask: Ask) -> Ask:
    params = ask.params
    return replace(ask, params=replace(params, max_tokens=min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)))
