"""The engine's thread under pressure: full queues, time limits, failures, clients that leave, shutdown."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.sentences import assert_one_sentence
from tests.serve.support import CHAT, LETTERS, chat_request, parse_sse, serving, text_of

LONG = {"max_tokens": 100, "logit_bias": LETTERS}


@contextmanager
def held(engine, monkeypatch):
    """The engine stands still inside a step, from the first one on, until the block ends."""
    go_on, holding, real = threading.Event(), threading.Event(), engine.step

    def step():
        holding.set()
        assert go_on.wait(30)
        return real()

    monkeypatch.setattr(engine, "step", step)
    try:
        yield holding
    finally:
        go_on.set()


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert_one_sentence(error["message"])
    return error


def assert_nothing_left(running):
    running.wait_until_idle()
    assert running.engine.num_requests == 0
    assert (
        running.metric("kv_slots_used") == running.metric("requests_running") == running.metric("requests_waiting") == 0
    )


def test_a_full_queue_is_429_with_retry_after(make_engine, monkeypatch):
    engine = make_engine(max_batch=1)
    with serving(engine, max_queue=1) as running, ThreadPoolExecutor(3) as pool:
        with held(engine, monkeypatch) as holding:
            first = pool.submit(running.chat)
            assert holding.wait(20)
            refused = error_of(running.chat(n=2), 429)
            assert refused["type"] == "rate_limit_error"
            assert error_of(running.chat(n=3), 400)["param"] == "n"  # would never fit
            response = running.chat(n=2)
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert running.client.get("/health").status_code == 200
        assert first.result().status_code == 200
        assert running.chat(n=2).status_code == 200
        assert running.metric("http_responses_total", route=CHAT, status="429") == 2
        assert_nothing_left(running)


def test_an_answer_that_takes_too_long_ends_with_an_error(make_engine):
    with serving(make_engine(), request_timeout_s=0.001) as running:
        assert error_of(running.chat(**LONG), 504)["code"] == "timeout"
        with running.client.stream("POST", CHAT, json=chat_request(**LONG, stream=True)) as response:
            bodies = parse_sse(response.read())
        assert response.status_code == 200 and bodies[-1]["error"]["code"] == "timeout"
        assert running.metric("requests_total", outcome="timeout") == 2
        assert_nothing_left(running)


def test_a_failing_step_ends_the_running_requests_and_the_server_goes_on(make_engine, monkeypatch, caplog):
    engine = make_engine()
    real, failing = engine.loop.step, threading.Event()

    def step():
        record = real()
        if failing.is_set() and len(engine.loop.batcher.running) == 3:
            failing.clear()
            raise ZeroDivisionError("a fault of the engine")
        return record

    with serving(engine) as running, ThreadPoolExecutor(3) as pool:
        expected = running.chat(**LONG).json()["choices"]
        monkeypatch.setattr(engine.loop, "step", step)
        failing.set()
        responses = list(pool.map(lambda _: running.chat(**LONG), range(3)))
        for response in responses:
            assert error_of(response, 500)["type"] == "server_error"
            assert "ZeroDivision" not in response.text
        assert "a fault of the engine" in caplog.text
        running.wait_until_idle()
        assert running.metric("kv_slots_used") == 0 and not engine.loop.batcher.running
        assert running.chat(**LONG).json()["choices"] == expected
        assert running.metric("requests_total", outcome="error") == 3


def test_a_failure_while_streaming_ends_the_stream_with_an_error(make_engine, monkeypatch):
    engine = make_engine()
    real = engine.loop.step

    def step():
        if engine.loop.batcher.running and len(engine.loop.batcher.running[0].output_ids) > 5:
            raise ZeroDivisionError
        return real()

    monkeypatch.setattr(engine.loop, "step", step)
    with serving(engine) as running:
        bodies = running.events(CHAT, **chat_request(**LONG))
        assert bodies[-1]["error"]["type"] == "server_error" and len(text_of(bodies)) > 5


def test_an_unexpected_error_in_a_route_is_500_in_the_usual_shape(running, monkeypatch):
    monkeypatch.setattr(type(running.engine), "chat_ids", lambda *_: 1 / 0)
    before = running.metric("http_responses_total", route=CHAT, status="500")
    assert error_of(running.chat(), 500)["type"] == "server_error"
    assert running.metric("http_responses_total", route=CHAT, status="500") == before + 1
    monkeypatch.undo()
    assert running.chat().status_code == 200


def test_a_client_that_leaves_while_waiting_gives_up_its_place(make_engine, monkeypatch):
    engine = make_engine(max_batch=1)
    with serving(engine, max_queue=2) as running, ThreadPoolExecutor(1) as pool:
        with held(engine, monkeypatch) as holding:
            first = pool.submit(running.chat)
            assert holding.wait(20)
            for stream in (True, False):
                with pytest.raises(httpx.TimeoutException):
                    running.client.post(CHAT, json=chat_request(stream=stream), timeout=0.2)
        assert first.result().status_code == 200
        assert_nothing_left(running)
        assert running.metric("requests_total", outcome="length") == 1


@pytest.mark.parametrize("drain_s", [30.0, 0.0])
def test_shutdown_lets_answers_finish_or_ends_them_in_time(drain_s, make_engine, monkeypatch):
    engine = make_engine()
    with serving(engine, drain_s=drain_s) as running, ThreadPoolExecutor(1) as pool:
        expected = running.chat(**LONG).json()["choices"][0]["message"]["content"]
        with held(engine, monkeypatch) as holding:
            answer = pool.submit(running.events, CHAT, **chat_request(**LONG))
            assert holding.wait(20)
            running.process.should_exit = True
            if drain_s:
                while running.client.get("/health").status_code == 200:  # until the server has noticed
                    pass
                assert "shutting down" in error_of(running.chat(), 503)["message"]
        bodies = answer.result()
        if drain_s:
            assert text_of(bodies) == expected
        else:
            assert "shutting down" in bodies[-1]["error"]["message"] or text_of(bodies) == expected
    assert engine.num_requests == 0


def test_the_state_page_shows_what_runs(make_engine, monkeypatch):
    monkeypatch.setattr("dspark.serve.state.WINDOW_S", 1000.0)
    with serving(make_engine()) as running:
        idle = running.client.get("/v1/dspark/state").json()
        assert idle["model"] == "toy" and idle["steps"] == 0 and idle["batch_size"] is None
        body = running.chat(**LONG).json()
        state = running.client.get("/v1/dspark/state").json()
        assert set(state) == set(idle)
        assert state["steps"] == body["dspark"]["steps"] and state["batch_size"] == 1
        assert state["acceptance_length"] == body["dspark"]["acceptance_length"]
        assert state["tokens_per_s"] > 0 and state["speculating"] and len(state["slot_acceptance"]) == 5
        assert state["running"] == state["waiting"] == 0 < state["kv_slots"]
