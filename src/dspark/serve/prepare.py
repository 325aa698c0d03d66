"""From a request's fields to the jobs of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.config import Grammar, SamplingParams
from dspark.engine import Engine
from dspark.errors import DsparkError
from dspark.schedule import parse_row_policy
from dspark.serve.errors import ApiError, refused
from dspark.serve.schema import ChatRequest, Common, CompletionRequest, Message, NamedTool, ResponseFormat
from dspark.serve.settings import ServeConfig
from dspark.serve.tools import Choice, call_grammar, check_tools, offered, tool_messages
from dspark.serve.worker import Job

COMPLETION_MAX_TOKENS = 16  # the API's own default
# Where a field has the name and meaning of a sampling parameter; left out or null, the parameter's default holds.
_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine shall do for one HTTP request, and how to show it."""

    jobs: tuple[Job, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    show_pieces: bool
    offers_tools: bool = False  # the answer may hold calls


def prepare_chat(request: ChatRequest, engine: Engine, config: ServeConfig) -> Prepared:
    """Raises ApiError (400, 404) when a field cannot be honoured."""
    _check_common(request, engine, config)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    named = request.tool_choice
    choice = named.model_dump() if isinstance(named, NamedTool) else named
    grammar = _grammar(request.response_format, tools, choice, engine)
    shown = offered(tools, choice)
    messages = tool_messages(_message(message) for message in request.messages)
    try:
        prompt_ids = engine.chat_ids(messages, tools=shown)
    except DsparkError as error:
        no_place = shown is not None and not engine.target.tokenizer.presents_tools
        raise refused(str(error), "tools" if no_place else "messages") from None
    limit = request.max_completion_tokens or request.max_tokens or _room(len(prompt_ids), engine, config)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    more = {"max_tokens": limit, "logprobs": logprobs, "grammar": grammar}
    return _prepared(request, [prompt_ids], more, offers_tools=shown is not None)


def prepare_completion(request: CompletionRequest, engine: Engine, config: ServeConfig) -> Prepared:
    """Raises ApiError (400, 404) when a field cannot be honoured."""
    _check_common(request, engine, config)
    try:
        prompts = _prompts(request.prompt, engine)
    except DsparkError as error:
        raise refused(str(error), "prompt") from None
    limit = request.max_tokens or COMPLETION_MAX_TOKENS
    return _prepared(request, prompts, {"max_tokens": limit, "logprobs": request.logprobs})


def _check_common(request: Common, engine: Engine, config: ServeConfig) -> None:
    if request.model != config.model_name:
        message = f"model is {request.model!r}; this server has {config.model_name!r}."
        raise ApiError(404, message, "model", "model_not_found")
    served = engine.config
    _one_of("proposer", request.proposer, {served.proposer, engine.proposer.name, "none"})
    _check_policy(request.policy, served.policy)
    _one_of("drafter", request.drafter, {served.drafter, "none"})


def _one_of(name: str, value: str | None, allowed: set[str]) -> None:
    if value is not None and value not in allowed:
        raise ApiError(400, f"{name} is {value!r}; allowed here are {', '.join(sorted(allowed))}.", name)


def _check_policy(policy: str | None, served: str) -> None:
    if policy is None or policy == served:
        return
    try:
        parse_row_policy(policy)
    except DsparkError as error:
        raise refused(str(error), "policy") from None


def _prepared(
    request: Common, prompts: Sequence[list[int]], more: dict[str, Any], offers_tools: bool = False
) -> Prepared:
    params = _params(request, more)
    speculate = "none" not in (request.proposer, request.drafter)
    jobs = tuple(
        Job(prompt, params, choice, speculate, request.policy) for prompt in prompts for choice in range(request.n or 1)
    )
    return Prepared(
        jobs,
        prompt_tokens=sum(map(len, prompts)),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        show_pieces=bool(request.dspark and request.dspark.pieces),
        offers_tools=offers_tools,
    )


def _params(request: Common, more: dict[str, Any]) -> SamplingParams:
    values = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        values["top_k"] = max(request.top_k, 0)  # -1 is another spelling of off
    values["logit_bias"] = _logit_bias(request.logit_bias or {})
    try:
        return SamplingParams(**values, **more)
    except DsparkError as error:
        raise refused(str(error)) from None


def _logit_bias(values: dict[str, float]) -> dict[int, float]:
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(400, f"logit_bias names {key[:20]!a}; keys are token ids such as '42'.", "logit_bias")
    return {int(key): value for key, value in values.items()}


def _grammar(
    wanted: ResponseFormat | None, tools: list[dict[str, Any]], choice: Choice | None, engine: Engine
) -> Grammar | None:
    """What the answer must match, compiled, so that a schema that cannot be used is refused here."""
    field = "tools"
    try:
        check_tools(tools, choice)
        grammar = call_grammar(tools, choice)
        if wanted is not None and wanted.type != "text":
            field = "response_format"
            if grammar is not None:
                raise ApiError(400, "response_format and a required tool exclude each other; give one of them.", field)
            schema = wanted.json_schema
            grammar = Grammar.json_object() if schema is None else Grammar.json_schema(schema.schema_)
        if grammar is not None:
            engine.grammars.compile(grammar)
    except DsparkError as error:
        raise refused(str(error), field) from None
    return grammar


def _message(message: Message) -> dict[str, Any]:
    """As chat templates expect it: text parts joined, fields that were left out absent."""
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"messages has one of role {message.role!r} without content; give it a text.", "messages")
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    if isinstance(message.content, list):
        fields["content"] = "".join(part.text for part in message.content)
    return fields


def _room(prompt_tokens: int, engine: Engine, config: ServeConfig) -> int:
    """Tokens an answer may have when the request does not say: what context, cache and the server's default leave."""
    slots = engine.loop.batcher.slots.capacity - engine.proposer.slack
    return max(1, min(config.default_max_tokens, min(engine.context, slots) - prompt_tokens))


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], engine: Engine) -> list[list[int]]:
    if isinstance(prompt, str):
        return [engine.target.tokenizer.encode(prompt)]
    if not prompt:
        raise ApiError(400, "prompt is empty; give a text or token ids.", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [engine.target.tokenizer.encode(p) if isinstance(p, str) else p for p in prompt]
