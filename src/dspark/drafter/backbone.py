"""The parallel stage: one pass that turns target features and a block of masks into one hidden state per slot.

A Qwen3 decoder whose keys and values come from two places: committed positions from the target's tapped features
(`context`, no input norm), the block's positions from the block itself. Source: arXiv 2607.05147.

Training and serving share every formula: `block_hidden` is the differentiable pass over many anchors of one text,
`append_context` with `block_pass` the same computed piece by piece against a cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.drafter.config import DrafterConfig
from dspark.target.decoder import PassRow
from dspark.target.kv import KvPool
from dspark.target.layers import NEG_INF, attend, by_kv_head, by_position, rms_norm, rope_tables, rotate
from dspark.target.linear import Linear, LinearFactory

# (layer, queries, keys, values of the block [N, heads, head_dim]) -> attention output [N, heads * head_dim]
_Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    q: Linear
    kv: Linear  # beside q, not stacked with it: context needs keys and values only
    q_norm: Tensor
    k_norm: Tensor
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Backbone:
    """A pure function of checkpoint tensors (names as in docs/checkpoints.md), packed by the injected `make`.

    Serving packs once. A trainer passes its parameters and `PlainLinear`, and builds a new one after each optimiser
    step, because stacked weights are copies; gradients reach the parameters. `positions` is how many true positions
    exist, those of a block at the very end included.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        make: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
    ):
        def vector(name: str) -> Tensor:
            return tensors[name].to(device, dtype)

        self._config = config
        self._fc = make(tensors["fc.weight"], None)
        self._hidden_norm, self._final_norm = vector("hidden_norm.weight"), vector("norm.weight")
        self._layers = [_load_layer(f"layers.{i}.", tensors, make, vector) for i in range(config.num_layers)]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        self._cos, self._sin = rope_tables(1.0 / config.rope_theta**exponents, positions, 1.0, dtype, device)
        self._scale = config.head_dim**-0.5

    def context(self, taps: Float[Tensor, "T L*D"]) -> Float[Tensor, "T D"]:
        """Features of committed positions as every layer sees them: `hidden_norm(fc([tap_1; ...; tap_L]))`."""
        return rms_norm(self._fc(taps), self._hidden_norm, self._config.rms_eps)

    @torch.no_grad()
    def append_context(self, taps: Float[Tensor, "T L*D"], rows: Sequence[PassRow], pool: KvPool) -> None:
        """Write keys and values of committed positions, rows laid end to end in `taps`.

        Row r's features belong to its positions kv_len..kv_len+num_tokens-1 and go to the pool slots of those
        positions. Append-only: what lies before kv_len stays, and committed positions never roll back. Any split of a
        text into calls gives the same cache.
        """
        positions, slots = _places(rows, taps.device)
        cos, sin = self._cos[positions], self._sin[positions]
        context = self.context(taps)
        for i, layer in enumerate(self._layers):
            keys, values = self._keys_values(layer, context, cos, sin)
            pool.write(i, slots, keys, values)

    @torch.no_grad()
    def block_pass(
        self, embedded: Float[Tensor, "B K D"], rows: Sequence[PassRow], pool: KvPool
    ) -> Float[Tensor, "B K D"]:
        """Hidden states of one block per row, after the final norm.

        Row r is `PassRow(start, kv_len, K)`: context 0..kv_len-1 is in the pool, the anchor stands at position kv_len.
        The block's own keys and values are scratch, written at positions kv_len..kv_len+K-1 and later overwritten by
        `append_context`. The caller guarantees that the row's slot range has room for kv_len + K positions: nothing
        here can see where the next row's range begins.
        """
        batch, block, _ = embedded.shape
        assert len(rows) == batch and all(row.num_tokens == block for row in rows)
        positions, slots = _places(rows, embedded.device)

        def attention(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pool.write(index, slots, keys, values)
            grouped = by_kv_head(queries, self._config.num_kv_heads, self._scale)
            outputs = [
                attend(own, *pool.read(index, row.start, row.kv_len + block), None)
                for own, row in zip(grouped.chunk(batch, dim=1), rows, strict=True)
            ]
            return by_position(outputs[0] if batch == 1 else torch.cat(outputs, dim=1), len(queries))

        return self._run(embedded.flatten(0, 1), positions, attention).view_as(embedded)

    def block_hidden(
        self, taps: Float[Tensor, "T L*D"], embedded: Float[Tensor, "A K D"], anchors: Int[Tensor, " A"]
    ) -> Float[Tensor, "A K D"]:
        """The training pass: blocks of many anchors of one text at once, differentiable.

        `taps[j]` belongs to position j. Block a stands at positions anchors[a]..anchors[a]+K-1 and sees context before
        its anchor and all of itself; blocks do not see each other.
        """
        count, block, _ = embedded.shape
        length = taps.shape[0]
        context = self.context(taps)
        cos, sin = self._cos[:length], self._sin[:length]
        mask = self._block_mask(anchors, block, length, context.dtype)

        def attention(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            context_keys, context_values = self._keys_values(self._layers[index], context, cos, sin)
            all_keys = torch.cat((context_keys, keys)).permute(1, 2, 0)
            all_values = torch.cat((context_values, values)).transpose(0, 1)
            grouped = by_kv_head(queries, self._config.num_kv_heads, self._scale)
            return by_position(attend(grouped, all_keys, all_values, mask), len(queries))

        positions = (anchors[:, None] + torch.arange(block, device=anchors.device)).flatten()
        return self._run(embedded.reshape(count * block, -1), positions, attention).view_as(embedded)

    def _run(self, x: Float[Tensor, "N D"], positions: Int[Tensor, " N"], attention: _Attention) -> Tensor:
        config, eps = self._config, self._config.rms_eps
        cos, sin = self._cos[positions], self._sin[positions]
        for i, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, eps)
            queries = layer.q(normed).view(-1, config.num_heads, config.head_dim)
            queries = rotate(rms_norm(queries, layer.q_norm, eps), cos, sin)
            x = x + layer.out(attention(i, queries, *self._keys_values(layer, normed, cos, sin)))
            gate, up = layer.gate_up(rms_norm(x, layer.post_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return rms_norm(x, self._final_norm, eps)

    def _keys_values(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        keys, values = layer.kv(x).view(-1, 2 * config.num_kv_heads, config.head_dim).chunk(2, dim=1)
        return rotate(rms_norm(keys, layer.k_norm, config.rms_eps), cos, sin), values

    def _block_mask(self, anchors: Tensor, block: int, length: int, dtype: torch.dtype) -> Float[Tensor, "m S"]:
        """0 where a block's query sees a key, -inf elsewhere; rows as `attend` orders them."""
        device = anchors.device
        owner = torch.arange(anchors.shape[0], device=device).repeat_interleave(block)
        sees_context = torch.arange(length, device=device)[None, :] < anchors[owner][:, None]
        sees_block = owner[:, None] == owner[None, :]
        hidden = ~torch.cat((sees_context, sees_block), dim=1)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, NEG_INF)
        return mask.repeat_interleave(self._config.num_heads // self._config.num_kv_heads, dim=0)


def _places(rows: Sequence[PassRow], device: torch.device) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """True positions and pool slots of the rows' tokens, rows end to end."""
    positions = torch.cat([torch.arange(r.kv_len, r.kv_len + r.num_tokens, device=device) for r in rows])
    starts = torch.tensor([r.start for r in rows], device=device)
    counts = torch.tensor([r.num_tokens for r in rows], device=device)
    return positions, positions + starts.repeat_interleave(counts)


def _load_layer(
    prefix: str, tensors: Mapping[str, Tensor], make: LinearFactory, vector: Callable[[str], Tensor]
) -> _Layer:
    def stacked(*names: str) -> Linear:
        weights = [tensors[f"{prefix}{name}.weight"] for name in names]
        return make(weights[0] if len(weights) == 1 else torch.cat(weights), None)

    return _Layer(
        input_norm=vector(prefix + "input_layernorm.weight"),
        q=stacked("self_attn.q_proj"),
        kv=stacked("self_attn.k_proj", "self_attn.v_proj"),
        q_norm=vector(prefix + "self_attn.q_norm.weight"),
        k_norm=vector(prefix + "self_attn.k_norm.weight"),
        out=stacked("self_attn.o_proj"),
        post_norm=vector(prefix + "post_attention_layernorm.weight"),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=stacked("mlp.down_proj"),
    )
