"""The loop: pieces add up, runs repeat, kills and resumes change nothing, bad numbers are caught."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.drafter import read_tensors
from dspark.errors import TrainError
from dspark.train import Session, SessionPlan, new_trainer
from dspark.train.state import STATE_FILE, CsvLog, read_state
from dspark.train.trainer import MOST_SKIPS
from tests.sentences import assert_one_sentence
from tests.train.toys import same_weights, toy_settings, toy_trainer

ROOT = Path(__file__).parents[2]


def trained(target, corpus, **changes):
    trainer = toy_trainer(target, corpus, **changes)
    return trainer, list(trainer.run())


def test_the_same_settings_give_the_same_weights(target, corpus):
    one, reports = trained(target, corpus)
    two, _ = trained(target, corpus)
    other, _ = trained(target, corpus, seed=4)
    assert same_weights(one.tensors, two.tensors) and not same_weights(one.tensors, other.tensors)
    assert [r.step for r in reports] == [1, 2, 3, 4, 5, 6]
    assert reports[-1].blocks == one.blocks > 6 * 20
    assert all(r.grad_norm > 0 and not r.skipped for r in reports)


@pytest.mark.parametrize("head", ["none", "markov", "gated", "rnn"])
def test_every_weight_learns(target, corpus, head):
    trainer = toy_trainer(target, corpus, head=head, rank=0 if head == "none" else 8, steps=3)
    before = {name: t.detach().clone() for name, t in trainer.tensors.items()}
    assert all(report.loss > 0 for report in trainer.run())
    still = [name for name, t in trainer.tensors.items() if name != "d2t" and torch.equal(t, before[name])]
    assert not still


def test_a_batch_does_not_depend_on_its_pieces(target, corpus):
    """Same blocks, cut into chunks of 8 or one by one: the gradient is that of the whole batch."""
    whole, cut = toy_trainer(target, corpus), toy_trainer(target, corpus)
    chunks = whole.plan.batch(0)
    singles = [type(c)(c.sequence, (a,)) for c in chunks for a in c.anchors]
    cut.plan.batch = lambda step: singles
    first, second = whole.gradients(0), cut.gradients(0)
    assert first[1] == second[1] and first[0] == pytest.approx(second[0], rel=1e-4)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(weight.grad, cut.weights[name].grad, rtol=1e-3, atol=1e-6, msg=name)


def test_resuming_goes_on_where_the_run_stood(target, corpus, tmp_path):
    straight, reports = trained(target, corpus)
    first = toy_trainer(target, corpus)
    steps = first.run(lambda: first.step >= 3)
    halves = list(steps)
    first.save(tmp_path)
    second = toy_trainer(target, corpus)
    assert second.resume(tmp_path) and second.step == 3
    halves += second.run()
    assert halves == reports
    assert same_weights(straight.tensors, second.tensors)
    assert not toy_trainer(target, corpus).resume(tmp_path / "nothing")


RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from dspark.target import load_target
from dspark.train import Session, SessionPlan
from dspark.train.state import read_state
from tests.train.toys import CPU, greedy_corpus, toy_trainer

model, out, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
target = load_target(str(model), CPU, "float32")
corpus = greedy_corpus(target)
trainer = toy_trainer(target, corpus, steps=8)
trainer.resume(out)
session = Session(trainer, corpus.subset([]), out, SessionPlan(save_every=2, log_every=1), "float32", 0)
for report in session.run():
    if report.step == kill_at:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run_process(model, out, kill_at=0):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(model), str(out), str(kill_at)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(model_folder, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run_process(model_folder, straight).returncode == 0
    killed = run_process(model_folder, broken, kill_at=5)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert read_state(broken)["step"] == 4  # step 5 was done and is lost
    resumed = run_process(model_folder, broken)
    assert resumed.returncode == 0, resumed.stderr
    one, two = read_state(straight), read_state(broken)
    assert one["step"] == two["step"] == 8 and one["blocks"] == two["blocks"]
    assert same_weights(one["tensors"], two["tensors"])
    assert same_weights(read_tensors(straight), read_tensors(broken))
    moments = [s["optimizer"]["state"] for s in (one, two)]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][k]["exp_avg_sq"], moments[1][k]["exp_avg_sq"]) for k in moments[0])
    # Rows of lost steps are written once.
    rows = [(d / "train.csv").read_text().splitlines() for d in (straight, broken)]
    assert [r.split(",")[0] for r in rows[1]] == ["step", *map(str, range(1, 9))]
    assert [r.split(",")[3:9] for r in rows[0]] == [r.split(",")[3:9] for r in rows[1]]  # all but seconds


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"lr": 1e-4}, "lr"),
        ({"seed": 9}, "seed"),
        ({"steps": 7}, "steps"),
        ({"rank": 4}, "rank"),
        ({"taps": (1,)}, "taps"),
    ],
)
def test_a_save_of_another_setting_is_refused(target, corpus, tmp_path, changes, name):
    toy_trainer(target, corpus).save(tmp_path)
    with pytest.raises(TrainError) as error:
        toy_trainer(target, corpus, **changes).resume(tmp_path)
    assert_one_sentence(error.value, [name, str(tmp_path)])


def test_a_save_of_other_data_is_refused(target, corpus, tmp_path):
    toy_trainer(target, corpus).save(tmp_path)
    with pytest.raises(TrainError) as error:
        toy_trainer(target, corpus.subset(range(len(corpus) - 1))).resume(tmp_path)
    assert_one_sentence(error.value, ["data"])


def test_damaged_and_foreign_states(target, corpus, tmp_path):
    trainer = toy_trainer(target, corpus)
    trainer.save(tmp_path)
    whole = (tmp_path / STATE_FILE).read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"hello"):
        (tmp_path / STATE_FILE).write_bytes(content)
        with pytest.raises(TrainError) as error:
            trainer.resume(tmp_path)
        assert_one_sentence(error.value, ["state.pt", "damaged"])
    torch.save({"format": 9}, tmp_path / STATE_FILE)
    with pytest.raises(TrainError) as error:
        trainer.resume(tmp_path)
    assert_one_sentence(error.value, ["format 9"])


def test_a_full_disk_keeps_the_last_save(target, corpus, tmp_path, monkeypatch):
    trainer = toy_trainer(target, corpus)
    trainer.save(tmp_path)

    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    next(trainer.run())
    with pytest.raises(TrainError) as error:
        trainer.save(tmp_path)
    assert_one_sentence(error.value, ["state.pt", "No space left"])
    monkeypatch.undo()
    assert read_state(tmp_path)["step"] == 0
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_a_log_that_cannot_grow_is_one_sentence(target, corpus, tmp_path):
    log = CsvLog(tmp_path / "run" / "train.csv", ("loss",), step=0)
    (tmp_path / "run" / "train.csv").unlink()
    (tmp_path / "run" / "train.csv").mkdir()
    with pytest.raises(TrainError) as error:
        log.write({"step": 1, "loss": 2.0})
    assert_one_sentence(error.value, ["train.csv", "--resume"])


def test_one_bad_gradient_is_skipped(target, corpus):
    trainer = toy_trainer(target, corpus, steps=4)
    gradients = trainer.gradients

    def spoiled(step):
        found = gradients(step)
        if step == 1:
            trainer.weights["fc.weight"].grad[0, 0] = float("nan")
        return found

    trainer.gradients = spoiled
    skipped = []
    for report in trainer.run():
        skipped.append(report.skipped)
        assert all(t.isfinite().all() for t in trainer.weights.values())
    assert skipped == [False, True, False, False] and trainer.skipped == 1


def test_lasting_bad_gradients_end_the_run(target, corpus):
    trainer = toy_trainer(target, corpus, steps=50)
    with torch.no_grad():
        trainer.weights["fc.weight"][0, 0] = float("inf")
    with pytest.raises(TrainError) as error:
        list(trainer.run())
    assert_one_sentence(error.value, ["not finite", f"{MOST_SKIPS} steps"])


def test_init_from_starts_at_a_drafters_weights(target, corpus, tmp_path):
    first, _ = trained(target, corpus)
    first.save(tmp_path)
    second = new_trainer(target, corpus, toy_settings(seed=8), init_from=tmp_path)
    halves = first.half_tensors()
    taken = second.half_tensors()
    assert all(torch.equal(taken[n], halves[n]) for n in taken)
    with pytest.raises(TrainError) as error:
        new_trainer(target, corpus, toy_settings(layers=2), init_from=tmp_path)
    assert_one_sentence(error.value, ["num_hidden_layers", "1", "2"])
    longer = new_trainer(target, corpus, toy_settings(block_size=6), init_from=tmp_path)
    assert longer.config.block_size == 6 and longer.gradients(0)[1] > 0


def test_the_log_averages_and_the_last_step_is_saved(target, corpus, tmp_path):
    trainer = toy_trainer(target, corpus, steps=5)
    session = Session(
        trainer, corpus, tmp_path, SessionPlan(log_every=2, validate_every=3, validate_blocks=20), "float32", 1e9
    )
    events = list(session.run())
    losses = [e.loss for e in events if hasattr(e, "loss")]
    rows = [line.split(",") for line in (tmp_path / "train.csv").read_text().splitlines()]
    column = rows[0].index("loss")
    assert [row[0] for row in rows[1:]] == ["2", "4", "5"]
    assert [float(row[column]) for row in rows[1:]] == pytest.approx(
        [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, losses[4]], rel=1e-3
    )
    assert [line.split(",")[0] for line in (tmp_path / "validation.csv").read_text().splitlines()] == ["step", "3", "5"]
    assert read_state(tmp_path)["step"] == 5
