"""The order of a run, its journal and its sizes, with systems that answer at once."""

from dataclasses import fields, replace
from itertools import islice

import pytest

from dspark.data.journal import Journal
from dspark.measure.bench.machine import MemoryPeak
from dspark.measure.bench.proof import compare
from dspark.measure.bench.records import CONTROL, PLAIN, Cell, Group, RequestRecord, Settings, StepCounts
from dspark.measure.bench.runner import Done, Runner, closed_groups, joined, open_groups, requests_per_s, turns
from tests.measure.bench.systems import Counting, asks

CODE, CHAT = Group("code", 0.0, 2), Group("chat", 0.0, 2)
SETTINGS = Settings("toy", (PLAIN, CONTROL, "m"), ("code", "chat"), (0.0,), (2,), (0,), min_tokens=7, rounds=2)


class Prompts:
    """A workload of requests that say nothing."""

    def asks(self, group):
        return iter(asks(50))


class NoMemory(MemoryPeak):
    def __init__(self):
        pass

    def reset(self):
        pass

    def read(self):
        return 5


@pytest.fixture
def start(tmp_path):
    """A runner on a journal in the test's folder."""

    def call(systems, settings=SETTINGS):
        journal = Journal(tmp_path / "parts.jsonl", settings.to_dict())
        return Runner(systems, Prompts(), settings, journal, NoMemory())

    return call


def systems(**more):
    return {PLAIN: Counting(), CONTROL: Counting(), "m": Counting(), **more}


def test_modes_take_turns_and_the_order_rotates():
    plan = turns([CODE, CHAT], {"a": None, "b": None}, 2)
    assert [(t.round, t.group, t.mode) for t in plan] == [
        (0, CODE, "a"), (0, CODE, "b"), (0, CHAT, "a"), (0, CHAT, "b"),
        (1, CODE, "b"), (1, CODE, "a"), (1, CHAT, "b"), (1, CHAT, "a"),
    ]  # fmt: skip


def test_a_mode_for_one_request_at_a_time_is_left_out_of_larger_groups():
    plan = turns([CODE, Group("code", 0.0, 1)], {PLAIN: None, "serial": 1}, 1)
    assert [(t.group.concurrency, t.mode) for t in plan] == [(2, PLAIN), (1, PLAIN), (1, "serial")]


def test_plain_decides_how_many_requests_all_modes_answer(start):
    several = systems(m=Counting(length=5))
    runner = start(several)
    cells = list(runner.run(turns(closed_groups(SETTINGS), dict.fromkeys(several), 2)))
    assert {len(cell.requests) for cell in cells} == {4}, "7 tokens at 3 an answer, two at a time"
    assert {c.tokens for c in cells if c.mode == "m"} == {20}
    assert all(c.peak_memory_bytes == 5 and c.counts is None for c in cells)


def test_a_stopped_run_goes_on_where_it_was(start):
    plan = turns([CODE, CHAT], dict.fromkeys(SETTINGS.modes), 2)
    first = start(systems())
    before = list(islice(first.run(plan), 5))
    first._journal.__exit__()
    fresh = systems()
    second = start(fresh)
    begun = []
    cells = list(second.run(plan, begun.append))
    assert cells[:5] == before and len(cells) == 12 and len(begun) == 6
    assert len({(c.mode, c.group, c.round) for c in cells}) == 12
    assert {len(cell.requests) for cell in cells} == {4}


ALONE = replace(SETTINGS, kinds=("code",), concurrencies=(1,))


def test_modes_take_turns_on_short_parts_of_a_cell(start):
    runner = start(systems(), ALONE)
    begun = []
    cells = list(runner.run(turns(closed_groups(ALONE), dict.fromkeys(ALONE.modes), 2), begun.append))
    modes = [turn.mode for turn in begun if turn.round == 0]
    assert modes == [PLAIN, CONTROL, "m", CONTROL, "m", PLAIN, "m", PLAIN, CONTROL], "7 tokens at 3 a request"
    assert [(cell.mode, len(cell.requests), cell.tokens) for cell in cells[:3]] == [(m, 3, 9) for m in ALONE.modes]
    assert len({request.prompt for request in cells[0].requests}) == 3
    assert len(begun) == 18


def test_a_run_stopped_within_a_cell_loses_only_the_part_that_ran(start):
    class Stops(Counting):
        def start(self, ask):
            if ask.prompt == 1:
                raise KeyboardInterrupt
            return super().start(ask)

    plan = turns(closed_groups(ALONE), dict.fromkeys(ALONE.modes), 1)
    first = start(systems(m=Stops()), ALONE)
    with pytest.raises(KeyboardInterrupt):
        list(first.run(plan))
    assert [cell.tokens for cell in first.cells] == [3, 3, 3], "what all modes have done"
    first._journal.__exit__()
    begun = []
    cells = list(start(systems(), ALONE).run(plan, begun.append))
    assert [turn.mode for turn in begun] == ["m", PLAIN, "m", PLAIN, CONTROL]
    assert [cell.tokens for cell in cells] == [9, 9, 9]


def test_parts_add_up_to_a_cell():
    few = dict.fromkeys([f.name for f in fields(StepCounts)], 2)
    lists = {"slot_drafted": (1, 1), "slot_verified": (1,), "slot_reached": (), "slot_accepted": (1,), "histogram": ()}
    stated = dict.fromkeys(("stated_count", "stated_sum", "stated_kept"), ())
    one = StepCounts(**{**few, **lists, **stated, "sources": {"lookup": 3}})
    other = replace(one, steps=5, slot_verified=(1, 4, 1), stated_count=(1, 0), sources={"table": 1, "lookup": 1})
    both = one + other
    assert both.steps == 7 and both.draft_ms == 4 and both.slot_verified == (2, 4, 1) and both.slot_drafted == (2, 2)
    assert both.stated_count == (1, 0) and both.sources == {"lookup": 4, "table": 1}
    cells = [
        Cell("m", CODE, 0, s, (RequestRecord(0, 1, n, 0.5, None, (), "stop", ""),), one, peak)
        for s, n, peak in ((1.0, 2, 9), (2.0, 7, 5))
    ]
    whole = joined([Done(cell, ((1,),)) for cell in cells])
    assert whole.cell.seconds == 3 and whole.cell.tokens == 9 and whole.cell.counts == one + one
    assert whole.cell.peak_memory_bytes == 9
    assert whole.token_ids == ((1,), (1,))


def test_answers_are_compared_request_by_request(start):
    several = systems(m=Counting(length=2))
    runner = start(several)
    list(runner.run(turns([CODE], dict.fromkeys(several), 2)))
    found = {each.mode: each for each in compare(runner.done)}
    assert found[PLAIN].compared == found[CONTROL].compared == 4 and not found[CONTROL].different
    assert [number for number, *_ in found["m"].different] == [0, 1, 2, 3]
    assert found["m"].different[0] == (0, (1, 2, 3), (1, 2))


def test_a_finished_cell_survives_its_journal():
    cell = Cell("m", CODE, 0, 1.0, (RequestRecord(0, 1, 2, 0.5, None, (), "stop", ""),))
    done = Done(cell, (None,))
    assert Done.from_dict(done.to_dict()) == done


def test_groups_of_a_run_and_the_rate_that_plain_sustains():
    settings = Settings("t", (), ("code", "chat"), (0.0, 1.0), (1, 4), (0, 512), rates=(2.0,), rate_share=0.5)
    closed = closed_groups(settings)
    assert len(closed) == len(set(closed)) == 16
    most = Group("code", 0.0, 4)
    request = RequestRecord(0, 1, 2, 0.5, None, (), "stop", "")
    cells = [Cell(PLAIN, most, number, seconds, (request,) * 6) for number, seconds in enumerate((1.0, 2.0))]
    assert requests_per_s(cells, most) == 4.0 and requests_per_s(cells, CODE) is None
    rates = [(group.kind, group.temperature, group.rate) for group in open_groups(settings, cells)]
    assert ("code", 0.0, 2.0) in rates and ("code", 0.0, 2.0) in rates and len(rates) == 5
    assert {group.concurrency for group in open_groups(settings, cells)} == {4}
