"""Trained = served: the trainer overfits its text as served blocks see it, and every misalignment breaks that."""

from dataclasses import replace

import pytest
import torch

from dspark.config import EngineConfig, SamplingParams
from dspark.drafter import load_drafter
from dspark.engine import Engine
from dspark.engine.dspark_proposer import DsparkProposer
from dspark.train import FeatureStore, Rollout, forward, roll_out, rollout_anchors
from dspark.train import trainer as trainer_module
from tests.train.toys import BLOCK, make_corpus, toy_trainer

# A head of full-ish rank: it could copy its previous token, so a leak there leaves nothing for the backbone to learn.
RUN = {"steps": 300, "lr": 5e-3, "rank": 64, "chunk_blocks": 16}


def train_and_roll_out(target, corpus):
    trainer = toy_trainer(target, corpus, **RUN)
    for _ in trainer.run():
        pass
    store = FeatureStore(target.decoder, trainer.config.target_layer_ids, corpus, 1e9)
    anchors = rollout_anchors(corpus, BLOCK, 10_000, seed=0)
    return trainer, roll_out(trainer.served("float32"), store, corpus, anchors)


@pytest.fixture(scope="module")
def learned(target, corpus):
    torch.set_num_threads(1)
    return train_and_roll_out(target, corpus)


def test_it_overfits_text_that_needs_context(learned):
    _, rollout = learned
    assert rollout.acceptance_length(BLOCK) > BLOCK + 1 - 0.3
    assert rollout.blocks > 200


def test_the_text_needs_context(corpus):
    """Knowing what most often follows the last token is far from enough."""
    followers = {}
    for i in range(len(corpus)):
        ids = corpus.response(i).tolist()
        for a, b in zip(ids, ids[1:], strict=False):
            followers.setdefault(a, []).append(b)
    hits = sum(max(map(f.count, set(f))) for f in followers.values())
    assert hits / sum(map(len, followers.values())) < 0.8


def zero_taps(monkeypatch):
    compute = FeatureStore.compute

    def blind(self, index):
        found = compute(self, index)
        return replace(found, taps=torch.zeros_like(found.taps))

    monkeypatch.setattr(FeatureStore, "compute", blind)


def shift_previous(monkeypatch):
    """Slot k sees the token it must predict."""

    def shifted(*args):
        slots = forward.chunk_slots(*args)
        return replace(slots, previous=slots.previous.roll(-1, dims=1))

    monkeypatch.setattr(trainer_module, "chunk_slots", shifted)


def shift_context(monkeypatch):
    """The context ends one position late: the anchor's own feature tells what follows it."""

    def shifted(drafter, features, *rest):
        moved = replace(features, taps=torch.cat((features.taps[1:], features.taps[-1:])))
        return forward.chunk_sums(drafter, moved, *rest)

    monkeypatch.setattr(trainer_module, "chunk_sums", shifted)


def shift_positions(monkeypatch):
    """Labels and target rows of the next position."""

    def shifted(ids, prompt_len, anchors, *rest):
        later = forward.chunk_slots(ids, prompt_len, (anchors + 1).clamp(max=len(ids) - 2), *rest)
        return replace(
            later, anchors=anchors, tokens=ids[anchors], previous=ids[anchors][:, None].expand_as(later.previous)
        )

    monkeypatch.setattr(trainer_module, "chunk_slots", shifted)


@pytest.mark.parametrize("mistake", [zero_taps, shift_previous, shift_context, shift_positions])
def test_each_mistake_keeps_it_from_learning(target, corpus, monkeypatch, mistake):
    mistake(monkeypatch)
    _, rollout = train_and_roll_out(target, corpus)
    assert rollout.acceptance_length(BLOCK) < BLOCK + 1 - 0.7


def test_rollouts_count_what_the_engine_accepts(target, corpus, learned, tmp_path):
    """The same drafter in the engine, on the same prompts: accepted drafts per slot agree with rollouts at the same
    anchors."""
    trainer, _ = learned
    trainer.save(tmp_path)
    drafter = load_drafter(tmp_path, target.decoder, target.fingerprint)
    engine = Engine(target, DsparkProposer(drafter), EngineConfig(model="toy", kv_gb=0.02, policy=f"fixed:{BLOCK}"))
    anchors, accepted = {}, []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for i in range(len(corpus)):
        steps = []
        engine.listeners[:] = [lambda record, steps=steps: steps.extend(record.rows)]
        prompt = corpus.sequence(i)[: corpus.prompt_lens[i]].tolist()
        output = engine.generate([prompt], params)[0]
        assert prompt + list(output.token_ids) == corpus.sequence(i).tolist()
        position = corpus.prompt_lens[i]
        for row in steps:
            if row.prefill:
                continue
            if position + BLOCK < corpus.length(i) and row.verified == BLOCK:
                anchors.setdefault(i, []).append(position)
                accepted.append(row.accepted)
            position += row.committed
    store = FeatureStore(target.decoder, trainer.config.target_layer_ids, corpus, 1e9)
    rollout = roll_out(drafter, store, corpus, anchors)
    assert rollout.blocks == len(accepted) > 30
    in_engine = tuple(sum(a >= k for a in accepted) for k in range(1, BLOCK + 1))
    # Features are rounded to float16 in training, which may turn a near-tie.
    assert all(abs(a - b) <= 0.02 * rollout.blocks for a, b in zip(in_engine, rollout.survived, strict=True))


def test_rollout_numbers():
    rollout = Rollout(blocks=10, survived=(8, 4, 0))
    assert rollout.acceptance_length(1) == 1.8 and rollout.acceptance_length(3) == 2.2
    assert rollout.slot_acceptance == (0.8, 0.5, 0.0)


def test_rollouts_use_greedy_responses_only_and_whole_blocks():
    greedy, sampled = make_corpus([[1] * 9], [3]), make_corpus([[1] * 9], [3], temperature=0.7)
    assert rollout_anchors(sampled, 4, 100, seed=0) == {}
    assert rollout_anchors(greedy, 4, 100, seed=0) == {0: [3, 4]}  # the block at 4 ends with the last token, 8
    assert sum(map(len, rollout_anchors(greedy, 2, 2, seed=0).values())) == 2
