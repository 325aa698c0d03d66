"""Streamed text: never half a character, never part of a stop string, and in the end the whole (PITFALLS row 16)."""

from hypothesis import given
from hypothesis import strategies as st

from dspark.engine.text import TextStream
from dspark.target import Tokenizer
from tests.toy_models import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
TEXTS = st.text(st.sampled_from("ab \n.é世界🙂👩‍👩‍👧"), min_size=1, max_size=30)


def stream(ids, stop=(), take_every=1):
    """Push ids as a decode loop would; the pieces a client saw, and the stream."""
    text, seen = TextStream(TOKENIZER, stop), []
    for i, token_id in enumerate(ids):
        stopped = text.push(token_id)
        if i % take_every == 0:
            seen += text.take()
        if stopped:
            break
    text.finish()
    seen += text.take(finished=True)
    return [piece.text for piece in seen], text


@given(TEXTS, st.integers(1, 5))
def test_pieces_add_up_to_the_text_and_no_character_is_split(text, take_every):
    pieces, result = stream(TOKENIZER.encode(text), take_every=take_every)
    assert "".join(pieces) == result.text == text
    assert all("�" not in piece for piece in pieces)


@given(TEXTS, st.lists(st.text("ab .é🙂", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 5))
def test_a_stop_string_is_never_shown_not_even_in_part(text, stops, take_every):
    pieces, result = stream(TOKENIZER.encode(text), stops, take_every)
    assert "".join(pieces) == result.text == expected_text(text, stops)


def expected_text(text, stops):
    """What is left of a text that is read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


def test_an_unfinished_character_is_shown_as_it_decodes_when_the_answer_ends():
    ids = TOKENIZER.encode("a🙂")[:-2]
    pieces, result = stream(ids)
    assert "".join(pieces) == result.text == TOKENIZER.decode(ids)


def test_only_the_unfinished_character_waits():
    """A token may end one character, hold whole ones, and begin another: here each byte stands for such tokens."""
    text = TextStream(HalfCharacters())
    shown = []
    for token_id in range(4):
        text.push(token_id)
        shown.append("".join(piece.text for piece in text.take()))
    assert shown == ["a", "🙂b", "🙂c", "🙂d"]
    text.finish()
    assert text.text == "a🙂b🙂c🙂d�" and text.starts == [0, 1, 3, 5]


class HalfCharacters:
    """Every token ends a smile, says a letter and begins a smile."""

    def decode(self, ids):
        half = "🙂".encode()[:2], "🙂".encode()[2:]
        raw = b"".join((half[1] if i else b"") + bytes([97 + i]) + half[0] for i in ids)
        return raw.decode(errors="replace")


def test_without_holding_back_part_of_a_stop_string_would_be_shown():
    """The wrong variant: showing all text at once."""
    text = TextStream(TOKENIZER, ["</end>"])
    shown = []
    for token_id in TOKENIZER.encode("hello </end>"):
        text.push(token_id)
        shown.append(text.text)
    assert any("</en" in seen for seen in shown)
    pieces, _ = stream(TOKENIZER.encode("hello </end>"), ["</end>"])
    assert "".join(pieces) == "hello "
