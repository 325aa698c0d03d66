"""A short soak on a toy: benchmarks/soak.py finds nothing, and finds what is put in."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.engine.batcher import Row
from dspark.target import PassRow
from tests.engine import support as s

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


@pytest.fixture(scope="module")
def fleet(script):
    fleet = script.Fleet()
    yield fleet
    fleet.close()


def run(script, fleet, engine, seconds):
    return script.soak(engine, fleet, s.prompts(6), seconds=seconds, clients=32, most_tokens=40)


def test_a_short_soak_finds_nothing(script, fleet, make_engine):
    result = run(script, fleet, make_engine(), seconds=4)
    assert result.faults() == [] and result.compared > 10
    assert {"answered", "malformed, refused"} <= set(result.seen)
    assert "cache slots in use at the end | 0 |" in script.report(result)


@pytest.mark.slow
def test_half_a_minute_of_soak_finds_nothing(script, fleet, make_engine):
    result = run(script, fleet, make_engine(), seconds=30)
    assert result.faults() == [] and result.compared > 100 and result.seen["left"] > 5


def test_answers_that_mix_are_found(script, fleet, make_engine, monkeypatch):
    shared = lambda row: PassRow(0, row.request.kv_len, len(row.tokens) + len(row.draft_ids))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(Row, "pass_row", shared)
        answers = script.Answers()
        engine = make_engine()
        with script.serving(engine) as server:
            server.worker.observers.append(answers.observe)
            bodies = [
                {"model": "soak", "prompt": p, "max_tokens": 30, "temperature": 0} for p in s.prompts(8, longest=40)
            ]
            fleet.do("burst", url=server.url, bodies=bodies)
    compared, different = script.compare(engine, answers)
    assert compared == 8 and any(not difference.is_tie for difference in different)


def test_what_is_left_over_is_a_fault(script):
    mark = script.Footprint(memory_bytes=10**9, files=9, threads=4, kv_slots=0, requests=0)
    clean = script.Soak(1.0, {"answered": 3, "left": 1}, mark, mark, mark, compared=3, different=[])
    assert clean.faults() == []
    for name in ("kv_slots", "requests", "files", "threads"):
        leaking = replace(clean, end=replace(mark, **{name: getattr(mark, name) + 1}))
        assert len(leaking.faults()) == 1 and name in leaking.faults()[0]
    assert "length" in replace(clean, wrong_length=1).faults()[0]
    assert "memory grew" in replace(clean, end=replace(mark, memory_bytes=2 * 10**9)).faults()[0]
    assert replace(clean, seen={"answered": 3, "500": 1}).faults() == ["500: 1"]
    assert replace(clean, seen={"left": 3}).faults() == ["nothing was answered"]


def test_overhead_is_a_table_of_equal_work(script, fleet, make_engine):
    engine = make_engine(prefix_cache=False, max_batch=8)
    cells = script.overhead(engine, fleet, s.prompts(8), tokens=12, rounds=1)
    page = script.overhead_report(cells)
    assert page.count("\n| ") == 5 and "served, streamed" in page and "answers differ" not in page


def test_the_limit_of_the_overhead_is_held_or_missed(script):
    def page(served, again=102):
        speeds = {script.DIRECT: 100, script.CONTROL: again, script.WHOLE: 100, script.STREAMED: served}
        return script.overhead_report([script.Cell(mode, "mixed", 0, 1.0, n, "x") for mode, n in speeds.items()])

    assert "5 % is held" in page(97) and "4.0 % for streamed" in page(97)
    assert "5 % is missed" in page(90)
    assert "5 % cannot be judged" in page(97, again=120)
    assert "5 % cannot be judged" in page(110)


def test_an_answer_that_ends_too_early_is_found(script, make_engine):
    engine, prompt = make_engine(), tuple(s.prompts(1)[0])
    whole = engine.generate([prompt], s.greedy(max_tokens=20))[0].token_ids
    answers = script.Answers({(prompt, 0.0, None): {whole[:7], whole}})
    assert script.compare(engine, answers) == (2, [])  # its client may have left
    answers.stopped.add(((prompt, 0.0, None), whole[:7]))
    _, (found,) = script.compare(engine, answers, [prompt])
    assert (found.prompt, found.position, found.is_tie) == (0, 7, False)
