"""From measured costs to a `Profile`: which differences say what, and how noise is kept from bending them."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import TypeVar

import numpy as np

from dspark.schedule.profile import NOTHING, Curve, Profile

PassPoint = tuple[int, int, int]  # tokens, rows, context
DraftPoint = tuple[int, int, bool]  # rows, slots, sampled at a temperature above 0
HostPoint = tuple[int, int, bool]  # rows, drafted tokens per row, sampled at a temperature above 0

_P = TypeVar("_P", bound=Hashable)

MOMENT = 12  # samples before and after one that were taken while the machine was about as fast
SHORT = 0.1  # of the median cost: times below say little about how fast the machine was
# How far, as a logarithm, the cost of a size may lie off the line between its neighbours before that looks like noise.
KINK = 0.04
_OF_MEDIAN = 1.25  # standard error of a median over that of a mean
_OF_DEVIATION = 1.48  # standard deviation over the median absolute one


def steady_medians(samples: Sequence[tuple[_P, float]]) -> tuple[dict[_P, float], dict[_P, float]]:
    """The median time of every point, with the machine's faster and slower moments taken out, and its standard error
    as a share of it.

    Plans live on differences between costs that are a few percent apart, while a shared machine's speed wanders by
    ten. A sample is therefore divided by how samples around it compare with the medians of their own points. Errors
    come from one scatter for all points, since most have too few samples to tell their own; there are none where every
    point has one sample.

    Args:
        samples: (point, ms) in the order in which they were taken, points taking turns.
    """
    times = [ms for _, ms in samples]
    for _ in range(2):
        usual = _medians([(point, ms) for (point, _), ms in zip(samples, times, strict=True)])
        least = SHORT * median(usual.values()) if usual else 0.0
        speeds = [ms / usual[point] if usual[point] > least else None for point, ms in samples]
        times = []
        for i, (_, ms) in enumerate(samples):
            near = [speed for speed in speeds[max(0, i - MOMENT) : i + MOMENT + 1] if speed]
            times.append(ms / median(near) if near else ms)
    steady = [(point, ms) for (point, _), ms in zip(samples, times, strict=True)]
    medians = _medians(steady)
    return medians, _errors(steady, medians)


def _errors(steady: Sequence[tuple[_P, float]], medians: Mapping[_P, float]) -> dict[_P, float]:
    counts = Counter(point for point, _ in steady)
    off = [abs(ms / medians[point] - 1) for point, ms in steady if counts[point] > 1 and medians[point] > 0]
    if not off:
        return {}
    scatter = _OF_DEVIATION * median(off)
    return {point: _OF_MEDIAN * scatter / math.sqrt(count) for point, count in counts.items()}


def _medians(samples: Iterable[tuple[_P, float]]) -> dict[_P, float]:
    found: dict[_P, list[float]] = defaultdict(list)
    for point, ms in samples:
        found[point].append(ms)
    return {point: median(times) for point, times in found.items()}


def rising(values: Sequence[float]) -> list[float]:
    """The closest values (least squares) that never fall: neighbours in the wrong order share their mean.

    Medians of noisy times may fall where costs cannot; a true step is left as it is.
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (high, some), (low, more) = blocks[-2], blocks.pop()
            blocks[-1] = ((high * some + low * more) / (some + more), some + more)
    return [value for value, count in blocks for _ in range(count)]


def smoothed(points: Mapping[int, float], errors: Mapping[int, float]) -> dict[int, float]:
    """Costs by size with noise taken out, as far as their errors (shares) say that it is noise.

    Of all costs the likeliest, if measured ones are off by their errors and each lies about `KINK` off the line between
    its neighbours, both as logarithms: a stair much larger than its error stays one, one that is not is spread out.
    Plans take a stair for a bargain, so that one that is not there has them verify the same wrong number for ever.
    """
    sizes = sorted(points)
    if len(sizes) < 3 or not errors or min(points.values()) <= 0:
        return dict(points)
    least, unknown = min(errors.values()), max(errors.values())
    if not least:
        return dict(points)
    at = np.log(sizes)
    off_line = np.zeros((len(sizes) - 2, len(sizes)))
    for i, (before, here, after) in enumerate(zip(at, at[1:], at[2:], strict=False)):
        nearer = (here - before) / (after - before)
        off_line[i, i : i + 3] = nearer - 1, 1, -nearer
    weights = np.array([errors.get(n, unknown) for n in sizes]) ** -2.0
    measured = np.log([points[n] for n in sizes])
    found = np.linalg.solve(np.diag(weights) + off_line.T @ off_line / KINK**2, weights * measured)
    return dict(zip(sizes, np.exp(found).tolist(), strict=True))


def curve(points: Mapping[int, float]) -> Curve:
    """A curve through the points, negative values raised to 0 and noise made monotone."""
    sizes = sorted(points)
    return Curve(tuple(sizes), tuple(rising([max(0.0, points[n]) for n in sizes])))


def attention_curve(points: Mapping[int, float]) -> Curve:
    """Cost per cached position over tokens of a request, made concave enough that splitting a pass among more
    requests never makes it cheaper: neither the cost falls with tokens, nor does the cost per token rise."""
    sizes = sorted(points)
    costs = rising([max(0.0, points[n]) for n in sizes])
    for i in range(1, len(costs)):
        costs[i] = min(costs[i], costs[i - 1] * sizes[i] / sizes[i - 1])
    return Curve(tuple(sizes), tuple(costs))


def fit_profile(
    passes: Mapping[PassPoint, float],
    drafts: Mapping[DraftPoint, float],
    hosts: Mapping[HostPoint, float],
    block: int,
    errors: Mapping[PassPoint, float] | None = None,
) -> Profile:
    """Put a profile together from median costs in ms.

    Args:
        passes: passes over one request at the smallest context give `tokens`; those of B tokens over B requests give
            `rows`; those over one request at the largest context give `attention`. Other points are not looked at.
        drafts: one and `block` slots per row count; sampled points beside greedy ones. Empty without a drafter.
        hosts: steps without drafts per row count; drafted and sampled ones beside them.
        block: tokens of a whole draft.
        errors: standard errors of passes, as shares; see `smoothed`. None: costs are as exact as they stand.
    """
    base, far = min(c for _, _, c in passes), max(c for _, _, c in passes)
    tokens = {n: ms for (n, rows, context), ms in passes.items() if rows == 1 and context == base}
    errors = errors or {}
    tokens = smoothed(tokens, {n: errors[n, 1, base] for n in tokens if (n, 1, base) in errors})
    more = {r: ms - tokens[n] for (n, r, context), ms in passes.items() if n == r > 1 and context == base}
    reading = {
        n: (ms - tokens[n]) / (far - base)
        for (n, rows, context), ms in passes.items()
        if rows == 1 and context == far > base
    }
    return Profile(
        tokens=curve(tokens),
        rows=curve({1: 0.0, **more}),
        attention=attention_curve(reading) if reading else NOTHING,
        base_context=base,
        block=block if drafts else 0,
        draft=curve({rows: ms for (rows, slots, sampled), ms in drafts.items() if slots == 1 and not sampled})
        if drafts
        else NOTHING,
        draft_slot=_slot_curve(drafts, block),
        draft_sampled_ms=_typical(
            (ms - drafts[rows, slots, False]) / (rows * slots)
            for (rows, slots, sampled), ms in drafts.items()
            if sampled
        ),
        host=curve({rows: ms for (rows, drafted, sampled), ms in hosts.items() if not drafted and not sampled}),
        host_token_ms=_host_token_ms(hosts, sampled=False),
        host_token_sampled_ms=max(0.0, _host_token_ms(hosts, sampled=True) - _host_token_ms(hosts, sampled=False)),
        host_sampled_ms=_typical(
            (ms - hosts[rows, 0, False]) / rows
            for (rows, drafted, sampled), ms in hosts.items()
            if sampled and not drafted
        ),
    )


def residual(profile: Profile, held_out: Mapping[PassPoint, float]) -> float:
    """Median relative error of predicted pass times on points the fit did not see; 0 without any."""
    errors = [abs(profile.pass_ms(*point) / ms - 1) for point, ms in held_out.items()]
    return median(errors) if errors else 0.0


def _slot_curve(drafts: Mapping[DraftPoint, float], block: int) -> Curve:
    if block < 2 or not drafts:
        return NOTHING
    return curve(
        {
            rows: (ms - drafts[rows, 1, False]) / (block - 1)
            for (rows, slots, sampled), ms in drafts.items()
            if slots == block and not sampled
        }
    )


def _host_token_ms(hosts: Mapping[HostPoint, float], sampled: bool) -> float:
    """What a drafted token adds, from steps with and without drafts that are otherwise alike."""
    return _typical(
        (ms - hosts[rows, 0, sampled]) / (rows * drafted)
        for (rows, drafted, drawn), ms in hosts.items()
        if drafted and drawn == sampled and (rows, 0, sampled) in hosts
    )


def _typical(values: Iterable[float]) -> float:
    found = list(values)
    return max(0.0, mean(found)) if found else 0.0
