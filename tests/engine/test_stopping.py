"""An accepted block is cut exactly where plain decoding stops (clause 9)."""

import dataclasses

import pytest

from tests.engine import support as s

PROMPT = s.prompts(1)[0]
LENGTH = 24


def sampling(**changes):
    """Seeded sampling among lower-case letters, so that every token is a character of its own."""
    letters = {"allowed_token_ids": range(97, 123), "max_tokens": LENGTH, "logprobs": 3}
    return s.seeded(5, **(letters | changes))


@pytest.fixture(scope="module")
def answer(target):
    """A long plain answer that every case below cuts short."""
    return s.toy_engine(target).generate([PROMPT], sampling())[0]


def run(target, proposer, params):
    return s.toy_engine(target, proposer, policy="fixed:8").generate([PROMPT], params)[0]


def assert_same(ours, plain):
    for field in ("token_ids", "text", "finish_reason"):
        assert getattr(ours, field) == getattr(plain, field)
    assert [(p.token_id, p.logprob, p.top) for p in ours.logprobs] == [
        (p.token_id, p.logprob, p.top) for p in plain.logprobs
    ]
    assert len(ours.logprobs) == len(ours.token_ids)
    stats = ours.stats
    assert stats.committed == stats.accepted + stats.steps - stats.truncated
    assert stats.committed + 1 == len(ours.token_ids)


@pytest.mark.parametrize("limit", range(1, LENGTH + 1))
def test_max_tokens_at_every_offset(limit, target, answer):
    params = sampling(max_tokens=limit)
    ours = run(target, s.ScriptedProposer([answer]), params)
    assert_same(ours, run(target, s.NoneProposer(), params))
    assert len(ours.token_ids) == limit
    assert ours.finish_reason == "length"


@pytest.mark.parametrize("offset", range(LENGTH))
def test_end_token_at_every_offset(offset, target, answer):
    params = sampling(stop_token_ids=[answer.token_ids[offset]])
    ours = run(target, s.ScriptedProposer([answer]), params)
    assert_same(ours, run(target, s.NoneProposer(), params))
    assert ours.finish_reason == "stop"
    assert ours.token_ids[-1] == answer.token_ids[offset]


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("offset", range(0, LENGTH - 9, 2))
def test_stop_string_at_every_offset_and_across_blocks(width, offset, target, answer):
    stop = answer.text[offset : offset + width]
    params = sampling(stop=[stop])
    ours = run(target, s.ScriptedProposer([answer]), params)
    assert_same(ours, run(target, s.NoneProposer(), params))
    assert stop not in ours.text


def test_eos_ends_a_request_unless_ignored(target, answer):
    """The toy's real end token, forced by a bias."""
    eos = target.spec.eos_ids[0]
    params = sampling(allowed_token_ids=[*range(97, 123), eos], logit_bias={eos: 4.0}, ignore_eos=False)
    plain = run(target, s.NoneProposer(), params)
    assert plain.finish_reason == "stop" and len(plain.token_ids) < LENGTH
    ignoring = dataclasses.replace(params, ignore_eos=True)
    longer = run(target, s.NoneProposer(), ignoring)
    assert_same(run(target, s.ScriptedProposer([longer]), params), plain)
    assert_same(run(target, s.ScriptedProposer([longer]), ignoring), longer)
    assert longer.finish_reason == "length" and len(longer.token_ids) == LENGTH


def test_min_tokens_hold_back_every_kind_of_end(target, answer):
    stop_id, stop_text = answer.token_ids[2], answer.text[4]
    params = sampling(min_tokens=8, stop=[stop_text], stop_token_ids=[stop_id])
    plain = run(target, s.NoneProposer(), params)
    assert len(plain.token_ids) >= 8
    assert_same(run(target, s.ScriptedProposer([plain]), params), plain)


@pytest.mark.parametrize("left", range(1, 10))
def test_the_context_limit_is_reached_and_not_passed(left, target, answer):
    params = sampling(max_tokens=None)
    context = len(PROMPT) + left
    for proposer in (s.ScriptedProposer([answer]), s.bigram_proposer(target, block_size=8)):
        ours = s.toy_engine(target, proposer, policy="fixed:8", context=context).generate([PROMPT], params)[0]
        plain = s.toy_engine(target, context=context).generate([PROMPT], params)[0]
        assert_same(ours, plain)
        assert len(ours.token_ids) == left and ours.finish_reason == "length"


def test_a_stop_checked_only_at_block_ends_would_be_missed(target, answer):
    """The wrong variant: a block's last token alone does not show where plain decoding stops."""
    offset = 12
    params = sampling(stop_token_ids=[answer.token_ids[offset]])
    engine = s.toy_engine(target, s.ScriptedProposer([answer]), policy="fixed:8")
    ends = []
    engine.add(PROMPT, params, on_chunk=lambda c: ends.append(c.token_ids[-1]) if c.token_ids else None)
    uncut = s.toy_engine(target, s.ScriptedProposer([answer]), policy="fixed:8")
    blocks = []
    uncut.add(PROMPT, sampling(), on_chunk=lambda c: blocks.append(c.token_ids))
    while engine.step() or uncut.step():
        pass
    assert answer.token_ids[offset] == ends[-1]
    assert answer.token_ids[offset] not in [block[-1] for block in blocks if block]
