"""Many requests at once: admission, chunks, aborts, and one failing request among others."""

import pytest

from dspark.errors import RequestError
from dspark.target import SlotRanges
from dspark.target.kv import KEY_BLOCK
from tests.engine import support as s


def finish(engine):
    records = []
    while (record := engine.step()) is not None:
        records.append(record)
    return records


@pytest.mark.parametrize(("kv_gb", "at_once"), [(0.00015, 1), (0.00025, 2), (0.02, 7)])
def test_more_requests_than_fit_wait_their_turn(kv_gb, at_once, target):
    """A pool for one, two or all of them gives the same answers, and is empty afterwards."""
    prompts = s.prompts(7, seed=5)
    expected = s.toy_engine(target).generate(prompts, s.seeded(1))
    engine = s.toy_engine(target, kv_gb=kv_gb)
    running = []
    engine.listeners.append(lambda record: running.append(len(record.rows)))
    outputs = engine.generate(prompts, s.seeded(1))
    assert [o.token_ids for o in outputs] == [e.token_ids for e in expected]
    assert engine.loop.batcher.free_slots == engine.loop.batcher.slots.capacity
    assert max(running) == at_once


def test_records_obey_their_identities(target):
    engine = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:5", max_pass_tokens=32)
    records = []
    engine.listeners.append(records.append)
    engine.generate(s.prompts(4), [s.seeded(i, max_tokens=10 + i) for i in range(4)])
    rows = [row for record in records for row in record.rows]
    for row in rows:
        assert row.accepted == sum(row.slot_accepted) <= row.verified == len(row.slot_accepted) <= row.drafted
        if not row.prefill:
            assert row.committed == row.accepted + 1 - row.truncated
        assert (row.source == "none") == (row.drafted == 0)
    for record in records:
        assert record.tokens == sum(row.prefill or 1 + row.verified for row in record.rows) <= 32
    assert [record.step for record in records] == list(range(1, len(records) + 1))


def test_drafts_shrink_where_many_requests_share_a_small_pass(target):
    """And prompts still get their turn: nobody waits until others have finished."""
    prompts = s.prompts(12, longest=6)
    params = [s.seeded(1, max_tokens=10 + 5 * i) for i in range(12)]
    expected = s.toy_engine(target).generate(prompts, params)
    engine = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:6", max_batch=12, max_pass_tokens=16)
    records = []
    engine.listeners.append(records.append)
    outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [e.token_ids for e in expected]
    assert max(record.tokens for record in records) <= 16
    crowded = [r for r in records if sum(not row.prefill for row in r.rows) >= 6]
    assert crowded and all(row.drafted <= 16 // 6 - 1 for record in crowded for row in record.rows)
    assert any(row.drafted >= 4 for record in records for row in record.rows)


def test_drafts_leave_most_of_a_pass_to_prompts_that_wait(target):
    engine = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:6", max_batch=9, max_pass_tokens=64)
    records = []
    engine.listeners.append(records.append)
    for prompt in s.prompts(8):
        engine.add(prompt, s.greedy(max_tokens=40))
    while not records or any(row.prefill for row in records[-1].rows):
        engine.step()
    engine.add([1 + i % 20 for i in range(200)], s.greedy(max_tokens=4))
    engine.step()
    (chunk,) = [row.prefill for row in records[-1].rows if row.prefill]
    assert len(records[-1].rows) == 9 and chunk >= 48


def test_an_aborted_request_keeps_its_text_and_frees_its_slots(target):
    engine = s.toy_engine(target, s.bigram_proposer(target))
    prompts = s.prompts(2)
    expected = s.toy_engine(target).generate(prompts, s.seeded(1))
    chunks = []
    first = engine.add(prompts[0], s.seeded(1), on_chunk=chunks.append)
    second = engine.add(prompts[1], s.seeded(1), on_chunk=chunks.append)
    for _ in range(4):
        engine.step()
    output = engine.abort(first)
    assert output.finish_reason == "abort"
    assert output.token_ids == expected[0].token_ids[: len(output.token_ids)] and output.token_ids
    assert engine.abort(first) is None
    finish(engine)
    done = {c.output.request_id: c.output for c in chunks if c.output}
    assert done[second].token_ids == expected[1].token_ids
    assert engine.loop.batcher.free_slots == engine.loop.batcher.slots.capacity


def test_closing_a_stream_aborts_its_request(target):
    engine = s.toy_engine(target)
    stream = engine.stream(s.prompts(1)[0], s.seeded(1))
    next(stream)
    stream.close()
    assert engine.num_requests == 0
    assert engine.loop.batcher.free_slots == engine.loop.batcher.slots.capacity


def test_streamed_chunks_add_up_to_the_output(target):
    engine = s.toy_engine(target, s.bigram_proposer(target))
    chunks = list(engine.stream(s.prompts(1)[0], s.seeded(1)))
    output = chunks[-1].output
    assert "".join(c.text for c in chunks) == output.text
    assert tuple(t for c in chunks for t in c.token_ids) == output.token_ids
    assert {p.kind for c in chunks for p in c.pieces} >= {"accepted", "recovered"}


def test_a_request_whose_masks_leave_nothing_ends_alone(target):
    """The only allowed token is an end token that min_tokens forbids."""
    end = target.spec.eos_ids[0]
    impossible = s.greedy(allowed_token_ids=[end], min_tokens=5, ignore_eos=False)
    prompts = s.prompts(2)
    expected = s.toy_engine(target).generate(prompts[:1], s.greedy())
    outputs = s.toy_engine(target, s.bigram_proposer(target)).generate(prompts, [s.greedy(), impossible])
    assert outputs[0].token_ids == expected[0].token_ids
    assert outputs[1].finish_reason == "error" and "No token is possible" in outputs[1].error


@pytest.mark.parametrize(
    ("prompt", "changes", "says"),
    [
        ([], {}, "prompt is empty"),
        ([70] * 600, {}, "600 tokens"),
        ([70] * 512, {}, "512 tokens"),
        ([70, 9999], {}, "9999"),
        ([70], {"logit_bias": {-1: 1.0}}, "-1"),
        ([70], {"allowed_token_ids": [5, 260]}, "260"),
        ([70], {"stop_token_ids": [300]}, "300"),
    ],
)
def test_requests_that_cannot_be_run_are_refused_in_one_sentence(prompt, changes, says, target):
    engine = s.toy_engine(target)
    with pytest.raises(RequestError) as error:
        engine.add(prompt, s.greedy(**changes))
    assert says in str(error.value) and "\n" not in str(error.value)
    assert engine.num_requests == 0


def test_a_request_larger_than_the_pool_is_refused_and_not_left_waiting(target):
    engine = s.toy_engine(target, kv_gb=0.0003)
    with pytest.raises(RequestError, match="kv-gb"):
        engine.add([70] * 400, s.greedy(max_tokens=100))


def test_as_many_settings_as_prompts(target):
    with pytest.raises(RequestError, match="2 prompts"):
        s.toy_engine(target).generate(s.prompts(2), [s.greedy()])


def test_free_ranges_join_again():
    ranges = SlotRanges(5 * KEY_BLOCK + 17)
    a, b, c = (ranges.take(KEY_BLOCK + 1), ranges.take(KEY_BLOCK), ranges.take(2 * KEY_BLOCK))
    assert (a, b, c) == (0, 2 * KEY_BLOCK, 3 * KEY_BLOCK)
    assert ranges.take(1) is None
    ranges.give_back(a)
    ranges.give_back(c)
    assert ranges.take(3 * KEY_BLOCK) is None
    ranges.give_back(b)
    assert ranges.take(5 * KEY_BLOCK) == 0
