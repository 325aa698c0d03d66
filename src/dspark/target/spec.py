"""What a decoder of the Llama family can vary in, read from a Hugging Face config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "swish")  # two names of one function


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequency scaling; types `default`, `linear` and `llama3`."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of one decoder. Sizes in elements, `context` in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    context: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def matrix_shapes(self) -> frozenset[tuple[int, int]]:
        """(out, in) of every matrix as the decoder packs it."""
        heads = self.num_heads * self.head_dim
        stacked = heads + 2 * self.num_kv_heads * self.head_dim
        return frozenset(
            {
                (stacked, self.hidden_size),
                (self.hidden_size, heads),
                (2 * self.ffn_size, self.hidden_size),
                (self.hidden_size, self.ffn_size),
                (self.vocab_size, self.hidden_size),
            }
        )

    def inv_freq(self) -> Tensor:
        """Rotary inverse frequencies [head_dim / 2], float32."""
        half = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        base = 1.0 / (self.rope_theta**half)
        scaling = self.rope_scaling
        if scaling.kind == "default":
            return base
        if scaling.kind == "linear":
            return base / scaling.factor
        # llama3: keep short waves, stretch long ones, blend between (Llama 3.1 model card).
        wave = 2 * math.pi / base
        low = scaling.original_context / scaling.low_freq_factor
        high = scaling.original_context / scaling.high_freq_factor
        blend = (scaling.original_context / wave - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        mixed = (1 - blend) * base / scaling.factor + blend * base
        return torch.where(wave > low, base / scaling.factor, torch.where(wave < high, base, mixed))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> "ModelSpec":
        """Read a Hugging Face config.

        Raises:
            ModelError: the architecture or one of its features is not supported, or a key is missing.
        """
        architecture = (config.get("architectures") or ["none named"])[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{where} has architecture {architecture}; supported are {', '.join(ARCHITECTURES)}, "
                "so use a model of one of these families."
            )
        try:
            _refuse_sliding_window(config, where)
            _refuse_activation(config, where)
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            attention_bias = bool(config.get("attention_bias", False))
            eos = config.get("eos_token_id")
            return cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                ffn_size=int(config["intermediate_size"]),
                context=int(config.get("max_position_embeddings", 2048)),
                rms_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=_rope_theta(config),
                rope_scaling=_rope_scaling(config, where),
                tied_head=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
                out_bias=attention_bias and architecture != "Qwen2ForCausalLM",
                mlp_bias=bool(config.get("mlp_bias", False)),
                qk_norm=architecture == "Qwen3ForCausalLM",
                eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
                bos_id=config.get("bos_token_id"),
            )
        except KeyError as missing:
            raise ModelError(f"{where} has a config.json without {missing}; the model folder is incomplete.") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ModelError(
                f"{where} has a config.json with an unusable value ({error}); download the model again."
            ) from None


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(_rope_parameters(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _rope_scaling(config: Mapping[str, Any], where: str) -> RopeScaling:
    values = _rope_parameters(config)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"{where} uses rope scaling {kind!r}; supported are {', '.join(ROPE_TYPES)}.")
    return RopeScaling(
        kind,
        float(values.get("factor", 1.0)),
        float(values.get("low_freq_factor", 1.0)),
        float(values.get("high_freq_factor", 4.0)),
        int(values.get("original_max_position_embeddings", 8192)),
    )


def _refuse_sliding_window(config: Mapping[str, Any], where: str) -> None:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", config["architectures"][0] == "MistralForCausalLM")
    if window and used and window < config.get("max_position_embeddings", window + 1):
        raise ModelError(
            f"{where} uses a sliding attention window of {window} tokens, which is not supported; "
            "use a model with full attention."
        )


def _refuse_activation(config: Mapping[str, Any], where: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"{where} has the activation {activation!r}; supported is {ACTIVATIONS[0]}, so use a model that has it."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, with generation_config.json's end tokens where it names any.

    Raises:
        ModelError: missing or not JSON.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json; give a Hugging Face model folder, a GGUF file or a hub id."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a JSON {type(config).__name__}, not an object; download the model again.")
    try:
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return config
    if isinstance(generation, dict) and generation.get("eos_token_id") is not None:
        config["eos_token_id"] = generation["eos_token_id"]
    return config
