"""The parts of a report on speed. Each takes a view of the result and gives None when it has nothing to say."""

from collections.abc import Callable, Sequence

from dspark.measure.bench.records import CONTROL, PLAIN, Group, Row
from dspark.measure.bench.report_markup import Section, folded, grid, hint, spread, table, verdict
from dspark.measure.bench.report_plots import Axis, Line, PlotRow, legend, line_chart, row_chart
from dspark.measure.bench.report_view import View

SPEEDUP = "speed-up over plain decoding (times)"
Value = Callable[[Row], float | None]


def key(view: View, rows: Sequence[Row], filled: bool = False) -> str:
    shown = [mode for mode in view.modes if any(row.mode == mode for row in rows)]
    return legend([(mode, view.styles[mode]) for mode in shown], filled)


def _axis(label: str, values: Sequence[float], at: float | None = None) -> Axis:
    """One axis for several charts, so that they can be compared; it begins at 0 unless all values are far from it."""
    every = [*values, *(() if at is None else (at,))]
    low, high = min(every), max(every)
    return Axis(label, low=0.0 if low < 0.5 * high else 0.95 * low, high=1.05 * high)


def speedups(view: View) -> Section | None:
    """Every mode on every kind of text, requests as few at once as were measured."""
    rows = [row for group in view.base for row in view.rows_of(group, control=True)]
    measured = [row for row in rows if row.speedup]
    if not measured:
        return None
    x = _axis(SPEEDUP, [v for r in measured if r.speedup for v in (r.speedup.low, r.speedup.high)], at=1.0)
    panels = []
    for group in view.base:
        shown = [row for row in view.rows_of(group, control=True) if row.speedup]
        if shown:
            plotted = [
                PlotRow(
                    row.mode,
                    ((row.speedup.median, view.styles[row.mode]),),
                    (row.speedup.low, row.speedup.high),
                    note=f"{row.speedup.median:.2f}x {_mark(row)}".strip(),
                )
                for row in shown
                if row.speedup
            ]
            noise = max((row.noise or 0.0 for row in shown), default=0.0)
            panels.append(row_chart(str(group), x, plotted, at=1.0, band=noise))
    body = hint(
        "Dot: median over rounds, each round against plain decoding in the same round. Line: quartiles. Shaded: how "
        "far plain strays from itself; what lies inside is no difference. ≠ marks answers that are not plain's."
    )
    return Section("kinds", "Speed-up by kind of text", body + grid(panels) + folded("As a table", speed_table(rows)))


def _mark(row: Row) -> str:
    return "≠" if row.equal == "no" else ""


def speed_table(rows: Sequence[Row]) -> str:
    head = ("group", "mode", "tok/s", "tok/s per user", "speed-up", "noise", "verdict", "answers as plain's")
    return table(
        head,
        [
            (
                str(row.group),
                row.mode,
                spread(row.tok_per_s, 1),
                spread(row.tok_per_s_user, 1),
                spread(row.speedup, 2, "x"),
                "-" if row.noise is None else f"± {row.noise:.2f}",
                verdict(row.verdict),
                row.equal or "-",
            )
            for row in rows
        ],
        words=(1,),
    )


def concurrency(view: View) -> Section | None:
    """What more requests at once bring in all, and cost each."""
    panels, rows = [], []
    for base in view.base:
        groups = view.sweep(base, "concurrency")
        if len(groups) < 2:
            continue
        here = [row for group in groups for row in view.rows_of(group)]
        rows.extend(here)
        where = f"{base.kind}, T={base.temperature:g}"
        lines = _lines(view, here, _user_speed, _speed, lambda group: str(group.concurrency))
        x, y = Axis("tokens per second, each user", low=0.0), Axis("tokens per second, all users", low=0.0)
        panels.append(line_chart(f"{where}: throughput against speed per user", x, y, lines))
        counts = tuple(float(group.concurrency) for group in groups)
        if lines := _lines(view, here, lambda row: row.group.concurrency, _speedup):
            x, y = Axis("requests at once", log2=True, ticks=counts), Axis(SPEEDUP, low=0.0)
            panels.append(line_chart(f"{where}: speed-up", x, y, lines, at=1.0))
    if not panels:
        return None
    told = hint("Up and to the right is better. The small figure beside a point is the number of requests at once.")
    body = told + key(view, rows) + grid(panels) + folded("As a table", speed_table(rows))
    return Section("concurrency", "Requests at once", body)


def depth(view: View) -> Section | None:
    """How speed-up and acceptance hold as prompts grow."""
    panels, rows = [], []
    for base in view.base:
        groups = view.sweep(base, "depth")
        if len(groups) > 1:
            here = [row for group in groups for row in view.rows_of(group)]
            rows.extend(here)
            panels.extend(_depth_charts(view, base, groups, here))
    if not panels:
        return None
    body = key(view, rows) + grid(panels) + folded("As a table", speed_table(rows))
    return Section("depth", "Depth of the context", body)


def _depth_charts(view: View, base: Group, groups: Sequence[Group], rows: Sequence[Row]) -> list[str]:
    tokens = {group: max(view.prompt_tokens(group), 1.0) for group in groups}
    x = Axis("prompt (tokens)", log2=True, ticks=tuple(tokens.values()))
    charts: tuple[tuple[str, str, float | None, Value], ...] = (
        ("speed-up", SPEEDUP, 1.0, _speedup),
        ("acceptance length", "acceptance length (tokens per step)", None, lambda row: row.acceptance_length),
        ("speed", "tokens per second, each user", None, _user_speed),
    )
    drawn = []
    for title, label, at, value in charts:
        if lines := _lines(view, rows, lambda row: tokens[row.group], value):
            name = f"{base.kind}, T={base.temperature:g}, {base.concurrency} at a time: {title}"
            drawn.append(line_chart(name, x, Axis(label, low=0.0), lines, at=at))
    return drawn


def _speedup(row: Row) -> float | None:
    return row.speedup.median if row.speedup else None


def _speed(row: Row) -> float | None:
    return row.tok_per_s.median


def _user_speed(row: Row) -> float | None:
    return row.tok_per_s_user.median


def _lines(
    view: View, rows: Sequence[Row], x: Value, y: Value, label: Callable[[Group], str] | None = None
) -> list[Line]:
    """A line a mode through the rows that have both values."""
    lines = []
    for mode in view.modes:
        own = [(row, x(row), y(row)) for row in rows if row.mode == mode]
        points = [(row, (px, py)) for row, px, py in own if px is not None and py is not None]
        if points:
            labels = tuple(label(row.group) for row, _ in points) if label else ()
            lines.append(Line(mode, view.styles[mode], tuple(place for _, place in points), labels))
    return lines


def every_row(view: View) -> Section | None:
    """All rows, the control's too."""
    rows = [row for group in view.groups for row in view.rows_of(group, control=True)]
    if not rows:
        return None
    told = hint(f"Median over rounds, quartiles in brackets. {CONTROL!r} is {PLAIN!r} a second time.")
    return Section("rows", "Every row", folded(f"{len(rows)} rows", told + speed_table(rows)))
