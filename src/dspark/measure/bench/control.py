"""Which differences are real: paired ratios, the control's noise, and the verdict (pure)."""

import statistics
from collections.abc import Iterable, Sequence

from dspark.measure.bench.records import CONTROL, PLAIN, Cell, ControlSummary, Group, Spread

RESTLESS = 0.03  # a control that strays further from 1, or varies more, voids a run
FEWEST_ROUNDS = 3  # below, quartiles say nothing, and so does the verdict

Ratios = dict[Group, list[float]]


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (linear between values) of one value or more."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def pace(cell: Cell) -> float:
    """What ratios compare: tokens a second; in open loop, where arrivals decide that, answers per second of waiting."""
    if cell.group.rate is None:
        return cell.tok_per_s
    return len(cell.requests) / sum(request.latency_s for request in cell.requests)


def ratios(cells: Iterable[Cell], mode: str, baseline: str = PLAIN) -> Ratios:
    """Pace of `mode` over `baseline`'s by group, round by round; rounds that lack one of the two are left out."""
    paces = {(cell.group, cell.round, cell.mode): pace(cell) for cell in cells}
    found: Ratios = {}
    for (group, number, name), value in paces.items():
        other = paces.get((group, number, baseline))
        if name == mode and other is not None:
            found.setdefault(group, []).append(value / other)
    return found


def noise_of(control: Ratios) -> dict[Group, float]:
    """How far from 1 the control's quartiles stray: those of the group, or of all groups where that is more."""
    if not control:
        return {}
    everywhere = _stray(spread([ratio for each in control.values() for ratio in each]))
    return {group: max(everywhere, _stray(spread(each))) for group, each in control.items()}


def verdict(ratio: Spread, noise: float) -> str:
    """ "faster" or "slower" when the ratios' quartiles lie beyond the noise on the same side of 1, else "none"."""
    if ratio.rounds < FEWEST_ROUNDS:
        return "none"
    if ratio.low > 1 + noise:
        return "faster"
    return "slower" if ratio.high < 1 - noise else "none"


def control_summary(cells: Iterable[Cell]) -> ControlSummary | None:
    """The control over all groups and rounds; None without one."""
    every = [ratio for each in ratios(cells, CONTROL).values() for ratio in each]
    if not every:
        return None
    ratio = spread(every)
    width = ratio.high - ratio.low
    return ControlSummary(ratio, width, RESTLESS, restless=max(width, abs(ratio.median - 1)) > RESTLESS)


def _stray(ratio: Spread) -> float:
    return max(abs(ratio.low - 1), abs(ratio.high - 1))
