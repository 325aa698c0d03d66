"""What the caches of an engine must hold, kept prefixes included, and how its pool must be divided."""

import torch

from dspark.engine.dspark_proposer import DsparkProposer
from dspark.engine.model_proposer import ModelProposer
from dspark.target import PassRow
from dspark.target.kv import round_up

SLOTS = 512


@torch.inference_mode()
def check_caches(engine):
    """Target's and proposer's caches of every running and kept text equal a recompute from nothing."""
    batcher = engine.loop.batcher
    texts = [(r.id, r.tokens(0)[: r.kv_len], r.start) for r in batcher.running if r.kv_len]
    for request in batcher.running:
        assert request.in_prefill or request.kv_len == request.num_tokens - 1
    for owner, ids, start in texts + [(p.owner, list(p.token_ids), p.start) for p in batcher.prefixes.kept]:
        check_text(engine, owner, ids, start)


def check_text(engine, owner, ids, start):
    target, proposer = engine.target, engine.loop.proposer
    pool = target.decoder.new_pool(SLOTS)
    _, taps = target.decoder.run(torch.tensor(ids), [PassRow(0, 0, len(ids))], pool, proposer.taps)
    assert_same(engine.loop._pool, start, pool, len(ids))
    if isinstance(proposer, DsparkProposer):
        done = proposer._context_len.get(owner, 0)
        waiting = proposer._waiting.get(owner, [])
        assert done + sum(map(len, waiting)) == len(ids)
        if waiting:
            torch.testing.assert_close(torch.cat(waiting), taps[done:])
        if done:
            context = proposer._drafter.new_pool(SLOTS)
            proposer._drafter.append_context(taps[:done], [PassRow(0, 0, done)], context)
            assert_same(proposer._pool, start, context, done)
    if isinstance(proposer, ModelProposer) and (valid := min(proposer._valid.get(owner, 0), len(ids))):
        context = proposer._decoder.new_pool(SLOTS)
        proposer._decoder.run(torch.tensor(ids[:valid]), [PassRow(0, 0, valid)], context)
        assert_same(proposer._pool, start, context, valid)


def assert_same(pool, start, expected, length):
    for layer in range(pool.layers):
        for ours, theirs in zip(pool.read(layer, start, length), expected.read(layer, 0, length), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check_pool(engine):
    """Every slot is free or has one owner, and nobody's context is kept without its slots."""
    batcher = engine.loop.batcher
    slack = engine.loop.proposer.slack
    owned = [(r.start, round_up(r.limit + slack, 128)) for r in batcher.running]
    owned += [(p.start, round_up(len(p.token_ids), 128)) for p in batcher.prefixes.kept]
    used = [slot for start, size in owned for slot in range(start, start + size)]
    assert len(used) == len(set(used)) and all(0 <= slot < batcher.slots.capacity for slot in used)
    assert len(used) + batcher.slots.free_slots == batcher.slots.capacity
    owners = {r.id for r in batcher.running} | {p.owner for p in batcher.prefixes.kept}
    for state in ("_context_len", "_waiting", "_valid", "_indexes"):
        assert set(getattr(engine.loop.proposer, state, {})) <= owners
