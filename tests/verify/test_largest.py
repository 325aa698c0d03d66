"""The fast search for the largest value is torch's, ties included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.verify.largest import largest_ids

few = st.sampled_from([-float("inf"), -1.0, -0.0, 0.0, 0.5, 1.0, float("inf")])


@given(st.integers(1, 4), st.integers(1, 40), st.data(), st.sampled_from([torch.float32, torch.float64]))
def test_it_is_the_first_of_the_largest(rows, width, data, dtype):
    several = data.draw(st.lists(st.lists(few, min_size=width, max_size=width), min_size=rows, max_size=rows))
    found = largest_ids(torch.tensor(several, dtype=dtype)).tolist()
    assert found == [row.index(max(row)) for row in several]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_and_dtype(dtype):
    values = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(largest_ids(values.T), values.T.argmax(dim=1))
    assert torch.equal(largest_ids(values[:, ::3].requires_grad_()), values[:, ::3].argmax(dim=1))
