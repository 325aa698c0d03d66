"""Requests with a policy of their own: drafts follow it, the text is that of plain decoding, others notice nothing."""

import pytest

from dspark.engine.guard import Guard
from dspark.errors import SettingsError
from tests.engine import machine as m
from tests.engine import support as s

PROMPTS = s.prompts(4)
OWN = [None, "fixed:1", "fixed:6", "threshold:0.49"]
PARAMS = s.seeded(temperature=0.7)


def decode(engine, policies):
    """Outputs in the prompts' order, and every step's rows by prompt."""
    outputs, rows = {}, [[] for _ in PROMPTS]
    ids = [
        engine.add(
            prompt, PARAMS, on_chunk=lambda c: c.output and outputs.update({c.output.request_id: c.output}), policy=p
        )
        for prompt, p in zip(PROMPTS, policies, strict=True)
    ]
    while engine.num_requests:
        for row in engine.step().rows:
            rows[ids.index(row.request_id)].append(row)
    return [outputs[i] for i in ids], rows


@pytest.mark.parametrize("common", ["fixed:3", "history", "scheduled"])
def test_every_request_drafts_by_its_own_policy(common, target, monkeypatch):
    m.Clock(monkeypatch, target)
    plain = s.toy_engine(target).generate(PROMPTS, PARAMS)
    engine = m.engine_on(target, s.bigram_proposer(target), policy=common)
    outputs, rows = decode(engine, OWN)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    longest = [max(row.drafted for row in some) for some in rows]
    assert longest[1:3] == [1, 6]
    assert longest[0] <= 3 if common == "fixed:3" else longest[0] > 0
    assert any(row.verified < row.drafted for row in rows[3])
    assert all(row.verified == row.drafted for some in rows[1:3] for row in some)
    # Nothing of it is left for requests to come.
    again, rows = decode(engine, [None] * len(PROMPTS))
    assert [o.token_ids for o in again] == [o.token_ids for o in plain]
    if common == "fixed:3":
        assert max(row.drafted for some in rows for row in some) == 3


def test_a_pause_holds_for_requests_without_a_policy_of_their_own(target, monkeypatch):
    m.Clock(monkeypatch, target)
    monkeypatch.setattr(Guard, "allows", lambda *args: False)
    engine = m.engine_on(target, s.bigram_proposer(target), policy="history")
    _, rows = decode(engine, OWN)
    drafted = [sum(row.drafted for row in some) for some in rows]
    assert drafted[0] == 0 and all(drafted[1:])


def test_the_guard_learns_nothing_beside_such_a_request_and_takes_no_rest_to_learn(target, monkeypatch):
    m.Clock(monkeypatch, target)
    allows, measured = Guard.allows, []

    def recorded(guard, rows, measures):
        measured.append(measures)
        return allows(guard, rows, measures)

    monkeypatch.setattr(Guard, "allows", recorded)
    engine = m.engine_on(target, s.bigram_proposer(target), policy="history")
    decode(engine, OWN)
    assert not any(measured)
    decode(engine, [None] * len(PROMPTS))
    assert any(measured)


def test_a_policy_that_cannot_be_ones_own_adds_no_request(target):
    engine = s.toy_engine(target, s.bigram_proposer(target))
    for text in ("scheduled", "fixed:0", "never"):
        with pytest.raises(SettingsError):
            engine.add(PROMPTS[0], PARAMS, policy=text)
    assert engine.num_requests == 0
