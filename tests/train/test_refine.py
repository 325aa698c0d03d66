"""Refinement passes in training show the blocks serving would show, on the chunks that (seed, step, chunk) pick."""

import torch

from dspark.config import SamplingParams, SlotRule, Streams
from dspark.drafter import propose_block
from dspark.target import PassRow
from dspark.train import trainer as trainer_module
from dspark.train.refine import Refinement, drafted_blocks, refinement
from tests.train.toys import BLOCK, CPU, same_weights, toy_trainer


def trained(target, corpus, **changes):
    trainer = toy_trainer(target, corpus, steps=6, **changes)
    for _ in trainer.run():
        pass
    return trainer


def test_without_it_nothing_is_drafted(target, corpus, monkeypatch):
    plain = trained(target, corpus)

    def never(*args):
        raise AssertionError("a block was drafted")

    monkeypatch.setattr("dspark.train.forward.drafted_blocks", never)
    assert same_weights(plain.tensors, trained(target, corpus, refine_prob=0.0).tensors)


def test_which_chunks_are_refined_is_a_function_of_their_numbers():
    def picked(seed, probability):
        return [
            (step, chunk)
            for step in range(100)
            for chunk in range(8)
            if refinement(probability, seed, step, chunk, 0.0, CPU)
        ]

    assert picked(1, 0.3) == picked(1, 0.3) != picked(2, 0.3)
    assert 180 < len(picked(1, 0.3)) < 300
    assert set(picked(1, 0.3)) < set(picked(1, 0.6))
    assert not picked(1, 0.0) and len(picked(1, 1.0)) == 800
    draws = {
        float(torch.rand((), generator=refinement(1.0, 0, s, c, 1.0, CPU).generator)) for s in (0, 1) for c in (0, 1)
    }
    assert len(draws) == 4


def test_blocks_are_those_a_serving_refinement_feeds_back(target, corpus, monkeypatch):
    """Greedy: the input ids of the last pass of `propose_block` with one refinement."""
    trainer = trained(target, corpus, draft_vocab=200)
    drafter, features, ids = trainer.served("float32"), trainer.store[2], corpus.sequence(2)
    anchors = torch.tensor([12, 20, 31])
    fed = []
    block_pass = type(drafter).block_pass

    def recorded(self, ids, rows, pool):
        fed.append(ids)
        return block_pass(self, ids, rows, pool)

    monkeypatch.setattr(type(drafter), "block_pass", recorded)
    served, rule = [], SlotRule(SamplingParams(temperature=0))
    for anchor in anchors.tolist():
        pool, row = drafter.new_pool(64), PassRow(0, anchor, BLOCK)
        drafter.append_context(features.taps[:anchor].float(), [PassRow(0, 0, anchor)], pool)
        streams = Streams((False,), (0,), (anchor + 1,), (0,))
        start = ids[anchor : anchor + 1]
        propose_block(drafter, start, [row], pool, [BLOCK], lambda slot, ids: [rule], streams, refinements=1)
        served.append(fed[-1][0])
    how = Refinement(0.0, torch.Generator())
    found = drafted_blocks(drafter, features.taps[:31].float(), ids[anchors], anchors, how)
    assert torch.equal(found, torch.stack(served))
    assert (found[:, 1:] != trainer.config.mask_token_id).all()


def test_samples_follow_the_drafters_distribution(target, corpus):
    """The first drafted token of many blocks at one anchor against the softmax it is drawn from."""
    trainer = trained(target, corpus)
    drafter, features, ids = trainer.served("float32"), trainer.store[0], corpus.sequence(0)
    anchors, context = torch.full((100,), 15), features.taps[:15].float()
    how = Refinement(0.3, torch.Generator().manual_seed(1))
    drafted = [drafted_blocks(drafter, context, ids[anchors], anchors, how)[:, 1] for _ in range(20)]
    hidden = drafter.backbone.block_hidden(context, drafter.embed(drafter.masked_block(ids[anchors[:1]])), anchors[:1])
    bias = drafter.head.block_bias(drafter.head.embed(ids[anchors[:1], None], like=hidden), hidden[:, :1])
    logits = (drafter.base_logits(hidden[:, :1]) + bias)[0, 0]
    found = torch.bincount(torch.cat(drafted), minlength=len(logits)) / 2000

    def in_doubt(temperature):
        expected = (logits / temperature).softmax(-1)
        return ((found - expected).abs() > 5 * (expected / 2000).sqrt() + 1e-3).sum()

    assert in_doubt(0.3) == 0 and in_doubt(1.0) > 5


def test_it_changes_what_is_learned_and_resumes_bitwise(target, corpus, tmp_path):
    straight = trained(target, corpus, refine_prob=0.5)
    assert not same_weights(straight.tensors, trained(target, corpus).tensors)
    first = toy_trainer(target, corpus, refine_prob=0.5)
    for _ in first.run(lambda: first.step >= 3):
        pass
    first.save(tmp_path)
    second = toy_trainer(target, corpus, refine_prob=0.5)
    assert second.resume(tmp_path)
    for _ in second.run():
        pass
    assert same_weights(straight.tensors, second.tensors)


def test_texts_are_drafted_at_their_own_temperature(target, corpus, monkeypatch):
    seen = []

    def recorded(drafter, features, slots, probs, refine):
        seen.append(refine.temperature)
        return chunk_sums(drafter, features, slots, probs, refine)

    chunk_sums = trainer_module.chunk_sums
    monkeypatch.setattr(trainer_module, "chunk_sums", recorded)
    trainer = toy_trainer(target, corpus, refine_prob=1.0)
    trainer.gradients(0)
    assert set(seen) == set(corpus.temperatures) == {0.0}
