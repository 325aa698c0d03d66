"""The parts of a report behind the speed: acceptance, time, waiting, use of the machine.

As in `report_speed`, each takes a view of the result and gives None when it has nothing to say.
"""

from collections.abc import Sequence

from dspark.measure.bench.records import PLAIN, Group, Row
from dspark.measure.bench.report_markup import Section, folded, grid, hint, number, percent, quantiles, scaled, table
from dspark.measure.bench.report_plots import (
    Axis,
    Columns,
    Line,
    PlotRow,
    column_chart,
    legend,
    line_chart,
    row_chart,
    short,
)
from dspark.measure.bench.report_speed import key
from dspark.measure.bench.report_view import View

PARTS = ("draft", "verify", "host")
ALL_PARTS = (*PARTS, "steps with prompt tokens")
QUANTILES = ("p50", "p90", "p99")
MOST_OPEN = 3  # groups whose charts are all unfolded


def acceptance(view: View) -> Section | None:
    """How far drafts get, slot by slot."""
    parts: list[str] = []
    rows: list[Row] = []
    for group in view.base:
        here = [row for row in view.rows_of(group) if row.slot_marginal]
        rows.extend(here)
        if here:
            is_open = len(view.base) <= MOST_OPEN or not parts
            parts.append(folded(str(group), grid(_acceptance_charts(view, group, here)), is_open))
    if not parts:
        return None
    every = [row for group in view.groups for row in view.rows_of(group) if row.acceptance_length is not None]
    figures = table(
        ("group", "mode", "acceptance length (tokens)", "acceptance rate", "steps by source of their draft"),
        [
            (
                str(row.group),
                row.mode,
                number(row.acceptance_length),
                percent(row.acceptance_rate),
                ", ".join(f"{name} {percent(share, 0)}" for name, share in row.sources.items()) or "-",
            )
            for row in every
        ],
        words=(1,),
    )
    return Section("acceptance", "Acceptance", key(view, rows) + "".join(parts) + folded("As a table", figures))


def _acceptance_charts(view: View, group: Group, rows: Sequence[Row]) -> list[str]:
    panels = []
    marginal = "all slots before accepted too", "reached and accepted (%)", [row.slot_marginal for row in rows]
    conditional = "given all slots before", "accepted when reached (%)", [row.slot_conditional for row in rows]
    for title, label, values in (marginal, conditional):
        shares = [tuple((n + 1, 100 * share) for n, share in enumerate(own)) for own in values]
        lines = [Line(r.mode, view.styles[r.mode], own) for r, own in zip(rows, shares, strict=True) if own]
        longest = max(map(len, shares))
        x = Axis("draft slot", low=1, high=longest, ticks=tuple(range(1, longest + 1)))
        panels.append(line_chart(f"{group}: {title}", x, Axis(label, low=0, high=100), lines))
    counted = [Columns(r.mode, view.styles[r.mode], tuple(100 * s for s in r.histogram)) for r in rows]
    places = [str(n) for n in range(max(len(each.heights) for each in counted))]
    y = Axis("steps with a draft (%)", low=0)
    panels.append(column_chart(f"{group}: tokens accepted", Axis("draft tokens accepted"), y, places, counted))
    return panels


def reliability(view: View) -> Section | None:
    """What the drafter says of its own drafts against what came true."""
    bins = view.result.reliability
    if not bins:
        return None
    lines = []
    for mode in dict.fromkeys(each.mode for each in bins):
        own = sorted((b for b in bins if b.mode == mode and b.count), key=lambda b: b.stated)
        every = sum(b.count for b in own)
        points = tuple((100 * b.stated, 100 * b.observed) for b in own)
        lines.append(Line(mode, view.styles.get(mode, 0), points, sizes=tuple(b.count / every for b in own)))
    x, y = Axis("stated survival (%)", low=0, high=100), Axis("observed survival (%)", low=0, high=100)
    told = hint("On the dashed line a drafter's confidence is right. Larger marks stand for more slots.")
    chart = line_chart("Stated against observed survival", x, y, lines, diagonal=True)
    return Section("reliability", "Reliability", told + legend([(e.name, e.style) for e in lines]) + grid([chart]))


def time_split(view: View) -> Section | None:
    """Where the time of an output token goes."""
    found = {
        (row.mode, group): split
        for group in view.base
        for row in view.rows_of(group)
        if (split := view.split_ms(row.mode, group)) is not None
    }
    if not found:
        return None
    x = Axis("milliseconds per output token", low=0, high=1.02 * max(sum(split) for split in found.values()))
    panels = []
    for group in view.base:
        rows = [
            PlotRow(mode, segments=tuple((ms, n) for n, ms in enumerate(split)), note=f"{sum(split):.1f} ms")
            for (mode, own), split in found.items()
            if own == group
        ]
        if rows:
            panels.append(row_chart(str(group), x, rows))
    shares = [
        (str(r.group), r.mode, percent(r.draft_share), percent(r.verify_share), percent(r.host_share))
        for group in view.groups
        for r in view.rows_of(group)
        if r.verify_share is not None
    ]
    figures = table(("group", "mode", *(f"{part} (% of decoding time)" for part in PARTS)), shares, words=(1,))
    told = hint(
        "Our own engine's steps. Host: all that is not a model's pass. Steps that run prompt tokens are not split."
    )
    parts = legend(list(zip(ALL_PARTS, range(4), strict=True)), filled=True)
    return Section("split", "Time: draft, verify, host", told + parts + grid(panels) + folded("As a table", figures))


def _latency_panel(group: Group, rows: Sequence[Row]) -> str:
    plotted = [
        PlotRow(
            row.mode,
            tuple(
                (value, style) for style, value in enumerate((row.latency_s.p50, row.latency_s.p90, row.latency_s.p99))
            ),
            (row.latency_s.p50, row.latency_s.p99),
            note=f"{short(row.latency_s.p99)} s",
        )
        for row in rows
    ]
    return row_chart(f"{group}: whole answer", Axis("seconds from arrival to the last token", low=0.0), plotted)


def _latency_table(rows: Sequence[Row]) -> str:
    head = ["group", "mode", "requests", *(f"answer {q} (s)" for q in QUANTILES)]
    head += [f"{name} {q} (ms)" for name in ("TTFT", "TPOT", "ITL") for q in QUANTILES]
    return table(
        head,
        [
            (
                str(row.group),
                row.mode,
                row.requests,
                *quantiles(row.latency_s, 2),
                *quantiles(row.ttft_ms),
                *quantiles(row.tpot_ms),
                *quantiles(row.itl_ms),
            )
            for row in rows
        ],
        words=(1,),
    )


def latencies(view: View) -> Section | None:
    """Waiting: first token, each token, the whole answer."""
    if not view.base:
        return None
    panels = [_latency_panel(group, view.rows_of(group)) for group in view.base]
    rows = [row for group in view.closed for row in view.rows_of(group)]
    told = hint("Requests kept in flight: a new one arrives when another ends. The figure at the right is p99.")
    marks = legend(list(zip(QUANTILES, range(3), strict=True)))
    body = told + marks + grid(panels) + folded("As a table, with TTFT, TPOT and ITL", _latency_table(rows))
    return Section("latency", "Latency", body)


def arrivals(view: View) -> Section | None:
    """The same with arrivals at a rate, whether or not earlier requests are done."""
    if not view.open:
        return None
    panels = [_latency_panel(group, view.rows_of(group)) for group in view.open]
    rows = [row for group in view.open for row in view.rows_of(group)]
    plain = {row.group: row.latency_s.p99 for row in rows if row.mode == PLAIN}
    gains = [
        (
            str(row.group),
            row.mode,
            number(row.latency_s.p50),
            number(row.latency_s.p99),
            f"{row.latency_s.p99 / plain[row.group]:.2f}x" if row.group in plain else "-",
            percent(row.use.bytes_share) if row.use else "-",
            percent(row.use.flop_share) if row.use else "-",
        )
        for row in rows
    ]
    head = ("group", "mode", "answer p50 (s)", "answer p99 (s)", "p99 over plain's", "memory use", "arithmetic use")
    told = hint("Poisson arrivals: requests come at their own times, and wait when the engine is behind.")
    body = told + legend(list(zip(QUANTILES, range(3), strict=True))) + grid(panels) + table(head, gains, words=(1,))
    return Section("arrivals", "Arrivals at a rate", body + folded("All latencies", _latency_table(rows)))


def _shares(row: Row) -> tuple[float, ...]:
    """Of memory bandwidth and of arithmetic; none where either is unknown."""
    if row.use is None or row.use.bytes_share is None or row.use.flop_share is None:
        return ()
    return row.use.bytes_share, row.use.flop_share


def utilisation(view: View) -> Section | None:
    """How much of the machine is put to use."""
    every = [row for group in view.groups for row in view.rows_of(group)]
    used = [row for row in every if row.use]
    if not used and not any(row.peak_memory_bytes for row in every):
        return None
    panels = []
    for group in (*view.base, *view.open):
        rows = [
            PlotRow(
                row.mode,
                tuple((100 * share, style) for style, share in enumerate(shares)),
                note=" / ".join(percent(share, 0) for share in shares),
            )
            for row in view.rows_of(group)
            if (shares := _shares(row))
        ]
        if rows:
            x = Axis("share of the measured peak (%)", low=0, high=max(100, *(v for row in rows for v, _ in row.dots)))
            panels.append(row_chart(str(group), x, rows))
    head = ("group", "mode", "memory read", "of peak", "arithmetic", "of peak", "peak memory of the process")
    figures = table(
        head,
        [
            (
                str(row.group),
                row.mode,
                scaled(row.use.bytes_per_s, "B/s") if row.use else "-",
                percent(row.use.bytes_share) if row.use else "-",
                scaled(row.use.flop_per_s, "FLOP/s") if row.use else "-",
                percent(row.use.flop_share) if row.use else "-",
                scaled(row.peak_memory_bytes, "B"),
            )
            for row in every
        ],
        words=(1,),
    )
    marks = legend([("memory bandwidth", 0), ("arithmetic", 1)])
    told = hint("What the target's passes read and computed a second, over what this machine was measured to reach.")
    body = (told + marks + grid(panels) if panels else "") + (folded("As a table", figures) if panels else figures)
    return Section("utilisation", "Utilisation and memory", body)
