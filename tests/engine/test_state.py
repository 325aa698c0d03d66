"""After every step the caches are what a recompute gives, and their lengths what they should be (clauses 8 and 11)."""

import pytest
import torch

from dspark.engine.dspark_proposer import DsparkProposer
from dspark.engine.model_proposer import ModelProposer
from dspark.target import PassRow
from tests.engine import support as s

PROMPTS = s.prompts(5, seed=3, longest=90)


@torch.no_grad()
def recomputed(target, ids, taps=()):
    pool = target.decoder.new_pool(256)
    _, tapped = target.decoder.run(torch.tensor(ids), [PassRow(0, 0, len(ids))], pool, taps)
    return pool, tapped


def assert_cache(pool, start, expected, length, exact=True):
    for layer in range(pool.layers):
        for ours, theirs in zip(pool.read(layer, start, length), expected.read(layer, 0, length), strict=True):
            if exact:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check(engine):
    """Every running request: kv_len as defined, the target's cache and the proposer's equal to a recompute."""
    target, proposer = engine.target, engine.loop.proposer
    for request in engine.loop.batcher.running:
        expected_len = request.kv_len if request.in_prefill else request.num_tokens - 1
        assert request.kv_len == expected_len <= len(request.tokens(0))
        if not request.kv_len:
            continue
        committed = request.tokens(0)[: request.kv_len]
        expected, taps = recomputed(target, committed, proposer.taps)
        assert_cache(engine.loop._pool, request.start, expected, request.kv_len)
        if isinstance(proposer, DsparkProposer):
            done = proposer._context_len.get(request.id, 0)
            waiting = sum(len(t) for t in proposer._waiting.get(request.id, []))
            assert done + waiting == request.kv_len
            if done:
                drafter_pool = proposer._drafter.new_pool(256)
                proposer._drafter.append_context(taps[:done], [PassRow(0, 0, done)], drafter_pool)
                assert_cache(proposer._pool, request.start, drafter_pool, done, exact=False)
        if isinstance(proposer, ModelProposer):
            valid = min(proposer._valid.get(request.id, 0), request.kv_len)
            if valid:
                model_pool = proposer._decoder.new_pool(256)
                proposer._decoder.run(torch.tensor(committed[:valid]), [PassRow(0, 0, valid)], model_pool)
                assert_cache(proposer._pool, request.start, model_pool, valid, exact=False)


def proposers(target, tmp_path):
    answers = s.toy_engine(target).generate(PROMPTS, s.seeded(2))
    return {
        "none": s.NoneProposer(),
        "sometimes right": s.ScriptedProposer(answers, error=s.coin(4, 0.4)),
        "model": s.model_proposer(target, tmp_path / "model"),
        "dspark": s.bigram_proposer(target),
    }


@pytest.mark.parametrize("kind", ["none", "sometimes right", "model", "dspark"])
@pytest.mark.parametrize("chunk", [16, 512])
@torch.inference_mode()
def test_caches_equal_a_recompute_after_every_step(kind, chunk, deep_target, tmp_path):
    proposer = proposers(deep_target, tmp_path)[kind]
    engine = s.toy_engine(deep_target, proposer, policy="fixed:4", max_batch=3, max_pass_tokens=chunk)
    ids = [engine.add(p, s.seeded(2, max_tokens=20 + i)) for i, p in enumerate(PROMPTS)]
    for step in range(1000):
        if engine.step() is None:
            break
        check(engine)
        if step == 6:
            engine.abort(ids[1])
            check(engine)
    assert engine.num_requests == 0
    assert engine.loop.batcher.free_slots == engine.loop.batcher.slots.capacity


@torch.inference_mode()
def test_a_cache_that_keeps_rejected_drafts_is_found_out(deep_target):
    """The wrong variant: counting a rejected token as kept fails the same check."""
    answers = s.toy_engine(deep_target).generate(PROMPTS[:1], s.seeded(2))
    engine = s.toy_engine(deep_target, s.ScriptedProposer(answers, error=lambda p: True), policy="fixed:4")
    engine.add(PROMPTS[0], s.seeded(2))
    while not engine.loop.batcher.running or engine.loop.batcher.running[0].in_prefill:
        engine.step()
    engine.step()
    check(engine)
    engine.loop.batcher.running[0].kv_len += 1
    with pytest.raises(AssertionError):
        check(engine)


def test_off_means_no_taps_and_no_drafter(deep_target):
    """Speculation off asks the target for nothing beside its own pass."""
    engine = s.toy_engine(deep_target, s.random_proposer(deep_target)).without_drafts()
    assert engine.loop.proposer.taps == ()
    assert engine.loop.proposer.kv_token_bytes == 0


def count_calls(monkeypatch, drafter_class, name):
    calls = []
    original = getattr(drafter_class, name)
    monkeypatch.setattr(drafter_class, name, lambda self, *args: (calls.append(args), original(self, *args))[1])
    return calls


def test_a_request_that_is_not_drafted_for_costs_no_drafter_pass(deep_target, monkeypatch):
    """Paused: taps wait raw, and one pass projects them when a draft is wanted again."""
    from dspark.drafter import Drafter

    appended = count_calls(monkeypatch, Drafter, "append_context")
    blocks = count_calls(monkeypatch, Drafter, "block_pass")
    proposer = s.random_proposer(deep_target)
    engine = s.toy_engine(deep_target, proposer, policy="fixed:4")
    engine.add(PROMPTS[0], s.seeded(2, max_tokens=30), speculate=False)
    for _ in range(10):
        engine.step()
    assert appended == [] and blocks == []
    engine.loop.batcher.running[0].speculate = True
    engine.step()
    assert len(appended) == 1 and len(blocks) == 1
    with torch.inference_mode():
        check(engine)


def test_drafts_after_a_pause_are_those_without_one(deep_target):
    drafted = {}
    for paused in (False, True):
        engine = s.toy_engine(deep_target, s.random_proposer(deep_target), policy="fixed:4")
        engine.add(PROMPTS[0], s.greedy(max_tokens=30), speculate=not paused)
        while (request := engine.loop.batcher.running[0] if engine.loop.batcher.running else None) is None or (
            len(request.output_ids) < 12
        ):
            engine.step()
        rows = engine.loop.batcher.next_rows(4)
        from dspark.engine.loop import _streams

        with torch.inference_mode():
            drafted[paused] = (
                request.output_ids,
                engine.loop.proposer.propose(rows, [4], _streams(rows)).ids.tolist(),
            )
    assert drafted[True] == drafted[False]
