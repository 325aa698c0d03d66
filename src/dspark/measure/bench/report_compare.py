"""Two results side by side: the same mode on the same group of prompts, before and after."""

from collections.abc import Iterator
from dataclasses import dataclass

from dspark.errors import DataError
from dspark.measure.bench.control import verdict as judged
from dspark.measure.bench.records import CONTROL, PLAIN, BenchResult, Group, Spread
from dspark.measure.bench.report_html import document
from dspark.measure.bench.report_markup import Section, code, hint, number, spread, table, verdict
from dspark.measure.bench.report_view import warnings

_SPEEDUP, _SPEED = ("speed-up before", "after", "ratio", "by speed-up"), ("tok/s before", "after", "ratio", "by tok/s")
_HEAD = ("group", "mode", *_SPEEDUP, *_SPEED, "AL before", "after")
_VERDICTS = (5, 9)
# Settings that change what a figure means; the rest only decides which figures there are.
_WORK = ("prompts", "prompts_digest", "limit", "max_tokens", "seed", "acceptance")
_SETTINGS = (*_WORK, "drafter", "dtype", "device", "exact", "threads")


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both results. `noise` is the larger of the two runs' noise floors for these prompts."""

    before: Spread
    after: Spread
    noise: float

    @property
    def ratio(self) -> float:
        return self.after.median / self.before.median

    @property
    def verdict(self) -> str:
        """As within a run: "faster" or "slower" when even the nearest quartiles lie apart by more than the noise of
        either run, in enough rounds to tell; else "none"."""
        low, high = self.after.low / self.before.high, self.after.high / self.before.low
        rounds = min(self.before.rounds, self.after.rounds)
        return judged(Spread(self.ratio, low, high, rounds), self.noise)


@dataclass(frozen=True, slots=True)
class Pair:
    """A mode on a group in both results. tok/s depends on how quick the machine was that day; the speed-up, over plain
    in the same run, does not (None for plain itself)."""

    mode: str
    group: Group
    tok_per_s: Change
    speedup: Change | None
    acceptance_length: tuple[float | None, float | None]

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of the table's columns."""
        cells = [str(self.group), self.mode]
        for change, digits, unit in ((self.speedup, 2, "x"), (self.tok_per_s, 1, "")):
            if change is None:
                cells += ["-"] * 4
            else:
                cells += [spread(change.before, digits, unit), spread(change.after, digits, unit)]
                cells += [f"{change.ratio:.2f}x", change.verdict]
        return (*cells, *(number(length) for length in self.acceptance_length))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything two results share, and sentences on how the runs differ other than in their figures."""

    target: str
    pairs: tuple[Pair, ...]
    differences: tuple[str, ...]

    def told(self) -> str:
        """How many changed, in a sentence or two."""
        changes = [pair.speedup or pair.tok_per_s for pair in self.pairs]
        faster, slower = (sum(change.verdict == word for change in changes) for word in ("faster", "slower"))
        return (
            f"Of {len(changes)} cells {faster} became faster and {slower} slower, by their speed-up over {PLAIN} in "
            f"the same run, {PLAIN} itself by tok/s; a difference inside the noise of either run is none."
        )

    def markdown(self) -> str:
        """A table with a row a mode and group, under what the runs do not have in common."""
        lines = [_line(_HEAD), _line(("---", "---", *["---:"] * (len(_HEAD) - 2)))]
        lines += [_line(pair.cells()) for pair in self.pairs]
        return "\n\n".join([*self.differences, self.told(), "\n".join(lines)]) + "\n"

    def page(self, command: str = "") -> str:
        """The same as one HTML page; `command` is what made it."""
        rows = [
            [verdict(cell) if n in _VERDICTS and cell != "-" else cell for n, cell in enumerate(pair.cells())]
            for pair in self.pairs
        ]
        sections = [Section("changes", "Before and after", hint(self.told()) + table(_HEAD, rows, words=(1,)))]
        if command:
            sections.append(Section("reproduce", "Run it again", code(command)))
        return document(f"Benchmark of {self.target}: before and after", "", self.differences, sections)


def compare(before: BenchResult, after: BenchResult) -> Comparison:
    """The cells that both results have.

    Raises:
        DataError: the results are of different targets, or have no mode on the same group of prompts in common.
    """
    if before.target_name != after.target_name:
        raise DataError(
            f"These results are of different targets, {before.target_name} and {after.target_name}; "
            "compare two runs of one target."
        )
    pairs = tuple(_pairs(before, after))
    if not pairs:
        raise DataError(
            "These results have no mode on the same kind, temperature, concurrency and depth in common; "
            "run dspark bench twice with the same options."
        )
    said = [f"Before: {words}" for words in warnings(before)] + [f"After: {words}" for words in warnings(after)]
    return Comparison(before.target_name, pairs, (*said, *_differences(before, after)))


def _pairs(before: BenchResult, after: BenchResult) -> Iterator[Pair]:
    later = {(row.mode, row.group): row for row in after.rows}
    noises = _noises(before), _noises(after)
    for row in before.rows:
        other = later.get((row.mode, row.group))
        if other is None or row.mode == CONTROL:
            continue
        noise = max(each.get(row.group, 0.0) for each in noises)
        gain = Change(row.speedup, other.speedup, noise) if row.speedup and other.speedup else None
        lengths = row.acceptance_length, other.acceptance_length
        yield Pair(row.mode, row.group, Change(row.tok_per_s, other.tok_per_s, noise), gain, lengths)


def _noises(result: BenchResult) -> dict[Group, float]:
    """Of each group; the row of plain has none of its own."""
    return {row.group: row.noise for row in result.rows if row.noise is not None}


def _differences(before: BenchResult, after: BenchResult) -> list[str]:
    old, new = (
        {
            "dspark": result.version,
            "processor": result.machine.cpu,
            **{name: getattr(result.settings, name) for name in _SETTINGS},
            **{f"version of {name}": version for name, version in sorted(result.machine.versions.items())},
        }
        for result in (before, after)
    )
    return [
        f"Not the same in both: {name}, {old.get(name)} before and {new.get(name)} after."
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
