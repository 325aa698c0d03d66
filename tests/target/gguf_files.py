"""GGUF files of toy models, written the way llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.toy_models import CHAT_TEMPLATE, byte_tokenizer, write_model

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t")]
USER_TOKEN, UNUSED_TOKEN = "<tool>", "<unused>"
VOCAB_SIZE = 258 + len(MERGES) + 2
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def merging_tokenizer() -> Tokenizer:
    """The toy byte tokenizer with four merges, and a token that users' text may hold."""
    vocab = {t: i for t, i in byte_tokenizer().get_vocab().items() if i < 256}
    vocab |= {"<|start|>": 256, "<|end|>": 257}
    vocab |= {a + b: 258 + i for i, (a, b) in enumerate(MERGES)}
    vocab[USER_TOKEN] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    tokenizer.add_tokens([AddedToken(USER_TOKEN, normalized=False)])
    return tokenizer


def write_merging_model(folder: Path, shape: str = "llama", **changes: Any) -> Path:
    """A Hugging Face folder with the tokenizer that `write_gguf` writes."""
    write_model(folder, shape, vocab_size=VOCAB_SIZE, **changes)
    merging_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's keys for a Hugging Face config, and the tokenizer."""
    name = config["model_type"]
    vocab = merging_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), UNUSED_TOKEN]
    kinds = {"<|start|>": TokenType.CONTROL, "<|end|>": TokenType.CONTROL}
    kinds |= {USER_TOKEN: TokenType.USER_DEFINED, UNUSED_TOKEN: TokenType.UNUSED}
    return {
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kinds.get(t, TokenType.NORMAL)) for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F16",
    architecture: str | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Path:
    """The model of a Hugging Face folder as GGUF, matrices as `kind` and vectors as F32.

    Args:
        extra: more tensors, in GGUF's names.
        changes: metadata keys to set, dots written as two underscores; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = architecture or config["model_type"]
    writer = GGUFWriter(path, architecture)
    values = metadata(config) | {name.replace("__", "."): value for name, value in changes.items()}
    for name, value in values.items():
        if value is not None:
            _add_value(writer, name, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = _interleaved(tensor, heads)
        _add_tensor(writer, _gguf_name(name), tensor, kind)
    for name, tensor in (extra or {}).items():
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_stored(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a matrix after `kind` and our fp16 cache."""
    quantisation = GGMLQuantizationType[kind]
    values = dequantize(quantize(tensor.numpy(), quantisation), quantisation)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).half()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_NAMES[part]}.{kind}"


def _add_value(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, value)


def _add_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    quantisation = GGMLQuantizationType[kind if tensor.dim() == 2 else "F32"]
    writer.add_tensor(name, quantize(tensor.contiguous().numpy(), quantisation), raw_dtype=quantisation)
