"""Drafter folders: which tensors a drafter has, reading and writing them, and whether they belong to this target.

Names are those of docs/checkpoints.md, which vLLM and SGLang load. DeepSpec's and speculators' folders use the same
names, plus copies of the target's parts, which we accept.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dspark.artifacts import Fingerprint
from dspark.artifacts.files import replacing
from dspark.drafter.config import DrafterConfig
from dspark.drafter.drafter import Drafter, build_drafter
from dspark.drafter.vocabulary import DraftVocabulary
from dspark.errors import DrafterError
from dspark.target.decoder import Decoder
from dspark.target.linear import linear_factory

WEIGHTS_FILE = "model.safetensors"
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Parts of speculators folders we have no use for: the inverse of d2t, and copies of the target's norm and head.
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a drafter must have."""
    hidden, head_dim, rank = config.hidden_size, config.head_dim, config.markov_rank
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (config.ffn_size, hidden),
            "mlp.up_proj": (config.ffn_size, hidden),
            "mlp.down_proj": (hidden, config.ffn_size),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if config.head != "none":
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab, rank)
    if config.head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.head == "rnn":
        joint = (3 * rank, 2 * rank + hidden)
        shapes |= {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": (3 * rank,)}
    if config.confidence:
        features = hidden + rank if config.confidence_with_markov else hidden
        shapes |= {"confidence_head.proj.weight": (1, features), "confidence_head.proj.bias": (1,)}
    if config.token_free_confidence:
        # "confidence_head" is part of the name because vLLM skips tensors whose name contains it.
        shapes["confidence_head_token_free.proj.weight"] = (1, hidden)
        shapes["confidence_head_token_free.proj.bias"] = (1,)
    if config.draft_vocab_size is not None:
        shapes["d2t"] = (config.draft_vocab,)
    return shapes


def optional_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors a folder may bring and need not: the target's embedding, the head's rows, and a `d2t` of zeros."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab, config.hidden_size),
        "d2t": (config.draft_vocab,),
    }


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise DrafterError unless the tensors are exactly those of `config`, finite, and `d2t` is in range."""
    required = tensor_shapes(config)
    missing = sorted(required.keys() - tensors.keys())
    if missing:
        raise DrafterError(f"The drafter has no tensor {_some(missing)}; its folder is incomplete, so copy it again.")
    expected = optional_shapes(config) | required
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise DrafterError(
            f"The drafter has a tensor {_some(unexpected)} that its config.json does not account for; "
            "use the config.json it was trained with."
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise DrafterError(
                f"Tensor {name} has shape {tuple(tensor.shape)}; config.json asks for {expected[name]}, so use the "
                "config.json the drafter was trained with."
            )
        if name == "d2t":
            DraftVocabulary.from_offsets(tensor, config.vocab_size)
        elif tensor.dtype not in _WEIGHT_DTYPES:
            raise DrafterError(
                f"Tensor {name} is of type {tensor.dtype}; supported are float16, bfloat16 and float32, so save the "
                "drafter without quantisation."
            )
        elif not tensor.isfinite().all():
            raise DrafterError(f"Tensor {name} holds infinite or undefined numbers; train or copy the drafter again.")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def check_identity(config: DrafterConfig, target: Fingerprint) -> list[str]:
    """Compare what the drafter was made for with what it is about to draft for.

    Returns sentences to log: the drafter still drafts, but guesses of another target's text are seldom right.

    Raises:
        DrafterError: the tokenizers differ, so token ids mean different texts.
    """
    made_for, this = config.target, target.name or "this target"
    if made_for is None:
        return [f"The drafter does not say which target it was made for; if it was not {this}, it will guess badly."]
    other = made_for.name or "another target"
    if made_for.tokenizer != target.tokenizer:
        raise DrafterError(
            f"The drafter was made for the tokenizer of {other} ({made_for.tokenizer}), but {this} has another "
            f"({target.tokenizer}); use a drafter trained for {this}."
        )
    parts = (
        ("weights", made_for.weights, target.weights),
        ("chat template", made_for.template, target.template),
    )
    return [
        f"The drafter was made for the {part} of {other} ({theirs}), but {this} has a different fingerprint there "
        f"({ours}); expect fewer accepted tokens until the drafter is trained again."
        for part, theirs, ours in parts
        if theirs != ours
    ]


def save_drafter(folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter's folder, tensors in the dtypes they have.

    Each file appears whole or not at all, config.json last: a folder without it is not a drafter.

    Raises:
        DrafterError: the tensors are not those of `config`.
    """
    check_tensors(config, tensors)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    with replacing(folder / WEIGHTS_FILE) as part:
        part.write_bytes(save(stored, metadata={"format": "pt"}))  # save_file's files are their owner's alone
    with replacing(folder / "config.json") as part:
        part.write_text(text, encoding="utf-8")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder (one safetensors file or several) under our names.

    Raises:
        DrafterError: there are none, or a file is damaged.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise DrafterError(f"{folder} has no .safetensors file; give the folder of a trained drafter.")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            message = f"{path} is not a readable safetensors file ({error}); copy the drafter again."
            raise DrafterError(message) from None
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name not in _IGNORED}


def load_drafter(
    folder: Path, target: Decoder, identity: Fingerprint, dtype: str = "float32", pad_id: int | None = None
) -> Drafter:
    """Read a drafter (ours, DeepSpec's or speculators') for serving `target`, linears packed for `dtype`.

    What the caller should log is in the drafter's `warnings`.

    Raises:
        DrafterError: the folder is damaged, not supported, or does not fit the target.
        ModelError: `dtype` has no kernel on the target's device.
    """
    config = DrafterConfig.load(folder)
    config.check_fits(target.spec, pad_id)
    warnings = check_identity(config, identity)
    tensors = read_tensors(folder)
    check_tensors(config, tensors)
    return build_drafter(config, tensors, target, linear_factory(dtype, target.device), warnings=tuple(warnings))


def random_tensors(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Untrained float32 weights: norms 1, biases 0, matrices normal with variance 1 / inputs, random draft tokens."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name == "d2t":
            ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab].sort().values
            tensors[name] = DraftVocabulary(ids, config.vocab_size).offsets()
        elif len(shape) == 1:
            tensors[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return tensors


def random_drafter(config: DrafterConfig, target: Decoder, seed: int = 0, dtype: str = "float32") -> Drafter:
    """A drafter that knows nothing: for tests, and for measuring what hopeless drafts cost.

    Raises:
        DrafterError: `config` does not fit the target.
    """
    config.check_fits(target.spec)
    return build_drafter(config, random_tensors(config, seed), target, linear_factory(dtype, target.device))
