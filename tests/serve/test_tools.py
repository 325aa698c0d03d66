"""Tools: shown through the chat template, called in <tool_call> markers, taken apart whole or streamed."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config import SamplingParams
from dspark.errors import RequestError
from dspark.serve.tools import CallStream, call_grammar, check_tools, offered, split_calls, tool_messages
from dspark.target import load_target
from tests.engine import support as s
from tests.toy_models import CHAT_TEMPLATE, write_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Zürich"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}

TEMPLATE = (
    "{% if tools %}<|start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "Answer with <tool_call>.<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def call(name, arguments):
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


def shown(parsed):
    return parsed.content, [(c.name, json.loads(c.arguments)) for c in parsed.calls]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    write_model(folder, "qwen3", layer_scale=0.06)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_target(str(folder), s.CPU, "float32")


# Shown to the model ---------------------------------------------------------------------------------------------------


def test_tools_and_earlier_calls_reach_the_template(target):
    asked = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "é"}'}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    text = target.tokenizer.render_chat(tool_messages(messages), tools=offered([CLOCK], "auto"))
    assert json.dumps(CLOCK) in text
    assert 'assistant\n<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call><|end|>' in text
    assert "<|start|>tool\nnoon<|end|>\n<|start|>assistant\n" in text
    assert asked["function"]["arguments"] == '{"zone": "é"}'  # the caller's message is as it was


def test_no_tools_are_shown_where_none_may_be_called(target):
    messages = [{"role": "user", "content": "When?"}]
    plain = target.tokenizer.render_chat(messages)
    assert target.tokenizer.render_chat(messages, tools=offered([CLOCK], "none")) == plain
    assert "Tools" not in plain


def test_a_template_without_tools_refuses_them_in_one_sentence(tmp_path):
    tokenizer = s.toy_target(tmp_path, exact=False).tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    with pytest.raises(RequestError, match="leave tools out"):
        tokenizer.render_chat([{"role": "user", "content": "When?"}], tools=[CLOCK])


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        (None, "auto", "without tools"),
        ([], NAMED, "without tools"),
        ([CLOCK], NAMED, "get_weather"),
        ([CLOCK], "always", "always"),
        ([CLOCK, CLOCK], "auto", "two functions"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "a b"),
    ],
)
def test_what_does_not_fit_together_is_refused(tools, choice, says):
    with pytest.raises(RequestError) as error:
        check_tools(tools, choice)
    assert says in str(error.value) and "\n" not in str(error.value)
    check_tools([CLOCK, WEATHER], NAMED)
    check_tools(None, "none")


# Called by the model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <b>you</b>\n", "Hello <b>you</b>\n", []),
        (call("clock", {}), "", [("clock", {})]),
        (f"Let me see.\n\n{call('clock', {'a': [1]})}\n", "Let me see.", [("clock", {"a": [1]})]),
        (call("f", {}) + "\n" + call("g", {"x": "ü🙂"}), "", [("f", {}), ("g", {"x": "ü🙂"})]),
        (call("f", {}) + "\nand more", "\nand more", [("f", {})]),
        (call("f", {"x": '</tool_call> "\\'}), "", [("f", {"x": '</tool_call> "\\'})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "", [("f", {"x": "\ud800"})]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),  # the end token came early
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", {})]),
        ("a\n<tool_call>no JSON</tool_call>b", "a\n<tool_call>no JSON</tool_call>b", []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}', '<tool_call>{"name": "f", "arguments": {"x": NaN}}', []),
        ('<tool_call>"</tool_call> and on', '<tool_call>"</tool_call> and on', []),
        ("a < b <tool", "a < b <tool", []),
    ],
)
def test_answers_are_taken_apart_the_same_whole_and_streamed(text, content, calls):
    whole = split_calls(text)
    assert shown(whole) == (content, calls)
    assert all(c.arguments.encode() and c.id.startswith("call_") for c in whole.calls)
    assert len({c.id for c in whole.calls}) == len(calls)
    for seed in range(20):
        flip = random.Random(seed)
        stream, got, at = CallStream(), [], 0
        while at < len(text):
            size = flip.choice([1, 1, 2, 5, 30])
            got.append(stream.push(text[at : at + size]))
            at += size
        got.append(stream.finish())
        assert "".join(p.content for p in got) == content
        assert [(c.name, json.loads(c.arguments)) for p in got for c in p.calls] == calls


@given(st.text(st.sampled_from('<>/tool_call"{}\\ \na'), max_size=60), st.integers(1, 9))
def test_no_part_of_a_marker_is_shown_before_it_is_text_for_certain(text, size):
    """And nothing is lost: without a call, the pieces are the answer."""
    stream, content = CallStream(), ""
    for at in range(0, len(text), size):
        content += stream.push(text[at : at + size]).content
        assert text.startswith(content)
        rest = text[len(content) : at + size]
        assert "<tool_call>" in text or not rest.strip() or "<tool_call>".startswith(rest.strip())
    assert content + stream.finish().content == text


def test_a_text_is_shown_as_soon_as_it_cannot_become_a_call():
    stream = CallStream()
    assert stream.push("Hi <tool").content == "Hi"
    assert stream.push("box>").content == " <toolbox>"
    assert stream.push('<tool_call>{"name": "f"}').content == ""
    assert [c.name for c in stream.push("</tool_call>").calls] == ["f"]


# Asked for by tool_choice ---------------------------------------------------------------------------------------------


def test_only_required_and_named_calls_need_a_grammar():
    for tools, choice in ((None, None), ([CLOCK], None), ([CLOCK], "auto"), ([CLOCK], "none")):
        assert call_grammar(tools, choice) is None


@pytest.mark.parametrize(("choice", "parallel"), [("required", True), ("required", False), (NAMED, True)])
def test_an_answer_that_must_call_does(choice, parallel, target):
    pytest.importorskip("llguidance")
    grammar = call_grammar([CLOCK, WEATHER], choice, parallel)
    bias = {**dict.fromkeys(b"\t\r ", -100.0), target.spec.eos_ids[0]: 2.0}
    params = [SamplingParams(seed=i, max_tokens=250, grammar=grammar, logit_bias=bias) for i in range(4)]
    outputs = s.toy_engine(target, s.bigram_proposer(target)).generate([[70, 71]] * 4, params)
    for output in outputs:
        content, calls = shown(split_calls(output.text))
        assert calls and (content == "" or output.finish_reason == "length")
        assert len(calls) == 1 or (parallel and choice == "required")
        for name, arguments in calls:
            assert name == "get_weather" or (name == "clock" and choice == "required")
            if name == "get_weather":
                assert arguments["city"] in ("Oslo", "Zürich") and 1 <= arguments["days"] <= 9
            else:
                assert arguments == {}
    assert any(o.finish_reason == "stop" for o in outputs)
