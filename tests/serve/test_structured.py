"""Structured output and tool calls through the API; the rules behind them are tested next to their code."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from dspark.engine.grammar import GrammarState
from tests.engine import support as s
from tests.serve.support import CHAT, chat_request, serving, text_of
from tests.serve.test_faults import assert_fails
from tests.serve.test_tools import TEMPLATE
from tests.toy_models import write_model

SCHEMA = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}, "count": {"enum": [1, 20, 300]}, "names": {"enum": ["a", "é🙂"]}},
    "required": ["ready", "count", "names"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
SEEDED = {"temperature": 1.0, "max_tokens": 150, "response_format": FORMAT}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "finds", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "stop_here"}}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    """A server whose model's chat template presents tools."""
    folder = write_model(tmp_path_factory.mktemp("tools"), "qwen3", layer_scale=0.06, max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    target = s.load_target(str(folder), s.CPU, "float32", True)
    with serving(s.toy_engine(target, s.bigram_proposer(target), policy="fixed:5")) as running:
        yield running


def test_row_15_structured_output_loses_its_place_when_drafts_are_rejected(running, monkeypatch):
    """Eight schemas' worth of drafts, accepted and rejected, beside clients that leave in the middle."""

    def ask(seed):
        if seed % 3 == 2:  # leaves after the first bytes
            with running.client.stream("POST", CHAT, json=chat_request(**SEEDED, seed=seed, stream=True)) as response:
                next(response.iter_raw(1))
            return None
        return running.chat(**SEEDED, seed=seed)

    def check():
        with ThreadPoolExecutor(4) as pool:
            responses = [response for response in pool.map(ask, range(9)) if response is not None]
        for response in responses:
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            said = json.loads(choice["message"]["content"])
            assert list(said) == ["ready", "count", "names"]
            assert said["ready"] in (True, False) and said["count"] in (1, 20, 300) and said["names"] in ("a", "é🙂")
        assert sum(response.json()["dspark"]["drafted"] for response in responses) > 0
        running.wait_until_idle()
        assert running.metric("kv_slots_used") == 0

    check()
    monkeypatch.setattr(GrammarState, "allowed", lambda self, ids, real=GrammarState.allowed: real(self, ()))
    assert_fails(check)


def test_json_object_streams_as_json(running):
    fields = chat_request(
        temperature=1.0, max_tokens=200, response_format={"type": "json_object"}, logit_bias={"125": 9}
    )
    events = running.events(CHAT, **fields, seed=1)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert isinstance(json.loads(text_of(events)), dict)


def test_speculation_does_not_change_structured_answers(running):
    for seed in range(3):
        drafted, plain = (running.chat(**SEEDED, seed=seed, **more).json() for more in ({}, {"proposer": "none"}))
        assert drafted["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
            "response_format",
        ),
        ({"tools": [TOOL]}, "tools"),  # this model's template has no place for them
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_structured_is_refused(fields, param, running):
    response = running.chat(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_tools_that_do_not_fit_are_refused(with_tools):
    for fields in (
        {"tools": [TOOL, TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "unknown"}}},
        {"tools": [TOOL], "tool_choice": "required", "response_format": FORMAT},
        {"tools": [{"type": "function", "function": {"name": "bad name"}}]},
    ):
        assert with_tools.chat(**fields).status_code == 400


def test_required_and_named_tools_are_called(with_tools):
    client = openai.OpenAI(base_url=f"{with_tools.url}/v1", api_key="none", max_retries=0)
    no_blanks = dict.fromkeys(("9", "10", "13", "32"), -100)  # the toy would spend all its tokens on them
    messages = [{"role": "user", "content": "go"}]
    fields = {"model": "toy", "messages": messages, "max_tokens": 300, "temperature": 1, "logit_bias": no_blanks}
    named = {"type": "function", "function": {"name": "look_up"}}
    for seed, choice in enumerate(("required", named)):
        answer = client.chat.completions.create(**fields, seed=seed, tools=[TOOL, OTHER], tool_choice=choice)
        (message,) = [choice.message for choice in answer.choices]
        assert message.tool_calls and not message.content and answer.choices[0].finish_reason == "tool_calls"
        assert {call.function.name for call in message.tool_calls} <= {"look_up", "stop_here"}
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert list(arguments) == (["ready", "count", "names"] if call.function.name == "look_up" else [])
        streamed = {}
        for chunk in client.chat.completions.create(
            **fields, seed=seed, tools=[TOOL, OTHER], tool_choice=choice, stream=True
        ):
            for call in chunk.choices[0].delta.tool_calls or []:
                streamed[call.index] = (call.function.name, call.function.arguments)
            reason = chunk.choices[0].finish_reason
        assert reason == "tool_calls"
        assert list(streamed.values()) == [(c.function.name, c.function.arguments) for c in message.tool_calls]


def test_without_a_call_tools_change_nothing_of_the_answer(with_tools):
    body = with_tools.chat(tools=[TOOL], tool_choice="auto").json()
    events = with_tools.events(CHAT, **chat_request(tools=[TOOL], tool_choice="auto"))
    message = body["choices"][0]["message"]
    assert "tool_calls" not in message and message["content"] == text_of(events)
    assert body["choices"][0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_conversation_with_tool_results_is_rendered(with_tools):
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"ready": true}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    short = with_tools.post(CHAT, **chat_request() | {"messages": messages[:1]}).json()["usage"]["prompt_tokens"]
    whole = with_tools.post(CHAT, **chat_request() | {"messages": messages})
    assert whole.status_code == 200 and whole.json()["usage"]["prompt_tokens"] > short
