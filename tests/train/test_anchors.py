"""Anchors, masks and batches against loops over every position."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.train import BatchPlan, response_anchors, slot_mask
from dspark.train.forward import chunk_slots


def counted_slots(prompt_len, length, block):
    """(anchor, slot) pairs that count, by the definition: anchor and first label in the response, and every label up
    to the slot's own too."""
    found = set()
    for anchor in range(length):
        if not prompt_len <= anchor < length:
            continue
        for slot in range(1, block + 1):
            if all(prompt_len <= anchor + k < length for k in range(1, slot + 1)):
                found.add((anchor, slot))
    return found


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 5))
def test_anchors_and_masks_are_the_definition(prompt_len, response_len, block):
    length = prompt_len + response_len
    anchors = torch.tensor(list(response_anchors(prompt_len, length)), dtype=torch.int64)
    mask = slot_mask(anchors, block, length)
    found = {(int(anchors[a]), k + 1) for a, k in mask.nonzero().tolist()}
    assert found == counted_slots(prompt_len, length, block)
    assert mask.shape == (max(0, response_len - 1), block)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(1, 4))
def test_slots_name_the_right_tokens(prompt_len, response_len, block):
    length = prompt_len + response_len
    ids = torch.arange(length) + 100  # token = 100 + position
    to_draft = torch.arange(200) * 2  # draft id = 2 * token
    to_draft[100 + length - 1] = -1  # the last token cannot be drafted
    anchors = torch.tensor(list(response_anchors(prompt_len, length)))
    slots = chunk_slots(ids, prompt_len, anchors, block, 4.0, to_draft)
    assert slots.tokens.tolist() == [100 + a for a in anchors.tolist()]
    pairs = sorted(counted_slots(prompt_len, length, block))
    assert slots.mask.sum() == len(pairs)
    expected_labels, expected_rows, expected_previous = [], [], []
    for anchor, slot in pairs:
        position = anchor + slot
        expected_labels.append(-1 if position == length - 1 else 2 * (100 + position))
        expected_rows.append(position - 1 - prompt_len)
        expected_previous.append(100 + position - 1)
    assert slots.labels.tolist() == expected_labels
    assert slots.rows.tolist() == expected_rows
    assert slots.previous[slots.mask].tolist() == expected_previous
    torch.testing.assert_close(slots.weights, torch.tensor([2.718281828 ** (-(k - 1) / 4.0) for _, k in pairs]))


def test_an_epoch_shows_every_anchor_once():
    prompt_lens, lengths = [2, 1, 3, 2], [40, 8, 4, 2]  # the last has no response, the third one anchor-less token
    plan = BatchPlan(prompt_lens, lengths, batch_blocks=4, chunk_blocks=4, seed=1)
    seen = Counter((c.sequence, a) for step in range(plan.steps_per_epoch) for c in plan.batch(step) for a in c.anchors)
    every = {(i, a) for i, (p, n) in enumerate(zip(prompt_lens, lengths, strict=True)) for a in range(p, n - 1)}
    assert seen == Counter(every) and plan.num_anchors == len(every)
    assert all(len(c.anchors) <= 4 for step in range(plan.steps_per_epoch) for c in plan.batch(step))


def test_batches_depend_on_seed_and_step_only():
    def plan(seed):
        return BatchPlan([2] * 6, [30] * 6, batch_blocks=16, chunk_blocks=4, seed=seed)

    steps = range(3 * plan(1).steps_per_epoch)
    forward, one = [plan(1).batch(s) for s in steps], plan(1)
    assert [one.batch(s) for s in reversed(steps)] == forward[::-1]
    assert [plan(2).batch(s) for s in steps] != forward
    per_epoch = plan(1).steps_per_epoch
    assert forward[:per_epoch] != forward[per_epoch : 2 * per_epoch]
    assert all(sum(len(c.anchors) for c in batch) <= 16 for batch in forward)
