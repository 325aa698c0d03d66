"""Engines on toy targets, and proposers whose guesses the test decides."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.config import Draft, EngineConfig, SamplingParams, Streams
from dspark.drafter import DrafterConfig, build_drafter, random_drafter, random_tensors
from dspark.engine import Engine, Output
from dspark.engine.batcher import Row
from dspark.engine.dspark_proposer import DsparkProposer
from dspark.engine.model_proposer import ModelProposer
from dspark.engine.proposer import NoneProposer, Proposer, StatelessProposer, point_masses
from dspark.target import PassRow, Target, load_target
from dspark.target.linear import linear_factory
from tests.toy_models import VOCAB_SIZE, write_model

CPU = torch.device("cpu")
MASK_ID = 258


def toy_target(
    folder: Path, shape: str = "qwen3", dtype: str = "float32", exact: bool = True, **changes: Any
) -> Target:
    return load_target(str(write_model(folder, shape, **changes)), CPU, dtype, exact)


def toy_engine(target: Target, proposer: Proposer | None = None, **settings: Any) -> Engine:
    """Drafts four tokens a step unless the settings name another policy: what a default plans depends on the clock."""
    config = EngineConfig(**{"model": "toy", "kv_gb": 0.02, "policy": "fixed:4", **settings})
    return Engine(target, proposer or NoneProposer(), config)


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Random bytes of different lengths."""
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=make).tolist()
    return [torch.randint(32, 127, (n,), generator=make).tolist() for n in lengths]


class ScriptedProposer(StatelessProposer):
    """Knows what plain decoding will say, and errs where the test wants it to.

    `error(position)` says whether the guess for that output position is wrong; `length(position)` how long a draft
    beginning there may be.
    """

    name = "scripted"

    def __init__(
        self,
        answers: Sequence[Output],
        error: Callable[[int], bool] = lambda position: False,
        length: Callable[[int], int] = lambda position: 100,
    ):
        self._answers = {tuple(a.prompt_ids): a.token_ids for a in answers}
        self._error, self._length = error, length

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        guesses = []
        for row, wanted in zip(rows, lens, strict=True):
            answer = self._answers[tuple(row.request.prompt_ids)]
            begin = len(row.request.output_ids)
            end = min(begin + min(wanted, self._length(begin)), len(answer))
            guesses.append([(answer[i] + 1) % 250 if self._error(i) else answer[i] for i in range(begin, end)])
        return point_masses(guesses, self.name)


def coin(seed: int, chance: float) -> Callable[[int], bool]:
    """A repeatable coin per position."""
    flips = (torch.rand(4096, generator=torch.Generator().manual_seed(seed)) < chance).tolist()
    return lambda position: flips[position]


def drafter_config(target: Target, **changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": target.spec.hidden_size,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 64,
        "vocab_size": target.spec.vocab_size,
        "target_layer_ids": (0, 1),
        "mask_token_id": MASK_ID,
        "block_size": 6,
        "markov_rank": 16,
        "context": target.spec.context,
        "target": target.fingerprint,
    }
    return DrafterConfig(**(values | changes))


def random_proposer(target: Target, seed: int = 3, **changes: Any) -> DsparkProposer:
    return DsparkProposer(random_drafter(drafter_config(target, **changes), target.decoder, seed))


@torch.no_grad()
def bigram_logits(target: Target) -> torch.Tensor:
    """[V, V]: what the target says after each single token, far from the start of a fixed text."""
    pool = target.decoder.new_pool(256)
    text = torch.tensor(prompts(1, seed=9)[0])
    target.decoder.run(text, [PassRow(0, 0, len(text))], pool)
    rows = []
    for token in range(VOCAB_SIZE):
        hidden, _ = target.decoder.run(torch.tensor([token]), [PassRow(0, len(text), 1)], pool)
        rows.append(target.decoder.logits(hidden))
    return torch.cat(rows)


def bigram_proposer(target: Target, block_size: int = 6) -> DsparkProposer:
    """A drafter that knows what usually follows a token: right often, wrong often, at every slot."""
    config = drafter_config(target, markov_rank=VOCAB_SIZE, block_size=block_size)
    tensors = random_tensors(config, seed=5)
    tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB_SIZE, dtype=target.decoder.dtype)
    tensors["markov_head.markov_w2.weight"] = bigram_logits(target).T.contiguous()
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], 0.02)  # the backbone hardly speaks
    make = linear_factory(str(target.decoder.dtype).removeprefix("torch."), CPU)
    return DsparkProposer(build_drafter(config, tensors, target.decoder, make))


def model_proposer(target: Target, folder: Path, noise: float = 0.02, **changes: Any) -> ModelProposer:
    """A copy of the target with noise on its weights, as an independent drafting model; `changes` go into its
    config.json."""
    from safetensors.torch import load_file, save_file

    folder = write_model(folder, "qwen3", **changes)
    tensors = load_file(folder / "model.safetensors")
    make = torch.Generator().manual_seed(11)
    noisy = {name: t + noise * torch.randn(t.shape, generator=make) for name, t in tensors.items()}
    save_file(noisy, folder / "model.safetensors")
    return ModelProposer(load_target(str(folder), CPU, "float32"), target)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **changes})


def seeded(seed: int = 1, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 40, "ignore_eos": True, **changes})
