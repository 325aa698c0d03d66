"""Draft vocabularies: offsets there and back, and every way `d2t` can be wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.drafter import DraftVocabulary
from dspark.errors import DrafterError


@given(st.sets(st.integers(0, 99), min_size=1).map(sorted))
def test_offsets_round_trip_and_expand_puts_logits_at_their_ids(ids):
    offsets = torch.tensor([token - i for i, token in enumerate(ids)])
    vocabulary = DraftVocabulary.from_offsets(offsets, 100)
    assert vocabulary.ids.tolist() == ids
    assert torch.equal(vocabulary.offsets(), offsets)
    assert vocabulary.members == set(ids)
    logits = torch.randn(2, 3, len(ids))
    full = vocabulary.expand(logits)
    assert full.shape == (2, 3, 100)
    assert torch.equal(full[..., ids], logits)
    others = [token for token in range(100) if token not in ids]
    assert (full[..., others] == float("-inf")).all()
    assert torch.equal(full.argmax(-1), vocabulary.ids[logits.argmax(-1)])


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        ([0, 0, 98], "token id 100; the target has ids 0 to 99"),
        ([-1, 0], "token id -1"),
        ([5, 4], "draft ids 0 and 1 to token ids 5 and 5"),
        ([7, 3], "draft ids 0 and 1 to token ids 7 and 4"),
        ([0.0, 1.0], "whole numbers"),
    ],
)
def test_bad_offsets_are_named(d2t, says):
    with pytest.raises(DrafterError, match=says):
        DraftVocabulary.from_offsets(torch.tensor(d2t), 100)
