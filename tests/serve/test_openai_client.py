"""The official `openai` client against a real server."""

import openai
import pytest

from dspark.config import SamplingParams
from tests.serve.support import LETTERS, serving

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello hello"}]
SEEDED = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "logit_bias": LETTERS}


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def library(plain, messages=MESSAGES, **params):
    values = SEEDED | {"logit_bias": {int(k): v for k, v in LETTERS.items()}} | params
    return plain.generate([plain.chat_ids(messages)], SamplingParams(**values))[0]


def test_chat_is_the_librarys_answer(client, plain):
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, **SEEDED)
    expected = library(plain)
    assert answer.object == "chat.completion" and answer.model == "toy" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids) == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_stream_is_the_same_answer(client, plain):
    stream = client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SEEDED
    )
    *chunks, last = list(stream)
    expected = library(plain)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert not last.choices and last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks)


def test_logprobs_are_the_librarys(client, plain):
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=3, **SEEDED)
    expected = library(plain, logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([t.logprob for t in expected.logprobs])
    assert bytes(b for entry in content for b in entry.bytes).decode() == expected.text
    for entry, token in zip(content, expected.logprobs, strict=True):
        assert entry.token == chr(token.token_id) and len(entry.top_logprobs) == 3
        assert [alternative.logprob for alternative in entry.top_logprobs] == pytest.approx([p for _, p in token.top])


def test_completions_of_texts_and_ids(client, plain):
    values = {"temperature": 0, "max_tokens": 12}
    texts = ["hello hello", "good day"]
    expected = [o.text for o in plain.generate(texts, SamplingParams(**values))]
    for prompt in (texts, [list(text.encode()) for text in texts]):
        answer = client.completions.create(model="toy", prompt=prompt, **values)
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate(expected))
    for prompt in (texts[0], list(texts[0].encode())):
        assert client.completions.create(model="toy", prompt=prompt, **values).choices[0].text == expected[0]
    stream = client.completions.create(model="toy", prompt=texts[0], stream=True, **values)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]


def test_completion_logprobs(client, plain):
    answer = client.completions.create(
        model="toy", prompt="hello", temperature=0, max_tokens=9, logprobs=2, logit_bias=LETTERS
    )
    (choice,) = answer.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [choice.text[at] for at in choice.logprobs.text_offset] == choice.logprobs.tokens
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == 9
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_several_choices_are_seeded_apart_and_repeat(client):
    def ask(**fields):
        answer = client.chat.completions.create(model="toy", messages=MESSAGES, n=3, **(SEEDED | fields))
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 72
        return [choice.message.content for choice in answer.choices]

    texts = ask()
    assert len(set(texts)) == 3 and ask() == texts
    assert ask(seed=4) != texts
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(model="toy", messages=MESSAGES, n=3, stream=True, **SEEDED):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "dspark"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_errors_are_the_clients_own_classes(client, make_engine):
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.chat.completions.create(model="toy", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with serving(make_engine(), api_key="secret") as guarded:
        stranger = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="guess", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model="toy", messages=MESSAGES)
        friend = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret", max_retries=0)
        assert friend.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=2).choices
