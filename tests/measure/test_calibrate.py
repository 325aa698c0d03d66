"""Collecting and fitting through the engine, on a toy whose drafter is often right and says the wrong thing."""

from dataclasses import replace

import pytest
import torch

from dspark.config import RowRecord, StepRecord, StepTimes
from dspark.errors import DataError, SettingsError
from dspark.measure.answers import Decoding
from dspark.measure.calibrate import CalibrationPlan, Cell, Collected, calibrate, fit_cell
from dspark.measure.confidence import BlockCollector, Blocks, split_by_prompt
from dspark.schedule.calibration import worst_ece
from tests.engine.support import prompts, random_proposer, toy_engine, toy_target
from tests.folders import refused
from tests.schedule.synthetic import blocks

PLAN = CalibrationPlan(block_size=4, temperatures=(0.0, 1.0), rules=("rejection",), blocks=8, max_tokens=12)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def engines(target, proposer):
    def engine_for(decoding):
        return toy_engine(target, proposer(target), policy="fixed:4", acceptance=decoding.rule, max_batch=4)

    return engine_for


def cells(engine_for, asked, plan=PLAN):
    return [event for event in calibrate(engine_for, asked, plan) if isinstance(event, Cell)]


def row(**values):
    common = {"request_id": 0, "source": "dspark", "drafted": 2, "verified": 2, "accepted": 1, "committed": 2}
    kept = {"truncated": 0, "slot_accepted": (True, False), "confidence": (0.9, 0.4)}
    return RowRecord(**(common | kept | values))


def test_only_whole_blocks_with_confidences_count():
    collector = BlockCollector(2)
    rows = (
        row(),
        row(committed=1, truncated=1, confidence=(0.5, 0.25)),  # cut by an end token: the verdict is whole
        row(verified=1, drafted=1, slot_accepted=(True,), confidence=(0.9,)),  # near the limit
        row(source="lookup", confidence=()),
        row(verified=0, drafted=0, source="none", slot_accepted=(), confidence=(), prefill=7),
    )
    collector(StepRecord(1, 9, 0, StepTimes(0, 0, 0), rows))
    found = collector.blocks()
    assert found.confidence.tolist() == [[0.9, 0.4], [0.5, 0.25]]
    assert found.survived.tolist() == [[True, False]] * 2


def test_halves_share_no_prompt_and_do_not_depend_on_the_order():
    asked = prompts(40)
    left, right = split_by_prompt([*asked, *asked[:5]])
    assert sorted(left + right) == sorted(asked) and min(len(left), len(right)) > 8
    assert split_by_prompt(asked[::-1]) == (left, right)


def test_the_engine_gives_blocks_of_every_decoding_and_repeats(target):
    engine_for, asked = engines(target, random_proposer), prompts(24)
    events = list(calibrate(engine_for, asked, PLAN))
    found = [event for event in events if isinstance(event, Cell)]
    assert [(c.stored.rules, c.stored.bucket) for c in found] == [(("rejection",), "greedy"), (("rejection",), "high")]
    for cell in found:
        assert min(cell.stored.fitted_blocks, cell.stored.reported_blocks) >= PLAN.blocks
        assert len(cell.stored.temperatures) == 4 and len(cell.stored.report["ece"]) == 4
        kept = cell.stored.report["survival"]
        assert kept[0] < 1 and all(a >= b for a, b in zip(kept, kept[1:], strict=False))
    assert found[1].stored.report["survival"][0] > 0.1
    assert any(isinstance(event, Collected) for event in events)
    assert [c.stored for c in cells(engine_for, asked)] == [c.stored for c in found]


def test_fit_and_report_are_on_different_blocks():
    """A fit that saw the reported half would hide that the halves differ."""
    right, wrong = blocks(4000, 3, seed=1), blocks(4000, 3, 1.0, -1.0, seed=2)
    decoding = Decoding(("coupled",), 1.0)
    agreeing, misled = fit_cell(decoding, wrong, wrong), fit_cell(decoding, wrong, right)
    assert (agreeing.stored.form, misled.stored.form) == ("platt", "platt")
    assert agreeing.scaling == misled.scaling and misled.held_out is right
    assert max(agreeing.stored.report["ece"]) < 0.03 < 0.1 < max(misled.stored.report["ece"])
    assert max(agreeing.stored.report["ece_raw"]) > 0.1 > max(misled.stored.report["ece_raw"])
    worst = worst_ece(misled.scaling, right.confidence, right.survived)
    assert max(misled.stored.report["ece"]) == pytest.approx(worst)


def test_reports_hold_one_class_outcomes():
    made = Blocks(torch.full((50, 2), 0.7), torch.zeros(50, 2, dtype=torch.bool))
    stored = fit_cell(Decoding(("coupled",), 1.0), made, made).stored
    assert stored.report["auc"] == (None, None) and max(stored.report["ece"]) < 0.05


def test_what_cannot_be_calibrated_is_refused(target):
    def silent(target):
        return random_proposer(target, confidence=False, confidence_with_markov=False)

    refused(SettingsError, lambda: cells(engines(target, silent), prompts(8)), "confidence head")
    refused(DataError, lambda: cells(engines(target, random_proposer), prompts(1)), "1 different prompts")
    refused(SettingsError, lambda: replace(PLAN, temperatures=(0.6, 0.8)), "0.6", "0.8", "middle")
    refused(SettingsError, lambda: replace(PLAN, rules=("strict",)), "strict")
