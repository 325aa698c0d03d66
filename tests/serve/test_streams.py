"""Streams: framing byte by byte, characters whole, and together exactly the whole answer."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark.config import SamplingParams
from dspark.serve.logprobs import token_bytes
from dspark.target import Tokenizer as OurTokenizer
from tests.engine import support as s
from tests.serve.support import (
    CHAT,
    COMPLETIONS,
    LETTERS,
    chat_request,
    completion_request,
    parse_sse,
    serving,
    text_of,
)
from tests.serve.test_faults import assert_fails
from tests.toy_models import byte_tokenizer, write_model

SEEDED = {"temperature": 1.0, "seed": 2, "max_tokens": 40}
# Every token ends one character and begins the next, as tokens of real models do: bytes of 🙂🎉🚀, and 世 in between.
ENDS, BEGINNING, BETWEEN = ["🙂", "🎉", "🚀"], "🙂".encode()[:2], "世"


@pytest.fixture(scope="module")
def split_target(tmp_path_factory):
    """A toy all of whose letters are tokens of half characters."""
    folder = write_model(tmp_path_factory.mktemp("split"), "qwen3", layer_scale=0.06)
    split_tokenizer().save(str(folder / "tokenizer.json"))
    return s.load_target(str(folder), s.CPU, "float32", True)


def split_tokenizer():
    spelled = {value: char for char, value in byte_tokenizer().get_vocab().items() if value < 256}
    vocab = {char: value for value, char in spelled.items() if not 97 <= value <= 122}
    for i in range(26):
        raw = ENDS[i % 3].encode()[2:] + (BETWEEN * (i % 4)).encode() + b"abcdefgh"[: i // 3] + BEGINNING
        vocab["".join(spelled[byte] for byte in raw)] = 97 + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    return tokenizer


@pytest.mark.parametrize("block", [1, 3, 8])
def test_row_16_characters_are_split_between_chunks(block, split_target, monkeypatch):
    """Emoji and CJK across tokens, drafted in blocks of several sizes."""
    engine = s.toy_engine(split_target, s.bigram_proposer(split_target, block_size=8), policy=f"fixed:{block}")
    fields = completion_request("12345", **SEEDED, logit_bias=LETTERS)

    def check():
        whole = running.post(COMPLETIONS, **fields).json()["choices"][0]["text"]
        events = running.events(COMPLETIONS, **fields)
        assert text_of(events) == whole
        assert events[-1]["dspark"]["accepted"] > 0
        texts = [text for event in events if (text := event["choices"][0]["text"])]
        assert len(texts) > 3 and any(emoji in whole for emoji in ENDS) and BETWEEN in whole
        # Only the halves at both ends of the answer have no other half.
        assert "�" not in "".join(texts).strip("�")

    with serving(engine) as running:
        check()
        monkeypatch.setattr("dspark.engine.text.REPLACEMENT", "\0")
        assert_fails(check)


def test_bytes_of_tokens_that_split_characters():
    tokenizer = OurTokenizer(split_tokenizer())
    text = "🙂世🎉".encode()
    assert token_bytes(tokenizer, 97) == "🙂".encode()[2:] + BEGINNING
    assert b"".join(token_bytes(OurTokenizer(byte_tokenizer()), byte) for byte in text) == text
    assert token_bytes(tokenizer, 256) == b"<|start|>"


def test_bytes_of_sentencepiece_tokens():
    """Spaces are part of tokens, and single bytes have tokens of their own."""
    vocab = [("<unk>", 0.0), ("▁hello", -1.0), ("▁", -2.0), ("é", -3.0)] + [(f"<0x{b:02X}>", -9.0) for b in range(256)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = OurTokenizer(backend)
    assert [token_bytes(tokenizer, i) for i in (1, 2, 3)] == [b" hello", b" ", "é".encode()]
    assert token_bytes(tokenizer, 4 + 0xF0) == b"\xf0"


def test_framing_byte_by_byte(running):
    """Headers, one data line per event, an empty line after each, and the end mark."""
    request = chat_request("héllo 🙂", stream=True, stream_options={"include_usage": True}, logit_bias=LETTERS)
    with running.client.stream("POST", CHAT, json=request) as response:
        raw = response.read()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache" and "content-length" not in response.headers
    bodies = parse_sse(raw)
    first, last, spent = bodies[0]["choices"][0], bodies[-2]["choices"][0], bodies[-1]
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert last["finish_reason"] == "length" and last["delta"] == {}
    assert spent["choices"] == [] and spent["usage"]["completion_tokens"] == 20
    assert all(body["usage"] is None for body in bodies[:-1])
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    rebuilt = b"".join(b"data: " + _compact(body) + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"
    assert raw == rebuilt


def _compact(body):
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def test_streamed_logprobs_are_the_whole_answers(running):
    fields = chat_request(**SEEDED, logit_bias=LETTERS, logprobs=True, top_logprobs=2)
    whole = running.post(CHAT, **fields).json()["choices"][0]
    events = running.events(CHAT, **fields)
    parts = [event["choices"][0]["logprobs"] for event in events]
    streamed, content = [entry for part in parts if part for entry in part["content"]], whole["logprobs"]["content"]
    assert len(content) == len(whole["message"]["content"]) == 40
    for one, other in zip(streamed, content, strict=True):
        assert (one["token"], one["bytes"]) == (other["token"], other["bytes"])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def test_pieces_say_where_text_came_from(running):
    fields = chat_request(**SEEDED, logit_bias=LETTERS)
    events = running.events(CHAT, **fields, dspark={"pieces": True})
    pieces = [piece for event in events[1:] for piece in event["dspark"]["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == text_of(events)
    assert {piece["kind"] for piece in pieces} >= {"accepted", "recovered", "plain"}
    assert sum(piece["kind"] == "accepted" for piece in pieces) == events[-1]["dspark"]["accepted"]
    without = running.events(CHAT, **fields)
    assert all("dspark" not in event for event in without[:-1]) and "pieces" not in without[-1]["dspark"]


@pytest.mark.parametrize("off", [{"proposer": "none"}, {"drafter": "none"}])
def test_speculation_off_is_the_same_text_without_drafts(off, running):
    fields = chat_request(**SEEDED, logit_bias=LETTERS)
    drafted, plain = (running.post(CHAT, **fields, **more).json() for more in ({}, off))
    assert drafted["choices"] == plain["choices"]
    assert drafted["dspark"]["drafted"] > 0 == plain["dspark"]["drafted"]
    assert plain["dspark"]["acceptance_length"] == 1.0
    events = running.events(CHAT, **fields, **off, dspark={"pieces": True})
    assert {piece["kind"] for event in events[1:] for piece in event["dspark"]["pieces"]} == {"plain"}


def test_an_answer_without_any_text(running):
    """The first token is an end token: no text, one token, one reason."""
    end = {"257": 100}
    body = running.chat(logit_bias=end, logprobs=True).json()
    assert body["choices"][0]["message"]["content"] == "" and body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["logprobs"]["content"] == [] and body["usage"]["completion_tokens"] == 1
    assert body["dspark"]["acceptance_length"] is None and body["dspark"]["steps"] == 0
    events = running.events(CHAT, **chat_request(logit_bias=end))
    assert text_of(events) == "" and events[-1]["choices"][0]["finish_reason"] == "stop"


def test_limits_that_are_not_named(make_engine, plain):
    """Chat goes on to the server's limit or as far as context and cache allow; completions stop at 16 tokens."""
    fields = {"model": "toy", "temperature": 0, "logit_bias": LETTERS}
    messages = [{"role": "user", "content": "hello"}]
    prompt = len(plain.chat_ids(messages))
    for settings, expected in (({"default_max_tokens": 33}, 33), ({}, plain.context - prompt)):
        with serving(make_engine(), **settings) as running:
            assert running.post(CHAT, **fields, messages=messages).json()["usage"]["completion_tokens"] == expected
            assert running.post(COMPLETIONS, **fields, prompt="x").json()["usage"]["completion_tokens"] == 16
    small = make_engine(kv_gb=0.0003)
    with serving(small) as running:
        made = running.post(CHAT, **fields, messages=messages).json()["usage"]["completion_tokens"]
        assert made == small.loop.batcher.slots.capacity - small.proposer.slack - prompt < plain.context - prompt
        refused = running.post(CHAT, **fields, messages=messages, max_tokens=400)
        assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]


def test_greedy_answers_are_the_librarys_for_many_prompts(running, plain):
    prompts = ["".join(map(chr, ids)) for ids in s.prompts(6, seed=3)]
    expected = plain.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    for prompt, answer in zip(prompts, expected, strict=True):
        assert running.post(COMPLETIONS, **completion_request(prompt)).json()["choices"][0]["text"] == answer.text
        assert text_of(running.events(COMPLETIONS, **completion_request(prompt))) == answer.text
