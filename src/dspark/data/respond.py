"""Responses of the target to given prompts, packed for training.

Every finished response is kept in a journal at once; the packed file is written when all are there.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark import __version__
from dspark.config import SamplingParams
from dspark.data.batch import Report, Work, decode_many, item_seed, item_share
from dspark.data.described import Described
from dspark.data.endpoint import Endpoint, ask_all
from dspark.data.journal import Journal, check_same
from dspark.data.packed import Corpus, Provenance, read_provenance, write_packed
from dspark.data.sources import Prompt, prompts_digest
from dspark.engine import Engine
from dspark.errors import DataError, SettingsError


@dataclass(frozen=True)
class RespondPlan:
    """How responses are sampled. Each prompt gets one of `temperatures`, chosen by a hash of its index with
    probabilities in the ratio of `weights`.

    Raises:
        SettingsError: a value is outside its range.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    weights: tuple[float, ...] = (1.0, 1.0, 1.0)
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int = 0
    system: str | None = None

    def __post_init__(self) -> None:
        if len(self.temperatures) != len(self.weights):
            raise SettingsError(
                f"--temperatures has {len(self.temperatures)} values and --weights {len(self.weights)}; give one "
                "weight per temperature."
            )
        if not (sum(self.weights) > 0 and all(0 <= weight < float("inf") for weight in self.weights)):
            raise SettingsError(f"--weights is {self.weights}; allowed are numbers of 0 or more, not all 0.")
        if self.seed < 0:
            raise SettingsError(f"--seed is {self.seed}; allowed is 0 or more.")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, top_p=self.top_p, max_tokens=self.max_tokens)

    def temperature(self, index: int) -> float:
        place = item_share(self.seed, index, "temperature") * sum(self.weights)
        for temperature, weight in zip(self.temperatures, self.weights, strict=True):
            place -= weight
            if place < 0:
                return temperature
        return self.temperatures[-1]

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature(index),
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=item_seed(self.seed, index, "response"),
        )

    def messages(self, prompt: Prompt) -> list[dict[str, str]]:
        """The prompt's messages, behind our system message if there is one and the prompt has none."""
        messages = [dict(message) for message in prompt.messages]
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def settings(self, prompts: Sequence[Prompt], target: Described, **source: Any) -> dict[str, Any]:
        """Everything the responses depend on, as plain data; `source` says what generates them."""
        return {
            "temperatures": list(self.temperatures),
            "weights": list(self.weights),
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "system": self.system,
            "prompts": len(prompts),
            "prompts_digest": prompts_digest(prompts),
            "target": target.identity(),
            **source,
        }


@dataclass
class Tokenised:
    """Prompts as the target reads them. Those that leave no room for an answer are in `too_long`."""

    ids: list[list[int]]
    too_long: frozenset[int]

    def todo(self, journal: Journal) -> Iterator[int]:
        return (i for i in range(len(self.ids)) if i not in journal.entries and i not in self.too_long)


def tokenise(prompts: Sequence[Prompt], plan: RespondPlan, target: Described, context: int) -> Tokenised:
    """Raises RequestError when the chat template refuses a prompt or there is none."""
    ids = [target.chat_ids(plan.messages(prompt)) for prompt in prompts]
    return Tokenised(ids, frozenset(i for i, prompt_ids in enumerate(ids) if len(prompt_ids) >= context))


def respond(engine: Engine, prompts: Tokenised, plan: RespondPlan, journal: Journal) -> Generator[Report, None, None]:
    """Answer what the journal does not hold yet; one report per step of the engine."""
    todo = prompts.todo(journal)
    tokens = 0

    def next_work() -> Work | None:
        index = next(todo, None)
        return None if index is None else Work(index, prompts.ids[index], plan.params(index))

    with closing(decode_many(engine, next_work)) as steps:
        for step in steps:
            tokens += step.tokens
            for index, output in step.outputs:
                _keep(journal, index, prompts.ids[index], output.token_ids, output.error)
            yield Report(_done(journal, prompts), len(prompts.ids), tokens)


def respond_by_endpoint(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    tokenised: Tokenised,
    plan: RespondPlan,
    journal: Journal,
    target: Described,
) -> Generator[Report, None, None]:
    """The same through a server; one report per answer. Its texts are tokenised again, and end with the target's end
    token where the server says that the model ended."""
    end_id = target.answer_end_id()
    tokens = 0

    def requests() -> Iterator[tuple[int, dict[str, Any]]]:
        for index in tokenised.todo(journal):
            params = plan.params(index)
            room = target.spec.context - len(tokenised.ids[index])
            yield (
                index,
                {
                    "messages": plan.messages(prompts[index]),
                    "temperature": params.temperature,
                    "top_p": params.top_p,
                    "max_tokens": min(plan.max_tokens, room),
                    "seed": (params.seed or 0) >> 32,  # what every server takes
                },
            )

    with closing(ask_all(endpoint, requests())) as replies:
        for index, reply in replies:
            ids = target.tokenizer.encode(reply.text, add_special_tokens=False)
            ids = ids[: target.spec.context - len(tokenised.ids[index])]
            if reply.ended and end_id is not None and len(ids) + len(tokenised.ids[index]) < target.spec.context:
                ids.append(end_id)
            _keep(journal, index, tokenised.ids[index], ids)
            tokens += len(ids)
            yield Report(_done(journal, tokenised), len(tokenised.ids), tokens)


def _keep(
    journal: Journal, index: int, prompt_ids: Sequence[int], ids: Sequence[int], error: str | None = None
) -> None:
    """The prompt's ids are kept too: a template may show the date, and what was answered is what must be packed."""
    journal.add(index, {"error": error} if error else {"prompt": list(prompt_ids), "ids": list(ids)})


def _done(journal: Journal, prompts: Tokenised) -> int:
    return len(journal.entries) + len(prompts.too_long)


def pack_responses(
    path: Path, prompts: Sequence[Prompt], plan: RespondPlan, settings: dict[str, Any], journal: Journal, by: Described
) -> tuple[str, ...]:
    """Write the packed file from a complete journal, in the order of the prompts; notes about what was left out.

    Raises:
        DataError: nothing is left to write, or the file cannot be written.
    """
    answered = {i: entry for i, entry in sorted(journal.entries.items()) if "error" not in entry}
    kept = [i for i, entry in answered.items() if not set(by.spec.eos_ids).issuperset(entry["ids"])]
    notes, counts = _left_out(prompts, journal, len(answered) - len(kept))
    if not kept:
        raise DataError(f"No response is left to write to {path} ({counts}); give other prompts.")
    parts = [np.array(answered[i]["prompt"] + answered[i]["ids"], np.int64) for i in kept]
    corpus = Corpus(
        torch.from_numpy(np.concatenate(parts)),
        (0, *np.cumsum([len(part) for part in parts]).tolist()),
        tuple(len(answered[i]["prompt"]) for i in kept),
        tuple(plan.temperature(i) for i in kept),
        tuple(prompts[i].kind for i in kept),
    )
    full = sum(len(part) >= by.spec.context for part in parts)
    if full:
        notes += (f"{full} of {len(prompts)} responses reach the context ({by.spec.context} tokens) and end there.",)
    about = {**settings, "left_out": counts, "made_by": f"dspark {__version__}"}
    write_packed(path, corpus, Provenance(by.fingerprint, about))
    return notes


def _left_out(prompts: Sequence[Prompt], journal: Journal, empty: int) -> tuple[tuple[str, ...], dict[str, int]]:
    """What did not make it into the file, in sentences and in numbers."""
    errors = [entry["error"].rstrip(".") for _, entry in sorted(journal.entries.items()) if "error" in entry]
    counts = {"too_long": len(prompts) - len(journal.entries), "empty": empty, "failed": len(errors)}
    texts = {
        "too_long": f"{counts['too_long']} of {len(prompts)} prompts leave no room for an answer and are left out.",
        "empty": f"{empty} of {len(prompts)} responses are empty and are left out.",
        "failed": f"{len(errors)} of {len(prompts)} requests failed and are left out ({errors[0] if errors else ''}).",
    }
    return tuple(texts[name] for name, count in counts.items() if count), counts


def responses_written(path: Path, settings: dict[str, Any]) -> bool:
    """Whether an earlier run of the same settings already wrote `path`.

    Raises:
        DataError: the file there was made otherwise.
    """
    if not path.exists():
        return False
    stored = read_provenance(path)
    if stored is None:
        raise DataError(f"{path} exists and does not say how it was made; choose another --out.")
    check_same(path, stored.sampling, settings)
    return True
