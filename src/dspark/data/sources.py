"""Prompts from files and data sets: OpenAI messages, ShareGPT, plain prompts, turns.

Of a conversation everything up to its last user message is the prompt; the answer to that is the target's to write.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.errors import DataError

HUB = "hf:"
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}
FORMATS = "messages (OpenAI), conversations (ShareGPT), prompt (text) or turns (texts)"

Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user message, and its kind of text."""

    messages: tuple[Message, ...]
    kind: str


def read_prompts(
    sources: Sequence[str], limit: int | None = None, split: str = "train", subset: str | None = None
) -> list[Prompt]:
    """Prompts of JSONL files, folders of them, and data set ids (`hf:owner/name`), in this order; at most `limit` of
    each source.

    Raises:
        DataError: a source is missing, empty, or has a line of no known format.
    """
    prompts: list[Prompt] = []
    for source in sources:
        found = _hub_prompts(source, split, subset) if source.startswith(HUB) else _local_prompts(Path(source))
        before = len(prompts)
        prompts += islice(found, limit)
        if len(prompts) == before:
            raise DataError(f"{source} holds no prompts; give JSON lines with {FORMATS}.")
    return prompts


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Short hash of all prompts in their order."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(json.dumps([prompt.kind, list(map(dict, prompt.messages))], sort_keys=True).encode())
    return sha.hexdigest()[:16]


def parse_record(record: Any, where: str, default_kind: str) -> Prompt:
    """One record of any known format.

    Raises:
        DataError: the format is unknown or the record has no user message; `where` begins the sentence.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} is not a JSON object; each line holds one with {FORMATS}.")
    if "messages" in record:
        messages = _messages(record["messages"], "role", "content", where)
    elif "conversations" in record:
        messages = _messages(record["conversations"], "from", "value", where)
    elif isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    elif "prompt" in record:
        messages = _messages(record["prompt"], "role", "content", where)
    elif isinstance(record.get("turns"), Sequence) and record["turns"] and isinstance(record["turns"][0], str):
        messages = [{"role": "user", "content": record["turns"][0]}]
    else:
        names = ", ".join(map(str, record)) or "nothing"
        raise DataError(f"{where} is of no known format (it has {names}); known are {FORMATS}.")
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise DataError(f"{where} has no user message with text; take it out.")
    kind = next((record[k] for k in ("kind", "cat") if isinstance(record.get(k), str) and record[k]), default_kind)
    return Prompt(tuple(messages), kind)


def _messages(turns: Any, role_key: str, text_key: str, where: str) -> list[dict[str, str]]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where} has messages that are not a list; give a list of objects.")
    messages = []
    for turn in turns:
        role = turn.get(role_key) if isinstance(turn, Mapping) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise DataError(f"{where} has a message with {role_key} {role!r}; known are {', '.join(_ROLES)}.")
        messages.append({"role": _ROLES[role], "content": _text(turn.get(text_key), text_key, where)})
    return messages


def _text(content: Any, text_key: str, where: str) -> str:
    """A message's text; OpenAI also allows a list of parts, of which text parts are understood."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise DataError(f"{where} has a message whose {text_key} is not text; only text can be answered.")


def _local_prompts(path: Path) -> Iterator[Prompt]:
    if not path.exists():
        raise DataError(f"{path} does not exist; give a JSONL file, a folder of them, or hf: and a data set id.")
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        yield from _file_prompts(file)


def _file_prompts(path: Path) -> Iterator[Prompt]:
    try:
        # Not splitlines(): a line of JSON may hold other line separators as they are.
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}, line {number},"
                    yield parse_record(_parse_json(line, where), where, path.stem)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; give JSON lines.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from None


def _parse_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; each line holds one object with {FORMATS}.") from None


def _hub_prompts(source: str, split: str, subset: str | None) -> Iterator[Prompt]:
    try:
        from datasets import load_dataset  # only when a data set is asked for
    except ImportError:
        raise DataError(
            f"{source} needs the package datasets; install it with pip install 'dspark[data]', or give a JSONL file."
        ) from None
    name = source.removeprefix(HUB)
    try:
        # Streamed, so that a limit does not wait for the whole set.
        records = load_dataset(name, subset, split=split, streaming=True)
        for number, record in enumerate(records, 1):
            yield parse_record(record, f"{source}, record {number},", name.rpartition("/")[2])
    except DataError:
        raise
    except Exception as error:  # offline, unknown, gated, no such split: many classes, one sentence
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".").replace(". ", "; ")
        raise DataError(
            f"Data set {name} cannot be read ({reason}); check --split, --subset and the network."
        ) from None
