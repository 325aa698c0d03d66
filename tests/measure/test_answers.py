"""Answering many prompts: every prompt once, begun ones to their end, nothing left behind."""

import pytest

from dspark.errors import SettingsError
from dspark.measure.answers import Decoding, answers, decodings, seeded, sibling
from tests.engine.support import greedy, prompts, random_proposer, toy_engine, toy_target
from tests.folders import refused


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def engine(target):
    return toy_engine(target, max_batch=3)


def test_each_prompt_is_answered_as_generate_answers_it(engine):
    asked = prompts(7)
    found = {o.prompt_ids: o.token_ids for o in answers(engine, ((ids, greedy(max_tokens=6)) for ids in asked))}
    expected = {o.prompt_ids: o.token_ids for o in engine.generate(asked, greedy(max_tokens=6))}
    assert found == expected and len(found) == 7 and engine.num_requests == 0


def test_what_was_begun_is_answered_to_its_end_and_no_more_begins(engine):
    outputs = []
    for output in answers(engine, ((ids, greedy(max_tokens=6)) for ids in prompts(9)), lambda: len(outputs) > 0):
        outputs.append(output)
    assert len(outputs) == 3 and all(len(o.token_ids) == 6 for o in outputs)


def test_closing_ends_what_runs(engine):
    running = answers(engine, ((ids, greedy(max_tokens=n)) for n, ids in zip((2, 30, 30), prompts(3), strict=True)))
    assert len(next(running).token_ids) == 2 and engine.num_requests == 2
    running.close()
    assert engine.num_requests == 0


def test_sampled_answers_repeat_and_differ_by_seed_and_place(target):
    def sampled(seed):
        engine = toy_engine(target, random_proposer(target), max_batch=3, acceptance="rejection")
        return [o.token_ids for o in answers(engine, seeded([prompts(1)[0]] * 3, 1.0, 8, seed))]

    assert sampled(0) == sampled(0) != sampled(1)
    assert len(set(sampled(0))) == 3


def test_greedy_decoding_is_one_under_all_rules():
    assert decodings(("rejection", "coupled"), (0.0, 1.0)) == [
        Decoding(("rejection", "coupled"), 0.0),
        Decoding(("rejection",), 1.0),
        Decoding(("coupled",), 1.0),
    ]
    assert len({str(d) for d in decodings(("rejection", "coupled"), (0.0, 0.7, 1.0))}) == 5
    assert decodings(("coupled", "coupled"), (0.5, 0.5)) == [Decoding(("coupled",), 0.5)]


@pytest.mark.parametrize(
    ("rules", "temperatures", "names"),
    [
        (("exact",), (0.0,), ["exact", "coupled"]),
        (("coupled",), (-1.0,), ["-1.0"]),
        (("coupled",), (float("nan"),), ["nan"]),
        ((), (0.0,), ["rule"]),
        (("coupled",), (), ["temperature"]),
    ],
)
def test_decodings_that_do_not_exist_are_refused(rules, temperatures, names):
    refused(SettingsError, lambda: decodings(rules, temperatures), *names)


def test_a_sibling_shares_the_target_only(engine):
    own = sibling(engine, acceptance="coupled", policy="fixed:2", proposer="lookup")
    assert (own.config.acceptance, own.config.policy, own.proposer.name) == ("coupled", "fixed:2", "lookup")
    assert own.target is engine.target and own.config.max_batch == engine.config.max_batch
    assert sibling(own).proposer is not own.proposer
