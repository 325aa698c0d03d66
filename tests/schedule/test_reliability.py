"""ECE, AUC and reliability bins against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.schedule.reliability import auc, chance_ece, ece, reliability

# Few distinct values, so that ties and full bins occur; bin edges and both ends are among them.
STATEMENTS = st.lists(
    st.tuples(st.sampled_from([0.0, 1 / 15, 0.2, 0.3333, 0.5, 0.71, 14 / 15, 1.0]), st.booleans()),
    min_size=1,
    max_size=40,
)


def tensors(statements):
    return torch.tensor([p for p, _ in statements], dtype=torch.float64), torch.tensor([o for _, o in statements])


def by_definition(statements, bins):
    total = 0.0
    for number in range(bins):
        inside = [(p, o) for p, o in statements if min(int(p * bins), bins - 1) == number]
        if inside:
            total += abs(sum(p for p, _ in inside) - sum(o for _, o in inside))
    return total / len(statements)


@settings(deadline=None)
@given(STATEMENTS, st.integers(1, 20))
def test_ece_is_its_definition(statements, bins):
    assert float(ece(*tensors(statements), bins)) == pytest.approx(by_definition(statements, bins), abs=1e-12)


@settings(deadline=None)
@given(STATEMENTS)
def test_ece_of_several_rows_is_each_rows(statements):
    stated, outcome = tensors(statements)
    rows = torch.stack((stated, stated / 2, 1 - stated))
    assert ece(rows, outcome).tolist() == [float(ece(row, outcome)) for row in rows]


@settings(deadline=None)
@given(STATEMENTS)
def test_bins_hold_every_statement(statements):
    stated, outcome = tensors(statements)
    bins = reliability(stated, outcome)
    assert bins.counts.sum() == len(statements)
    assert float((bins.counts * bins.stated).sum()) == pytest.approx(float(stated.sum()))
    assert float((bins.counts * bins.observed).sum()) == pytest.approx(float(outcome.sum()))


@settings(deadline=None)
@given(STATEMENTS)
def test_auc_is_its_definition(statements):
    positives = [p for p, o in statements if o]
    negatives = [p for p, o in statements if not o]
    found = auc(*tensors(statements))
    if not positives or not negatives:
        assert found is None
        return
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    assert found == pytest.approx(wins / len(positives) / len(negatives))


@pytest.mark.parametrize("seed", range(4))
def test_chance_alone_gives_the_ece_of_true_statements(seed):
    """A perfect predictor's ECE is not 0; `chance_ece` says what it is."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.rand(3000, generator=generator, dtype=torch.float64)
    outcome = torch.rand(3000, generator=generator, dtype=torch.float64) < true
    expected = chance_ece(true)
    assert 0.02 < expected < 0.04
    assert float(ece(true, outcome)) < 2 * expected
    assert float(ece(true**2, outcome)) > 4 * expected
