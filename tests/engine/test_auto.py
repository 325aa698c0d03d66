"""Proposer `auto`: each row's chain from one source, chosen before any token is drawn."""

from dataclasses import replace

import pytest
import torch

from dspark.config import Draft
from dspark.engine.auto_proposer import AutoProposer, merged
from dspark.engine.lookup import LookupProposer
from dspark.schedule import planner
from dspark.target import PassRow
from tests.engine import machine as m
from tests.engine import support as s
from tests.engine.test_identity import CRITICAL, chi_square, exact_probabilities, frequencies

PROMPTS = s.prompts(3, seed=4)


def auto(target, neural=None) -> AutoProposer:
    return AutoProposer(LookupProposer(), neural or s.bigram_proposer(target))


def sources_of(records) -> set[str]:
    return {row.source for record in records for row in record.rows}


@pytest.mark.parametrize("policy", ["fixed:4", "scheduled"])
def test_both_sources_are_used_and_records_name_them(policy, target, monkeypatch):
    m.Clock(monkeypatch, target)
    engine = m.engine_on(target, auto(target), policy=policy)
    records = m.run(engine, PROMPTS, s.greedy(max_tokens=120))
    assert {"lookup", "dspark"} <= sources_of(records) <= {"lookup", "dspark", "none"}
    for row in (row for record in records for row in record.rows):
        assert (row.source == "none") == (row.drafted == 0)


def test_a_drafter_that_costs_more_than_it_brings_leaves_the_drafting_to_lookup(target, monkeypatch):
    dear = m.Machine(m.TWO_CORES.passes, draft=60.0, host=0.5)
    m.Clock(monkeypatch, target, dear)
    engine = m.engine_on(target, auto(target), dear, policy="scheduled")
    records = m.run(engine, PROMPTS[:1], s.greedy(max_tokens=200))
    used = [row.source for record in records for row in record.rows]
    assert used.count("lookup") > 20 and used.count("dspark") <= 3


@pytest.mark.parametrize("watched", [True, False])
def test_a_source_that_learns_from_every_step_is_not_tried(watched, target, monkeypatch):
    m.Clock(monkeypatch, target)
    proposer = LookupProposer()
    offers = proposer.offers

    def hopeless(row, outlook):
        return tuple(replace(offer, survival=(0.01,), watched=watched) for offer in offers(row, outlook))

    monkeypatch.setattr(proposer, "offers", hopeless)
    records = m.run(m.engine_on(target, proposer, policy="scheduled"), PROMPTS, s.greedy(max_tokens=250))
    assert (sum(row.drafted for record in records for row in record.rows) == 0) is watched


def test_sampling_by_rejection_follows_the_target(target):
    """Point masses of one row beside distributions of another, in one draft."""
    assert chi_square(frequencies(target, auto(target)), exact_probabilities(target)) < CRITICAL


@torch.inference_mode()
def test_a_drafter_used_now_and_then_knows_its_whole_context(deep_target, monkeypatch):
    """Raw taps wait while lookup drafts; after every step the projected ones are those of a recompute (clause 11)."""
    monkeypatch.setattr(planner, "PASS_GAIN", 0.0)  # or this poor drafter would hardly be used
    neural = s.random_proposer(deep_target)
    m.Clock(monkeypatch, deep_target)
    engine = m.engine_on(deep_target, auto(deep_target, neural), policy="scheduled")
    engine.add(PROMPTS[0], s.greedy(max_tokens=150))
    checked = 0
    while (record := engine.step()) is not None and engine.loop.batcher.running:
        (request,) = engine.loop.batcher.running
        done = neural._context_len.get(request.id, 0)
        assert done + sum(map(len, neural._waiting.get(request.id, []))) == request.kv_len
        if record.rows[0].source == "dspark" or len(request.output_ids) == 140:
            checked += 1
            ids = torch.tensor(request.tokens(0)[:done])
            pool = deep_target.decoder.new_pool(512)
            _, taps = deep_target.decoder.run(ids, [PassRow(0, 0, done)], pool, neural.taps)
            expected = neural._drafter.new_pool(512)
            neural._drafter.append_context(taps, [PassRow(0, 0, done)], expected)
            for layer in range(expected.layers):
                ours = neural._pool.read(layer, request.start, done)
                for mine, theirs in zip(ours, expected.read(layer, 0, done), strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert 3 < checked < 120


def masses(*ids) -> Draft:
    return Draft(torch.tensor([ids]), (len(ids),), sources=("lookup",))


def test_merged_drafts_keep_ids_lengths_sources_and_distributions():
    probs = torch.rand(2, 2, 5)
    drawn = Draft(torch.tensor([[1, 2], [3, 0]]), (2, 1), probs, torch.rand(2, 2), ("dspark", "dspark"))
    whole = merged([([3], masses(4, 4, 2)), ([0, 2], drawn)], 5)
    assert whole.lens == (2, 0, 1, 3, 0) and whole.sources == ("dspark", "none", "dspark", "lookup", "none")
    assert whole.ids[3].tolist() == [4, 4, 2] and whole.ids[0, :2].tolist() == [1, 2]
    assert torch.equal(whole.probs[0, :2], probs[0]) and torch.equal(whole.probs[2, :2], probs[1])
    assert torch.equal(whole.probs[3], torch.nn.functional.one_hot(torch.tensor([4, 4, 2]), 5).float())
    assert torch.equal(whole.confidence[0, :2], drawn.confidence[0])


def test_merged_point_masses_need_no_distributions_and_nothing_is_nothing():
    whole = merged([([1], masses(4)), ([0], masses(3, 2))], 2)
    assert whole.probs is None and whole.lens == (2, 1)
    assert merged([], 3).lens == (0, 0, 0) and merged([([0], Draft(torch.zeros(1, 0).long(), (0,)))], 1).lens == (0,)


def test_a_truncated_draft_loses_only_length():
    draft = Draft(torch.tensor([[1, 2], [3, 4]]), (2, 2), sources=("lookup", "lookup"))
    assert draft.truncate((1, 5)).lens == (1, 2) and torch.equal(draft.truncate((1, 5)).ids, draft.ids)
