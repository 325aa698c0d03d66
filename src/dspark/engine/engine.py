"""The library's front door and composition root."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.config import EngineConfig, SamplingParams, StepRecord
from dspark.engine.batcher import Batcher
from dspark.engine.grammar import Grammars
from dspark.engine.guard import Guard
from dspark.engine.loop import DecodeLoop
from dspark.engine.prefix import PrefixCache
from dspark.engine.profiling import load_or_measure, mark_stale, needs_costs, profile_key
from dspark.engine.proposer import NoneProposer, Proposer
from dspark.engine.request import Chunk, Output, Request
from dspark.engine.scheduler import Scheduler
from dspark.engine.setup import build_proposer, check_request, context_limit, pick_device, pool_slots
from dspark.engine.text import TextStream
from dspark.errors import RequestError
from dspark.schedule import CostCurves, Costs, check_policy, is_adaptive, parse_policy, parse_row_policy
from dspark.target import SlotRanges, Target, load_target
from dspark.verify import request_key

Prompt = str | Sequence[int]


class Engine:
    """Decodes many requests at once; speculates with one proposer; gives exactly the target's output.

    Not thread-safe: one thread owns an engine.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        config: EngineConfig,
        costs: Costs | None = None,
    ):
        """`costs` are measured ones of this machine; they may be missing.

        Raises:
            SettingsError: the policy plans by costs and there are none.
        """
        self.target, self.proposer, self.config = target, proposer, config
        self.context = context_limit(config, target.spec.context)
        slots = pool_slots(config, target.decoder.kv_token_bytes + proposer.kv_token_bytes, self.context)
        proposer.open_pool(slots, target.decoder.device)
        pool = target.decoder.new_pool(slots)
        prefixes = PrefixCache(SlotRanges(slots), pool, proposer, config.prefix_cache)
        batcher = Batcher(prefixes, config.max_batch, config.max_pass_tokens, proposer.slack)
        curves = CostCurves(costs) if costs is not None else None
        guard = Guard() if config.guard and is_adaptive(config.policy) else None
        scheduler = Scheduler(parse_policy(config.policy, curves), proposer, curves, proposer.calibration, guard)
        self.loop = DecodeLoop(target, proposer, scheduler, batcher, pool)
        self.grammars = Grammars(target.tokenizer, target.spec.vocab_size, target.spec.eos_ids)
        self.listeners: list[Callable[[StepRecord], None]] = []
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    @classmethod
    def from_pretrained(cls, model: str = "smollm2", drafter: str = "auto", **settings: Any) -> "Engine":
        """Load a target and whatever drafts for it.

        Args:
            model: alias (`smollm2`), Hugging Face folder, GGUF file or hub id.
            drafter: "auto" (the one made for this target, if any), "none", or a drafter folder.
            settings: any field of `EngineConfig`.

        Raises:
            DsparkError: the model, the drafter or a setting is wrong; one sentence says which and what to do.
        """
        config = EngineConfig.from_dict({"model": model, "drafter": drafter, **settings})
        check_policy(config.policy)  # before the slow part
        if config.threads:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device)
        return cls.over(load_target(config.model, device, config.dtype, config.exact), config)

    @classmethod
    def over(cls, target: Target, config: EngineConfig) -> "Engine":
        """An engine on a loaded target, with a proposer of its own and whatever its plans need.

        Raises:
            DsparkError: as `from_pretrained`.
        """
        proposer = build_proposer(config, target)
        if not needs_costs(config, proposer):
            return cls(target, proposer, config)
        path = None if config.profile == "auto" else Path(config.profile).expanduser()
        engine = cls(target, proposer, config, load_or_measure(target, proposer, config, cls, path))
        if path is None:
            key = profile_key(target, proposer, config)
            engine.loop.scheduler.when_costs_are_wrong(lambda: mark_stale(key))
        return engine

    def without_drafts(self) -> "Engine":
        """A plain engine on the same weights: the denominator of every ratio."""
        plain = replace(self.config, proposer="none", drafter="none", corpus_table="none")
        return Engine(self.target, NoneProposer(), plain)

    # Requests ---------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Answer prompts (texts or token ids, as they are) together; outputs in the prompts' order."""
        several = _as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise RequestError(
                f"{len(several)} prompts came with {len(each)} sampling settings; give one, or one each."
            )
        outputs: dict[int, Output] = {}
        ids: list[int] = []

        def collect(chunk: Chunk) -> None:
            if chunk.output:
                outputs[chunk.output.request_id] = chunk.output

        try:
            for prompt, one in zip(several, each, strict=True):
                ids.append(self.add(prompt, one, on_chunk=collect))
            while len(outputs) < len(ids):
                self.step()
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [outputs[i] for i in ids]

    def chat(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], params: SamplingParams | None = None
    ) -> list[Output]:
        """Answer conversations (OpenAI-style messages) through the model's chat template."""
        return self.generate([self.chat_ids(messages) for messages in conversations], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; the last chunk carries the whole output. Closing it aborts the request."""
        chunks: list[Chunk] = []
        request_id = self.add(prompt, params or SamplingParams(), on_chunk=chunks.append)
        try:
            while request_id in self._requests or chunks:
                while chunks:
                    yield chunks.pop(0)
                if request_id in self._requests:
                    self.step()
        finally:
            self.abort(request_id)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; see `Tokenizer.render_chat`."""
        text = self.target.tokenizer.render_chat(messages, tools=tools)
        return self.target.tokenizer.encode(text, add_special_tokens=False)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        choice: int = 0,
        on_chunk: Callable[[Chunk], None] | None = None,
        speculate: bool = True,
        policy: str | None = None,
    ) -> int:
        """Queue a request and return its id; `step` moves it on. `speculate=False`: nothing is proposed for this one.

        `policy` is this request's own: any that looks at one request at a time. None is the engine's.

        Raises:
            SettingsError: the policy is unknown, or another one than the engine's that plans for the whole batch.
            RequestError: empty, too long for the context or for the cache, naming ids outside the vocabulary, or with a
                grammar that cannot be compiled (see `Grammars.compile`, which may run beforehand in another thread).
        """
        own = None if policy in (None, self.config.policy) else parse_row_policy(policy)
        ids = self.target.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        check_request(ids, params, self.target.spec.vocab_size, self.context)
        limit = min(self.context, len(ids) + (params.max_tokens or self.context))
        if not self.loop.batcher.fits_ever(limit):
            raise RequestError(
                f"The request needs cache for {limit} tokens and the pool holds {self.loop.batcher.slots.capacity}; "
                "lower max_tokens or raise --kv-gb."
            )
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids())
        seed = secrets.randbits(63) if params.seed is None else params.seed
        rule = self.config.acceptance
        coupled = params.seed is not None if rule == "auto" else rule == "coupled"
        text = TextStream(self.target.tokenizer, params.stop)
        grammar = None if params.grammar is None else self.grammars.start(params.grammar, end_ids)
        request = Request(
            self._next_id, ids, params, limit, end_ids, text, request_key(seed, choice), coupled, on_chunk, grammar
        )
        request.speculate = speculate
        if own is not None:
            self.loop.scheduler.prefer(request, own)
        self._next_id += 1
        self._requests[request.id] = request
        self.loop.batcher.waiting.append(request)
        return request.id

    def abort(self, request_id: int) -> Output | None:
        """End a request now and free its slots; its partial output, or None when it has ended before."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason = "abort"
        return self._end(request)

    def reset(self) -> None:
        """After a step failed unexpectedly: end every request as aborted and keep nothing that is cached."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.loop.take_finished()
        self.loop.batcher.prefixes.clear()

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    def step(self) -> StepRecord | None:
        """One pass of the decode loop over every running request. None when there is nothing to do."""
        record = self.loop.step()
        for request in self.loop.take_finished():
            self._end(request)
        if record:
            for listener in self.listeners:
                listener(record)
        return record

    def _end(self, request: Request) -> Output:
        request.text.finish()
        output = request.output()
        self._requests.pop(request.id, None)
        self.loop.remove(request)
        request.emit(output)
        return output

    def _eos_ids(self) -> frozenset[int]:
        return frozenset(self.target.spec.eos_ids)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text or one list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    several: list[Prompt] = list(prompts)  # type: ignore[arg-type]
    return [several] if several and isinstance(several[0], int) else several  # type: ignore[list-item]
