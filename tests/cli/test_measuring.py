"""`dspark calibrate` and `dspark acceptance` on a toy: what they write, what they print, what they refuse."""

import json
import os
import sys

import pytest

from dspark.artifacts import Fingerprint, read_calibration, weights_digest
from dspark.drafter import DrafterConfig, random_tensors
from dspark.drafter.checkpoint import save_drafter
from dspark.measure.calibrate import BlockCollector
from tests.engine.support import drafter_config
from tests.sentences import assert_one_sentence

FEW = ["--blocks", "6", "--max-tokens", "12", "--batch", "4"]


@pytest.fixture
def folder(engine, tmp_path):
    """An untrained drafter."""
    config = drafter_config(engine.target, block_size=3)
    save_drafter(tmp_path / "drafter", config, random_tensors(config, seed=1))
    return tmp_path / "drafter"


@pytest.fixture
def prompts(tmp_path):
    where = tmp_path / "sets"
    where.mkdir()
    for name, form in (("one", lambda t: {"prompt": t}), ("two", lambda t: {"turns": [t, "and then"]})):
        lines = [json.dumps(form(f"Question {name} {i}")) for i in range(6)]
        (where / f"{name}.jsonl").write_text("\n".join(lines))
    return where


@pytest.fixture
def calibrate(run, model, folder, prompts):
    def call(*args, where=prompts):
        common = ["--target", model, "--dtype", "float32", "--kv-gb", "0.05", "--drafter", str(folder)]
        return run("calibrate", *common, *FEW, *(["--prompts", str(where)] if where else []), *args)

    return call


@pytest.fixture
def acceptance(run, model, prompts):
    def call(*args, where=prompts):
        common = ["--target", model, "--dtype", "float32", "--kv-gb", "0.05", "--max-tokens", "10"]
        return run("acceptance", *common, "--prompts", str(where), *args)

    return call


def test_calibration_lies_beside_the_drafter(calibrate, folder, engine):
    result = calibrate("--temperatures", "0,1", "--rules", "rejection,coupled")
    assert result.code == 0, result.err
    stored = read_calibration(folder, engine.target.fingerprint)
    assert stored.drafter == weights_digest(folder) and isinstance(stored.target, Fingerprint)
    assert set(stored.table) == {(rule, bucket) for rule in ("rejection", "coupled") for bucket in ("greedy", "high")}
    assert all(min(c.fitted_blocks, c.reported_blocks) >= 6 and len(c.temperatures) == 3 for c in stored.cells)
    assert result.out.count("| slot |") == 3 and "calibration.json" in result.err


def test_what_is_not_measured_again_stays(calibrate, folder, engine):
    assert calibrate("--temperatures", "1", "--rules", "rejection,coupled").code == 0
    before = {cell.rules: cell for cell in read_calibration(folder, engine.target.fingerprint).cells}
    result = calibrate("--temperatures", "0,1", "--rules", "rejection", "--seed", "1")
    assert result.code == 0 and "stay" in result.err
    cells = {(cell.rules, cell.bucket): cell for cell in read_calibration(folder, engine.target.fingerprint).cells}
    assert len(cells) == 3 and cells[("coupled",), "high"] == before[("coupled",)]
    save_drafter(folder, DrafterConfig.load(folder), random_tensors(DrafterConfig.load(folder), seed=2))
    assert calibrate("--temperatures", "0").code == 0  # nothing fitted to other weights stays
    assert len(read_calibration(folder, engine.target.fingerprint).cells) == 1


def test_results_repeat_and_a_diagram_is_drawn_where_matplotlib_is(calibrate, folder, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out = tmp_path / "elsewhere"
    first = calibrate("--temperatures", "1", "--rules", "coupled", "--out", str(out))
    assert first.code == 0
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(out)) == ["calibration.json", "reliability.png"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = calibrate("--temperatures", "1", "--rules", "coupled")
    assert result.code == 0 and "dspark[plots]" in result.err and not (folder / "reliability.png").exists()
    assert result.out == first.out
    assert (folder / "calibration.json").read_bytes() == (out / "calibration.json").read_bytes()


def test_ctrl_c_leaves_nothing_half_written(calibrate, folder, monkeypatch):
    before = sorted(os.listdir(folder))

    def interrupted(self, record):
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockCollector, "__call__", interrupted)
    assert calibrate("--temperatures", "0").code == 130
    assert sorted(os.listdir(folder)) == before


def test_too_few_prompts_are_said(calibrate):
    result = calibrate("--temperatures", "0", "--blocks", "5000")
    assert result.code == 0 and "of 5000 blocks" in result.err


def test_the_table_counts_every_set(acceptance, tmp_path):
    where = tmp_path / "new" / "counts.json"
    result = acceptance("--proposer", "lookup", "--limit", "4", "--json", str(where))
    assert result.code == 0, result.err
    head, _, *rows = result.out.splitlines()
    assert head == "| acceptance length | T=0 | T=1 rejection | T=1 coupled |"
    assert [row.split("|")[1].strip() for row in rows[:3]] == ["one", "two", "**mean**"]
    values = json.loads(where.read_text())
    assert len(values["cells"]) == 6 and values["settings"]["proposer"] == "lookup"
    for cell in values["cells"]:
        assert cell["prompts"] == 4 and sum(cell["sources"].values()) == cell["steps"]
        assert cell["acceptance_length"] == pytest.approx(cell["committed"] / cell["steps"])
    shown = [f"{cell['acceptance_length']:.2f}" for cell in values["cells"]]
    assert [row.split("|")[2].strip() for row in rows[:2]] == shown[:2]


def test_plain_decoding_has_length_one(acceptance):
    result = acceptance("--proposer", "none", "--temperatures", "0")
    assert "| **mean** | **1.00** |" in result.out and "none 100 %" in result.out


def test_prompts_without_room_are_left_out_and_said(acceptance, prompts):
    (prompts / "long.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("short one", "x" * 5000)))
    result = acceptance("--proposer", "none", "--temperatures", "0")
    assert result.code == 0 and "1 of 2 prompts of long" in result.err
    (prompts / "long.jsonl").write_text(json.dumps({"prompt": "x" * 5000}))
    result = acceptance("--proposer", "none", "--temperatures", "0")
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["All 1 prompts of long", "context"])


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--temperatures", "0,warm"], ["--temperatures", "0,warm"]),
        (["--temperatures", "-1"], ["-1"]),
        (["--rules", "strict"], ["strict", "coupled"]),
        (["--rules", ","], ["at least one rule"]),
        (["--seed", "-1"], ["--seed"]),
        (["--batch", "0"], ["max_batch"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
    ],
)
def test_mistakes_of_both_are_one_line(calibrate, acceptance, folder, args, names):
    for result in (calibrate(*args), acceptance(*args)):
        assert result.code == 2 and result.out == ""
        assert_one_sentence(result.err.strip(), names)
    assert not (folder / "calibration.json").exists()


def test_mistakes_of_calibrate_are_one_line(calibrate, prompts, tmp_path):
    (tmp_path / "file").write_text("")
    for args, names in (
        (["--temperatures", "0.6,0.8"], ["0.6", "0.8"]),
        (["--blocks", "0"], ["--blocks"]),
        (["--held-out", "0"], ["--held-out"]),
        (["--data", "some.npz"], ["--data", "--prompts"]),
        (["--drafter", "/nowhere"], ["/nowhere"]),
        (["--out", str(tmp_path / "file")], ["--out"]),
    ):
        result = calibrate(*args)
        assert result.code == 2 and result.out == ""
        assert_one_sentence(result.err.strip(), names)
    result = calibrate(where=None)
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["--data", "--prompts"])


def test_mistakes_of_acceptance_are_one_line(acceptance, prompts, tmp_path):
    (tmp_path / "file").write_text("")
    for args, names in (
        (["--limit", "0"], ["--limit"]),
        (["--json", str(tmp_path / "file" / "x.json")], ["--json"]),
        (["--policy", "sometimes"], ["sometimes"]),
    ):
        result = acceptance(*args)
        assert result.code == 2 and result.out == ""
        assert_one_sentence(result.err.strip(), names)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = acceptance(where=empty)
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["empty", ".jsonl"])


def test_a_drafter_without_confidences_is_refused(calibrate, folder, engine):
    config = drafter_config(engine.target, block_size=3, confidence=False, confidence_with_markov=False)
    save_drafter(folder, config, random_tensors(config, seed=1))
    assert not DrafterConfig.load(folder).confidence
    result = calibrate("--temperatures", "0")
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["confidence head"])
