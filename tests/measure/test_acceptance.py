"""The acceptance table counts what happened."""

import pytest

from dspark.measure.acceptance import Acceptance, all_sets, mean_length, measure_acceptance
from dspark.measure.answers import Decoding, decodings
from tests.engine.support import ScriptedProposer, greedy, prompts, random_proposer, toy_engine, toy_target

GREEDY = decodings(("rejection", "coupled"), (0.0,))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def cells(engine, sets, columns=GREEDY, tokens=21):
    make = engine if callable(engine) else lambda decoding: engine
    return [e for e in measure_acceptance(make, sets, columns, tokens) if isinstance(e, Acceptance)]


def test_plain_decoding_keeps_one_token_a_step(target):
    (cell,) = cells(toy_engine(target), {"a": prompts(3)})
    assert cell.acceptance_length == 1 and cell.committed == cell.steps == 3 * 20
    assert cell.sources == {"none": 60} and cell.slot_survival == ()


def test_perfect_drafts_keep_all_and_wrong_ones_none(target):
    asked = prompts(3)
    known = toy_engine(target).generate(asked, greedy(max_tokens=21))
    right = toy_engine(target, ScriptedProposer(known), policy="fixed:4", exact=True)
    (cell,) = cells(right, {"a": asked})
    # The prompt's pass gives the first token; 20 more come five a step.
    assert (cell.steps, cell.committed, cell.acceptance_length) == (12, 60, 5.0)
    assert cell.slot_survival == (1, 1, 1, 1) and cell.sources == {"scripted": 12}
    third_wrong = ScriptedProposer(known, error=lambda position: position % 3 == 0)
    (cell,) = cells(toy_engine(target, third_wrong, policy="fixed:4"), {"a": asked})
    assert cell.slot_survival == (1, 1, 0, 0)[: len(cell.slot_survival)] and 2.5 < cell.acceptance_length <= 3


def test_steps_without_a_draft_count(target):
    asked = prompts(2)
    known = toy_engine(target).generate(asked, greedy(max_tokens=21))
    sometimes = ScriptedProposer(known, length=lambda position: 4 if position < 10 else 0)
    (cell,) = cells(toy_engine(target, sometimes, policy="fixed:4"), {"a": asked})
    assert cell.sources["none"] > 0 and cell.acceptance_length == cell.committed / sum(cell.sources.values())


def test_every_set_and_decoding_has_its_cell(target):
    columns = decodings(("rejection", "coupled"), (0.0, 1.0))

    def engine(decoding):
        return toy_engine(target, random_proposer(target), policy="fixed:4", acceptance=decoding.rule)

    sets = {"one": prompts(2), "two": prompts(3, seed=1)}
    found = cells(engine, sets, columns, tokens=9)
    assert [(c.decoding, c.name) for c in found] == [(d, name) for d in columns for name in sets]
    again = cells(engine, sets, columns, tokens=9)
    assert found == again  # seeds make the table repeat
    total = all_sets(found, columns[1])
    assert total.prompts == 5 and total.steps == sum(c.steps for c in found if c.decoding == columns[1])
    lengths = [c.acceptance_length for c in found if c.decoding == columns[1]]
    assert mean_length(found, columns[1]) == pytest.approx(sum(lengths) / 2)


def test_the_mean_counts_each_set_the_same():
    decoding = Decoding(("coupled",), 1.0)
    small, large = Acceptance("a", decoding, steps=10, committed=30), Acceptance("b", decoding, steps=1000)
    large.committed = 1000
    assert mean_length([small, large], decoding) == 2.0
    assert all_sets([small, large], decoding).acceptance_length == pytest.approx(1030 / 1010)
