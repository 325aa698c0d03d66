"""examples/speedrun.sh runs from a target to a measured speed-up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "speedrun.sh"


def run(*args, **environment):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(SCRIPT), *args]
    return subprocess.run(command, env=os.environ | {"PATH": path} | environment, capture_output=True, text=True)


@pytest.mark.real
def test_the_tiny_run_goes_all_the_way(tmp_path):
    """The converted target comes from the common cache; everything made here goes to a folder of the test's own."""
    result = run("--tiny", "--out", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr[-3000:]
    steps = [line.split()[2:] for line in result.stderr.splitlines() if line.startswith("== dspark")]
    names = [" ".join(step[: 2 if step[0] == "data" else 1]) for step in steps]
    assert names == [
        *("data synth", "data respond", "data inspect", "estimate", "train", "data table"),
        *("data synth", "calibrate", "acceptance", "profile", "generate"),
    ]
    made = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert {"prompts.jsonl", "data.npz", "fresh.jsonl", "drafter/table.dspt", "drafter/calibration.json"} <= made
    assert {f"drafter/{name}" for name in ("config.json", "model.safetensors", "train.csv", "validation.csv")} <= made
    assert "equal to plain decoding" in result.stderr + result.stdout


@pytest.mark.parametrize("args", [["--help"], ["--what"], ["--out"]])
def test_a_wrong_option_starts_nothing(args):
    result = run(*args, PATH="/usr/bin:/bin")
    assert result.returncode == (0 if args == ["--help"] else result.returncode)
    assert result.returncode in (0, 1, 2) and "== dspark" not in result.stderr
    assert "--tiny" in result.stdout or "--out" in result.stderr
