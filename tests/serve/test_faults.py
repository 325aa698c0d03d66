"""Faults that servers like this one are known for: each check holds here, and fails once the fault is put in.

The numbers are those of the list of faults this project tests against.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dspark.config import Commit, SamplingParams, SlotRule
from dspark.engine.batcher import Row
from dspark.engine.loop import DecodeLoop
from dspark.engine.request import Request, RequestStats
from dspark.engine.text import TextStream
from dspark.errors import RequestError
from dspark.serve.worker import Worker
from dspark.target import KvPool, PassRow
from tests.serve.support import CHAT, LETTERS, chat_request, completion_request, serving, text_of

PROMPT = "hello hello hello"
LENGTH = 30
SEEDED = {"temperature": 1.0, "seed": 5, "max_tokens": LENGTH, "logit_bias": LETTERS}


def assert_fails(check):
    """The check notices the fault that was just put in."""
    with pytest.raises(AssertionError):
        check()


def library(plain, prompt=PROMPT, **changes):
    """What plain decoding says to a completion request of the same fields."""
    fields = SEEDED | changes
    bias = {int(token): value for token, value in fields.pop("logit_bias").items()}
    return plain.generate([prompt], SamplingParams(**fields, logit_bias=bias))[0]


def complete(running, prompt=PROMPT, **changes):
    response = running.post("/v1/completions", **completion_request(prompt, **(SEEDED | changes)))
    assert response.status_code == 200, response.text
    return response.json()


def unchecked_commit(self, token_ids, num_accepted, drafted, real=Request.commit):
    """Wrong: looks for ends only at the last token of a block."""
    for token_id in token_ids[:-1]:
        self.output_ids.append(token_id)
        self.text.push(token_id, may_stop=False)
    last = real(self, token_ids[-1:], 0, 0)
    return Commit(tuple(token_ids), num_accepted, 0, last.finish_reason)


def test_row_8_a_stop_string_inside_an_accepted_block_is_missed(running, plain, monkeypatch):
    text = library(plain).text
    stops = [text[at : at + width] for at in range(4, LENGTH - 3, 5) for width in (1, 3)]
    expected = [library(plain, stop=(stop,)) for stop in stops]

    def check():
        for stop, answer in zip(stops, expected, strict=True):
            body = complete(running, stop=stop)
            assert body["choices"][0]["text"] == answer.text
            assert body["choices"][0]["finish_reason"] == answer.finish_reason == "stop"
            assert body["usage"]["completion_tokens"] == len(answer.token_ids)

    check()
    monkeypatch.setattr(Request, "commit", unchecked_commit)
    assert_fails(check)


def test_row_9_logprobs_go_on_after_the_text_was_cut(running, plain, monkeypatch):
    text = library(plain).text
    stops = [text[at : at + 3] for at in (6, 11, 17)]

    def check():
        for stop in stops:
            fields = completion_request(PROMPT, **SEEDED, stop=stop, logprobs=1)
            choice = running.post("/v1/completions", **fields).json()["choices"][0]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            seen = tokens = ""
            for event in running.events("/v1/completions", **fields):
                part = event["choices"][0]
                seen += part["text"]
                tokens += "".join((part["logprobs"] or {"tokens": []})["tokens"])
                assert tokens == seen

    check()
    monkeypatch.setattr(TextStream, "shown_tokens", property(lambda self: len(self.starts)))
    assert_fails(check)


def test_row_10_the_next_turn_follows_what_was_cut_off(running, plain, monkeypatch):
    """A second turn after an answer that a stop string cut inside a block: known up to the cut, and not beyond."""
    opening = [{"role": "user", "content": "tell me about the sea and the hills"}]
    first = plain.generate([plain.chat_ids(opening)], SamplingParams(temperature=0, max_tokens=LENGTH))[0].text
    fields = {"model": "toy", "temperature": 0, "max_tokens": LENGTH}

    def check():
        cut = running.post(CHAT, **fields, messages=opening, stop=first[8:10]).json()["choices"][0]["message"][
            "content"
        ]
        assert cut == first[: first.index(first[8:10])]
        turns = [*opening, {"role": "assistant", "content": cut}, {"role": "user", "content": "and then?"}]
        expected = plain.generate([plain.chat_ids(turns)], SamplingParams(temperature=0, max_tokens=LENGTH))[0]
        body = running.post(CHAT, **fields, messages=turns).json()
        assert body["choices"][0]["message"]["content"] == expected.text
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(plain.chat_ids(opening)) <= cached < body["usage"]["prompt_tokens"]

    check()
    running.engine.loop.batcher.prefixes.clear()
    monkeypatch.setattr(KvPool, "copy", lambda self, *_: None)
    assert_fails(check)


def test_row_13_seeds_are_mixed_between_requests(running, plain, monkeypatch):
    expected = [library(plain, seed=seed).text for seed in range(6)]

    def check():
        with ThreadPoolExecutor(6) as pool:
            bodies = pool.map(lambda seed: complete(running, seed=seed), range(6))
            assert [body["choices"][0]["text"] for body in bodies] == expected

    assert len(set(expected)) == 6
    check()
    calls = []
    monkeypatch.setattr("dspark.engine.engine.request_key", lambda *_: calls.append(0) or len(calls))
    assert_fails(check)


PENALTIES = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.2},
    {"frequency_penalty": -1.0, "top_p": 0.9, "top_k": 12, "min_p": 0.01},
]


def test_row_14_penalties_forget_the_tokens_of_the_draft(running, plain, monkeypatch):
    expected = [library(plain, **changes).text for changes in PENALTIES]

    def check():
        for changes, text in zip(PENALTIES, expected, strict=True):
            assert complete(running, **changes)["choices"][0]["text"] == text

    assert len({library(plain).text, *expected}) == 5
    check()
    stale = lambda self, draft_ids: SlotRule(self.params, self.prompt_ids, list(self.output_ids))  # noqa: E731
    monkeypatch.setattr(Request, "slot_rule", stale)
    assert_fails(check)


def test_row_17_an_answer_runs_over_the_context(running, monkeypatch):
    context = running.engine.context

    def check():
        for left in range(1, 9):
            body = complete(running, [70] * (context - left), max_tokens=50)
            assert body["usage"]["total_tokens"] == context
            assert body["choices"][0]["finish_reason"] == "length"
        full = running.post("/v1/completions", **completion_request([70] * context))
        assert full.status_code == 400 and str(context) in full.json()["error"]["message"]

    check()
    monkeypatch.setattr(running.engine, "context", context + 1)
    assert_fails(check)


def hang_up(running, after_bytes):
    """Read so much of a stream, then close the connection."""
    fields = chat_request(max_tokens=400, stream=True, logit_bias=LETTERS)
    with running.client.stream("POST", CHAT, json=fields) as response:
        for seen, _ in enumerate(response.iter_raw(64), 1):
            if seen * 64 >= after_bytes:
                return


def test_row_19_a_disconnect_leaves_its_request_running(make_engine, monkeypatch):
    def check():
        with serving(make_engine(prefix_cache=False), drain_s=0) as running:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(partial(hang_up, running), (1, 200, 700, 1500, 1, 3000)))
            running.wait_until_idle()
            assert running.metric("requests_total", outcome="abort") == 6
            assert running.engine.num_requests == 0
            assert running.metric("kv_slots_used") == 0

    check()
    monkeypatch.setattr(Worker, "cancel", lambda self, ticket: None)
    assert_fails(check)


def test_row_20_answers_change_when_many_run_at_once(running, plain, monkeypatch):
    prompts = [f"{number} hello {number * 7}" for number in range(12)]
    expected = [library(plain, prompt, temperature=0).text for prompt in prompts]

    def check():
        with ThreadPoolExecutor(12) as pool:
            bodies = pool.map(lambda prompt: complete(running, prompt, temperature=0), prompts)
            assert [body["choices"][0]["text"] for body in bodies] == expected

    check()
    shared = lambda row: PassRow(0, row.request.kv_len, len(row.tokens) + len(row.draft_ids))  # noqa: E731
    monkeypatch.setattr(Row, "pass_row", shared)
    assert_fails(check)


def test_row_22_one_bad_request_takes_others_down(running, plain, monkeypatch):
    expected = library(plain).text
    overflow = {"repetition_penalty": 1e-300}  # divides every logit seen before to infinity

    def ask(index):
        if index % 2:
            return running.post("/v1/completions", **completion_request(PROMPT, **(SEEDED | overflow)))
        return running.post("/v1/completions", **completion_request(PROMPT, **SEEDED))

    def check():
        with ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(ask, range(8)))
        assert [response.status_code for response in responses] == [200, 400] * 4
        assert {r.json()["choices"][0]["text"] for r in responses[::2]} == {expected}
        assert all("No token is possible" in r.json()["error"]["message"] for r in responses[1::2])

    check()

    def raises(self, *_):
        raise RequestError("somebody's mask is empty")

    monkeypatch.setattr(DecodeLoop, "_probs_row_by_row", raises)
    assert_fails(check)


COUNTS = (
    "decode_steps",
    "drafted_tokens",
    "verified_tokens",
    "accepted_tokens",
    "committed_tokens",
    "truncated_tokens",
)


def counts(running):
    return {name: running.metric(f"{name}_total") for name in COUNTS}


def test_row_26_metrics_are_off_by_the_tokens_of_a_cut_block(running, plain, monkeypatch):
    text = library(plain).text

    def check():
        before = counts(running)
        made = first = 0
        for at in range(4, LENGTH - 2):
            body = complete(running, stop=text[at : at + 2])
            made, first = made + body["usage"]["completion_tokens"], first + 1
        running.wait_until_idle()
        spent = {name: value - before[name] for name, value in counts(running).items()}
        assert spent["truncated_tokens"] > 0
        committed = spent["accepted_tokens"] + spent["decode_steps"] - spent["truncated_tokens"]
        assert spent["committed_tokens"] == committed == made - first

    check()

    def forgets(self, *args, real=Request.commit):
        commit = real(self, *args)
        return Commit(commit.token_ids, commit.num_accepted, 0, commit.finish_reason)

    monkeypatch.setattr(Request, "commit", forgets)
    assert_fails(check)


def test_row_27_nobody_can_tell_why_a_request_was_slow(running, monkeypatch):
    def check():
        before = counts(running)
        body = complete(running)
        numbers = body["dspark"]
        running.wait_until_idle()
        spent = {name: value - before[name] for name, value in counts(running).items()}
        assert numbers["steps"] == spent["decode_steps"] > 0
        for name in ("drafted", "verified", "accepted", "committed", "truncated"):
            assert numbers[name] == spent[f"{name}_tokens"]
        assert numbers["committed"] + 1 == body["usage"]["completion_tokens"]
        assert numbers["acceptance_length"] == pytest.approx(numbers["committed"] / numbers["steps"], abs=1e-3)
        assert numbers["verify_ms"] > 0 and numbers["time_to_first_token_ms"] > 0 and numbers["tokens_per_s"] > 0
        streamed = running.events("/v1/completions", **completion_request(PROMPT, **SEEDED))[-1]["dspark"]
        assert {name: streamed[name] for name in ("steps", "drafted", "accepted", "truncated")} == {
            name: numbers[name] for name in ("steps", "drafted", "accepted", "truncated")
        }

    check()
    monkeypatch.setattr(RequestStats, "add", lambda self, row, times: None)
    assert_fails(check)


def test_streams_and_whole_answers_agree(running):
    fields = chat_request(**SEEDED)
    assert (
        text_of(running.events(CHAT, **fields))
        == running.post(CHAT, **fields).json()["choices"][0]["message"]["content"]
    )
