"""Rollouts at temperature 1 are what rule `rejection` accepts: against fresh passes, and against the engine."""

import pytest
import torch

from dspark.config import EngineConfig, SamplingParams
from dspark.data import Corpus
from dspark.drafter import load_drafter
from dspark.engine import Engine
from dspark.engine.dspark_proposer import DsparkProposer
from dspark.target import PassRow
from dspark.train import Session, SessionPlan, roll_out_sampled, sampled_anchors, validate
from tests.train.toys import BLOCK, make_corpus, toy_trainer


@pytest.fixture(scope="module")
def trained(target, corpus):
    torch.set_num_threads(1)
    trainer = toy_trainer(target, corpus, steps=60, lr=5e-3, rank=64)
    for _ in trainer.run():
        pass
    return trainer


def test_anchors_lie_in_sampled_text_only():
    sampled, greedy = make_corpus([[1] * 12] * 3, [3] * 3, temperature=1.0), make_corpus([[1] * 12], [3])
    assert sampled_anchors(greedy, 4, 10, seed=0) == {}
    assert sampled_anchors(make_corpus([[1] * 12], [3], temperature=0.7), 4, 10, seed=0) == {}
    chosen = sampled_anchors(sampled, 4, 10, seed=0)
    assert sum(map(len, chosen.values())) == 10 and max(map(len, chosen.values())) <= 4
    assert all(3 <= p < 8 and places == sorted(set(places)) for places in chosen.values() for p in places)


def test_every_chance_equals_a_recompute(target, corpus, trained, monkeypatch):
    """One fresh pass over prefix and draft, no caches: a pass that left its drafts behind would show."""
    drafter, ids = trained.served("float32"), corpus.sequence(1)
    drafts = []
    propose = validate.propose_block

    def recorded(*args):
        drafts.append(propose(*args))
        return drafts[-1]

    monkeypatch.setattr(validate, "propose_block", recorded)
    anchors = [10, 12, 13, 30]
    found = list(validate._survivals(drafter, target.decoder, ids, anchors, key=5))
    assert len({tuple(d.ids[0].tolist()) for d in drafts}) > 1
    for anchor, draft, chances in zip(reversed(anchors), drafts, found, strict=True):
        text = torch.cat((ids[: anchor + 1], draft.ids[0]))
        hidden, _ = target.decoder.run(text, [PassRow(0, 0, len(text))], target.decoder.new_pool(128))
        p = target.decoder.logits(hidden).softmax(-1)[anchor:-1]
        slots = torch.arange(BLOCK)
        keep = (p[slots, draft.ids[0]] / draft.probs[0, slots, draft.ids[0]]).clamp(max=1)
        torch.testing.assert_close(torch.tensor(chances), keep.cumprod(0), rtol=1e-3, atol=1e-5)


def test_it_is_what_the_engine_accepts(target, corpus, trained, tmp_path):
    """Text sampled in the engine with this drafter: kept draft tokens against rollouts at the same anchors."""
    trained.save(tmp_path)
    drafter = load_drafter(tmp_path, target.decoder, target.fingerprint)
    settings = EngineConfig(model="toy", kv_gb=0.02, policy=f"fixed:{BLOCK}", acceptance="rejection")
    engine = Engine(target, DsparkProposer(drafter), settings)
    texts, anchors, accepted = [], {}, []
    for i in range(8):
        steps = []
        engine.listeners[:] = [lambda record, steps=steps: steps.extend(record.rows)]
        prompt = corpus.sequence(i % len(corpus))[:12].tolist()
        params = SamplingParams(temperature=1, max_tokens=80, ignore_eos=True, seed=i)
        texts.append(prompt + list(engine.generate([prompt], params)[0].token_ids))
        position = len(prompt)
        for row in steps:
            if not row.prefill and row.verified == BLOCK and position + BLOCK < len(texts[-1]):
                anchors.setdefault(i, []).append(position)
                accepted.append(row.accepted)
            position += row.committed if not row.prefill else 0
    sampled: Corpus = make_corpus(texts, [12] * 8, temperature=1.0)
    rollout = roll_out_sampled(drafter, target.decoder, sampled, anchors)
    assert rollout.blocks == len(accepted) > 200
    for slot in range(BLOCK):
        share, expected = sum(a > slot for a in accepted) / len(accepted), rollout.survived[slot] / rollout.blocks
        # Coin tosses on one side, other drafts on both.
        assert abs(share - expected) < 4 * (expected * (1 - expected) / len(accepted)) ** 0.5 + 0.02
    assert 0.05 < rollout.survived[0] / rollout.blocks < 0.98


def test_both_temperatures_are_logged(target, corpus, tmp_path):
    sampled = Corpus(corpus.ids, corpus.offsets, corpus.prompt_lens, (0.0, 1.0) * 3, corpus.kinds)
    plan = SessionPlan(validate_every=2, validate_blocks=20, sampled_blocks=5)
    trainer = toy_trainer(target, corpus, steps=2)
    list(Session(trainer, sampled, tmp_path, plan, "float32", 1e9).run())
    names, row = [line.split(",") for line in (tmp_path / "validation.csv").read_text().splitlines()]
    values = dict(zip(names, row, strict=True))
    assert values["validation_blocks"] == "20" and values["t1_blocks"] == "5"
    lengths = [float(values[f"al_t1_{k}"]) for k in range(1, BLOCK + 1)]
    assert 1 < lengths[0] <= lengths[-1] < BLOCK + 1 and lengths == sorted(lengths)


def test_without_text_of_a_temperature_its_columns_stay_empty(target, corpus, tmp_path):
    trainer = toy_trainer(target, corpus, steps=2)
    session = Session(trainer, corpus, tmp_path, SessionPlan(validate_every=2, validate_blocks=5), "float32", 1e9)
    assert session.can_validate and session.validate().sampled is None
    list(session.run())
    names, row = [line.split(",") for line in (tmp_path / "validation.csv").read_text().splitlines()]
    assert dict(zip(names, row, strict=True))["al_t1_1"] == ""
