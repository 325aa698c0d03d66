"""Features on disk: the same numbers, within the bound, whole after a kill, and one sentence when the disk is full."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.errors import TrainError
from dspark.train import CacheLimits, Estimate, FeatureStore, new_trainer
from dspark.train.disk import FeatureDisk
from dspark.train.estimate import estimate, require_disk
from tests.sentences import assert_one_sentence
from tests.train.toys import same_weights, toy_settings

TAPS = (0, 1)


def open_store(target, corpus, folder, disk_bytes=1e9, taps=TAPS):
    disk = CacheLimits(0, folder, disk_bytes).open_disk(target, taps)
    return FeatureStore(target.decoder, taps, corpus, 0, disk)


def no_target(monkeypatch):
    def never(self, index):
        raise AssertionError("the target ran")

    monkeypatch.setattr(FeatureStore, "compute", never)


def same_features(a, b):
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("taps", "hidden", "log_z"))


def test_another_run_reads_what_one_computed(target, corpus, tmp_path, monkeypatch):
    first = open_store(target, corpus, tmp_path)
    found = [first[i] for i in range(len(corpus))]
    no_target(monkeypatch)
    second = open_store(target, corpus, tmp_path)
    assert all(second.holds(i) and same_features(second[i], found[i]) for i in range(len(corpus)))


def test_a_text_is_found_in_any_data_and_nothing_else_is(target, corpus, tmp_path):
    found = open_store(target, corpus, tmp_path)[2]
    assert not open_store(target, corpus, tmp_path, taps=(0,)).holds(2)
    part = open_store(target, corpus.subset([0, 2, 3]), tmp_path)
    assert [part.holds(i) for i in range(3)] == [False, True, False]
    assert same_features(part[1], found)
    moved = replace(corpus, prompt_lens=tuple(n + 1 for n in corpus.prompt_lens))
    assert not open_store(target, moved, tmp_path).holds(2)
    assert part.on_disk_bytes == open_store(target, corpus, tmp_path).on_disk_bytes == part.disk.used_bytes


def test_everything_under_the_folder_counts(target, corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"x" * 5000)
    one = open_store(target, corpus, tmp_path / "size")
    one[0]
    size = one.disk.used_bytes
    shutil.rmtree(tmp_path / "size")
    store = open_store(target, corpus, tmp_path, disk_bytes=5000 + 2.5 * size)
    for i in range(len(corpus)):
        store[i]
    assert 1 <= sum(store.holds(i) for i in range(len(corpus))) <= 2
    stored = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    assert stored == store.disk.used_bytes <= 5000 + 2.5 * size
    again = open_store(target, corpus, tmp_path, disk_bytes=1)
    assert again.disk.used_bytes == stored and again.disk.left_bytes == 0 and again.on_disk_bytes == stored - 5000


def test_processes_divide_what_is_left(tmp_path):
    FeatureDisk(tmp_path, "key", 1e9).put("text", {"taps": torch.zeros(100)})
    alone, shared = FeatureDisk(tmp_path, "key", 10_000), FeatureDisk(tmp_path, "key", 10_000, writers=2)
    assert shared.used_bytes == alone.used_bytes > 400
    assert 2 * shared.left_bytes == alone.left_bytes > 0


def test_what_a_kill_left_is_removed_and_damage_is_computed_again(target, corpus, tmp_path):
    store = open_store(target, corpus, tmp_path)
    expected = store[1]
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    part = path.with_name(f"{corpus.text_digest(2)}.999.part")
    part.write_bytes(b"half")
    again = open_store(target, corpus, tmp_path)
    assert not part.exists() and not again.holds(2)
    assert same_features(again[1], expected)
    assert same_features(open_store(target, corpus, tmp_path)[1], expected)


def test_a_full_disk_is_one_sentence(target, corpus, tmp_path, monkeypatch):
    store = open_store(target, corpus, tmp_path)

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TrainError) as error:
        store[0]
    assert_one_sentence(error.value, ["No space left", "--cache-dir", str(tmp_path)])


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError) as error:
        FeatureDisk(tmp_path / "file", "key", 1e9)
    assert_one_sentence(error.value, ["--cache-dir"])


def test_training_takes_the_same_steps(target, corpus, tmp_path, monkeypatch):
    def run(cache):
        trainer = new_trainer(target, corpus, toy_settings(), cache)
        for _ in trainer.run():
            pass
        return trainer.tensors

    plain = run(CacheLimits())
    on_disk = CacheLimits(0, tmp_path, 1e9)
    assert same_weights(plain, run(on_disk))
    no_target(monkeypatch)
    assert same_weights(plain, run(on_disk))


def test_the_estimate_counts_what_is_there(target, corpus, tmp_path):
    cache = CacheLimits(0, tmp_path, 1e9)
    trainer = new_trainer(target, corpus, toy_settings(), cache)
    before = estimate(trainer)
    for i in range(len(corpus)):
        trainer.store[i]
    after = estimate(new_trainer(target, corpus, toy_settings(), cache))
    assert before.kept == after.kept == 1.0 and before.recompute_s == 0
    assert before.on_disk_bytes == 0 and before.written_bytes == before.feature_bytes
    # Files also hold names and shapes.
    assert after.on_disk_bytes >= after.feature_bytes and after.written_bytes == 0 and after.fill_s == 0
    none = estimate(new_trainer(target, corpus, toy_settings(), CacheLimits(0)))
    assert none.kept == 0 and none.recompute_s > 0


def test_time_follows_from_the_rates():
    found = Estimate(
        step_s=0.5, blocks_per_step=64, feature_tok_per_s=100, tokens=1000, batch_tokens=200, feature_bytes=400,
        cache_bytes=100, train_bytes=8, disk_bytes=200, on_disk_bytes=100,
    )  # fmt: skip
    assert found.kept == 0.5 and found.cached == 0.25
    assert found.fill_s == 2.5  # half of 1000 tokens stays, half of that is there
    assert found.recompute_s == 1.0  # half of 200 tokens a step
    assert found.seconds(10) == 2.5 + 10 * 1.5
    assert found.written_bytes == 100 and found.run_bytes == 7
    steps = found.steps_in(17.5)
    assert steps == 10


def test_a_disk_without_room_is_refused_before_the_start(tmp_path):
    require_disk(tmp_path / "new" / "run", 1)
    with pytest.raises(TrainError) as error:
        require_disk(tmp_path / "new" / "run", 1e18)
    assert_one_sentence(error.value, [os.fspath(tmp_path), "GB"])
