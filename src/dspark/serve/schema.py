"""What a request may say. Every field is honoured; any other is refused by name."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
_LARGEST = 2**31 - 1


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    list[Text],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
Count = Annotated[int, Field(ge=1, le=_LARGEST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """No field is ignored and no value converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool | None = None


class ShowOptions(Strict):
    """`pieces`: streamed chunks say where each piece of text came from."""

    pieces: bool = False


class Common(Strict):
    """Fields of both endpoints."""

    model: str
    max_tokens: Count | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: Annotated[int, Field(ge=-1, le=_LARGEST)] | None = None
    min_p: Finite | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    logit_bias: dict[str, Finite] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    proposer: str | None = None
    policy: str | None = None
    drafter: str | None = None
    dspark: ShowOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class JsonSchema(Strict):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _a_schema_where_one_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format needs json_schema with type json_schema, and only there")
        return self


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None

    @model_validator(mode="after")
    def _fields_that_need_each_other(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


class CompletionRequest(Common):
    """`POST /v1/completions`. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def field_names() -> frozenset[str]:
    """Every name a field of any part of a request may have."""
    models: list[type[Strict]] = [Strict]
    for model in models:
        models += model.__subclasses__()
    return frozenset(f.alias or name for model in models for name, f in model.model_fields.items())
