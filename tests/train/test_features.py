"""Features are the target's own numbers, the same whether cached or computed again."""

import torch

from dspark.target import PassRow
from dspark.train import CacheLimits, FeatureStore, feature_bytes, new_trainer, target_probs
from dspark.train.features import DraftProbs
from tests.train.toys import make_corpus, toy_settings, toy_trainer

TAPS = (-1, 1)


def store(target, corpus, cache_bytes=1e9):
    return FeatureStore(target.decoder, TAPS, corpus, cache_bytes)


def test_they_are_the_targets_taps_and_distributions(target, corpus):
    index = 3
    ids, prompt_len = corpus.sequence(index), corpus.prompt_lens[index]
    pool = target.decoder.new_pool(128)
    hidden, taps = target.decoder.run(ids, [PassRow(0, 0, len(ids))], pool, TAPS)
    features = store(target, corpus)[index]
    assert features.taps.dtype == torch.float16
    torch.testing.assert_close(features.taps.float(), taps[:-1], rtol=1e-3, atol=1e-3)
    expected = target.decoder.logits(hidden[prompt_len:-1]).softmax(-1)
    draft_ids = torch.tensor([3, 50, 101, 259])
    rows = torch.arange(len(expected))
    probs = target_probs(features, rows, target.decoder.head_weight[draft_ids].float())
    torch.testing.assert_close(probs, expected[:, draft_ids], rtol=2e-2, atol=1e-4)
    everything = target_probs(features, rows, target.decoder.head_weight.float())
    torch.testing.assert_close(everything.sum(-1), torch.ones(len(rows)))
    # The greedy text is the target's argmax: a shift by one would show.
    assert (everything.argmax(-1) == ids[prompt_len + 1 :]).float().mean() > 0.95


def test_a_long_sequence_in_several_passes(target):
    make = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 250, (511,), generator=make).tolist()
    corpus = make_corpus([ids], [5])
    whole, _ = target.decoder.run(torch.tensor(ids), [PassRow(0, 0, 511)], target.decoder.new_pool(640))
    from dspark.train import features as module

    before, module.PASS_TOKENS = module.PASS_TOKENS, 100
    try:
        found = store(target, corpus)[0]
    finally:
        module.PASS_TOKENS = before
    expected = target.decoder.logits(whole[5:-1]).logsumexp(-1)
    torch.testing.assert_close(found.log_z, expected, rtol=1e-3, atol=1e-3)


def test_values_beyond_float16_keep_their_range(target, corpus, monkeypatch):
    run = target.decoder.run

    def loud(*args):
        hidden, taps = run(*args)
        return hidden, taps * 1e6

    monkeypatch.setattr(target.decoder, "run", loud)
    taps = store(target, corpus).compute(0).taps
    assert taps.dtype == torch.float32 and taps.abs().max() > 65504 and taps.isfinite().all()


def test_the_cache_keeps_to_its_bound_and_changes_nothing(target, corpus):
    one = store(target, corpus)[0]
    small = store(target, corpus, cache_bytes=2.5 * one.num_bytes)
    for _ in range(2):
        for i in range(len(corpus)):
            again, kept = small[i], store(target, corpus)[i]
            assert torch.equal(again.taps, kept.taps) and torch.equal(again.log_z, kept.log_z)
    held = [i for i in range(len(corpus)) if small.holds(i)]
    assert 1 <= len(held) <= 2 and sum(small[i].num_bytes for i in held) <= 2.5 * one.num_bytes
    assert small[held[0]] is small[held[0]]
    total = sum(store(target, corpus)[i].num_bytes for i in range(len(corpus)))
    assert abs(feature_bytes(target.decoder, TAPS, corpus) - total) < 0.1 * total


def test_gradients_do_not_depend_on_the_cache(target, corpus):
    kept, computed = toy_trainer(target, corpus), toy_trainer(target, corpus, cache_bytes=0)
    for step in range(2):
        assert kept.gradients(step) == computed.gradients(step)
    for name, weight in kept.weights.items():
        assert torch.equal(weight.grad, computed.weights[name].grad), name


def test_kept_probabilities_are_the_computed_ones(target, corpus):
    rows, features = torch.tensor([4, 0, 4, 9]), store(target, corpus)[2]
    head_rows = target.decoder.head_weight[torch.tensor([3, 50, 101])].float()
    kept, computed = DraftProbs(head_rows, corpus, 1e9), DraftProbs(head_rows, corpus, 0)
    assert kept.keeps and not computed.keeps
    for _ in range(2):
        torch.testing.assert_close(kept(2, features, rows), computed(2, features, rows), rtol=1e-3, atol=1e-6)


def test_probabilities_are_kept_where_memory_is_left_over(target, corpus):
    features = feature_bytes(target.decoder, (0, 1), corpus)
    needed = toy_trainer(target, corpus).probs.num_bytes
    for memory, wanted, keeps in (
        (features + needed, True, True),
        (features + needed - 1, True, False),
        (1e9, False, False),
    ):
        trainer = new_trainer(target, corpus, toy_settings(), CacheLimits(memory, probs=wanted))
        assert trainer.probs.keeps == keeps
        assert trainer.gradients(0)[0]["l1"] > 0
