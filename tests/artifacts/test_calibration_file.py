"""calibration.json: what is written is read back, and what does not belong to this drafter is refused by name."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from dspark.artifacts import (
    CalibrationCell,
    Fingerprint,
    StoredCalibration,
    read_calibration,
    weights_digest,
    write_calibration,
)
from dspark.errors import DrafterError
from dspark.schedule.calibration import Calibration
from tests.folders import edit_json, refused

TARGET = Fingerprint("w1", "t1", "c1", "toy")


@pytest.fixture
def folder(tmp_path):
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    return tmp_path


def stored(folder):
    cells = (
        CalibrationCell(
            ("rejection", "coupled"), "greedy", 0.0, "platt", (2.0, 0.5), (0.25, -1.0), (1.0, 1.5), 50, 60,
            {"ece": (0.01, 0.02), "auc": (0.9, None)},
        ),
        CalibrationCell(("coupled",), "high", 1.0, "raw", (1.0, 1.0), (0.0, 0.0), (1.1, 0.9), 70, 80),
    )  # fmt: skip
    return StoredCalibration(weights_digest(folder), TARGET, cells, {"seed": 3})


def test_round_trip(folder):
    assert read_calibration(folder, TARGET) is None
    path = write_calibration(folder, stored(folder))
    assert read_calibration(folder, TARGET) == stored(folder)
    assert sorted(os.listdir(folder)) == [path.name, "model.safetensors"]


def test_rules_of_one_cell_share_its_scaling(folder):
    calibration = Calibration.from_table(stored(folder).table)
    greedy = calibration.scaling("rejection", 0)
    assert greedy is not None and greedy == calibration.scaling("coupled", 0)
    assert greedy.temperatures == (2.0, 0.5) and greedy.biases == (0.25, -1.0)
    assert calibration.scaling("coupled", 1).temperatures == (1.0, 1.0)


def test_survivals_are_those_that_were_reported_whole(folder):
    cells = stored(folder).cells
    known = replace(cells[0], report={"survival": (0.5, 0.25)})
    broken = replace(cells[1], report={"survival": (0.5, None)})
    found = replace(stored(folder), cells=(known, broken)).survivals
    assert found == {("rejection", "greedy"): (0.5, 0.25), ("coupled", "greedy"): (0.5, 0.25)}
    assert stored(folder).survivals == {}


def test_other_weights_make_it_stale(folder):
    write_calibration(folder, stored(folder))
    before = weights_digest(folder)
    save_file({"fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    refused(DrafterError, lambda: read_calibration(folder, TARGET), "calibration.json", before, weights_digest(folder))


def test_another_target_is_refused_and_another_template_is_not(folder):
    write_calibration(folder, stored(folder))
    other = replace(TARGET, weights="w2", name="tuned")
    refused(DrafterError, lambda: read_calibration(folder, other), "toy", "w1", "tuned", "w2")
    assert read_calibration(folder, replace(TARGET, template="c2")) is not None


def break_cell(**changes):
    def edit(path):
        values = json.loads(path.read_text())
        values["cells"][0] |= changes
        path.write_text(json.dumps(values))

    return edit


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda path: path.write_text("{"), ["JSON"]),
        (lambda path: path.write_bytes(b"\xff\xfe"), ["JSON"]),
        (lambda path: path.write_text("[]"), ["not a calibration"]),
        (lambda path: edit_json(path, format="other"), ["not a calibration"]),
        (lambda path: edit_json(path, version=2), ["version 2", "reads 1"]),
        (lambda path: edit_json(path, extra=1), ["extra"]),
        (lambda path: edit_json(path, cells=[{}]), ["rules"]),
        (lambda path: edit_json(path, cells=5), ["damaged"]),
        (lambda path: edit_json(path, target={"weights": "w1"}), ["tokenizer"]),
        (break_cell(new=1), ["new"]),
        (break_cell(temperatures=[1.0]), ["damaged"]),
        (break_cell(temperatures=[1.0, 0.0]), ["above 0"]),
        (break_cell(temperatures=[1.0, "x"]), ["x"]),
        (break_cell(biases=[0.0, float("nan")]), ["finite"]),
        (break_cell(form="magic"), ["form"]),
        (break_cell(report=[1]), ["damaged"]),
    ],
)
def test_damage_is_one_sentence(folder, damage, names):
    damage(write_calibration(folder, stored(folder)))
    refused(DrafterError, lambda: read_calibration(folder, TARGET), "calibration.json", "calibrate", *names)


def test_a_folder_that_takes_no_file_is_one_sentence(folder):
    (folder / "taken").write_text("")
    refused(DrafterError, lambda: write_calibration(folder / "taken", stored(folder)), "taken", "--out")
    (folder / "model.safetensors").unlink()
    refused(DrafterError, lambda: weights_digest(folder), ".safetensors")
