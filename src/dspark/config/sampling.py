"""How a request wants its tokens chosen and where it wants to stop."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from dspark.errors import SettingsError

MAX_LOGPROBS = 50
GRAMMARS = ("json_object", "json_schema", "regex", "lark")


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise SettingsError(f"{name} is {value!r}; allowed is {allowed}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, from its first character to its last. `text` is a JSON schema, a regular expression
    or a grammar in Lark's notation; `json_object` has none.

    Raises:
        SettingsError: unknown kind, or a text where none belongs or none where one does.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        _check(self.kind in GRAMMARS, "grammar kind", self.kind, "one of " + ", ".join(GRAMMARS))
        _check(isinstance(self.text, str), "grammar text", self.text, "a text")
        wanted = "nothing" if self.kind == "json_object" else f"a {self.kind.replace('_', ' ')}"
        _check(bool(self.text.strip()) == (self.kind != "json_object"), "grammar text", self.text, wanted)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that a schema (its text, or the parsed object) validates; keys come in the schema's order."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise SettingsError(f"The JSON schema holds something that is not JSON ({error}); remove it.") from None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; names and meanings follow vLLM and the OpenAI API.

    Raises:
        SettingsError: a value is outside its range (the message names it and what is allowed).
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Collection[int] | None = None
    grammar: Grammar | None = None  # the answer ends when it is complete
    min_tokens: int = 0  # end tokens are impossible before this many output tokens
    max_tokens: int | None = 256  # None = up to the context limit
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None  # given: the text depends on it alone, whatever the drafter or batch
    logprobs: int | None = None  # that many alternatives per token, of the unprocessed distribution

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        number, whole = _is_number, _is_whole
        _check(
            number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more"
        )
        _check(whole(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 (off) or a whole number above 0")
        _check(number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and up to 1 (off)")
        _check(number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        _check(
            number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(number(value) and -2 <= value <= 2, name, value, "-2 to 2 (0 is off)")
        _check(
            isinstance(self.logit_bias, Mapping)
            and all(whole(token) and number(bias) and -100 <= bias <= 100 for token, bias in self.logit_bias.items()),
            "logit_bias",
            self.logit_bias,
            "a mapping from token id to a number from -100 to 100",
        )
        allowed = self.allowed_token_ids
        _check(
            allowed is None or (len(allowed) > 0 and all(map(whole, allowed))),
            "allowed_token_ids",
            allowed,
            "None or at least one token id",
        )
        _check(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "None or a Grammar")
        _check(whole(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        limit = self.max_tokens
        _check(limit is None or (whole(limit) and limit >= 1), "max_tokens", limit, "1 or more, or None")
        _check(limit is None or self.min_tokens <= limit, "min_tokens", self.min_tokens, f"up to max_tokens ({limit})")
        _check(
            all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "a text or a list of non-empty texts",
        )
        _check(all(map(whole, self.stop_token_ids)), "stop_token_ids", self.stop_token_ids, "a list of token ids")
        _check(
            self.seed is None or (whole(self.seed) and 0 <= self.seed < 2**63),
            "seed",
            self.seed,
            "a whole number from 0 to 2**63 - 1, or None",
        )
        _check(
            self.logprobs is None or (whole(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"0 to {MAX_LOGPROBS}, or None",
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from plain data. Raises SettingsError for an unknown key."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise SettingsError(f"Unknown sampling setting {name!r}; known are {', '.join(known)}.")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class SlotRule:
    """Everything that turns one row of logits into the distribution of one token.

    `prompt_ids` and `output_ids` are the history *of that slot*: for draft slot k, `output_ids` ends with the
    draft tokens before k. They are read only when the parameters need them (penalties, min_tokens).
    """

    params: SamplingParams
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    end_ids: Sequence[int] = ()  # ids that end the request, impossible before min_tokens
    allowed_ids: Collection[int] | None = None  # of this slot, beside params.allowed_token_ids
    mask: Bool[Tensor, " V"] | None = None  # what the grammar allows in this slot, beside both
