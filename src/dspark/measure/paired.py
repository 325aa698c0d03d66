"""Paired runs: modes take turns on the same prompts, and a second copy of the baseline shows the noise."""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Mode:
    """One way of answering prompts; `run` returns the token ids of each answer."""

    name: str
    run: Callable[[Sequence[Sequence[int]]], Answers]


@dataclass(frozen=True, slots=True)
class Cell:
    """One mode on one group of prompts in one round. `work` is a hash of all answers' ids."""

    mode: str
    group: str
    round: int
    seconds: float
    tokens: int
    work: str

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of a mode over the baseline's: median, smallest and largest over rounds. `same_work`: equal ids."""

    median: float
    low: float
    high: float
    same_work: bool

    def __str__(self) -> str:
        note = "" if self.same_work else ", answers differ"
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f}{note})"


def run_paired(
    modes: Sequence[Mode], groups: dict[str, Sequence[Sequence[int]]], rounds: int, warm_up: bool = True
) -> Iterator[Cell]:
    """Every mode on every group of prompts, once a round; the order rotates so that no mode always goes first."""
    if warm_up:
        first = next(iter(groups.values()))
        for mode in modes:
            mode.run(first[:1])
    for number in range(rounds):
        for group, prompts in groups.items():
            for offset in range(len(modes)):
                mode = modes[(number + offset) % len(modes)]
                began = time.perf_counter()
                answers = mode.run(prompts)
                seconds = time.perf_counter() - began
                work = hashlib.sha256(repr([list(a) for a in answers]).encode()).hexdigest()[:12]
                yield Cell(mode.name, group, number, seconds, sum(map(len, answers)), work)


def median_speed(cells: Sequence[Cell], mode: str, group: str | None = None) -> float:
    """Median over rounds of tokens per second, over all groups together or one."""
    return statistics.median(speed for _, speed in sorted(_speeds(cells, mode, group).items()))


def ratio(cells: Sequence[Cell], mode: str, baseline: str, group: str | None = None) -> Ratio:
    """Speed of `mode` over `baseline`, round by round."""
    ours, theirs = _speeds(cells, mode, group), _speeds(cells, baseline, group)
    ratios = [ours[number] / theirs[number] for number in ours]
    return Ratio(
        statistics.median(ratios), min(ratios), max(ratios), _work(cells, mode, group) == _work(cells, baseline, group)
    )


def _chosen(cells: Sequence[Cell], mode: str, group: str | None) -> list[Cell]:
    return [c for c in cells if c.mode == mode and group in (None, c.group)]


def _speeds(cells: Sequence[Cell], mode: str, group: str | None) -> dict[int, float]:
    chosen = _chosen(cells, mode, group)
    return {
        number: sum(c.tokens for c in chosen if c.round == number) / sum(c.seconds for c in chosen if c.round == number)
        for number in {c.round for c in chosen}
    }


def _work(cells: Sequence[Cell], mode: str, group: str | None) -> set[tuple[str, str]]:
    return {(c.group, c.work) for c in _chosen(cells, mode, group)}
