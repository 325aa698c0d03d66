"""Other engines in this process, as systems under measurement: transformers, llama.cpp, vLLM."""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.errors import DsparkError, SettingsError
from dspark.measure.bench.drive import Ask, Event
from dspark.measure.bench.modes import Mode
from dspark.measure.bench.records import StepCounts
from dspark.target import Target, resolve_model
from dspark.target.linear import resolve_dtype
from dspark.target.load import ALIASES, packaged_file

LOOKUP_TOKENS = 10  # drafted by the prompt lookups of transformers and llama.cpp, as their documentation advises


@dataclass(frozen=True, slots=True)
class Place:
    """What the engines of one run share. `context`: most tokens of a request; `at_once`: most requests together."""

    target: Target
    context: int
    at_once: int


Pieces = list[tuple[float, list[int]]]  # when new ids came, and which


class Serial:
    """Answers one request after the other; `generate` returns an answer in the pieces in which it came."""

    at_once: int | None = 1
    promises = False

    def __init__(self, generate: Callable[[Ask], Pieces], note: str):
        self._generate, self.note = generate, f"one request at a time; {note}"
        self._waiting: list[tuple[int, Ask]] = []
        self._next = 0

    def start(self, ask: Ask) -> int:
        key = self._next
        self._next += 1
        self._waiting.append((key, ask))
        return key

    def step(self) -> list[Event]:
        key, ask = self._waiting.pop(0)
        pieces = self._generate(ask)
        ids = tuple(token for _, new in pieces for token in new)
        reason = "length" if len(ids) >= (ask.params.max_tokens or 0) else "stop"
        return [*(Event(key, at, len(new)) for at, new in pieces), Event(key, time.perf_counter(), 0, reason, ids)]

    def abort(self) -> None:
        self._waiting.clear()

    def counts(self) -> StepCounts | None:
        return None


# transformers -------------------------------------------------------------------------------------------------------


def open_transformers(mode: Mode, place: Place) -> Serial:
    """`generate` in float32 on the target's own folder, plain, with its prompt lookup, or with an assistant model."""
    target = place.target
    model = _transformers_model(target.folder, target)
    extra: dict[str, Any] = {}
    if mode.engine == "transformers-lookup":
        extra["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    elif mode.engine == "transformers-assisted":
        extra["assistant_model"] = _transformers_model(resolve_model(mode.argument), target)
    return Serial(lambda ask: _transformers_pieces(model, target, ask, extra), "float32 weights")


def _transformers_model(folder: Path, target: Target) -> Any:
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval().to(target.decoder.device)


def _transformers_pieces(model: Any, target: Target, ask: Ask, extra: dict[str, Any]) -> Pieces:
    ids = torch.tensor([ask.ids], device=target.decoder.device)
    seen = len(ask.ids)
    pieces: Pieces = []

    def watch(input_ids: Any, scores: Any, **unused: Any) -> Any:
        nonlocal seen
        pieces.append((time.perf_counter(), input_ids[0, seen:].tolist()))
        seen = input_ids.shape[1]
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    params, eos = ask.params, list(target.spec.eos_ids)
    sampling: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        torch.manual_seed(params.seed or 0)
        sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        repetition_penalty=1.0,
        stopping_criteria=[watch],
        **sampling,
        **extra,
    )
    answer = output[0, len(ask.ids) :].tolist()
    if answer != [token for _, new in pieces for token in new]:  # a way of generating that does not call back
        return [(time.perf_counter(), answer)]
    return [piece for piece in pieces if piece[1]]


# llama.cpp ----------------------------------------------------------------------------------------------------------


_TRIAL = """
import sys, llama_cpp
llama = llama_cpp.Llama(model_path=sys.argv[1], n_ctx=64, verbose=False)
print([token for _, token in zip(range(2), llama.generate([1, 2, 3]))])
"""


def open_llama_cpp(mode: Mode, place: Place) -> Serial:
    """llama-cpp-python on the GGUF file the target came from, or another one.

    Raises:
        SettingsError: the target is no GGUF file and the mode names none, or it crashes here.
    """
    llama_cpp = importlib.import_module("llama_cpp")
    path = _gguf_file(mode, place.target.name)
    _check_survives(path)
    draft = None
    if mode.engine == "llama.cpp-lookup":
        lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        draft = lookup(num_pred_tokens=LOOKUP_TOKENS)
    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=place.context + LOOKUP_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=draft,
        verbose=False,
    )
    eos = set(place.target.spec.eos_ids)
    return Serial(lambda ask: _llama_pieces(llama, ask, eos), f"weights as in {path.name}")


def _check_survives(path: Path) -> None:
    """A crash of its native code would take the whole run with it, so a child process goes first."""
    trial = subprocess.run([sys.executable, "-c", _TRIAL, str(path)], capture_output=True, check=False)
    if trial.returncode < 0:
        raise SettingsError(
            f"llama.cpp crashes here on {path.name} (signal {-trial.returncode}); on a CPU with AMX build it without "
            "(docs/bench.md says how), or leave it out."
        )


def _llama_pieces(llama: Any, ask: Ask, eos: set[int]) -> Pieces:
    params = ask.params
    llama.reset()  # or it would keep what the prompt shares with the one before
    llama.set_seed((params.seed or 0) % 2**32)
    pieces: Pieces = []
    tokens = llama.generate(list(ask.ids), temp=params.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
    with closing(tokens):
        for token in tokens:
            pieces.append((time.perf_counter(), [int(token)]))
            if token in eos or len(pieces) >= (params.max_tokens or 0):
                break
    return pieces


def _gguf_file(mode: Mode, target: str) -> Path:
    name = mode.argument or target
    path = packaged_file(name) if name in ALIASES else Path(name).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        raise SettingsError(
            f"mode {mode.name!r} needs a GGUF file and {name} is none; write {mode.engine}:FILE.gguf, or leave it out."
        )
    return path


# vLLM ---------------------------------------------------------------------------------------------------------------


class Vllm:
    """vLLM's engine stepped from Python, so that requests join and leave as in ours."""

    at_once: int | None = None
    promises = False

    def __init__(self, place: Place):
        vllm = importlib.import_module("vllm")
        device = place.target.decoder.device
        arguments = vllm.EngineArgs(
            model=str(place.target.folder),
            dtype="float32" if device.type == "cpu" else resolve_dtype("auto", device),
            max_model_len=place.context,
            max_num_seqs=place.at_once,
            enable_prefix_caching=False,
        )
        self._vllm = vllm
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._eos = list(place.target.spec.eos_ids)
        self._seen: dict[int, int] = {}
        self._next = 0
        self.note = f"{arguments.dtype} weights"

    def start(self, ask: Ask) -> int:
        params = ask.params
        key = self._next
        self._next += 1
        sampling = self._vllm.SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            seed=None if params.greedy else params.seed,
            stop_token_ids=self._eos,
            detokenize=False,
        )
        self._engine.add_request(str(key), {"prompt_token_ids": list(ask.ids)}, sampling)
        self._seen[key] = 0
        return key

    def step(self) -> list[Event]:
        events = []
        for output in self._engine.step():
            key, answer = int(output.request_id), output.outputs[0]
            ids = tuple(answer.token_ids)
            new, self._seen[key] = len(ids) - self._seen[key], len(ids)
            ended = (answer.finish_reason or "unknown", ids) if output.finished else (None, None)
            events.append(Event(key, time.perf_counter(), new, *ended))
            if output.finished:
                del self._seen[key]
        return events

    def abort(self) -> None:
        for key in self._seen:
            self._engine.abort_request([str(key)])
        self._seen.clear()

    def counts(self) -> StepCounts | None:
        return None


def open_baseline(mode: Mode, place: Place) -> Serial | Vllm:
    """An engine that is not ours, in this process.

    Raises:
        SettingsError: it cannot be started; the sentence says why.
    """
    try:
        if mode.engine == "vllm":
            return Vllm(place)
        return (open_llama_cpp if mode.engine.startswith("llama.cpp") else open_transformers)(mode, place)
    except DsparkError:
        raise
    except Exception as error:  # many classes of several libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".").replace(". ", "; ")
        raise SettingsError(f"mode {mode.name!r} cannot be started ({reason}); leave it out.") from None
