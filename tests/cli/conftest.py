import io
import sys
from dataclasses import dataclass

import pytest
import torch

from dspark.cli.main import main
from dspark.engine import Engine
from tests.toy_models import write_model


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def quiet_machine(tmp_path, monkeypatch):
    """One thread for toy passes, an empty cache, and no colours unless the test asks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A toy whose greedy text repeats itself, so that lookup has something to find."""
    return str(write_model(tmp_path_factory.mktemp("cli"), "qwen3", layer_scale=0.06))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line in this process."""

    def call(*args: str, stdin: str | bytes = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["dspark", *args])
        encoded = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(encoded), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return Result(stopped.value.code or 0, printed.out, printed.err)

    return call


@pytest.fixture
def generate(run, model):
    """`dspark generate --model TOY`: exact numbers and lookup of four tokens, unless the arguments say otherwise."""

    def call(*args: str, stdin: str | bytes = "") -> Result:
        usual = ("--proposer", "lookup", "--policy", "fixed:4", "--exact")
        return run("generate", "--model", model, *usual, *args, stdin=stdin)

    return call


@pytest.fixture(scope="session")
def engine(model):
    """What `generate` runs on."""
    return Engine.from_pretrained(model, proposer="lookup", policy="fixed:4", exact=True, threads=1)
