"""Goodness of fit. The seeds of the tests are fixed, so a test that passes once always passes."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from statistics import NormalDist

FALSE_ALARM = 1e-5


def chi_square_limit(degrees: int, false_alarm: float = FALSE_ALARM) -> float:
    """Critical value of the chi-square distribution, by the Wilson-Hilferty cube."""
    z = NormalDist().inv_cdf(1 - false_alarm)
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * spread**0.5) ** 3


def fits(samples: Iterable[Hashable], expected: Mapping[Hashable, float]) -> bool:
    """Whether the samples look drawn from `expected` (probabilities); cells under 5 expected counts are pooled."""
    counts = Counter(samples)
    total = sum(counts.values())
    if any(expected.get(cell, 0.0) == 0 for cell in counts):
        return False
    cells, pooled = [], [0.0, 0.0]
    for cell, probability in expected.items():
        if probability * total >= 5:
            cells.append((counts[cell], probability * total))
        else:
            pooled[0] += counts[cell]
            pooled[1] += probability * total
    if pooled[1] > 0:
        cells.append((pooled[0], max(pooled[1], 1.0)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return statistic <= chi_square_limit(max(len(cells) - 1, 1))
