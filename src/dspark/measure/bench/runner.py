"""Runs every mode on every group, in turns, and keeps each finished cell in a journal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from dspark.data.journal import Journal
from dspark.measure.bench.drive import Answer, Ask, System, drive, poisson, until
from dspark.measure.bench.machine import MemoryPeak
from dspark.measure.bench.records import PLAIN, Cell, Group, Settings
from dspark.measure.bench.workload import Workload

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Done:
    """A finished cell and its answers' ids, in the order of its requests (None where only text is known)."""

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
    Plain goes first in the first round, where it decides how many requests a group has.
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
    """Runs turns in order. Finished ones come from the journal, the others from their systems.

    `cells` grows as cells finish, so that it is what a run had when Ctrl-C ended it.
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
        stored = map(Done.from_dict, journal.entries.values())
        self._stored = {(d.cell.mode, d.cell.group, d.cell.round): d for d in stored}
        self.done: list[Done] = []

    @property
    def cells(self) -> list[Cell]:
        return [done.cell for done in self.done]

    def run(self, plan: Sequence[Turn], before: Callable[[Turn], None] = lambda turn: None) -> Iterator[Cell]:
        """Yields every cell as it is done; `before` is told which one comes next."""
        for turn in plan:
            done = self._stored.get((turn.mode, turn.group, turn.round))
            if done is None:
                before(turn)
                done = self._cell(turn)
                self._journal.add(len(self._journal.entries), done.to_dict())
            self.done.append(done)
            yield done.cell

    def _cell(self, turn: Turn) -> Done:
        system, group = self._systems[turn.mode], turn.group
        self._warm_up(turn.mode, group)
        size = next((len(c.requests) for c in self.cells if c.group == group and c.mode == PLAIN), None)
        system.counts()  # those of the warm-up
        self._memory.reset()
        answers, seconds = self._drive(system, group, size)
        cell = Cell(
            mode=turn.mode,
            group=group,
            round=turn.round,
            seconds=seconds,
            requests=tuple(answer.record for answer in answers),
            counts=system.counts(),
            peak_memory_bytes=self._memory.read(),
        )
        return Done(cell, tuple(answer.token_ids for answer in answers))

    def _drive(self, system: System, group: Group, size: int | None) -> tuple[list[Answer], float]:
        """`size` requests; where plain has not said how many, as many as bring the wanted tokens."""
        asks = islice(self._workload.asks(group), size)
        arrivals = None if group.rate is None else poisson(group.rate, self._settings.seed)
        if size is not None:
            return drive(system, asks, group.concurrency, arrivals)
        # Two waves at least: the last requests of a cell run with fewer beside them.
        waves = 1 if group.concurrency == 1 else 2
        enough = until(self._settings.min_tokens, waves * group.concurrency)
        return drive(system, asks, group.concurrency, arrivals, enough)

    def _warm_up(self, mode: str, group: Group) -> None:
        """A few tokens of as many requests as will run together, once."""
        if (mode, group.concurrency) not in self._warm:
            asks = [_short(ask) for ask in islice(self._workload.asks(group), group.concurrency)]
            drive(self._systems[mode], asks, group.concurrency)
            self._warm.add((mode, group.concurrency))


def _short(ask: Ask) -> Ask:
    params = ask.params
    return replace(ask, params=replace(params, max_tokens=min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)))
