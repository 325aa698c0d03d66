"""Log-probabilities in the shapes of both endpoints."""

import re
from collections.abc import Sequence
from typing import Any

from dspark.engine import TokenLogprobs
from dspark.engine.text import REPLACEMENT
from dspark.target import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level tokenizers spell bytes with: printable ones as they are, others from 256 on."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTES = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The UTF-8 bytes one token adds to a text; of a special token, its own spelling."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if REPLACEMENT not in text:
        # Some decoders drop the first space of a text, so the token is decoded behind another one.
        twice = tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(text) :] if twice.startswith(text) else text).encode()
    spelled = tokenizer.token_text(token_id)
    if byte := _BYTE_TOKEN.fullmatch(spelled):
        return bytes([int(byte[1], 16)])
    if all(char in _BYTES for char in spelled):
        return bytes(_BYTES[char] for char in spelled)
    return text.encode()


def token_name(raw: bytes) -> str:
    """A token as text; one that is part of a character, as OpenAI's API writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(tokenizer, token_id)
    return {"token": token_name(raw), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for token in tokens:
        top = [_entry(tokenizer, *pair) for pair in token.top]
        content.append(_entry(tokenizer, token.token_id, token.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, Any]:
    entries = [_entry(tokenizer, token.token_id, token.logprob) for token in tokens]
    top = []
    for token in tokens:
        alternatives = [_entry(tokenizer, *pair) for pair in token.top]
        top.append({entry["token"]: entry["logprob"] for entry in alternatives})
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }
