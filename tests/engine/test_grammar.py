"""Structured output is right at every length, with every proposer, and costs nobody else anything (clause 6)."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.config import Grammar, SamplingParams, SlotRule
from dspark.drafter.proposal import _possible
from dspark.drafter.vocabulary import DraftVocabulary
from dspark.engine.grammar import GrammarState
from dspark.engine.lookup import LookupProposer
from dspark.errors import RequestError, SettingsError
from dspark.verify import processed_probs
from tests.engine import support as s

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["small", "smaller", "big"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
KINDS = ["lookup", "model", "dspark"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """In float64, so that no two ways to a token's score differ by as much as a tie."""
    folder = tmp_path_factory.mktemp("wide")
    return s.toy_target(folder, dtype="float64", exact=False, layer_scale=0.06)


@pytest.fixture
def proposer_of(target, tmp_path):
    def make(kind):
        if kind == "model":
            return s.model_proposer(target, tmp_path / "model")
        return {"none": s.NoneProposer, "lookup": LookupProposer}.get(kind, lambda: s.bigram_proposer(target))()

    return make


def constrained(grammar, params=s.seeded, seed=1, **changes):
    """A toy likes blanks too much to come to an end."""
    blanks = dict.fromkeys(b" \n\r\t", -100.0)
    values = {"max_tokens": 120, "ignore_eos": False, "grammar": grammar, "logit_bias": blanks, **changes}
    return params(seed, **values) if params is s.seeded else params(**values)


def check(output, schema):
    """A finished answer is valid; an unfinished one was cut by its limit."""
    if output.finish_reason == "stop":
        assert jsonschema_rs.is_valid(schema, json.loads(output.text)), output.text
    else:
        assert output.finish_reason == "length", output.error


# Right and the same ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [s.greedy, s.seeded])
def test_constrained_text_is_that_of_plain_decoding(kind, params, target, proposer_of):
    prompts = s.prompts(4, seed=8)
    settings = [constrained(Grammar.json_schema(SCHEMA), params, i) for i in range(3)] + [s.seeded(9, max_tokens=60)]
    expected = s.toy_engine(target).generate(prompts, settings)
    engine = s.toy_engine(target, proposer_of(kind), policy="fixed:5")
    outputs = engine.generate(prompts, settings)
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [(e.token_ids, e.finish_reason) for e in expected]
    for output in outputs[:3]:
        check(output, SCHEMA)
    assert any(o.finish_reason == "stop" for o in outputs[:3])
    assert sum(o.stats.accepted for o in outputs[:3]) > 0 or kind == "lookup"


def test_unseeded_answers_follow_the_grammar_with_drafts(target):
    """Rule `rejection`: drafts come from a masked q, and recovered tokens from a masked p."""
    engine = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:5")
    params = SamplingParams(grammar=Grammar.json_schema(SCHEMA), max_tokens=150)
    outputs = engine.generate(s.prompts(6, seed=3), params)
    for output in outputs:
        check(output, SCHEMA)
    assert sum(o.stats.accepted for o in outputs) > 0


def test_drafts_the_grammar_forbids_are_rejected_not_cut(target):
    """A lookup in a prompt of other text proposes what no JSON may hold; every step still verifies it."""
    prompt = list(b'{"name": <<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<< ') * 3
    settings = constrained(Grammar.json_object(), max_tokens=40)
    expected = s.toy_engine(target).generate([prompt], settings)[0]
    wrong = s.ScriptedProposer([expected], error=s.coin(2, 0.5))
    records = []
    engine = s.toy_engine(target, wrong, policy="fixed:4")
    engine.listeners.append(records.append)
    output = engine.generate([prompt], settings)[0]
    assert output.token_ids == expected.token_ids
    assert all(row.verified == row.drafted for record in records for row in record.rows)
    assert 0 < output.stats.accepted < output.stats.verified


def test_the_answer_ends_with_the_grammar_and_not_before(target):
    """With and without an end token; inside a block of drafts too."""
    grammar = Grammar("regex", "ab{3}c")
    for changes in ({"ignore_eos": True}, {"ignore_eos": False}, {"min_tokens": 50}):
        for proposer in (s.NoneProposer(), s.ScriptedProposer([], length=lambda at: 0), s.bigram_proposer(target)):
            if isinstance(proposer, s.ScriptedProposer):
                proposer.propose = lambda rows, lens, streams: s.point_masses([list(b"abbbcd!")[:n] for n in lens], "x")
            engine = s.toy_engine(target, proposer, policy="fixed:7")
            output = engine.generate([[70, 71]], constrained(grammar, **changes))[0]
            assert (output.text, output.finish_reason) == ("abbbc", "stop")


def test_a_stop_token_cuts_an_answer_like_a_stop_string(target):
    grammar = Grammar("regex", "ab{3}c")
    for changes in ({"stop_token_ids": [98]}, {"stop": ["b"]}):
        output = s.toy_engine(target).generate([[70, 71]], constrained(grammar, **changes))[0]
        assert (output.text, output.finish_reason) == ("a", "stop")


def test_an_end_token_comes_only_where_the_grammar_may_end(target):
    """Whatever the target would like."""
    end = target.spec.eos_ids[0]
    eager = constrained(Grammar("regex", "[0-9]{2}|[0-9]{4}"), logit_bias={end: 100.0})
    assert all(len(o.text) == 2 for o in s.toy_engine(target).generate(s.prompts(4), eager))
    never = constrained(Grammar("regex", "[0-9]{2}|[0-9]{4}"), logit_bias={end: -100.0})
    assert all(len(o.text) == 4 for o in s.toy_engine(target).generate(s.prompts(4), never))


def test_a_limit_cuts_the_answer_where_plain_decoding_does(target):
    engine = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:5")
    for limit in range(1, 12):
        output = engine.generate([[70, 71]], constrained(Grammar("regex", "(ab){20}"), max_tokens=limit))[0]
        assert (output.text, output.finish_reason) == (("ab" * 20)[:limit], "length")


# Fuzz -----------------------------------------------------------------------------------------------------------------

KEYS = st.text('abcü"{', min_size=1, max_size=3)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 'a"b'}, {"enum": ["x", 1, None, "é🙂"]}]),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-9, 99), st.integers(0, 9)),
)


def _object(properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(KEYS, inner, max_size=3)),
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=5,
)


@given(schemas=st.lists(SCHEMAS, min_size=2, max_size=4), seed=st.integers(0, 99), aborts=st.sets(st.integers(0, 3)))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_schemas_with_aborts_in_between(schemas, seed, aborts, target):
    """PITFALLS 15."""
    engine = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:4")
    outputs = {}
    ids = []
    for number, schema in enumerate(schemas):
        params = constrained(Grammar.json_schema(schema), seed=seed + number)
        collect = lambda chunk, number=number: outputs.__setitem__(number, chunk.output)  # noqa: E731
        ids.append(engine.add(list(b"json: "), params, on_chunk=collect))
    for step in range(400):
        if engine.step() is None:
            break
        if step in (2, 7) and aborts:
            engine.abort(ids[aborts.pop() % len(ids)])
    assert engine.num_requests == 0 and len(outputs) == len(schemas)
    for number, schema in enumerate(schemas):
        if outputs[number].finish_reason != "abort":
            check(outputs[number], schema)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_does_what_a_list_of_the_same_ids_does(temperature):
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature, allowed_token_ids=[1, 2, 5], min_tokens=3, top_k=2)
    ids = [2, 3, 5, 8]
    mask = torch.zeros(9, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
    listed, masked = (SlotRule(params, end_ids=(5,), **extra) for extra in ({"allowed_ids": ids}, {"mask": mask}))
    assert torch.equal(processed_probs(logits, [masked]), processed_probs(logits, [listed]))
    assert processed_probs(logits, [masked])[0, 2] == 1  # all that is left


def test_a_drafter_ends_its_draft_where_its_own_vocabulary_has_nothing_allowed(target):
    """Which the tokens before that slot decide, so that it is a plan any rule allows."""
    inside, outside = ord("a"), ord("b")
    vocabulary = DraftVocabulary(torch.tensor([inside, 257]), full_size=260)
    for allowed, expected in (([inside], True), ([outside], False), ([257], False), ([257, outside, inside], True)):
        mask = torch.zeros(260, dtype=torch.bool).index_fill_(0, torch.tensor(allowed), True)
        rule = SlotRule(SamplingParams(min_tokens=2), end_ids=(257,), mask=mask)
        assert _possible(rule, vocabulary) == expected
        assert _possible(rule, None) == (allowed != [257])


# Refusals and failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("json_schema", "{"), "json schema"),
        (Grammar.json_schema({"type": "nope"}), "nope"),
        (Grammar.json_schema({"not": {"type": "string"}}), "not"),
        (Grammar.json_schema({"type": "string", "pattern": "("}), "unclosed"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (Grammar("regex", "("), "regex"),
        (Grammar("lark", "begin: 'x'"), "lark"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_sentence_before_decoding(grammar, says, target):
    engine = s.toy_engine(target)
    with pytest.raises(RequestError) as error:
        engine.add([70], constrained(grammar))
    assert says in str(error.value) and "\n" not in str(error.value)
    assert engine.num_requests == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar("xml", "x"),
        lambda: Grammar("regex"),
        lambda: Grammar("json_object", "{}"),
        lambda: Grammar.json_schema({"const": {1, 2}}),
        lambda: SamplingParams(grammar={"type": "object"}),
    ],
)
def test_settings_that_are_no_grammar_are_refused(make):
    with pytest.raises(SettingsError):
        make()


@pytest.mark.parametrize("kind", ["none", "model", "dspark"])
def test_a_grammar_that_cannot_be_followed_ends_its_own_request_only(kind, target, proposer_of, monkeypatch):
    prompts = s.prompts(2)
    expected = s.toy_engine(target).generate(prompts[:1], s.greedy())[0]
    engine = s.toy_engine(target, proposer_of(kind))
    ids = {}
    for name, prompt, params in zip("ab", prompts, [s.greedy(), constrained(Grammar.json_schema(SCHEMA))], strict=True):
        engine.add(prompt, params, on_chunk=lambda chunk, name=name: ids.__setitem__(name, chunk.output))
    for _ in range(3):
        engine.step()
    doomed = engine.loop.batcher.running[1].grammar
    doomed._matcher.consume_token(0)  # the matcher enters its error state and never leaves it
    while engine.step() is not None:
        pass
    assert ids["a"].token_ids == expected.token_ids
    assert ids["b"].finish_reason == "error" and "grammar" in ids["b"].error


def test_without_llguidance_the_request_is_refused(target, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"dspark\[grammar\]"):
        s.toy_engine(target).add([70], constrained(Grammar.json_object()))


# Wrong variants -------------------------------------------------------------------------------------------------------


def test_a_state_that_is_not_rolled_back_is_found_out(target, monkeypatch):
    """The wrong variant: committed tokens are read behind the rejected draft."""

    def push(self, token_id):
        self._matcher.try_consume_tokens([token_id])
        self._ahead, self._masks = [], {}
        return self._matcher.is_stopped()

    grammar = Grammar.json_schema(SCHEMA)
    expected = s.toy_engine(target).generate([[70, 71]], constrained(grammar))[0]
    engine = s.toy_engine(target, s.ScriptedProposer([expected], error=s.coin(1, 0.3)), policy="fixed:4")
    assert engine.generate([[70, 71]], constrained(grammar))[0].token_ids == expected.token_ids
    monkeypatch.setattr(GrammarState, "push", push)
    assert engine.generate([[70, 71]], constrained(grammar))[0].token_ids != expected.token_ids
