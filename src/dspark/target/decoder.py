"""One parametrised decoder for the Llama family: many requests, any number of tokens each, one pass."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import ModelError
from dspark.target.invariance import attention_multiple, linear_sizes
from dspark.target.kv import KEY_BLOCK, KvPool, round_up
from dspark.target.layers import attend, by_kv_head, by_position, query_mask, rms_norm, rope_tables, rotate
from dspark.target.linear import Linear, LinearFactory, activation_dtype, linear_factory
from dspark.target.spec import ModelSpec

EMBEDDING_TAP = -1


@dataclass(frozen=True, slots=True)
class PassRow:
    """One request's part of a pass: `num_tokens` tokens at positions kv_len.., its slots beginning at `start`."""

    start: int
    kv_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens of one row that attend together: over how many keys, under which mask."""

    count: int
    start: int  # pool slot of the row's position 0
    key_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Runs token ids through the model; keys and values go to a `KvPool`, layer outputs to taps on request.

    In exact mode (CPU) a token's numbers depend, bitwise, on its own request's tokens up to it and on nothing else:
    small passes are padded to the kernels' invariant sizes, and a token attends over a key length that depends on its
    position only.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], dtype: str, device: torch.device, exact: bool = False
    ):
        self.spec, self.device, self.exact = spec, device, exact
        self.dtype = activation_dtype(dtype, device)
        make = linear_factory(dtype, device)
        load = _Weights(tensors, spec, device, self.dtype)
        # Looked up row by row, so the table stays in the weights' own dtype and half the size.
        self.embedding = load.raw("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)).to(device)
        # Kept beside the packed head for drafters, which take rows of it for their own vocabulary.
        head_shape = (spec.vocab_size, spec.hidden_size)
        self.head_weight = self.embedding if spec.tied_head else load.raw("lm_head.weight", head_shape)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing is single-threaded and the slowest part
            head = pool.submit(make, self.head_weight, None)
            self._layers = list(pool.map(lambda i: _load_layer(load, spec, i, make), range(spec.num_layers)))
            self.head = head.result()
        self.final_norm = load.vector("model.norm.weight", spec.hidden_size)
        self._cos, self._sin = rope_tables(spec.inv_freq(), spec.context, 1.0, self.dtype, device)
        self._scale = spec.head_dim**-0.5
        # In exact mode, passes and attention calls are padded to these sizes.
        self._sizes = linear_sizes(make, self.dtype, spec.matrix_shapes()) if exact else None
        self._row_multiple = attention_multiple(spec.num_kv_heads, spec.head_dim, self.dtype) if exact else 1

    def new_pool(self, slots: int) -> KvPool:
        spec = self.spec
        return KvPool(spec.num_layers, spec.num_kv_heads, spec.head_dim, slots, self.dtype, self.device)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values one cached token takes."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize

    def embed(self, ids: Int[Tensor, " T"]) -> Float[Tensor, "T D"]:
        return F.embedding(ids, self.embedding).to(self.dtype)

    def run(
        self, ids: Int[Tensor, " T"], rows: Sequence[PassRow], pool: KvPool, taps: Sequence[int] = ()
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T L*D"] | None]:
        """One pass over the rows' tokens, laid end to end in `ids`.

        Returns the last layer's output before the final norm, and the tapped layer outputs side by side (None without
        taps). Keys and values are written at each row's positions kv_len..; the caller states what to keep.
        """
        total = ids.shape[0]
        positions = torch.cat([torch.arange(r.kv_len, r.kv_len + r.num_tokens, device=self.device) for r in rows])
        starts = torch.tensor([r.start for r in rows], device=self.device)
        counts = torch.tensor([r.num_tokens for r in rows], device=self.device)
        slots = positions + starts.repeat_interleave(counts)
        if extra := self._padding(total):
            ids, positions = F.pad(ids, (0, extra)), F.pad(positions, (0, extra))
        cos, sin = self._cos[positions], self._sin[positions]
        spans = self._spans(rows)
        x = self.embed(ids)
        tapped = [x[:total]] if EMBEDDING_TAP in taps else []
        for i, layer in enumerate(self._layers):
            x = x + self._attention(layer, i, x, cos, sin, slots, spans, pool)
            hidden = layer.gate_up(rms_norm(x, layer.post_norm, self.spec.rms_eps))
            gate, up = hidden.chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if i in taps:
                tapped.append(x[:total])
        return x[:total], torch.cat(tapped, dim=-1) if taps else None

    def logits(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Final norm and output head, for outputs of `run`."""
        count = hidden.shape[0]
        if extra := self._padding(count):
            hidden = F.pad(hidden, (0, 0, 0, extra))
        return self.head(rms_norm(hidden, self.final_norm, self.spec.rms_eps))[:count]

    def _padding(self, rows: int) -> int:
        return self._sizes.pad(rows) - rows if self._sizes else 0

    def _attention(
        self,
        layer: _Layer,
        index: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        spans: Sequence[_Span],
        pool: KvPool,
    ) -> Tensor:
        spec = self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(rms_norm(x, layer.input_norm, spec.rms_eps)).view(-1, heads + 2 * kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = rms_norm(qkv[:, :heads], layer.q_norm, spec.rms_eps)
            keys = rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, spec.rms_eps)
            rotated = rotate(torch.cat((queries, keys), dim=1), cos, sin)
        else:
            rotated = rotate(qkv[:, : heads + kv_heads], cos, sin)
        total = slots.shape[0]
        pool.write(index, slots, rotated[:total, heads:], qkv[:total, heads + kv_heads :])
        queries = by_kv_head(rotated[:total, :heads], kv_heads, self._scale)
        own = queries.split([span.count * spec.group for span in spans], dim=1)
        outputs = [
            attend(part, *pool.read(index, span.start, span.key_len), span.mask)
            for part, span in zip(own, spans, strict=True)
        ]
        attended = by_position(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), total)
        if x.shape[0] > total:
            attended = F.pad(attended, (0, 0, 0, x.shape[0] - total))
        return layer.out(attended)

    def _spans(self, rows: Sequence[PassRow]) -> list[_Span]:
        """Split the pass into spans; in exact mode also where a row crosses into the next key block."""
        spans = []
        for row in rows:
            position, end = row.kv_len, row.kv_len + row.num_tokens
            while position < end:
                stop = min(end, round_up(position + 1, KEY_BLOCK)) if self.exact else end
                count = stop - position
                key_len = round_up(stop, KEY_BLOCK) if self.exact else stop
                mask = None
                if count > 1 or self.exact:
                    group, multiple = self.spec.group, self._row_multiple
                    mask = query_mask(position, count, key_len, group, multiple, self.dtype, self.device)
                spans.append(_Span(count, row.start, key_len, mask))
                position = stop
        return spans


class _Weights:
    """Reads checkpoint tensors with their expected shapes."""

    def __init__(self, tensors: Mapping[str, Tensor], spec: ModelSpec, device: torch.device, dtype: torch.dtype):
        self._tensors, self._device, self._dtype = tensors, device, dtype

    def raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"The checkpoint has no tensor {name}; the model folder is incomplete or damaged.")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"Tensor {name} has shape {tuple(tensor.shape)}; its config.json asks for {shape}.")
        return tensor

    def vector(self, name: str, size: int) -> Tensor:
        return self.raw(name, (size,)).to(self._device, self._dtype)


def _load_layer(load: _Weights, spec: ModelSpec, index: int, make: LinearFactory) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

    def stacked(names: Sequence[str], outs: Sequence[int], in_size: int, bias: bool) -> Linear:
        full = [prefix + name for name in names]
        weight = torch.cat([load.raw(f"{n}.weight", (out, in_size)) for n, out in zip(full, outs, strict=True)])
        if not bias:
            return make(weight, None)
        return make(weight, torch.cat([load.raw(f"{n}.bias", (out,)) for n, out in zip(full, outs, strict=True)]))

    qkv = stacked([f"self_attn.{p}_proj" for p in "qkv"], [q_size, kv_size, kv_size], hidden, spec.qkv_bias)
    return _Layer(
        input_norm=load.vector(prefix + "input_layernorm.weight", hidden),
        qkv=qkv,
        q_norm=load.vector(prefix + "self_attn.q_norm.weight", head_dim) if spec.qk_norm else None,
        k_norm=load.vector(prefix + "self_attn.k_norm.weight", head_dim) if spec.qk_norm else None,
        out=stacked(["self_attn.o_proj"], [hidden], q_size, spec.out_bias),
        post_norm=load.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=stacked(["mlp.gate_proj", "mlp.up_proj"], [spec.ffn_size] * 2, hidden, spec.mlp_bias),
        down=stacked(["mlp.down_proj"], [hidden], spec.ffn_size, spec.mlp_bias),
    )
