"""Which rows of a result belong side by side, and the few sums that reports need beyond what rows say."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dspark.measure.bench.records import CONTROL, PLAIN, BenchResult, Group, Row
from dspark.measure.bench.report_plots import styles


def temperature_name(value: float) -> str:
    return f"T={value:g}"


def setting(group: Group) -> str:
    """A group without its kind of text: temperature, load, depth."""
    return str(group).partition(", ")[2]


@dataclass(frozen=True)
class View:
    """A result by mode, kind and load. Names keep the order of the run."""

    result: BenchResult

    @cached_property
    def modes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.mode for row in self.result.rows))

    @cached_property
    def styles(self) -> dict[str, int]:
        return styles(self.modes, grey=(PLAIN, CONTROL))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return tuple(dict.fromkeys(row.group for row in self.result.rows))

    @cached_property
    def closed(self) -> tuple[Group, ...]:
        """Groups with a fixed number of requests in flight."""
        return tuple(group for group in self.groups if group.rate is None)

    @cached_property
    def open(self) -> tuple[Group, ...]:
        """Groups with arrivals at a rate."""
        return tuple(group for group in self.groups if group.rate is not None)

    @cached_property
    def base(self) -> tuple[Group, ...]:
        """Of each kind and temperature the closed group with fewest requests at once at the smallest depth."""
        best: dict[tuple[str, float], Group] = {}
        for group in self.closed:
            key = (group.kind, group.temperature)
            if key not in best or (group.depth, group.concurrency) < (best[key].depth, best[key].concurrency):
                best[key] = group
        return tuple(best.values())

    @cached_property
    def _rows(self) -> dict[tuple[str, Group], Row]:
        return {(row.mode, row.group): row for row in self.result.rows}

    def row(self, mode: str, group: Group) -> Row | None:
        return self._rows.get((mode, group))

    def rows_of(self, group: Group, control: bool = False) -> list[Row]:
        """Every mode's row of a group; the control's only where asked for."""
        found = [self.row(mode, group) for mode in self.modes if control or mode != CONTROL]
        return [row for row in found if row is not None]

    def sweep(self, base: Group, by: str) -> list[Group]:
        """The closed groups that differ from `base` in the field `by` alone, in order of it."""
        others = [name for name in ("kind", "temperature", "concurrency", "depth") if name != by]
        same = [g for g in self.closed if all(getattr(g, name) == getattr(base, name) for name in others)]
        return sorted(same, key=lambda group: getattr(group, by))

    def prompt_tokens(self, group: Group) -> float:
        """Mean prompt length of a group in tokens; its depth where no request was kept."""
        lengths = [r.prompt_tokens for cell in self.result.cells if cell.group == group for r in cell.requests]
        return sum(lengths) / len(lengths) if lengths else float(group.depth)

    def split_ms(self, mode: str, group: Group) -> tuple[float, float, float, float] | None:
        """Milliseconds per output token: drafting, verifying and host work of steps without prompt tokens, and the
        steps with some. None where another engine does not say."""
        cells = [c for c in self.result.cells if c.mode == mode and c.group == group and c.counts is not None]
        tokens = sum(cell.tokens for cell in cells)
        if not tokens:
            return None
        counts = [cell.counts for cell in cells if cell.counts is not None]
        names = ("draft_ms", "verify_ms", "host_ms", "prefill_ms")
        draft, verify, host, prompt = (sum(getattr(c, name) for c in counts) / tokens for name in names)
        return draft, verify, host, prompt


def tally(rows: Sequence[Row]) -> str:
    """How often a mode was faster, slower, or neither, in words."""
    parts = []
    for verdict, word in (("faster", "faster"), ("slower", "slower"), ("none", "no difference")):
        if count := sum(row.verdict == verdict for row in rows):
            parts.append(f"{word} in {count}")
    return ", ".join(parts)


def rows_of_mode(result: BenchResult, mode: str) -> list[Row]:
    return [row for row in result.rows if row.mode == mode]


def work_line(result: BenchResult) -> str:
    """What was asked of every mode, in a sentence."""
    own = result.settings
    limit = "" if own.limit is None else f" (the first {own.limit} a kind)"
    return (
        f"{own.rounds} round{'s' if own.rounds > 1 else ''}, answers of up to {own.max_tokens} tokens, prompts: "
        f"{own.prompts}{limit}, seed {own.seed}."
    )


def machine_line(result: BenchResult) -> str:
    """Where it ran, in a sentence."""
    own = result.machine
    load = "" if own.load_before is None else f", load {own.load_before:.2f} at the start"
    versions = "".join(f", {name} {own.versions[name]}" for name in ("torch", "transformers") if name in own.versions)
    return f"{own.cpu}, {own.cores} cores, {own.threads} threads, {own.device}{versions}{load}."


def warnings(result: BenchResult) -> list[str]:
    """What a reader must know before any figure."""
    said = []
    if not result.complete:
        said.append("The run was stopped before its end: figures rest on the rounds that were done.")
    if result.control and result.control.restless:
        said.append(
            f"The machine was restless: plain against itself came to {result.control.ratio.median:.3f}x with an "
            f"interquartile range of {result.control.spread:.3f} (limit {result.control.limit:.3f}). Run it again on a "
            "quiet machine before believing any ratio."
        )
    for proof in result.proofs:
        if proof.expected and not proof.kept:
            said.append(f"Answers of {proof.mode} differ from plain's beyond near-ties ({proof.group}).")
    return said
