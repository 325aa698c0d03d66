"""What of a target its text depends on, without its weights in memory."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dspark.artifacts import Fingerprint
from dspark.errors import DataError, RequestError
from dspark.target import Target, Tokenizer
from dspark.target.load import SafetensorsFolder, resolve_model
from dspark.target.spec import ModelSpec, read_config

_MARK = "dsparkmarker"


@dataclass(frozen=True)
class Described:
    """Shape, tokenizer and fingerprint of a target."""

    spec: ModelSpec
    tokenizer: Tokenizer
    fingerprint: Fingerprint

    @classmethod
    def of(cls, target: Target) -> "Described":
        return cls(target.spec, target.tokenizer, target.fingerprint)

    @classmethod
    def load(cls, name: str) -> "Described":
        """Raises ModelError as `load_target`."""
        folder = resolve_model(name)
        spec = ModelSpec.from_config(read_config(folder), str(folder))
        tokenizer = Tokenizer.from_folder(folder)
        with ExitStack() as files:
            weights = SafetensorsFolder(folder, files).fingerprint()
        marks = (tokenizer.fingerprint(), tokenizer.template_fingerprint())
        return cls(spec, tokenizer, Fingerprint(weights, *marks, name))

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """What `Engine.chat_ids` gives: the conversation's ids, ready for the assistant's answer."""
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False)

    def identity(self) -> dict[str, str]:
        """The fingerprint without its name, which may differ for one target."""
        values = self.fingerprint.to_dict()
        return {name: values[name] for name in ("weights", "tokenizer", "template")}

    def answer_end_id(self) -> int | None:
        """The token that ends an answer: the one the chat template puts behind it if that ends a request, else the
        model's first end token; None for a model without any."""
        ends = self.spec.eos_ids
        try:
            turns = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
            text = self.tokenizer.render_chat(turns, add_generation_prompt=False)
        except RequestError:
            return ends[0] if ends else None
        after = self.tokenizer.encode(text.rpartition(_MARK)[2].lstrip(), add_special_tokens=False)
        return after[0] if after and after[0] in ends else (ends[0] if ends else None)


@dataclass(frozen=True)
class UserTurn:
    """How a chat template frames the user's message: ids before it, and what ends it."""

    header: str
    end_ids: tuple[int, ...]
    stop: tuple[str, ...]


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """Found by rendering a message that is only a marker and cutting there, so any template works.

    A turn ends at the first token behind the marker if that is a control token, else at the text behind it.

    Raises:
        RequestError: there is no chat template.
        DataError: the template does not show the user's message as it is.
    """
    header, mark, tail = tokenizer.render_chat([{"role": "user", "content": _MARK}]).partition(_MARK)
    if not mark:
        raise DataError(
            "The chat template does not show the user's message as it is, so no user turn can be sampled from this "
            "model; give prompts in a file."
        )
    after = tokenizer.encode(tail.lstrip(), add_special_tokens=False)
    if after and not tokenizer.decode(after[:1]):
        return UserTurn(header, (after[0],), ())
    return UserTurn(header, (), (tail.rstrip(),) if tail.strip() else ())
