"""GGUF to a Hugging Face folder, once: dequantised weights, config, tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from dspark.errors import ModelError
from dspark.target.linear import FP16_MAX
from dspark.target.spec import ModelSpec

GGUF_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# What Llama 3's frequency scaling did to the rotary frequencies; its settings are in the config instead.
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192  # of Llama 3, which 3.1 to 3.3 stretch

_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, Any] = {
    "gpt-2": None,
    "default": None,
    "smollm": _DIGITS,
    "llama-bpe": pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
    "qwen2": pre_tokenizers.Split(Regex(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")), behavior="isolated"),
}
_SPLITS_ITSELF = ("llama-bpe", "qwen2")  # their pattern replaces the byte-level one
_LLAMA3_WORDS = ("llama-bpe",)  # whole words of the vocabulary go before merges, and BOS before the text
_CONTROL, _USER_DEFINED = 3, 4


def convert_gguf(source: Path, folder: Path) -> None:
    """Write `source` to `folder` as config.json, model.safetensors (fp16, norms fp32) and a tokenizer.

    Raises:
        ModelError: not a GGUF file, or its architecture, tensor types or tokenizer are not supported.
        OSError: `folder` cannot be written.
    """
    reader, fields = _open(source)
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{source} has GGUF architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}.")
    try:
        _write_tokenizer(fields, folder, source)
        tensors = _tensors(reader, source, architecture, fields)
        config = _config(fields, architecture, tied="lm_head.weight" not in tensors)
        if factors := [t for t in reader.tensors if t.name == _ROPE_FACTORS]:
            config["rope_scaling"] = _llama3_scaling(config, torch.from_numpy(factors[0].data.copy()), source)
    except KeyError as missing:
        raise ModelError(f"{source} has no metadata {missing}; convert the model to GGUF again.") from None
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise OSError(str(error)) from None
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _open(source: Path) -> tuple[Any, dict[str, Any]]:
    """A GGUF reader and its metadata."""
    from gguf import GGUFReader  # only needed once per model

    try:
        reader = GGUFReader(source)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{source} is not a readable GGUF file ({error}); download it again.") from None


def _hf_name(name: str, source: Path) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and part in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[part]}.{kind}"
    raise ModelError(f"{source} holds tensor {name}, which no supported architecture has.")


def _tensors(reader: Any, source: Path, architecture: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    heads = fields[f"{architecture}.attention.head_count"]
    kv_heads = fields.get(f"{architecture}.attention.head_count_kv", heads)
    result = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        kind = tensor.tensor_type.name
        if kind not in GGUF_TYPES:
            raise ModelError(
                f"{source} holds {tensor.name} as {kind}; supported GGUF types are {', '.join(GGUF_TYPES)}."
            )
        try:
            values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except (ValueError, IndexError) as error:
            raise ModelError(f"{source} is damaged at tensor {tensor.name} ({error}); download it again.") from None
        array = torch.from_numpy(values.copy() if not values.flags.writeable else values)
        if architecture == "llama" and ".attn_q." in tensor.name:
            array = _halves(array, heads)
        elif architecture == "llama" and ".attn_k." in tensor.name:
            array = _halves(array, kv_heads)
        if array.dim() == 2 and (largest := array.abs().max().item()) > FP16_MAX:
            raise ModelError(
                f"{source} holds a weight of {largest:.3g} in {tensor.name}, which does not fit float16 (at most "
                f"{FP16_MAX:.0f}); use the model's Hugging Face folder with --dtype float32."
            )
        # Norms and biases are small and stay as precise as they came.
        result[_hf_name(tensor.name, source)] = array.half() if array.dim() == 2 else array.clone()
    return result


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps Llama's rotary pairs side by side; Hugging Face keeps them in two halves of a head."""
    rest = weight.shape[1:]
    return weight.view(heads, -1, 2, *rest).transpose(1, 2).reshape(weight.shape).contiguous()


def _llama3_scaling(config: dict[str, Any], factors: torch.Tensor, source: Path) -> dict[str, Any]:
    """The rope_scaling whose effect on the frequencies is `factors`, which is all that GGUF keeps of it.

    Raises:
        ModelError: the factors are not those of Llama 3.1 to 3.3.
    """
    scaling = {**_LLAMA3_ROPE, "factor": factors.max().item(), "original_max_position_embeddings": _LLAMA3_CONTEXT}
    plain = ModelSpec.from_config(config, str(source)).inv_freq()
    scaled = ModelSpec.from_config({**config, "rope_scaling": scaling}, str(source)).inv_freq()
    if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors, rtol=1e-3):
        raise ModelError(
            f"{source} scales rotary frequencies by its own {_ROPE_FACTORS}, and only that of Llama 3 is supported; "
            "use the Hugging Face folder of this model instead."
        )
    return scaling


def _config(fields: dict[str, Any], architecture: str, tied: bool) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(float(get("attention.layer_norm_rms_epsilon", 1e-6)), 12),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float16",
    }
    if get("rope.scaling.type") not in (None, "none"):
        config["rope_scaling"] = {"rope_type": get("rope.scaling.type"), "factor": get("rope.scaling.factor", 1.0)}
    return config


def _write_tokenizer(fields: dict[str, Any], folder: Path, source: Path) -> None:
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _SPLITS:
        raise ModelError(
            f"{source} has tokenizer {model!r} with pre-tokenizer {pre!r}; supported are gpt2 with "
            f"{', '.join(_SPLITS)}, so use the Hugging Face folder of this model instead."
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_WORDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS_ITSELF)
    split = _SPLITS[pre]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if split else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == _USER_DEFINED])
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_WORDS) and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], special_tokens=[(bos, bos_id)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for gguf_name, name in names.items():
        token_id = fields.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if token_id is not None:
            settings[name] = tokens[token_id]
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
