"""What is not supported is refused with status 400 and one sentence that names the field."""

import pytest

from tests.sentences import assert_one_sentence
from tests.serve.support import CHAT, COMPLETIONS, chat_request, completion_request


def refusal(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert_one_sentence(error["message"], [error["param"]] if error["param"] else [])
    return error


UNKNOWN = ["best_of", "echo", "suffix", "bad_words", "min_tokens", "functions", "parallel_tool_calls", "Temperature"]


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_fields_are_named(path, name, running):
    make = chat_request if path == CHAT else completion_request
    error = refusal(running.post(path, **make(), **{name: 1}))
    assert (error["param"], error["code"], error["type"]) == (name, "unknown_field", "invalid_request_error")


WRONG = [
    ("temperature", -0.1),
    ("temperature", "0.5"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("n", 0),
    ("n", 1000),
    ("max_tokens", 0),
    ("max_tokens", "10"),
    ("max_tokens", True),
    ("stop", ""),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("seed", -1),
    ("seed", 2**63),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"260": 1}),
    ("logit_bias", [5]),
    ("top_logprobs", 3),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("user", 5),
    ("proposer", "lookup"),
    ("proposer", "model:/etc"),
    ("policy", "fixed:99"),
    ("policy", "scheduled"),
    ("policy", "auto"),
    ("policy", ["fixed:3"]),
    ("drafter", "/etc/passwd"),
    ("tool_choice", "sometimes"),
    ("messages", []),
    ("messages", "hello"),
    ("messages", [{"role": "user"}]),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_named(name, value, running):
    assert refusal(running.post(CHAT, **(chat_request() | {name: value})))["param"] == name


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "owner", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": "x", "audio": {}}, "messages.0.audio"),
        ({"content": "x"}, "messages.0.role"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]},
            "messages.0.content",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content"),
    ],
)
def test_wrong_messages_are_named(message, param, running):
    assert refusal(running.post(CHAT, **chat_request() | {"messages": [message]}))["param"].startswith(param)


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], [1.5], ["a", 5], [-1], [260], ["a", ""], [10**30], "x" * 600], ids=repr
)
def test_prompts_that_cannot_be_run(prompt, running):
    refusal(running.post(COMPLETIONS, **completion_request(prompt)))


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_fields_are_named(missing, running):
    fields = chat_request()
    del fields[missing]
    error = refusal(running.post(CHAT, **fields))
    assert (error["param"], error["code"]) == (missing, "missing_field")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"model": NaN}', b'{"temperature": 1e999}', b"[" * 5000, b"null"],
    ids=repr,
)
def test_bodies_that_are_no_request(body, running):
    refusal(running.client.post(CHAT, content=body, headers={"content-type": "application/json"}))


def test_text_that_is_not_unicode(running):
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "\\ud800"}], "\\ud800": "\\ud800"}'
    refusal(running.client.post(CHAT, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_refused(content_type, running):
    """A page of another site can make a browser send these without asking, but not JSON."""
    body = running.client.build_request("POST", CHAT, json=chat_request()).read()
    headers = {} if content_type is None else {"content-type": content_type}
    error = refusal(running.client.post(CHAT, content=body, headers=headers))
    assert "application/json" in error["message"]


def test_other_models_paths_and_methods(running):
    assert refusal(running.post(CHAT, **chat_request() | {"model": "gpt"}), 404)["code"] == "model_not_found"
    refusal(running.client.get("/v1/engines"), 404)
    refusal(running.client.get("/v1/models/gpt"), 404)
    refusal(running.client.get(CHAT), 405)


def test_null_is_as_good_as_left_out(running):
    nulls = dict.fromkeys(
        ["top_p", "top_k", "min_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream", "user", "tools", "policy"]
    )
    plain, empty = running.chat(), running.chat(**nulls)
    assert empty.status_code == 200
    assert empty.json()["choices"] == plain.json()["choices"]


def test_text_parts_and_roles_reach_the_template(running):
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    joined = running.post(CHAT, **chat_request() | {"messages": [{"role": "user", "content": "hello world"}]})
    assert (
        running.post(CHAT, **chat_request() | {"messages": [{"role": "user", "content": parts}]}).json()["choices"]
        == joined.json()["choices"]
    )
    roles = [{"role": role, "content": "x"} for role in ("developer", "user", "assistant", "user")]
    as_system = [roles[0] | {"role": "system"}, *roles[1:]]
    answers = [running.post(CHAT, **chat_request() | {"messages": m}).json() for m in (roles, as_system)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"] > 40
