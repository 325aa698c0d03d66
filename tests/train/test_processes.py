"""Several processes: shares add up to the batch, stops and lengths agree, and one process changes nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.drafter import read_tensors
from dspark.train.processes import Alone, join_processes
from tests.train.toys import toy_trainer

ROOT = Path(__file__).parents[2]


class Recorded:
    """One of two processes, as far as a trainer can tell; what it would send is kept, nothing comes back."""

    count, device = 2, None

    def __init__(self, index):
        self.index, self.sent = index, []

    def add_up(self, tensors):
        self.sent.append([t.clone() for t in tensors])


def shares(target, corpus, step=0):
    trainers = [toy_trainer(target, corpus) for _ in range(2)]
    for index, trainer in enumerate(trainers):
        trainer.processes = Recorded(index)
    return trainers, [trainer.gradients(step) for trainer in trainers]


def test_shares_add_up_to_the_batch(target, corpus):
    whole = toy_trainer(target, corpus)
    means, blocks = whole.gradients(0)
    (first, second), found = shares(target, corpus)
    assert len(whole.plan.batch(0)) >= 3
    for name, weight in whole.weights.items():
        total = first.weights[name].grad + second.weights[name].grad
        torch.testing.assert_close(weight.grad, total, rtol=1e-4, atol=1e-6, msg=name)
    assert any(not torch.equal(first.weights[n].grad, w.grad) for n, w in whole.weights.items())
    for name, mean in means.items():
        assert found[0][0][name] + found[1][0][name] == pytest.approx(mean, rel=1e-5)
    assert found[0][1] == found[1][1] == blocks
    sent = [[t.shape for t in trainer.processes.sent[0]] for trainer in (first, second)]
    assert sent[0] == sent[1]


def test_a_process_without_a_chunk_still_adds(target, corpus):
    whole = toy_trainer(target, corpus)
    one_chunk = whole.plan.batch(0)[:1]
    trainer = toy_trainer(target, corpus)
    trainer.processes, trainer.plan.batch = Recorded(1), lambda step: one_chunk
    trainer.gradients(0)
    assert not any(weight.grad.any() for weight in trainer.weights.values())
    assert len(trainer.processes.sent[0]) == len(trainer.weights) + 1


def test_alone_unless_a_launcher_says_otherwise(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(join_processes("cpu"), Alone)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(join_processes("cpu"), Alone)


def test_without_accelerate_it_is_one_sentence(monkeypatch):
    from dspark.errors import TrainError
    from tests.sentences import assert_one_sentence

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(TrainError) as error:
        join_processes("cpu")
    assert_one_sentence(error.value, ["accelerate"])


RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from dspark.target import load_target
from dspark.train import join_processes
from tests.train.toys import CPU, greedy_corpus, toy_trainer

model, out = Path(sys.argv[1]), Path(sys.argv[2])
target = load_target(str(model), CPU, "float32")
trainer = toy_trainer(target, greedy_corpus(target))
trainer.processes = join_processes("cpu")
trainer.plan_steps(4 if trainer.processes.index == 0 else 99)
for _ in trainer.run(lambda: trainer.processes.index == 1 and trainer.step == 3):
    pass
trainer.save(out / str(trainer.processes.index))
"""


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(model_folder, target, corpus, tmp_path):
    """Over gloo on CPU. The second process asks for a stop after step 3: both stop there."""
    pytest.importorskip("accelerate")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-c", RUN, str(model_folder), str(tmp_path)]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=common | {"RANK": str(i), "LOCAL_RANK": str(i)}, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    first, second = read_tensors(tmp_path / "0"), read_tensors(tmp_path / "1")
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone = toy_trainer(target, corpus, steps=4)
    for _ in alone.run(lambda: alone.step == 3):
        pass
    for name, tensor in alone.half_tensors().items():
        torch.testing.assert_close(tensor.float(), first[name].float(), rtol=2e-3, atol=2e-3, msg=name)
