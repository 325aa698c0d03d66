"""A toy target, toy drafters, and the slow reference everything is compared with: loops, one formula per line."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.config import SamplingParams, SlotRule, Streams
from dspark.drafter import Drafter, DrafterConfig, build_drafter, random_tensors
from dspark.target.decoder import Decoder, PassRow
from dspark.target.linear import PlainLinear
from dspark.target.spec import ModelSpec

VOCAB, HIDDEN, MASK = 40, 16, 39
CPU = torch.device("cpu")


def target_spec(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    return ModelSpec.from_config(values | changes, "toy")


def make_target(tied: bool = True, dtype: str = "float64", **changes: object) -> Decoder:
    spec = target_spec(tie_word_embeddings=tied, **changes)
    g = torch.Generator().manual_seed(5)
    hidden, ffn = spec.hidden_size, spec.ffn_size
    # Small rows, so that distributions over the vocabulary are broad and sampling has something to choose from.
    tensors = {"model.embed_tokens.weight": torch.randn(spec.vocab_size, hidden, generator=g) / 4}
    tensors["lm_head.weight"] = torch.randn(spec.vocab_size, hidden, generator=g) / 4
    tensors["model.norm.weight"] = torch.ones(hidden)
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        tensors |= {f"{prefix}self_attn.{n}_proj.weight": torch.randn(hidden, hidden, generator=g) / 4 for n in "qkvo"}
        tensors |= {f"{prefix}mlp.{n}_proj.weight": torch.randn(ffn, hidden, generator=g) / 4 for n in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.randn(hidden, ffn, generator=g) / 4
        tensors |= {f"{prefix}{n}_layernorm.weight": torch.ones(hidden) for n in ("input", "post_attention")}
    cast = getattr(torch, dtype)
    return Decoder(spec, {name: tensor.to(cast) for name, tensor in tensors.items()}, dtype, CPU)


def make_config(**changes: object) -> DrafterConfig:
    values: dict[str, object] = {
        "hidden_size": HIDDEN,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_size": 20,
        "vocab_size": VOCAB,
        "target_layer_ids": (-1, 1, 2),
        "mask_token_id": MASK,
        "block_size": 4,
        "markov_rank": 5,
        "rope_theta": 100.0,
        "context": 512,
    }
    return DrafterConfig(**(values | changes))  # type: ignore[arg-type]


def lively_tensors(config: DrafterConfig, seed: int = 1) -> dict[str, Tensor]:
    """Random fp64 weights whose norms and biases are not 1 and 0, so that forgetting one shows."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in random_tensors(config, seed).items():
        if name != "d2t":
            noise = torch.randn(tensor.shape, generator=g, dtype=torch.float64)
            tensor = tensor.double() + (0.3 * noise if tensor.dim() == 1 else 0)
        tensors[name] = tensor
    return tensors


def make_drafter(target: Decoder, seed: int = 1, **changes: object) -> Drafter:
    config = make_config(**changes)
    return build_drafter(config, lively_tensors(config, seed), target, PlainLinear)


def random_taps(length: int, seed: int = 3, taps: int = 3) -> Tensor:
    return torch.randn(length, taps * HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def streams(batch: int, coupled: bool = False, position: int = 0, step: int = 0, key: int = 11) -> Streams:
    return Streams((coupled,) * batch, tuple(key + 97 * r for r in range(batch)), (position,) * batch, (step,) * batch)


def same_rule(batch: int, **params: object):
    """`rules_at` of requests that all have the same parameters and no history."""
    rule = SlotRule(SamplingParams(**params))  # type: ignore[arg-type]
    return lambda slot, ids: [rule] * batch


def cached_hidden(drafter: Drafter, taps: Tensor, anchor: int, start: int = 128) -> Tensor:
    """Hidden states [K, D] of one masked block after all of `taps`, the serving way."""
    pool = drafter.new_pool(1024)
    drafter.append_context(taps, [PassRow(start, 0, taps.shape[0])], pool)
    ids = drafter.masked_block(torch.tensor([anchor]))
    return drafter.block_pass(ids, [PassRow(start, taps.shape[0], ids.shape[1])], pool)[0]


@dataclass(frozen=True)
class Wrong:
    """Deliberate mistakes of the slow reference. A test that passes with one of these is no test."""

    block_shift: int = 0  # block positions off by this
    context_shift: int = 0  # context positions off by this
    causal: bool = False  # block slots see only slots before them
    normed_context: bool = False  # input norm applied to context too
    unnormed_keys: bool = False  # K norm left out for context
    context_cut: int = 0  # that many last context positions unseen


RIGHT = Wrong()


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def _rope(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        # The tables are float32, as transformers computes them.
        angle = torch.tensor(float(position)) * (1.0 / theta ** (torch.tensor(2 * i).float() / (2 * half)))
        cos, sin = angle.cos().double(), angle.sin().double()
        out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return out


def slow_hidden(
    config: DrafterConfig, w: dict[str, Tensor], taps: Tensor, block: Tensor, wrong: Wrong = RIGHT
) -> Tensor:
    """Hidden states [K, D] of one block [K, D] behind context `taps` [T, L*D], position by position, head by head."""
    eps, theta, width = config.rms_eps, config.rope_theta, config.head_dim
    length, slots = taps.shape[0], block.shape[0]
    context = [_rms(w["fc.weight"] @ tap, w["hidden_norm.weight"], eps) for tap in taps]
    x = [row.double() for row in block]
    for i in range(config.num_layers):
        layer = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}
        normed = [_rms(row, layer["input_layernorm.weight"], eps) for row in x]
        seen = [_rms(row, layer["input_layernorm.weight"], eps) for row in context] if wrong.normed_context else context
        sources = [(row, j + wrong.context_shift) for j, row in enumerate(seen)]
        sources += [(row, length + k + wrong.block_shift) for k, row in enumerate(normed)]
        attended = []
        for k in range(slots):
            heads = []
            for head in range(config.num_heads):
                kv = head // (config.num_heads // config.num_kv_heads)
                own, shared = slice(head * width, (head + 1) * width), slice(kv * width, (kv + 1) * width)
                query = _rms(layer["self_attn.q_proj.weight"][own] @ normed[k], layer["self_attn.q_norm.weight"], eps)
                query = _rope(query, length + k + wrong.block_shift, theta)
                scores, values = [], []
                for j, (row, position) in enumerate(sources):
                    if length - wrong.context_cut <= j < length or (wrong.causal and j > length + k):
                        continue
                    key = layer["self_attn.k_proj.weight"][shared] @ row
                    if not (wrong.unnormed_keys and j < length):
                        key = _rms(key, layer["self_attn.k_norm.weight"], eps)
                    scores.append(query @ _rope(key, position, theta) / width**0.5)
                    values.append(layer["self_attn.v_proj.weight"][shared] @ row)
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            attended.append(layer["self_attn.o_proj.weight"] @ torch.cat(heads))
        x = [row + out for row, out in zip(x, attended, strict=True)]
        for k, row in enumerate(x):
            y = _rms(row, layer["post_attention_layernorm.weight"], eps)
            gate, up = layer["mlp.gate_proj.weight"] @ y, layer["mlp.up_proj.weight"] @ y
            x[k] = row + layer["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([_rms(row, w["norm.weight"], eps) for row in x])
