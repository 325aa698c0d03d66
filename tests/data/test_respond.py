"""Responses to given prompts: what the engine would say, packed in the prompts' order, and the same after any kill."""

import json
from itertools import islice

import pytest

from dspark.config import SamplingParams
from dspark.data import (
    Described,
    Endpoint,
    Journal,
    Prompt,
    RespondPlan,
    journal_path,
    pack_responses,
    read_packed,
    read_provenance,
    respond,
    respond_by_endpoint,
    responses_written,
    tokenise,
)
from dspark.engine import Engine
from dspark.errors import DataError, SettingsError
from tests.data.support import writer_engine
from tests.sentences import assert_one_sentence
from tests.toy_models import EOS_ID

PLAN = RespondPlan(temperatures=(0.0, 0.7, 1.0), weights=(1, 1, 2), max_tokens=40, seed=3)
PROMPTS = [Prompt(({"role": "user", "content": f"Question {i}"},), "code" if i % 2 else "chat") for i in range(14)]


def run(target, out, prompts=PROMPTS, plan=PLAN, batch=8, steps=None):
    """(notes, the journal's bytes) of a run to the end; None after `steps` engine steps, as if killed there."""
    engine, described = writer_engine(target, batch), Described.of(target)
    settings = plan.settings(prompts, described, dtype="float32", exact=True)
    tokenised = tokenise(prompts, plan, described, engine.context)
    with Journal(journal_path(out), settings) as journal:
        reports = respond(engine, tokenised, plan, journal)
        for report in islice(reports, steps):
            assert report.total == len(prompts) and report.done <= report.total
        reports.close()
        assert engine.num_requests == 0
        if steps is not None:
            return None
        content = journal.path.read_bytes()
        notes = pack_responses(out, prompts, plan, settings, journal, described)
        journal.remove()
    return notes, content


@pytest.fixture(scope="module")
def whole(writer, tmp_path_factory):
    """(file, its bytes, the journal's bytes) of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "r.npz"
    notes, journal = run(writer, out)
    assert notes == ()
    return out, out.read_bytes(), journal


def read(path, target):
    return read_packed(path, target.spec.vocab_size, target.spec.context, target.fingerprint)


def test_the_file_holds_what_the_engine_serves(whole, writer):
    corpus, engine = read(whole[0], writer), writer_engine(writer)
    assert corpus.notes == () and corpus.kinds == tuple(p.kind for p in PROMPTS)
    assert set(corpus.temperatures) == {0.0, 0.7, 1.0}
    ended = 0
    for index, prompt in enumerate(PROMPTS):
        ids = corpus.sequence(index)[: corpus.prompt_lens[index]].tolist()
        assert ids == engine.chat_ids(prompt.messages)
        params = PLAN.params(index)
        assert params.temperature == PLAN.temperature(index) == corpus.temperatures[index]
        assert corpus.response(index).tolist() == list(engine.generate([ids], params)[0].token_ids)
        ended += corpus.response(index)[-1].item() == EOS_ID
    assert 0 < ended < len(PROMPTS)  # the end token is kept, and the limit cuts


def test_the_file_says_how_it_was_made(whole, writer):
    made = read_provenance(whole[0])
    assert made.target.matches(writer.fingerprint)
    wanted = {"temperatures": [0.0, 0.7, 1.0], "weights": [1, 1, 2], "max_tokens": 40, "seed": 3, "system": None}
    assert {name: made.sampling[name] for name in wanted} == wanted


def test_a_run_killed_anywhere_ends_with_the_same_file(whole, writer, tmp_path):
    _, wanted, content = whole
    header = content.index(b"\n") + 1
    for share in (0, 0.35, 0.8, 1):
        out = tmp_path / f"{share}.npz"
        journal_path(out).write_bytes(content[: header + int(share * (len(content) - header))])
        run(writer, out)
        assert out.read_bytes() == wanted and not journal_path(out).exists()


def test_stops_and_batch_sizes_change_nothing_and_nothing_is_computed_twice(whole, writer, tmp_path, monkeypatch):
    finished = []
    add = Journal.add
    monkeypatch.setattr(Journal, "add", lambda journal, i, value: (finished.append(i), add(journal, i, value)))
    out = tmp_path / "r.npz"
    run(writer, out, batch=3, steps=30)
    run(writer, out, batch=5, steps=15)
    assert 0 < len(finished) < len(PROMPTS)
    run(writer, out, batch=14)
    assert sorted(finished) == list(range(len(PROMPTS))) and out.read_bytes() == whole[1]


def test_a_complete_file_is_known_and_another_one_refused(whole, writer, tmp_path):
    described = Described.of(writer)
    settings = PLAN.settings(PROMPTS, described, dtype="float32", exact=True)
    assert responses_written(whole[0], settings) and not responses_written(tmp_path / "r.npz", settings)
    for changes, names in [
        ({"max_tokens": 99}, ["max_tokens", "40", "99"]),
        ({"target": {**described.identity(), "weights": "0123"}}, ["target", "0123"]),
        ({"prompts_digest": "0123"}, ["prompts_digest"]),
    ]:
        with pytest.raises(DataError) as error:
            responses_written(whole[0], settings | changes)
        assert_one_sentence(error.value, [str(whole[0]), *names])


def test_what_cannot_be_answered_is_left_out_with_a_count(writer, tmp_path, monkeypatch):
    long = Prompt(({"role": "user", "content": "x" * 600},), "chat")
    nearly = Prompt(({"role": "user", "content": "x" * 475},), "chat")  # the toy's context holds 512 tokens
    out = tmp_path / "r.npz"
    add = Engine.add

    def first_ends_at_once(engine, ids, params, **more):
        if ids == engine.chat_ids(PROMPTS[0].messages):
            params = SamplingParams(temperature=1, seed=1, max_tokens=1, logit_bias={EOS_ID: 100})
        return add(engine, ids, params, **more)

    monkeypatch.setattr(Engine, "add", first_ends_at_once)
    notes, _ = run(writer, out, [long, *PROMPTS[:2], nearly], RespondPlan((0.0,), (1.0,), max_tokens=40))
    corpus = read(out, writer)
    assert len(corpus) == 2 and corpus.length(1) == 512 and len(notes) == 3
    assert_one_sentence(notes[0], ["1 of 4 prompts", "no room"])
    assert_one_sentence(notes[1], ["1 of 4 responses", "empty"])
    assert_one_sentence(notes[2], ["1 of 4 responses", "context", "512"])
    assert read_provenance(out).sampling["left_out"] == {"too_long": 1, "empty": 1, "failed": 0}
    with pytest.raises(DataError) as error:
        run(writer, tmp_path / "none.npz", [long])
    assert_one_sentence(error.value, ["none.npz", "No response"])


@pytest.mark.real
def test_smollm2_answers_as_it_serves_whatever_shares_the_pass(smollm2_exact, tmp_path):
    plan = RespondPlan(temperatures=(0.0, 1.0), weights=(1, 1), max_tokens=6, seed=1)
    run(smollm2_exact, tmp_path / "r.npz", PROMPTS[:3], plan, batch=3)
    corpus, engine = read(tmp_path / "r.npz", smollm2_exact), writer_engine(smollm2_exact, 1)
    for index, prompt in enumerate(PROMPTS[:3]):
        (output,) = engine.chat([prompt.messages], plan.params(index))
        assert corpus.sequence(index).tolist() == [*output.prompt_ids, *output.token_ids]


def test_a_system_message_comes_before_prompts_that_have_none():
    plan = RespondPlan(system="Be kind.")
    own = Prompt(({"role": "system", "content": "Be brief."}, *PROMPTS[0].messages), "chat")
    assert plan.messages(PROMPTS[0])[0] == {"role": "system", "content": "Be kind."}
    assert plan.messages(own) == list(own.messages)


def test_temperatures_follow_the_weights():
    plan = RespondPlan(temperatures=(0.0, 0.5, 1.0), weights=(1, 0, 3))
    drawn = [plan.temperature(i) for i in range(2000)]
    assert 0.5 not in drawn and abs(drawn.count(1.0) / 2000 - 0.75) < 0.05  # 5 standard deviations


def test_a_server_answers_and_its_text_is_tokenised(writer, tmp_path):
    httpx = pytest.importorskip("httpx")
    described, bodies = Described.of(writer), []

    def handler(request):
        bodies.append(json.loads(request.content))
        ended = "Question 1" in bodies[-1]["messages"][-1]["content"]
        choice = {"message": {"content": "Fine, thanks"}, "finish_reason": "stop" if ended else "length"}
        return httpx.Response(200, json={"choices": [choice]})

    prompts = PROMPTS[:3]
    settings = PLAN.settings(prompts, described, endpoint_model="m")
    endpoint = Endpoint("http://server/v1", "m", transport=httpx.MockTransport(handler))
    tokenised = tokenise(prompts, PLAN, described, described.spec.context)
    with Journal(tmp_path / "j", settings) as journal:
        reports = list(respond_by_endpoint(endpoint, prompts, tokenised, PLAN, journal, described))
        pack_responses(tmp_path / "r.npz", prompts, PLAN, settings, journal, described)
    assert reports[-1].done == reports[-1].total == 3
    corpus, text = read(tmp_path / "r.npz", writer), list(b"Fine, thanks")
    assert [corpus.response(i).tolist() for i in range(3)] == [text, [*text, EOS_ID], text]
    assert sorted(b["temperature"] for b in bodies) == sorted(PLAN.temperature(i) for i in range(3))
    assert len({b["seed"] for b in bodies}) == 3


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"temperatures": (0.0, -1.0, 1.0)}, ["temperature", "-1"]),
        ({"temperatures": (1.0,)}, ["--temperatures", "--weights", "1", "3"]),
        ({"weights": (0, 0, 0)}, ["--weights", "not all 0"]),
        ({"weights": (1, -1, 1)}, ["--weights", "-1"]),
        ({"seed": -1}, ["--seed"]),
        ({"max_tokens": 0}, ["max_tokens"]),
    ],
)
def test_bad_plans(values, names):
    with pytest.raises(SettingsError) as error:
        RespondPlan(**values)
    assert_one_sentence(error.value, names)
