"""A toy that writes like someone: words of a few letters, and an end after a while."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dspark.config import EngineConfig
from dspark.engine import Engine
from dspark.engine.lookup import LookupProposer
from dspark.target import Target, load_target
from tests.toy_models import EOS_ID, write_model

WEIGHTS = "model.safetensors"
LETTERS = b"aeinorst"


def write_writer(folder: Path, end_share: float = 0.03) -> Path:
    """Every embedding has the same large first component, so the head's first column is a bias per token: letters and
    spaces are likely, the end token has about `end_share`, all else never comes."""
    write_model(folder, "qwen3", layer_scale=0.05)
    tensors = load_file(folder / WEIGHTS)
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    tensors["model.embed_tokens.weight"][:, 0] = 3.0
    tensors["model.norm.weight"] = torch.ones(hidden)
    head = tensors["lm_head.weight"]
    likely = math.log((1 - end_share) / len(LETTERS)) + 12
    bias = torch.full((head.shape[0],), -12.0)
    bias[list(LETTERS)] = likely
    bias[ord(" ")] = likely + 0.7
    bias[EOS_ID] = math.log(end_share) + 12
    head[:, 0] = bias / math.sqrt(hidden)
    save_file(tensors, folder / WEIGHTS)
    return folder


def load_writer(folder: Path) -> Target:
    return load_target(str(folder), torch.device("cpu"), "float32", exact=True)


def writer_engine(target: Target, batch: int = 8, **settings: object) -> Engine:
    config = EngineConfig(model="toy", kv_gb=0.02, exact=True, max_batch=batch, **settings)  # type: ignore[arg-type]
    return Engine(target, LookupProposer(), config)
