"""The long identity run of docs/results.md, as a test."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "identity.py"


@pytest.mark.slow
@pytest.mark.real
def test_sixty_answers_equal_plain_decoding_in_every_setting():
    """60 prompts of up to 128 tokens; a difference that is not a tie makes the script fail."""
    run = subprocess.run([sys.executable, SCRIPT, "--transformers", "0"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    exact = [line for line in run.stdout.splitlines() if line.startswith("| exact")]
    assert len(exact) == 8 and all(line.endswith("| 0 | 0 |") for line in exact)
