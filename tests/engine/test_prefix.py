"""A shared prefix is not run again, and nothing else changes: caches, drafts and answers (clauses 8 and 10)."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.engine import prefix
from dspark.engine.dspark_proposer import DsparkProposer
from dspark.engine.lookup import LookupProposer
from dspark.target import SlotRanges
from dspark.target.kv import KEY_BLOCK
from tests.engine import support as s
from tests.engine.caches import check_caches, check_pool

LONG, SHORT = s.prompts(2, seed=21, longest=60)
LONG = (LONG * 8)[:90]
KINDS = ["none", "lookup", "model", "dspark"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """In float64, so that two ways to the same number differ by less than any tie."""
    return s.toy_target(tmp_path_factory.mktemp("wide"), dtype="float64", exact=False)


@pytest.fixture
def proposer_of(target, tmp_path):
    def make(kind):
        if kind == "model":
            return s.model_proposer(target, tmp_path / "model")
        return {"none": s.NoneProposer, "lookup": LookupProposer}.get(kind, lambda: s.bigram_proposer(target))()

    return make


def run(engine, checked=True):
    while engine.step() is not None:
        if checked:
            check_pool(engine)


def answer(engine, prompt, params):
    return engine.generate([prompt], params)[0]


def following(output, *more):
    """The next turn of a conversation."""
    return [*output.prompt_ids, *output.token_ids, *more]


@pytest.mark.parametrize("shared", [0, 1, 40, 89, 90])
def test_exactly_the_shared_prefix_is_not_run_again(shared, target):
    engine = s.toy_engine(target)
    answer(engine, LONG, s.greedy(max_tokens=5))
    prompt = LONG[:shared] + [33, 34, 35] if shared < 90 else LONG
    run_tokens = []
    engine.listeners.append(lambda record: run_tokens.extend(row.prefill for row in record.rows))
    output = answer(engine, prompt, s.greedy(max_tokens=1))
    expected = min(shared, len(prompt) - 1)  # the last token's logits are needed
    assert output.stats.cached_tokens == expected
    assert sum(run_tokens) == len(prompt) - expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_of_a_conversation_runs_only_what_is_new(kind, target, proposer_of):
    engine, fresh = s.toy_engine(target, proposer_of(kind)), s.toy_engine(target, prefix_cache=False)
    prompt = SHORT
    for turn in range(3):
        params = s.seeded(turn, max_tokens=15)
        output, plain = answer(engine, prompt, params), answer(fresh, prompt, params)
        assert output.token_ids == plain.token_ids and plain.stats.cached_tokens == 0
        # All that the last turn ran: its last token was never an input.
        assert output.stats.cached_tokens == (0 if turn == 0 else len(prompt) - 2)
        check_caches(engine)
        prompt = following(output, 40 + turn)
    assert len(engine.loop.batcher.prefixes.kept) == 1  # later turns stand for earlier ones


def test_a_turn_after_a_stop_inside_a_block_follows_the_right_state(target):
    """PITFALLS 10: the cache must not hold what was drafted behind the stop."""
    plain = answer(s.toy_engine(target), SHORT, s.seeded(1))
    for stop_at in range(4, 11, 2):
        params = s.seeded(1, stop_token_ids=[plain.token_ids[stop_at]])
        engine = s.toy_engine(target, s.ScriptedProposer([plain]), policy="fixed:6")
        output = answer(engine, SHORT, params)
        (kept,) = engine.loop.batcher.prefixes.kept
        assert list(kept.token_ids) == following(output)[:-1]
        check_caches(engine)
        engine.loop.proposer._answers[tuple(following(output, 50))] = ()
        params = s.seeded(2, max_tokens=9)
        again = answer(engine, following(output, 50), params)
        assert again.token_ids == answer(s.toy_engine(target), following(output, 50), params).token_ids
        assert again.stats.cached_tokens == len(following(output)) - 1


@pytest.mark.parametrize(("kind", "batch", "chunk"), [("dspark", 1, 512), *((kind, 8, 16) for kind in KINDS)])
def test_answers_are_those_without_the_cache(kind, batch, chunk, target, proposer_of):
    tails = s.prompts(6, seed=4, longest=12)
    prompts = [LONG[: 15 * i] + tail for i, tail in enumerate(tails)] + [LONG, SHORT]
    params = [s.seeded(i, max_tokens=10) if i % 2 else s.greedy(max_tokens=10) for i in range(len(prompts))]
    expected = s.toy_engine(target, prefix_cache=False).generate(prompts, params)
    engine = s.toy_engine(target, proposer_of(kind), max_batch=batch, max_pass_tokens=chunk)
    for _ in range(2):
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [e.token_ids for e in expected]
    if batch > 1:  # the pool of a batch of one is too small to keep them all
        assert [o.stats.cached_tokens for o in outputs] == [len(p) - 1 for p in prompts]
    check_caches(engine)
    check_pool(engine)


@pytest.mark.parametrize("kind", ["model", "dspark"])
@pytest.mark.parametrize("batch", [1, 4])
def test_as_many_drafts_are_kept_with_a_cached_prefix_as_without(kind, batch, target, proposer_of):
    """PITFALLS 5: a drafter whose context misses the cached part would accept less."""
    prompts = [LONG[:70] + tail for tail in s.prompts(4, seed=6, longest=9)]
    params = [s.seeded(i, max_tokens=20) for i in range(4)]
    accepted = {}
    for cached in (False, True):
        engine = s.toy_engine(target, proposer_of(kind), max_batch=batch, prefix_cache=cached)
        answer(engine, LONG, s.greedy(max_tokens=8))
        outputs = engine.generate(prompts, params)
        assert [o.stats.cached_tokens for o in outputs] == [70 * cached] * 4
        accepted[cached] = [(o.stats.slot_verified, o.stats.slot_accepted) for o in outputs]
    assert accepted[True] == accepted[False] and any(sum(kept) for _, kept in accepted[True])


def test_one_prompt_asked_for_many_times_at_once_is_run_once(target):
    engine = s.toy_engine(target, max_pass_tokens=64)
    records = []
    engine.listeners.append(records.append)
    outputs = engine.generate([LONG] * 4, [s.seeded(i, max_tokens=6) for i in range(4)])
    assert sum(row.prefill for record in records for row in record.rows) == len(LONG) + 3
    assert len({o.token_ids for o in outputs}) == 4
    check_caches(engine)


def test_raw_taps_of_a_paused_request_go_with_its_prefix(target):
    engine = s.toy_engine(target, s.bigram_proposer(target))
    chunks = []
    engine.add(LONG, s.greedy(max_tokens=9), on_chunk=chunks.append, speculate=False)
    run(engine)
    paused = chunks[-1].output
    engine.add(following(paused, 44), s.greedy(max_tokens=9))
    while engine.step() is not None:
        check_caches(engine)


def test_the_longest_unused_prefix_goes_first_and_only_for_one_that_then_fits(target):
    engine = s.toy_engine(target, kv_gb=4 * KEY_BLOCK * target.decoder.kv_token_bytes / 1e9)
    batcher, params = engine.loop.batcher, s.greedy(max_tokens=10)
    first, second, third = ([40 + i] * 30 for i in range(3))
    for prompt in (first, second, third, first, second):
        answer(engine, prompt, params)
    assert [p.token_ids[0] for p in batcher.prefixes.kept] == [42, 40, 41]
    running = engine.add([60] * 200, s.greedy(max_tokens=40))  # two blocks
    engine.step()
    assert [p.token_ids[0] for p in batcher.prefixes.kept] == [40, 41]
    waiting = engine.add([61] * 300, params)  # three blocks: not while the other runs
    engine.step()
    assert [p.token_ids[0] for p in batcher.prefixes.kept] == [40, 41]
    engine.abort(running)
    engine.abort(waiting)
    engine.loop.batcher.prefixes.clear()
    assert batcher.slots.free_slots == batcher.slots.capacity


@pytest.mark.parametrize("kind", ["none", "dspark"])
def test_a_prefix_is_used_even_if_its_own_slots_are_needed(kind, target, proposer_of):
    """The new range then covers the old one."""
    proposer = proposer_of(kind)
    token_bytes = target.decoder.kv_token_bytes + proposer.kv_token_bytes
    engine = s.toy_engine(target, proposer, kv_gb=2.1 * KEY_BLOCK * token_bytes / 1e9)
    prompt = following(answer(engine, LONG, s.seeded(1, max_tokens=20)), 70)
    engine.add(prompt, s.seeded(2, max_tokens=30))
    engine.step()
    (request,) = engine.loop.batcher.running
    assert request.stats.cached_tokens == len(prompt) - 2 and not engine.loop.batcher.prefixes.kept
    check_caches(engine)
    run(engine)


def test_an_ended_request_is_kept_unless_it_failed(target):
    end = target.spec.eos_ids[0]
    impossible = s.greedy(allowed_token_ids=[end], min_tokens=5, ignore_eos=False)
    engine = s.toy_engine(target)
    assert answer(engine, LONG, impossible).finish_reason == "error"
    assert engine.loop.batcher.prefixes.kept == ()
    aborted = engine.add(LONG, s.greedy())
    engine.step()
    engine.abort(aborted)
    assert answer(engine, LONG, s.greedy()).stats.cached_tokens == len(LONG) - 1


def test_ranges_shrink_to_whole_key_blocks():
    ranges = SlotRanges(4 * KEY_BLOCK)
    start = ranges.take(4 * KEY_BLOCK)
    ranges.shrink(start, KEY_BLOCK + 1)
    assert ranges.free_slots == 2 * KEY_BLOCK
    ranges.shrink(start, 3 * KEY_BLOCK)  # never grows
    ranges.give_back(start)
    assert ranges.take(4 * KEY_BLOCK) == 0


@pytest.mark.parametrize("source", [0, 3, 5, 12])
def test_slots_are_copied_even_onto_themselves(source, target):
    pool = target.decoder.new_pool(20)
    for cache in pool.caches:
        cache.copy_(torch.rand(cache.shape))
    before = [cache.clone() for cache in pool.caches]
    pool.copy(source, 5, 7)
    for cache, old in zip(pool.caches, before, strict=True):
        assert torch.equal(cache[5:12], old[source : source + 7])
        assert torch.equal(cache[:5], old[:5]) and torch.equal(cache[12:], old[12:])


# Random work --------------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "step", "step", "step", "abort"]), st.integers(0, 90), st.integers(0, 3)),
    min_size=4,
    max_size=24,
)


@pytest.mark.parametrize("kind", KINDS)
@given(actions=ACTIONS, chunk=st.sampled_from([8, 24, 512]), blocks=st.integers(2, 7))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_work_leaves_caches_right_and_no_slot_lost_or_owned_twice(
    kind, actions, chunk, blocks, target, proposer_of
):
    proposer = proposer_of(kind)
    token_bytes = target.decoder.kv_token_bytes + proposer.kv_token_bytes
    settings = {"max_batch": 3, "max_pass_tokens": chunk, "policy": "fixed:3"}
    engine = s.toy_engine(target, proposer, kv_gb=(blocks + 0.1) * KEY_BLOCK * token_bytes / 1e9, **settings)
    running = []
    for number, (action, shared, tail) in enumerate(actions):
        if action == "add":
            prompt = LONG[:shared] + [60 + tail, 70]
            running.append(engine.add(prompt, s.seeded(number, max_tokens=3 + tail * 5)))
        elif action == "abort" and running:
            engine.abort(running.pop(shared % len(running)))
        else:
            engine.step()
        check_pool(engine)
    check_caches(engine)
    run(engine)
    check_caches(engine)
    assert engine.loop.batcher.free_slots == engine.loop.batcher.slots.capacity
    engine.loop.batcher.prefixes.clear()
    check_pool(engine)
    assert engine.loop.batcher.slots.free_slots == engine.loop.batcher.slots.capacity


# Wrong variants -----------------------------------------------------------------------------------------------------


def test_a_prefix_one_token_too_long_is_found_out(target, monkeypatch):
    engine = s.toy_engine(target)
    answer(engine, LONG, s.greedy())
    right = prefix._usable
    monkeypatch.setattr(prefix, "_usable", lambda *args: right(*args) + 1)
    engine.add([*LONG[:40], 33, 34, 35, 36], s.greedy())
    engine.step()
    with pytest.raises(AssertionError):
        check_caches(engine)


def test_a_drafter_context_that_stays_behind_is_found_out(target, monkeypatch):
    monkeypatch.setattr(DsparkProposer, "adopt", lambda *args: None)
    engine = s.toy_engine(target, s.bigram_proposer(target))
    answer(engine, LONG, s.greedy())
    engine.add([*LONG[:40], 33, 34, 35, 36], s.greedy())
    engine.step()
    with pytest.raises(AssertionError):
        check_caches(engine)
