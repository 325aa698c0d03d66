"""Text to ids and back, and the chat template."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as BackendTokenizer

from dspark.errors import ModelError, RequestError


class Tokenizer:
    """A model folder's tokenizer.json with its chat template.

    The template runs in jinja2's immutable sandbox with the helpers transformers gives it (`raise_exception`,
    `strftime_now`, a plain `tojson`).
    """

    def __init__(
        self, backend: BackendTokenizer, chat_template: str | None = None, special: Mapping[str, str] | None = None
    ):
        self._backend = backend
        self._special = dict(special or {})
        self.chat_template = chat_template
        self._template = _compile(chat_template) if chat_template else None

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Raises ModelError when tokenizer.json is missing or damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; save the model's fast tokenizer there with transformers "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(folder))."
            )
        try:
            backend = BackendTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{path} cannot be read ({error}); download the model again.") from None
        settings = _read_json(folder / "tokenizer_config.json")
        special = {k: _token_text(v) for k, v in settings.items() if k.endswith("_token") and v}
        return cls(backend, _chat_template(folder, settings), special)

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # lone surrogates, which is what Python makes of bytes that are not UTF-8
            raise RequestError("The text holds bytes that are not UTF-8; convert it to UTF-8 first.") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def special_id(self, role: str) -> int | None:
        """Id of the token in a role such as `pad_token`, if the tokenizer names one."""
        return self.token_id(self._special[role]) if role in self._special else None

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of one id, for logprobs and messages."""
        return self._backend.id_to_token(token_id) or f"<{token_id}>"

    @property
    def presents_tools(self) -> bool:
        """Whether the chat template shows tools to the model, in the style that answers with <tool_call>."""
        template = self.chat_template or ""
        return re.search(r"\btools\b", template) is not None and "<tool_call>" in template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Messages to prompt text. `tools` are OpenAI-style descriptions of functions.

        Raises:
            RequestError: the model has no template, or the template refuses the messages or does not know tools.
        """
        if self._template is None:
            raise RequestError("This model has no chat template; send a plain prompt instead of messages.")
        if tools and not self.presents_tools:
            raise RequestError(
                "This model's chat template has no tools in the <tool_call> style; leave tools out, or use a model "
                "made for them."
            )
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools or None}
        try:
            return self._template.render(**given, **self._special, **extra)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}.") from None

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._backend.to_str()

    def fingerprint(self) -> str:
        """Hash of every token and its id, added tokens included."""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        return _digest(json.dumps(sorted(vocab.items(), key=lambda item: item[1])))

    def template_fingerprint(self) -> str:
        return _digest(self.chat_template or "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again.") from None
    return values if isinstance(values, dict) else {}


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        # jinja2's own filter escapes HTML, which templates do not expect.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"The model's chat template cannot be compiled ({error}).") from None
