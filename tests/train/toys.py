"""A toy target whose greedy text needs its context, that text as a corpus, and settings small enough for seconds."""

from pathlib import Path
from typing import Any

import torch

from dspark.config import EngineConfig, SamplingParams
from dspark.data import Corpus
from dspark.engine import Engine
from dspark.engine.proposer import NoneProposer
from dspark.target import Target
from dspark.train import CacheLimits, Trainer, TrainSettings, new_trainer
from tests.toy_models import write_model

CPU = torch.device("cpu")
BLOCK = 4


def write_target(folder: Path) -> Path:
    return write_model(folder, "llama", seed=1, scale=0.3)


def make_corpus(sequences: list[list[int]], prompt_lens: list[int], temperature: float = 0.0) -> Corpus:
    lengths = torch.tensor([len(s) for s in sequences])
    count = len(sequences)
    return Corpus(
        torch.tensor([token for s in sequences for token in s]),
        (0, *lengths.cumsum(0).tolist()),
        tuple(prompt_lens),
        (temperature,) * count,
        ("chat",) * count,
    )


def greedy_corpus(target: Target, count: int = 6, tokens: int = 40) -> Corpus:
    engine = Engine(target, NoneProposer(), EngineConfig(model="toy", kv_gb=0.02))
    make = torch.Generator().manual_seed(5)
    prompts = [torch.randint(32, 127, (6 + i,), generator=make).tolist() for i in range(count)]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    texts = [p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
    return make_corpus(texts, [len(p) for p in prompts])


def toy_settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "steps": 6,
        "taps": (0, 1),
        "rank": 8,
        "block_size": BLOCK,
        "draft_vocab": None,
        "batch_blocks": 32,
        "chunk_blocks": 8,
        "lr": 3e-3,
        "seed": 3,
    }
    return TrainSettings(**(values | changes))


def toy_trainer(target: Target, corpus: Corpus, **changes: Any) -> Trainer:
    cache = CacheLimits(changes.pop("cache_bytes", 1e9))
    return new_trainer(target, corpus, toy_settings(**changes), cache)


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
