"""`dspark train`: from a packed file to a drafter folder, resumed, interrupted, and refused in one sentence."""

import os
import shutil
import signal

import pytest
import torch

from dspark.config import SamplingParams
from dspark.data import Corpus, Provenance, write_packed
from dspark.drafter import read_tensors
from dspark.train import Trainer
from tests.sentences import assert_one_sentence
from tests.train.toys import same_weights

SMALL = ["--taps", "0,1", "--rank", "8", "--block", "4", "--draft-vocab", "100", "--batch-blocks", "16"]
QUICK = ["--no-cut-loops", "--chunk-blocks", "8", "--held-out", "0.3", "--validate-blocks", "20", "--cache-gb", "0.1"]


@pytest.fixture(scope="session")
def data(engine, tmp_path_factory):
    """Answers of the toy, as `dspark` would pack them."""
    make = torch.Generator().manual_seed(3)
    prompts = [torch.randint(32, 127, (8,), generator=make).tolist() for _ in range(8)]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    texts = [p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
    offsets = (0, *torch.tensor([len(t) for t in texts]).cumsum(0).tolist())
    corpus = Corpus(torch.tensor(sum(texts, [])), offsets, (8,) * 8, (0.0,) * 8, ("chat",) * 8)
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    write_packed(path, corpus, Provenance(engine.target.fingerprint, {"temperature": 0}))
    return path


@pytest.fixture
def train(run, model, data):
    def call(*args, files=None):
        where = [str(f) for f in (files or [data])]
        return run("train", "--target", model, "--dtype", "float32", *SMALL, *QUICK, *args, "--data", *where)

    return call


def test_a_trained_folder_drafts_without_changing_the_answer(train, run, model, tmp_path):
    out = tmp_path / "run"
    result = train("--steps", "4", "--out", str(out))
    assert result.code == 0, result.err
    assert "blocks/s" in result.err and "AL for 1.. drafts" in result.err and f"--drafter {out}" in result.err
    assert {"config.json", "model.safetensors", "state.pt", "train.csv", "validation.csv"} <= set(os.listdir(out))
    common = ("generate", "--model", model, "--dtype", "float32", "--exact", "--max-tokens", "20", "Hello")
    drafted = run(*common, "--proposer", "dspark", "--drafter", str(out), "--policy", "fixed:4", "--stats")
    plain = run(*common, "--proposer", "none")
    assert drafted.code == 0 and drafted.out == plain.out and "dspark" in drafted.err


def test_interrupted_saved_and_resumed(train, tmp_path, monkeypatch):
    straight, broken, before = tmp_path / "a", tmp_path / "b", signal.getsignal(signal.SIGINT)
    assert train("--steps", "5", "--out", str(straight)).code == 0
    one_step = Trainer._one_step

    def interrupted(self):
        report = one_step(self)
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return report

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", interrupted)
        result = train("--steps", "5", "--out", str(broken))
    assert result.code == 130 and "step 2" in result.err and "--resume" in result.err
    assert signal.getsignal(signal.SIGINT) is before
    refused = train("--steps", "5", "--out", str(broken))
    assert refused.code == 2
    assert_one_sentence(refused.err.strip().splitlines()[-1], ["step 2", "--resume"])
    resumed = train("--out", str(broken), "--resume")  # a resumed run keeps its length
    assert resumed.code == 0, resumed.err
    assert same_weights(read_tensors(straight), read_tensors(broken))


def test_the_estimate_starts_nothing(train, tmp_path):
    out = tmp_path / "run"
    result = train("--minutes", "1", "--out", str(out), "--estimate")
    assert result.code == 0 and "memory" in result.err and "time" in result.err
    assert not out.exists()


def test_estimate_takes_the_same_command_line(run, train, model, data, tmp_path):
    """Also without --out, with the same numbers of data, memory and disk; nothing is written."""
    common = ["--target", model, "--dtype", "float32", *SMALL, *QUICK, "--steps", "7", "--data", str(data)]
    without = run("estimate", *common)
    assert without.code == 0, without.err
    beside = run("estimate", *common, "--out", str(tmp_path / "run"))
    flagged = train("--steps", "7", "--estimate")

    def fixed(result):
        kept = [line for line in result.err.splitlines() if not line.startswith(("speed", "time"))]
        return [line.split() for line in kept]

    assert fixed(without) == fixed(beside) == fixed(flagged)
    assert any(line[:2] == ["steps", "7"] for line in fixed(without)) and not (tmp_path / "run").exists()


def test_estimate_of_a_saved_run_leaves_it_alone(run, train, tmp_path):
    out = tmp_path / "run"
    assert train("--steps", "3", "--out", str(out)).code == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    left = train("--out", str(out), "--resume", "--estimate")
    assert left.code == 0 and "0 from step 3" in left.err
    other = train("--steps", "9", "--out", str(out), "--estimate")
    assert other.code == 0 and "9 from step 0" in other.err
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_features_on_disk_serve_the_next_run(train, tmp_path):
    args = ("--steps", "2", "--cache-dir", str(tmp_path / "features"))
    first = train(*args, "--out", str(tmp_path / "a"))
    assert first.code == 0 and "features 0.00 GB in --cache-dir" in first.err
    assert list((tmp_path / "features").rglob("*.safetensors"))
    assert train(*args, "--out", str(tmp_path / "b")).code == 0
    assert same_weights(read_tensors(tmp_path / "a"), read_tensors(tmp_path / "b"))


def test_going_on_takes_the_drafters_sizes(run, train, model, data, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    assert train("--steps", "2", "--out", str(first), "--layers", "2", "--head", "gated").code == 0
    (first / "state.pt").unlink()  # as a shipped folder
    common = ["--target", model, "--dtype", "float32", *QUICK, "--steps", "1", "--data", str(data)]
    result = run("train", *common, "--init-from", str(first), "--out", str(second))
    assert result.code == 0, result.err
    assert (second / "config.json").read_text() == (first / "config.json").read_text()
    against = run("train", *common, "--init-from", str(first), "--out", str(tmp_path / "c"), "--layers", "1")
    assert against.code == 2
    assert_one_sentence(against.err.strip(), ["num_hidden_layers"])


def test_warm_and_refined(train, tmp_path):
    result = train("--steps", "2", "--warm-start", "--refine-prob", "0.5", "--out", str(tmp_path / "run"))
    assert result.code == 0, result.err


def test_a_run_needs_a_folder(train):
    result = train("--steps", "1")
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["--out"])


def test_a_full_disk_is_known_before_the_first_step(train, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    result = train("--steps", "1", "--out", str(tmp_path / "run"))
    assert result.code == 2 and not (tmp_path / "run").exists()
    assert_one_sentence(result.err.strip().splitlines()[-1], ["GB", "run"])


def test_several_files_after_one_option(train, data, tmp_path):
    result = train("--steps", "1", "--out", str(tmp_path / "run"), "--estimate", files=[data, data])
    assert result.code == 0, result.err
    assert "sequences" in result.err


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--steps", "3", "--minutes", "1"], ["--minutes", "--steps"]),
        (["--steps", "0"], ["steps"]),
        (["--taps", "0,x"], ["--taps", "0,x"]),
        (["--taps", "0,2"], ["2"]),
        (["--held-out", "1"], ["--held-out"]),
        (["--minutes", "-1"], ["--minutes"]),
        (["--cache-gb", "-1"], ["--cache-gb"]),
        (["--kv-heads", "3"], ["num_kv_heads"]),
        (["--mask-token-id", "257"], ["257"]),
        (["--init-from", "/nowhere"], ["/nowhere"]),
        (["--refine-prob", "1.5"], ["refine_prob"]),
        (["--warm-start", "--layers", "9"], ["--layers"]),
        (["--cache-dir-gb", "-1"], ["--cache-dir-gb"]),
        (["--cache-dir", "/dev/null"], ["/dev/null", "--cache-dir"]),
    ],
)
def test_mistakes_are_one_line(train, tmp_path, args, names):
    result = train(*args, "--out", str(tmp_path / "run"))
    assert result.code == 2 and result.out == ""
    (line,) = result.err.strip().splitlines()
    assert_one_sentence(line, names)
    assert not (tmp_path / "run").exists()


def test_a_damaged_file_is_one_line(train, tmp_path):
    (tmp_path / "bad.npz").write_text("no")
    result = train("--steps", "1", "--out", str(tmp_path / "run"), files=[tmp_path / "bad.npz"])
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["bad.npz"])
