"""Every policy gives plain decoding's text, and those that look for what pays find it."""

import pytest

from dspark.engine.auto_proposer import AutoProposer
from dspark.engine.lookup import LookupProposer
from tests.engine import machine as m
from tests.engine import support as s

PROMPTS = s.prompts(4)
MODES = {"greedy": s.greedy(), "seeded": s.seeded(temperature=0.7)}
POLICIES = ["length", "history", "threshold:0.49", "scheduled", "auto"]


@pytest.fixture(scope="module")
def plain(target):
    return {name: s.toy_engine(target).generate(PROMPTS, params) for name, params in MODES.items()}


def proposer_of(kind, target):
    neural = s.bigram_proposer(target)
    return neural if kind == "dspark" else AutoProposer(LookupProposer(), neural)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["dspark", "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_text_is_that_of_plain_decoding(mode, kind, policy, target, plain, monkeypatch):
    m.Clock(monkeypatch, target)
    engine = m.engine_on(target, proposer_of(kind, target), policy=policy, max_batch=3, max_pass_tokens=64)
    outputs = engine.generate(PROMPTS, MODES[mode])
    assert [o.token_ids for o in outputs] == [a.token_ids for a in plain[mode]]
    assert sum(o.stats.accepted for o in outputs) > 0


def test_records_tell_drafted_from_verified(target, monkeypatch):
    m.Clock(monkeypatch, target)
    engine = m.engine_on(target, s.bigram_proposer(target), policy="threshold:0.49")
    rows = [row for record in m.run(engine, PROMPTS, s.greedy()) for row in record.rows]
    assert any(row.verified < row.drafted for row in rows)
    for row in rows:
        assert row.accepted <= row.verified <= row.drafted
        assert len(row.slot_accepted) == len(row.confidence) == row.verified
        assert (row.source == "none") == (row.drafted == 0)


def warm_ms_per_token(target, monkeypatch, policy, neural, rows=1, **settings):
    """Time per token on the made-up machine, after one round of learning."""
    with monkeypatch.context() as patch:
        clock = m.Clock(patch, target)
        clock.watch(neural)
        engine = m.engine_on(target, neural, policy=policy, **settings)
        m.run(engine, s.prompts(rows, seed=8), s.greedy(max_tokens=100))
        time, tokens = m.decoding_ms(m.run(engine, s.prompts(rows, seed=5), s.greedy(max_tokens=120)))
    return time / tokens


def test_scheduled_is_as_fast_as_the_best_fixed_length(target, monkeypatch):
    fixed = [warm_ms_per_token(target, monkeypatch, f"fixed:{n}", s.bigram_proposer(target)) for n in (1, 2, 4, 6)]
    plain = m.TWO_CORES.pass_ms(1, 1, 0) + m.TWO_CORES.host_ms(1)
    assert min(fixed) < 0.9 * plain
    assert warm_ms_per_token(target, monkeypatch, "scheduled", s.bigram_proposer(target)) < 1.03 * min(fixed)


def drafted_and_lost(records):
    """Steps with a draft, and the share of time beyond plain decoding of the same tokens, one row at a time."""
    time, tokens = m.decoding_ms(records)
    plain = tokens * (m.TWO_CORES.pass_ms(1, 1, 0) + m.TWO_CORES.host_ms(1))
    return sum(any(row.drafted for row in record.rows) for record in records), time / plain - 1


@pytest.mark.parametrize(("policy", "kind"), [("auto", "dspark"), ("auto", "auto"), ("history", "dspark")])
def test_a_hopeless_drafter_is_found_out_once_and_tried_ever_more_rarely(policy, kind, target, monkeypatch):
    neural = s.random_proposer(target)
    clock = m.Clock(monkeypatch, target)
    clock.watch(neural)
    proposer = neural if kind == "dspark" else AutoProposer(LookupProposer(), neural)
    engine = m.engine_on(target, proposer, policy=policy)
    first = m.run(engine, PROMPTS[:1], s.greedy(max_tokens=400))
    later = [m.run(engine, [prompt], s.greedy(max_tokens=400)) for prompt in PROMPTS[1:3]]
    neural_steps = [sum(row.source == "dspark" for r in records for row in r.rows) for records in (first, *later)]
    assert 0 < neural_steps[0] < 40
    assert all(n <= 6 for n in neural_steps[1:]) and sum(neural_steps[1:]) > 0
    assert all(drafted_and_lost(records)[1] < 0.02 for records in later)


def test_without_the_guard_fixed_drafts_whatever_it_brings(target, monkeypatch):
    neural = s.random_proposer(target)
    m.Clock(monkeypatch, target).watch(neural)
    engine = m.engine_on(target, neural, policy="fixed:4", guard=False)
    records = m.run(engine, PROMPTS[:1], s.greedy(max_tokens=60))
    drafted, lost = drafted_and_lost(records)
    assert drafted >= 50 and lost > 0.3


@pytest.mark.parametrize("policy", ["scheduled", "history"])
def test_in_a_pause_nothing_is_looked_up_or_learnt(policy, target, plain, monkeypatch):
    m.Clock(monkeypatch, target)
    monkeypatch.setattr("dspark.engine.scheduler.Guard.allows", lambda *args: False)
    monkeypatch.setattr("dspark.engine.scheduler.CostDrift.learn_drafts", lambda *args: pytest.fail("learnt"))
    proposer = LookupProposer()
    monkeypatch.setattr(proposer, "offers", lambda *args: pytest.fail("looked for a draft"))
    outputs = m.engine_on(target, proposer, policy=policy).generate(PROMPTS, MODES["greedy"])
    assert [o.token_ids for o in outputs] == [a.token_ids for a in plain["greedy"]]


def test_the_pause_of_a_full_batch_holds_while_a_place_is_filled_again(target, monkeypatch):
    m.Clock(monkeypatch, target)
    monkeypatch.setattr("dspark.engine.scheduler.Guard.allows", lambda guard, rows, measures: rows < 3)
    engine = m.engine_on(target, s.bigram_proposer(target), policy="history", max_batch=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, s.greedy(max_tokens=10 + 20 * i))
    records = []
    while engine.num_requests:
        records.append(engine.step())
    of_three = [record for record in records if sum(row.committed > 0 for row in record.rows) == 3]
    filled = [record for record in of_three if 0 < sum(row.prefill > 0 for row in record.rows) < 3]
    assert filled and not any(row.drafted for record in of_three for row in record.rows)
    assert any(row.drafted for record in records for row in record.rows)


WRONG = {
    "everything three times too dear": m.Machine(lambda tokens: 27.0 + 3.0 * tokens, draft=6.0, slot=0.6, host=1.5),
    "tokens too dear": m.Machine(lambda tokens: 7.0 + 3.0 * tokens, draft=2.0, slot=0.2, host=0.5),
    "tokens too cheap": m.Machine(lambda tokens: 9.7 + 0.3 * tokens, draft=2.0, slot=0.2, host=0.5),
    "drafter too dear": m.Machine(lambda tokens: 9.0 + 1.0 * tokens, draft=6.0, slot=0.6, host=0.5),
    "drafter too cheap": m.Machine(lambda tokens: 9.0 + 1.0 * tokens, draft=0.7, slot=0.07, host=0.5),
}


@pytest.mark.parametrize(
    ("look_ms", "learn_ms", "least", "most"), [(0, 0, 95, 100), (0.2, 0, 10, 20), (0, 0.2, 10, 20)]
)
def test_looks_that_find_nothing_are_as_rare_as_they_are_dear(look_ms, learn_ms, least, most, target, monkeypatch):
    """What a guess's outcome teaches the proposer is part of the look."""
    clock, proposer, looks, learnt = m.Clock(monkeypatch, target), LookupProposer(), [], []

    def offers(row, outlook):
        looks.append(clock.now_ms)
        clock.now_ms += look_ms
        return ()

    def observe(row, taps, kept):
        if len(learnt) < len(looks):
            learnt.append(clock.now_ms)
            clock.now_ms += learn_ms

    monkeypatch.setattr(proposer, "offers", offers)
    monkeypatch.setattr(proposer, "observe", observe)
    m.run(m.engine_on(target, proposer, policy="auto"), PROMPTS[:1], s.greedy(max_tokens=100))
    assert least <= len(looks) <= most


def learnt_ms_per_token(target, monkeypatch, costs):
    """Time per token on TWO_CORES under a plan with these costs, after an answer to learn from."""
    with monkeypatch.context() as patch:
        neural = s.bigram_proposer(target)
        m.Clock(patch, target).watch(neural)
        engine = m.engine_on(target, neural, costs, policy="scheduled")
        m.run(engine, PROMPTS[:1], s.greedy(max_tokens=400))
        # Several, since where one of them hits on a stretch that cannot be drafted, the next trial is a while away.
        records = [record for prompt in PROMPTS[1:] for record in m.run(engine, [prompt], s.greedy(max_tokens=400))]
        time, tokens = m.decoding_ms(records)
    return time / tokens


def test_a_profile_wrong_by_a_factor_of_three_recovers(target, monkeypatch):
    """Plans come to be about as good as with the right one, while the engine runs."""
    right = learnt_ms_per_token(target, monkeypatch, m.TWO_CORES)
    wrong = {error: learnt_ms_per_token(target, monkeypatch, costs) / right for error, costs in WRONG.items()}
    assert max(wrong.values()) < 1.05, wrong


def test_wrong_costs_are_reported_once(target, monkeypatch):
    calls = []
    for costs in (m.TWO_CORES, WRONG["everything three times too dear"]):
        with monkeypatch.context() as patch:
            m.Clock(patch, target)
            engine = m.engine_on(target, s.bigram_proposer(target), costs, policy="scheduled")
            engine.loop.scheduler.when_costs_are_wrong(lambda costs=costs: calls.append(costs))
            for prompt in PROMPTS[:2]:
                m.run(engine, [prompt], s.greedy(max_tokens=200))
    assert calls == [WRONG["everything three times too dear"]]
