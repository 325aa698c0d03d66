"""What a run begins with: mask token, draft vocabulary, bigrams, learning rate, settings that are refused."""

from collections import Counter

import pytest
import torch

from dspark.errors import DrafterError, SettingsError, TrainError
from dspark.train import TrainSettings, learning_rate, new_trainer
from dspark.train.start import (
    bigram_head,
    choose_draft_vocab,
    choose_mask_id,
    default_taps,
    special_ids,
    token_counts,
)
from tests.sentences import assert_one_sentence
from tests.toy_models import BOS_ID, EOS_ID
from tests.train.toys import make_corpus, toy_settings, toy_trainer


def test_the_mask_is_an_id_without_a_role_that_the_data_never_uses():
    assert choose_mask_id({0, 1, 4}, {2, 5}, 8) == 3
    assert choose_mask_id({0, 1, 3, 4, 6}, {2, 5}, 8) == 7
    with pytest.raises(TrainError) as error:
        choose_mask_id(set(range(7)), {7}, 8)
    assert_one_sentence(error.value)


def test_the_mask_is_stored_and_served(target, corpus, tmp_path):
    trainer = toy_trainer(target, corpus)
    mask = trainer.config.mask_token_id
    assert mask not in set(corpus.ids.tolist()) | {EOS_ID, BOS_ID}
    assert {EOS_ID, BOS_ID} <= special_ids(target)
    trainer.save(tmp_path)
    from dspark.drafter import load_drafter

    drafter = load_drafter(tmp_path, target.decoder, target.fingerprint)
    assert drafter.config.mask_token_id == mask and drafter.config.target == target.fingerprint
    assert drafter.warnings == ()


@pytest.mark.parametrize("bad", ["used", "end", "pad"])
def test_a_mask_with_another_meaning_is_refused(target, corpus, bad, monkeypatch):
    token = {"end": EOS_ID, "pad": 251, "used": int(corpus.ids[0])}[bad]
    special_id = type(target.tokenizer).special_id
    monkeypatch.setattr(
        type(target.tokenizer), "special_id", lambda self, role: 251 if role == "pad_token" else special_id(self, role)
    )
    assert 251 not in corpus.ids or bad != "pad"
    with pytest.raises(TrainError) as error:
        new_trainer(target, corpus, toy_settings(), mask_token_id=token)
    assert_one_sentence(error.value, [str(token)])


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_the_end():
    counts = torch.tensor([5, 0, 3, 3, 3, 9, 0])
    assert choose_draft_vocab(counts, 3, always=[]).tolist() == [0, 2, 5]
    assert choose_draft_vocab(counts, 3, always=[6]).tolist() == [0, 5, 6]
    assert choose_draft_vocab(counts, 7, always=[6]).tolist() == list(range(7))


def test_counts_are_of_responses():
    corpus = make_corpus([[1, 1, 2, 3], [4, 2, 2]], [2, 1])
    assert token_counts(corpus, 6).tolist() == [0, 0, 3, 1, 0, 0]


def test_the_markov_head_starts_at_the_bigrams():
    """At full rank the head's softmax is the smoothed conditional distribution counted by hand."""
    make = torch.Generator().manual_seed(1)
    sequences = [[9] + torch.randint(0, 8, (30,), generator=make).sort().values.tolist() for _ in range(6)]
    corpus, vocab = make_corpus(sequences, [1] * 6), 10
    draft_ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9])
    w1, w2 = bigram_head(corpus, draft_ids, vocab, rank=9, seed=0)
    assert w1.shape == (vocab, 9) and w2.shape == (8, 9)
    responses = [s[1:] for s in sequences]
    pairs = Counter((a, b) for r in responses for a, b in zip(r, r[1:], strict=False))
    tokens = Counter(t for r in responses for t in r)
    total = sum(tokens.values())
    for x in range(8):
        unigram = {y: (tokens[y] + 1) / (total + len(draft_ids)) for y in draft_ids.tolist()}
        mass = {y: unigram[y] + pairs[x, y] / 2.0 for y in unigram}
        expected = torch.tensor([mass[y] / sum(mass.values()) for y in unigram])
        # Randomised, and a little noise is added, so near rather than equal.
        torch.testing.assert_close((w2 @ w1[x]).softmax(0), expected, atol=0.02, rtol=0.05)


def test_bigrams_do_not_touch_the_global_generator():
    corpus = make_corpus([[1, 2, 3, 4, 5]], [1])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    bigram_head(corpus, torch.arange(6), 6, rank=3, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_learning_rate_rises_then_falls_to_zero():
    settings = toy_settings(steps=100, lr=2.0, warmup=0.1)
    rates = [learning_rate(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == pytest.approx(2.0)
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[55] == pytest.approx(1.0) and rates[100] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("head", "lstm"),
        ("block_size", 0),
        ("chunk_blocks", 65),
        ("rank", 0),
        ("decay", -1.0),
        ("taps", ()),
        ("seed", -1),
        ("warmup", 1.0),
    ],
)
def test_settings_outside_their_range(name, value):
    with pytest.raises(SettingsError) as error:
        TrainSettings(**{"steps": 10, "batch_blocks": 64, name: value})
    assert_one_sentence(error.value, [name])


@pytest.mark.parametrize("taps", [(0, 2), (-2, 0)])
def test_taps_the_target_does_not_have(target, corpus, taps):
    with pytest.raises(TrainError) as error:
        toy_trainer(target, corpus, taps=taps)
    assert_one_sentence(error.value, ["3 layers", "-1", "--taps"])


def test_default_taps_are_spread_over_the_target():
    assert default_taps(30) == (8, 18, 28)
    assert default_taps(3) == (0, 1) and default_taps(2) == (0,) and default_taps(1) == (-1,)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"taps": (1, 0)}, ["target_layer_ids"]),
        ({"kv_heads": 3}, ["num_kv_heads"]),
    ],
)
def test_sizes_that_do_not_fit_the_target(target, corpus, changes, names):
    with pytest.raises(DrafterError) as error:
        toy_trainer(target, corpus, **changes)
    assert_one_sentence(error.value, names)


def test_nothing_to_train_on(target, corpus):
    for empty in (corpus.subset([]), make_corpus([[1, 2, 3]], [2])):
        with pytest.raises(TrainError) as error:
            toy_trainer(target, empty)
        assert_one_sentence(error.value)
