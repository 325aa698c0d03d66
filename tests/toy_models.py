"""Tiny random models with a byte-level tokenizer, written as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EOS_ID, BOS_ID = 257, 256
VOCAB_SIZE = 260  # 256 bytes, <|start|>, <|end|>, and two ids without a token

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "llama-mha-bias": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3-wide-heads": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
}


def toy_config(shape: str = "llama", **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **SHAPES[shape],
        **changes,
    }


def toy_tensors(
    config: dict[str, Any], seed: int = 0, scale: float = 0.15, layer_scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Random weights large enough that layers matter and attention is not flat.

    A smaller `layer_scale` lets the layers add less, so that the last token decides more of the next one.
    """
    make = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make) * scale

    hidden, head_dim, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qwen2 = config["model_type"] == "qwen2"
    attention_bias = config.get("attention_bias", False)
    tensors = {
        "model.embed_tokens.weight": weight(config["vocab_size"], hidden),
        "model.norm.weight": 1 + weight(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = weight(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, out, into, bias in [
            ("self_attn.q_proj", q, hidden, attention_bias or qwen2),
            ("self_attn.k_proj", kv, hidden, attention_bias or qwen2),
            ("self_attn.v_proj", kv, hidden, attention_bias or qwen2),
            ("self_attn.o_proj", hidden, q, attention_bias),
            ("mlp.gate_proj", ffn, hidden, config.get("mlp_bias", False)),
            ("mlp.up_proj", ffn, hidden, config.get("mlp_bias", False)),
            ("mlp.down_proj", hidden, ffn, config.get("mlp_bias", False)),
        ]:
            adds = name.endswith(("o_proj", "down_proj"))
            tensors[f"{layer}{name}.weight"] = weight(out, into) * (layer_scale if adds else 1.0)
            if bias:
                tensors[f"{layer}{name}.bias"] = weight(out)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = 1 + weight(hidden)
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{layer}self_attn.{name}.weight"] = 1 + weight(head_dim)
    return tensors


def byte_tokenizer() -> Tokenizer:
    """One token per byte, its id the byte's value, and two control tokens."""
    shown_as_is = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in shown_as_is]
    vocab = {chr(b): b for b in shown_as_is} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    return tokenizer


def write_model(
    folder: Path, shape: str = "llama", seed: int = 0, scale: float = 0.15, layer_scale: float = 1.0, **changes: Any
) -> Path:
    """A model folder; `changes` go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = toy_config(shape, **changes)
    save_file(toy_tensors(config, seed, scale, layer_scale), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>", "bos_token": "<|start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
