"""Golden alignment: what the loss compares at (anchor, slot) is what serving drafts there and what the target says
there, near the beginning of a text and near the end of the context."""

import pytest
import torch

from dspark.drafter import random_tensors
from dspark.target import PassRow
from dspark.train import forward
from tests.train.toys import BLOCK, make_corpus, toy_trainer

LENGTH, PROMPT = 508, 3
ANCHORS = (3, 4, 17, 250, 500, 503)  # the last block reaches one token from the text's end, near the context's 512


@pytest.fixture(scope="module")
def compared(target):
    """(trainer, text, what the loss saw per (anchor, slot): draft logits, target probabilities, label)."""
    torch.set_num_threads(1)
    text = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(6))
    corpus = make_corpus([text.tolist()], [PROMPT])
    trainer = toy_trainer(target, corpus, draft_vocab=None)
    for name, tensor in random_tensors(trainer.config, seed=2).items():  # weights that use all they are given
        trainer.tensors[name].data.copy_(tensor)
    seen = []
    loss_sums = forward.loss_sums

    def recorded(logits, probs, labels, *rest):
        seen.append((logits.detach(), probs, labels))
        return loss_sums(logits, probs, labels, *rest)

    forward.loss_sums = recorded
    try:
        chunk = trainer._slots(0, ANCHORS)
        forward.chunk_sums(
            trainer.served("float32"), trainer.store[0], chunk, trainer.probs(0, trainer.store[0], chunk.rows)
        )
    finally:
        forward.loss_sums = loss_sums
    (logits, probs, labels), places = seen[0], [(ANCHORS[a], k + 1) for a, k in chunk.mask.nonzero().tolist()]
    return trainer, text, {place: (logits[n], probs[n], int(labels[n])) for n, place in enumerate(places)}


def served_logits(trainer, text, anchor, context_end=None, position=None):
    """Logits of every slot, previous tokens from the text, through the cached context."""
    drafter, features = trainer.served("float32"), trainer.store[0]
    context_end = anchor if context_end is None else context_end
    pool = drafter.new_pool(LENGTH + 2 * BLOCK)
    drafter.append_context(features.taps[:context_end].float(), [PassRow(0, 0, context_end)], pool)
    row = [PassRow(0, anchor if position is None else position, BLOCK)]
    hidden = drafter.block_pass(drafter.masked_block(text[anchor : anchor + 1]), row, pool)
    previous = text[anchor : anchor + BLOCK][None]
    return (drafter.base_logits(hidden) + drafter.head.block_bias(drafter.head.embed(previous, hidden), hidden))[0]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_the_loss_sees_what_serving_drafts(compared, anchor):
    trainer, text, seen = compared
    expected = served_logits(trainer, text, anchor)
    found = torch.stack([seen[anchor, k][0] for k in range(1, BLOCK + 1)])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    # One position more of context, or a block one position further: other numbers.
    assert (found - served_logits(trainer, text, anchor, position=anchor + 1)).abs().max() > 0.02
    late = served_logits(trainer, text, anchor, context_end=anchor + 1, position=anchor + 1)
    assert (found - late).abs().max() > 0.02


@pytest.mark.parametrize("anchor", ANCHORS)
def test_it_is_compared_with_what_the_target_says_there(compared, target, anchor):
    _, text, seen = compared
    for slot in range(1, BLOCK + 1):
        before = text[: anchor + slot]
        hidden, _ = target.decoder.run(before, [PassRow(0, 0, len(before))], target.decoder.new_pool(640))
        expected = target.decoder.logits(hidden[-1:]).softmax(-1)[0]
        _, probs, label = seen[anchor, slot]
        torch.testing.assert_close(probs, expected, rtol=3e-2, atol=1e-4)
        assert label == int(text[anchor + slot])


def test_every_slot_of_every_anchor_is_there(compared):
    _, _, seen = compared
    assert sorted(seen) == [(anchor, k) for anchor in ANCHORS for k in range(1, BLOCK + 1)]
