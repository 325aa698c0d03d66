"""The automatic profile: measured in turns, kept under its key, and never used where it does not belong."""

import json
from dataclasses import replace

import pytest

from dspark.artifacts.profile import ProfileKey, StoredProfile, profile_path, read_profile, write_profile
from dspark.config import EngineConfig
from dspark.engine import Engine, profiling
from dspark.engine.auto_proposer import AutoProposer
from dspark.engine.lookup import LookupProposer
from dspark.engine.profiling import Job, load_or_measure, profile_key, stored_profile, take_turns
from dspark.engine.proposer import NoneProposer
from dspark.errors import CacheError, ProfileError
from dspark.schedule.profile import Profile
from tests.engine.support import bigram_proposer, greedy, prompts, random_proposer, toy_engine
from tests.sentences import assert_one_sentence

CONFIG = EngineConfig(model="toy", dtype="float32", exact=True)


@pytest.fixture(autouse=True)
def hurry(monkeypatch, cache):
    """Once through all jobs: these tests ask what is measured, not how well."""
    monkeypatch.setattr(profiling, "BUDGET_S", 0.0)


@pytest.fixture(scope="module")
def stored(target):
    """A profile measured once for tests that do not write."""
    proposer = random_proposer(target)
    key = profile_key(target, proposer, CONFIG)
    return profiling.measure(target, proposer, CONFIG, Engine, key, budget_s=0.0)


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Taking turns -----------------------------------------------------------------------------------------------------


def fake_jobs(order, times, every=(1, 2, 4)):
    def job(name):
        def run():
            order.append(name)
            return {("pass", (name,)): times[name].pop(0)}

        return run

    return [Job(job(i), n) for i, n in enumerate(every)]


def test_jobs_take_turns_rare_ones_are_spread_and_a_cold_run_does_not_count(monkeypatch):
    monkeypatch.setattr(profiling, "MOST_ROUNDS", 5)
    order = []
    times = {0: [9.0] + 5 * [5.0], 1: [100.0, 25, 25], 2: [70.0, 6]}
    found, errors = take_turns(fake_jobs(order, times), budget_s=1000)
    rounds = "".join(map(str, order)).split("0")[1:]
    assert rounds == ["12", "", "1", "2", "1", ""]
    assert found == {("pass", (0,)): 5, ("pass", (1,)): 25, ("pass", (2,)): 6}
    assert set(errors) == set(found) and set(errors.values()) == {0.0}


def test_out_of_time_every_job_still_runs_once():
    order = []
    found, errors = take_turns(fake_jobs(order, {i: [float(i)] for i in range(3)}), budget_s=0)
    assert order == [0, 1, 2] and found == {("pass", (i,)): i for i in range(3)} and not errors


# Measuring --------------------------------------------------------------------------------------------------------


def test_everything_a_plan_asks_for_is_measured(stored, target):
    costs = Profile.from_dict(stored.costs)
    assert costs.block == random_proposer(target).most
    assert set(range(1, 17)) <= set(costs.tokens.at) and costs.tokens.at[-1] == 256  # the toy's context ends at 512
    assert costs.rows.at == costs.draft.at == (1, 2, 4, 8, 16, 32)
    assert costs.attention.at[-1] == 16 and costs.draft_slot.at == (1, 8) and costs.host.at == (1, 8, 32)
    assert costs.pass_ms(1, 1, 64) > 0 and costs.draft_ms(1) > 0 and costs.host_ms(1) > 0
    assert stored.target_name == target.name and stored.drafter_name == "dspark" and stored.residual >= 0


def test_without_a_drafter_only_target_and_host_are_measured(target):
    key = profile_key(target, NoneProposer(), CONFIG)
    costs = Profile.from_dict(profiling.measure(target, NoneProposer(), CONFIG, Engine, key, 0.0).costs)
    assert costs.block == 0 and costs.draft_ms(8) == 0 and costs.host_ms(8) > 0


def test_the_proposer_is_as_new_afterwards(target):
    proposer = bigram_proposer(target)
    stored_profile(target, proposer, CONFIG, Engine)
    params, asked = greedy(), prompts(3)
    measured, fresh = toy_engine(target, proposer), toy_engine(target, bigram_proposer(target))
    ours, theirs = measured.generate(asked, params), fresh.generate(asked, params)
    assert [(o.token_ids, o.stats.accepted, o.stats.steps) for o in ours] == [
        (o.token_ids, o.stats.accepted, o.stats.steps) for o in theirs
    ]
    assert sum(o.stats.accepted for o in ours) > 0


# Keeping ----------------------------------------------------------------------------------------------------------


def test_measured_once_then_read(target, stored, monkeypatch):
    monkeypatch.setattr(profiling, "measure", lambda *_: stored)
    first = stored_profile(target, random_proposer(target), CONFIG, Engine)
    assert profile_path(first.key).exists()
    monkeypatch.setattr(profiling, "measure", lambda *_: pytest.fail("measured again"))
    assert stored_profile(target, random_proposer(target, seed=8), CONFIG, Engine) == first
    monkeypatch.setattr(profiling, "measure", lambda *_: replace(stored, seconds=99.0))
    assert stored_profile(target, random_proposer(target), CONFIG, Engine, force=True).seconds == 99
    assert stored_profile(target, random_proposer(target), CONFIG, Engine).seconds == 99
    assert load_or_measure(target, random_proposer(target), CONFIG, Engine).to_dict() == stored.costs


def test_a_stale_profile_is_measured_anew_at_the_next_start(target, stored, monkeypatch):
    asked = []
    monkeypatch.setattr(profiling, "measure", lambda *_: asked.append(1) or stored)
    profiling.mark_stale(stored.key)  # nothing is cached yet: nothing to mark
    stored_profile(target, random_proposer(target), CONFIG, Engine)
    stored_profile(target, random_proposer(target), CONFIG, Engine)
    assert len(asked) == 1
    profiling.mark_stale(stored.key)
    stored_profile(target, random_proposer(target), CONFIG, Engine)
    stored_profile(target, random_proposer(target), CONFIG, Engine)
    assert len(asked) == 2


def test_an_engine_marks_its_cached_profile_once_steps_differ_from_it(target, stored, monkeypatch):
    """Costs measured by another: a hundred times what this machine takes. Steps in a pause are not compared."""
    slow = replace(stored, costs=Profile.from_dict(stored.costs).scaled(100.0).to_dict())
    monkeypatch.setattr(profiling, "measure", lambda *_: slow)
    monkeypatch.setattr("dspark.engine.engine.build_proposer", lambda *_: random_proposer(target))
    engine = Engine.over(target, replace(CONFIG, policy="scheduled", kv_gb=0.02))
    mark = profiling.stale_mark(profile_path(profile_key(target, random_proposer(target), engine.config)))
    assert not mark.exists()
    engine.generate(prompts(1), greedy(max_tokens=400))
    assert mark.exists()


def test_another_shape_or_setting_is_another_profile(target, stored):
    key = profile_key(target, random_proposer(target), CONFIG)
    others = [
        profile_key(target, NoneProposer(), CONFIG),
        profile_key(target, random_proposer(target, block_size=5), CONFIG),
        profile_key(target, random_proposer(target, ffn_size=32), CONFIG),
        profile_key(target, random_proposer(target), replace(CONFIG, dtype="float64")),
    ]
    assert key == stored.key == profile_key(target, AutoProposer(LookupProposer(), random_proposer(target)), CONFIG)
    assert len({k.digest for k in (key, *others)}) == 5


def test_a_damaged_cache_is_measured_anew_with_a_word(target, stored, monkeypatch, caplog):
    monkeypatch.setattr(profiling, "measure", lambda *_: stored)
    path = profile_path(stored.key)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert stored_profile(target, random_proposer(target), CONFIG, Engine) == stored
    assert_one_sentence(caplog.messages[0], [str(path), "JSON"])
    assert read_profile(path, stored.key).costs == json.loads(json.dumps(stored.costs))


def test_a_cache_that_cannot_be_written_stops_nothing(target, stored, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(profiling, "measure", lambda *_: stored)
    assert stored_profile(target, random_proposer(target), CONFIG, Engine) == stored
    assert any("cannot be written" in message for message in caplog.messages)


def test_a_profile_of_another_machine_is_refused(target, stored, tmp_path):
    path = tmp_path / "profile.json"
    elsewhere = replace(stored.key, cpu="Z80", threads=64)
    write_profile(path, replace(stored, key=elsewhere))
    with pytest.raises(ProfileError) as error:
        stored_profile(target, random_proposer(target), CONFIG, Engine, path)
    assert_one_sentence(error.value, [str(path), "cpu Z80", "threads 64, here 1", "dspark profile"])
    write_profile(path, stored)
    assert stored_profile(target, random_proposer(target), CONFIG, Engine, path).key == stored.key


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"format": 0}, ["format 0"]),
        ({"key": {}}, ["key"]),
        ({"costs": 3}, ["costs"]),
        ({"costs": {"tokens": 1}}, ["rows"]),
        ({"residual": "small"}, ["residual", "small"]),
    ],
)
def test_a_damaged_file_is_one_sentence(target, stored, tmp_path, change, names):
    path = tmp_path / "profile.json"
    write_profile(path, stored)
    changed(path, **change)
    with pytest.raises(ProfileError) as error:
        stored_profile(target, random_proposer(target), CONFIG, Engine, path)
    assert_one_sentence(error.value, [str(path), *names])


def test_missing_unreadable_and_unwritable_files(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    for name in ("none.json", "list.json"):
        with pytest.raises(ProfileError) as error:
            read_profile(tmp_path / name)
        assert_one_sentence(error.value, [name])
    key = ProfileKey("t", "", "cpu", "c", "float32", False, 1, "2", "0")
    with pytest.raises(CacheError) as full:
        write_profile(tmp_path / "list.json" / "profile.json", StoredProfile(key, {}))
    assert_one_sentence(full.value, ["list.json", "--out"])
