"""Charts as inline SVG, drawn by hand so that a report needs no script, no font and no network.

Colours are the classes `s0` to `s7` of the page's style sheet, which knows light and dark. All functions are pure:
data in, markup out. Sizes are in units of the view box, about one CSS pixel each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
ROW, CHARACTER = 23, 6.4  # height of a row; width of a letter at the size used
COLOURS = 7  # s7 is grey, kept for plain decoding
GREY = 7


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` names the quantity and its unit. Limits come from the data where none are given; `log2` needs values
    above 0; `ticks` are places to mark instead of round numbers."""

    label: str
    low: float | None = None
    high: float | None = None
    log2: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) of one name in one style; a text and a relative size (0 to 1) for each where given."""

    name: str
    style: int
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PlotRow:
    """One named row: stacked segments, a whisker, dots, each of them in a style; `note` is its value as text."""

    name: str
    dots: tuple[tuple[float, int], ...] = ()
    whisker: tuple[float, float] | None = None
    segments: tuple[tuple[float, int], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """One name's heights, a column each, beside the columns of the other names."""

    name: str
    style: int
    heights: tuple[float, ...]


def styles(names: Sequence[str], grey: Sequence[str] = ()) -> dict[str, int]:
    """A style a name, stable over a report; past the seventh colour the shape of the marker goes on changing."""
    others = [name for name in dict.fromkeys(names) if name not in grey]
    return {name: index + index // COLOURS for index, name in enumerate(others)} | dict.fromkeys(grey, GREY)


def short(value: float) -> str:
    """Three digits, no exponent, no trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], about `wanted` of them."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


class Scale:
    """From a value to a coordinate between `start` and `end`."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float):
        self.log2 = axis.log2
        low = axis.low if axis.low is not None else min(values, default=0.0)
        high = axis.high if axis.high is not None else max(values, default=1.0)
        if axis.log2:
            self.low, self.high = math.log2(low), math.log2(high)
            powers = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            ticks = [2.0**power for power in powers]
        else:
            self.low, self.high = low, high
            ticks = round_ticks(low, high) if high > low else [low]
            if axis.high is None and len(ticks) > 1 and ticks[-1] < high:
                self.high = high = round(2 * ticks[-1] - ticks[-2], 12)  # the axis ends at a tick
                ticks.append(high)
        if self.high <= self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.ticks = [tick for tick in axis.ticks if low <= tick <= high] or ticks
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        """Values outside the limits land on the nearer edge."""
        place = math.log2(value) if self.log2 else value
        share = min(max((place - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 2)


# Charts -----------------------------------------------------------------------------------------------------------


def row_chart(title: str, x: Axis, rows: Sequence[PlotRow], at: float | None = None, band: float | None = None) -> str:
    """Rows from top to bottom with their names at the left. `at` draws a line across, `band` shades that much on both
    sides of it: what lies inside is noise."""
    names = min(180.0, CHARACTER * max(len(row.name) for row in rows) + 10)
    notes = CHARACTER * max(len(row.note) for row in rows) + 8
    bottom = TOP + ROW * len(rows)
    ends = [sum(value for value, _ in row.segments) for row in rows if row.segments]
    values = [value for row in rows for value in (*(dot for dot, _ in row.dots), *(row.whisker or ()))] + ends
    scale = Scale(x, values, names, WIDTH - notes - RIGHT)
    parts = []
    if at is not None and band:
        left, right = scale(at - band), scale(at + band)
        parts.append(f'<rect class="band" x="{left}" y="{TOP}" width="{_width(left, right)}" height="{bottom - TOP}"/>')
    parts.append(_x_axis(scale, x.label, TOP, bottom))
    if at is not None:
        parts.append(f'<line class="at" x1="{scale(at)}" x2="{scale(at)}" y1="{TOP}" y2="{bottom}"/>')
    for index, row in enumerate(rows):
        parts.append(_row(row, scale, TOP + ROW * (index + 0.5), names, WIDTH - RIGHT - notes + 8))
    return _figure(title, "".join(parts), bottom + BOTTOM)


def line_chart(
    title: str, x: Axis, y: Axis, lines: Sequence[Line], at: float | None = None, diagonal: bool = False
) -> str:
    """Lines with a marker at each point. `at` draws a level, `diagonal` the line on which both axes agree."""
    bottom = HEIGHT - BOTTOM
    across = Scale(x, [px for line in lines for px, _ in line.points], LEFT + 8, WIDTH - RIGHT - 18)
    up = Scale(y, [py for line in lines for _, py in line.points], bottom, TOP + 8)
    parts = [_x_axis(across, x.label, TOP, bottom, LEFT), _y_axis(up, y.label)]
    if at is not None:
        parts.append(f'<line class="at" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(at)}" y2="{up(at)}"/>')
    if diagonal:
        low, high = max(across.low, up.low), min(across.high, up.high)
        ends = f'x1="{across(low)}" y1="{up(low)}" x2="{across(high)}" y2="{up(high)}"'
        parts.append(f'<line class="at" {ends}/>')
    labelled: list[tuple[float, float]] = []
    for line in lines:
        placed = [(across(px), up(py)) for px, py in line.points]
        path = " ".join(f"{px},{py}" for px, py in placed)
        parts.append(f'<polyline class="line {_colour(line.style)}{_dash(line.style)}" points="{path}"/>')
        for index, (px, py) in enumerate(placed):
            radius = 4.0 if not line.sizes else 2.5 + 6 * line.sizes[index] ** 0.5
            told = f"{line.name}: {short(line.points[index][0])}, {short(line.points[index][1])}"
            parts.append(_marker(px, py, line.style, radius, told))
            # One label over another could not be read.
            if line.labels and all(abs(px - x) > 16 or abs(py - y) > 11 for x, y in labelled):
                labelled.append((px, py))
                parts.append(_text(px + 6, py - 6, line.labels[index], "small"))
    return _figure(title, "".join(parts), HEIGHT)


def column_chart(title: str, x: Axis, y: Axis, groups: Sequence[str], columns: Sequence[Columns]) -> str:
    """Columns side by side in groups named along the x axis; missing heights are left out."""
    bottom = HEIGHT - BOTTOM
    up = Scale(y, [height for each in columns for height in each.heights], bottom, TOP + 8)
    parts = [_y_axis(up, y.label), _text((LEFT + WIDTH) / 2, HEIGHT - 8, x.label, "label", "middle")]
    room = (WIDTH - RIGHT - LEFT) / max(len(groups), 1)
    width = round(min(room * 0.8 / max(len(columns), 1), 34), 2)
    for place, group in enumerate(groups):
        middle = LEFT + room * (place + 0.5)
        parts.append(_text(middle, bottom + 16, group, "tick", "middle"))
        for index, each in enumerate(columns):
            if place < len(each.heights):
                left = round(middle + width * (index - len(columns) / 2), 2)
                top, told = up(each.heights[place]), f"{each.name}, {group}: {short(each.heights[place])}"
                box = f'x="{left}" y="{top}" width="{width}" height="{_width(top, bottom)}"'
                parts.append(f'<rect class="fill {_colour(each.style)}" {box}>{_title(told)}</rect>')
    return _figure(title, "".join(parts), HEIGHT)


def legend(entries: Sequence[tuple[str, int]], filled: bool = False) -> str:
    """Names beside the line and marker, or the filled square, that stand for them."""
    items = []
    for name, style in entries:
        line = f'<polyline class="line {_colour(style)}{_dash(style)}" points="1,7 25,7"/>{_marker(13, 7, style)}'
        square = f'<rect class="fill {_colour(style)}" x="6" y="1" width="12" height="12"/>'
        mark = f'<svg class="mark" viewBox="0 0 26 14" aria-hidden="true">{square if filled else line}</svg>'
        items.append(f"<li>{mark}{escape(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


# Parts ------------------------------------------------------------------------------------------------------------


def _figure(title: str, inside: str, height: float) -> str:
    svg = f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{inside}</svg>'
    return f'<figure><figcaption>{escape(title)}</figcaption><div class="scroll">{svg}</div></figure>'


def _row(row: PlotRow, scale: Scale, y: float, names: float, note: float) -> str:
    most = int((names - 10) / CHARACTER)
    name = row.name if len(row.name) <= most else row.name[: most - 1] + "…"
    parts = [_text(names - 8, y + 4, name, "name", "end", row.name), _text(note, y + 4, row.note, "value")]
    done = 0.0
    for value, style in row.segments:
        left, right = scale(done), scale(done + value)
        box = f'x="{left}" y="{y - 8}" width="{_width(left, right)}" height="16"'
        parts.append(f'<rect class="fill {_colour(style)}" {box}>{_title(f"{row.name}: {short(value)}")}</rect>')
        done += value
    if row.whisker:
        left, right = (scale(value) for value in row.whisker)
        parts.append(f'<line class="whisker" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
    parts.extend(_marker(scale(value), y, style, told=f"{row.name}: {short(value)}") for value, style in row.dots)
    return "".join(parts)


def _x_axis(scale: Scale, label: str, top: float, bottom: float, start: float | None = None) -> str:
    start, end = (scale.start, scale.end) if start is None else (start, scale.end + 18)
    parts = [f'<line class="axis" x1="{start:g}" x2="{end:g}" y1="{bottom}" y2="{bottom}"/>']
    for tick in scale.ticks:
        x = scale(tick)
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, short(tick), "tick", "middle"))
    middle = (start + end) / 2 if end - start > CHARACTER * len(label) else WIDTH / 2
    return "".join([*parts, _text(middle, bottom + 35, label, "label", "middle")])


def _y_axis(scale: Scale, label: str) -> str:
    parts = [f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{scale.start:g}"/>']
    for tick in scale.ticks:
        y = scale(tick)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(LEFT - 6, y + 4, short(tick), "tick", "end"))
    middle = (TOP + scale.start) / 2
    turned = f'transform="rotate(-90 14 {middle:g})"'
    parts.append(f'<text class="label" x="14" y="{middle:g}" text-anchor="middle" {turned}>{escape(label)}</text>')
    return "".join(parts)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start", told: str = "") -> str:
    place = f'x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}{_title(told)}</text>' if text else ""


def _title(told: str) -> str:
    return f"<title>{escape(told)}</title>" if told else ""


def _circle(x: float, y: float, r: float) -> tuple[str, str]:
    return "circle", f'cx="{x:g}" cy="{y:g}" r="{r:.3g}"'


def _polygon(*corners: tuple[float, float]) -> Callable[[float, float, float], tuple[str, str]]:
    def draw(x: float, y: float, r: float) -> tuple[str, str]:
        places = " ".join(f"{x + r * dx:.5g},{y + r * dy:.5g}" for dx, dy in corners)
        return "polygon", f'points="{places}"'

    return draw


_SHAPES = (
    _circle,
    _polygon((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    _polygon((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
    _polygon((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    _polygon((0, 1.2), (1.1, -0.9), (-1.1, -0.9)),
)


def _marker(x: float, y: float, style: int, radius: float = 4.0, told: str = "") -> str:
    tag, place = (_circle if style == GREY else _SHAPES[style % len(_SHAPES)])(x, y, radius)
    return f'<{tag} {place} class="fill {_colour(style)}">{_title(told)}</{tag}>'


def _colour(style: int) -> str:
    return f"s{style % (COLOURS + 1)}"


def _dash(style: int) -> str:
    return ("", " dash", " dots")[style // (COLOURS + 1) % 3]


def _width(start: float, end: float) -> float:
    return round(max(end - start, 0.0), 2)
