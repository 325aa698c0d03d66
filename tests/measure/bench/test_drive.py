"""Requests handed over and written down, on a clock that the test moves."""

from itertools import count, islice

import pytest

from dspark.measure.bench.drive import Event, drive, poisson, until, work_of
from tests.measure.bench.systems import Clock, Counting, asks


def run(system, several, at_once, arrivals=None, **more):
    return drive(system, several, at_once, arrivals, clock=system.clock, sleep=system.clock.sleep, **more)


def test_closed_loop_keeps_so_many_running():
    system = Counting()
    answers, seconds = run(system, asks(5), 2)
    assert system.most == 2 and seconds == 9.0, "three waves of three steps"
    assert [a.record.prompt for a in answers] == [0, 1, 2, 3, 4]
    assert {a.record.latency_s for a in answers} == {3.0}
    first = answers[0].record
    assert (first.ttft_s, first.gaps_ms, first.output_tokens) == (1.0, (1000.0, 1000.0), 3)
    assert answers[0].token_ids == (1, 2, 3) and first.work == work_of((1, 2, 3))


def test_requests_begin_until_there_is_enough():
    system = Counting()
    answers, _ = run(system, islice(count_asks(), 100), 2, enough=until(7, 0))
    assert len(answers) == 4 and sum(a.record.output_tokens for a in answers) == 12, "those begun are answered"
    answers, _ = run(Counting(), islice(count_asks(), 100), 4, enough=until(1, 4))
    assert len(answers) == 4


def count_asks():
    return (asks(1)[0] for _ in count())


def test_open_loop_waits_for_arrivals():
    system = Counting()
    answers, seconds = run(system, asks(2), 4, [0.0, 10.0])
    assert seconds == 13.0 and [a.record.arrival_s for a in answers] == [0.0, 10.0]
    assert [a.record.latency_s for a in answers] == [3.0, 3.0]


def test_open_loop_counts_the_time_in_the_queue():
    """One place, three arrivals at once: the last waits for two answers."""
    system = Counting()
    answers, _ = run(system, asks(3), 1, [0.0, 0.0, 0.5])
    assert [a.record.latency_s for a in answers] == [3.0, 6.0, 8.5]
    assert [a.record.ttft_s for a in answers] == [1.0, 4.0, 6.5]


def test_an_answer_that_came_whole_has_no_first_token():
    class Whole(Counting):
        def step(self):
            self.clock.now += 5.0
            key, _ = self.running.popitem()
            return [Event(key, self.clock.now, 4), Event(key, self.clock.now + 9, 0, "stop", (1, 2, 3, 4))]

    (answer,), _ = run(Whole(), asks(1), 1)
    assert answer.record.ttft_s is None and answer.record.latency_s == 5.0, "until the last token, not its report"


def test_answers_known_as_text_only_count_what_they_are_told():
    class Text(Counting):
        def step(self):
            self.clock.now += 1.0
            key, _ = self.running.popitem()
            return [Event(key, self.clock.now, 1), Event(key, self.clock.now, 0, "stop", None, 7)]

    (answer,), _ = run(Text(), asks(1), 1)
    assert answer.record.output_tokens == 7 and answer.record.work == "" and answer.token_ids is None


def test_ctrl_c_aborts_what_runs():
    class Stopped(Counting):
        def step(self):
            raise KeyboardInterrupt

    system = Stopped()
    with pytest.raises(KeyboardInterrupt):
        run(system, asks(2), 2)
    assert system.aborted


def test_arrivals_repeat_and_come_at_their_rate():
    first, again = (list(islice(poisson(4.0, seed), 4000)) for seed in (1, 1))
    assert first == again != list(islice(poisson(4.0, 2), 4000))
    assert first[0] == 0.0 and 4000 / first[-1] == pytest.approx(4.0, rel=0.06)
    assert Clock()() == 100.0
