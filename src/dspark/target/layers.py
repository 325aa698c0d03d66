"""The small pieces every decoder of the Llama family is made of, as plain functions.

Each gives a row bits that do not depend on the other rows of the call; `tests/target/test_exact.py` holds them to it.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

NEG_INF = float("-inf")


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*rows D"]:
    """`x / sqrt(mean(x^2) + eps) * weight`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(
    x: Float[Tensor, "T heads head_dim"], cos: Float[Tensor, "T 1 head_dim"], sin: Float[Tensor, "T 1 head_dim"]
) -> Float[Tensor, "T heads head_dim"]:
    """Rotary position embedding, half-split layout; the first half of `sin` carries the minus sign."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def by_kv_head(
    queries: Float[Tensor, "n heads head_dim"], kv_heads: int, scale: float
) -> Float[Tensor, "kv_heads n*group head_dim"]:
    """Queries as `attend` takes them: scaled, and for each key head its group of query heads, position after position.

    Done once for all requests of a pass, since consecutive positions stay together.
    """
    n, heads, head_dim = queries.shape
    grouped = (queries * scale).view(n, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
    return grouped.reshape(kv_heads, n * (heads // kv_heads), head_dim)


def by_position(outputs: Float[Tensor, "kv_heads n*group head_dim"], n: int) -> Float[Tensor, "n heads*head_dim"]:
    """What `attend` gives, back in the order of positions."""
    kv_heads, rows, head_dim = outputs.shape
    split = outputs.view(kv_heads, n, rows // n, head_dim).transpose(0, 1)
    return split.reshape(n, kv_heads * (rows // n) * head_dim)


def attend(
    queries: Float[Tensor, "kv_heads rows head_dim"],
    keys: Float[Tensor, "kv_heads head_dim S"],
    values: Float[Tensor, "kv_heads S head_dim"],
    mask: Float[Tensor, "m S"] | None,
) -> Float[Tensor, "kv_heads rows head_dim"]:
    """Grouped-query attention of one request as two batched matrix products; queries as `by_kv_head` gives them.

    `mask` (0 or -inf) has one row per row of queries, plus padding rows that make the products' kernels row-invariant
    (see `query_mask`); None means every key is seen.
    """
    if mask is None:
        return torch.bmm(torch.softmax(torch.bmm(queries, keys), -1), values)
    rows = queries.shape[1]
    if mask.shape[0] > rows:
        queries = F.pad(queries, (0, 0, 0, mask.shape[0] - rows))
    return torch.bmm(torch.softmax(torch.baddbmm(mask, queries, keys), -1), values)[:, :rows]


def query_mask(
    first: int, n: int, key_len: int, group: int, row_multiple: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "m S"]:
    """Causal mask of query positions first..first+n-1 over keys 0..key_len-1, for `attend`.

    Each position stands `group` times; rows are then padded to a multiple of `row_multiple`.
    """
    rows = n * group
    padded = -(-rows // row_multiple) * row_multiple
    last_seen = torch.arange(padded, device=device).div_(group, rounding_mode="floor").add_(first)
    keys = torch.arange(key_len, device=device)
    mask = torch.zeros(padded, key_len, dtype=dtype, device=device)
    return mask.masked_fill_(keys[None, :] > last_seen[:, None], NEG_INF)


def rope_tables(
    inv_freq: Float[Tensor, " half"], length: int, attention_scale: float, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "L 1 head_dim"], Float[Tensor, "L 1 head_dim"]]:
    """Cosines and signed sines for positions 0..length-1, computed in float32 as transformers does."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq[None, :].float()
    cos, sin = angles.cos() * attention_scale, angles.sin() * attention_scale
    table_cos = torch.cat((cos, cos), -1)[:, None, :].to(device, dtype)
    table_sin = torch.cat((-sin, sin), -1)[:, None, :].to(device, dtype)
    return table_cos, table_sin
