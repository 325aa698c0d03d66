"""Heads that begin by looking a fixed distance back.

What a drafter needs most is what the target knew just before the anchor. A fresh head spreads its attention over the
whole text, and a small drafter sees a hundred thousand blocks before one of its heads has learned to look there.

Queries and keys are normalised, so rows of a projection that are multiples of one direction give every input whose
product with that direction is positive the very same vector. A constant key, and the same vector turned back by the
rotary angles of d positions as constant query, have their largest product at distance d, whatever the text says. Only
the fastest rotary pairs take part: they tell neighbours apart, and distant positions average out.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.drafter import DrafterConfig
from dspark.target.layers import rms_norm

# Of the key/value heads in turn: slot k looks back k positions to the last one the target has run.
DISTANCES = (1, 2, 1, 3, 2, 1, 4)
_FREE = 2 / 9  # share of heads, at least one, that stay as they are, free to look for content
_SLOWEST = 0.15  # radians a position: slower rotary pairs cannot tell neighbours apart
_GAIN = 2**0.5  # of queries and keys: the next position's weight is then a tenth of the right one's
_RIDGE = 1e-3
_SURE = 0.99  # share of inputs that must be on the direction's positive side


def ridge(inputs: Float[Tensor, "N n"], wanted: Float[Tensor, "N m"], share: float) -> Float[Tensor, "n m"]:
    """Weights w with `inputs @ w` near `wanted`, in float64; `share` of the inputs' mean square is added."""
    x, y = inputs.double(), wanted.double()
    covariance = x.T @ x / len(x)
    covariance.diagonal().add_(share * covariance.diagonal().mean())
    return torch.linalg.solve(covariance, x.T @ y / len(x)).float()


def steady_direction(inputs: Float[Tensor, "N D"]) -> Float[Tensor, " D"] | None:
    """A direction with product near 1 with every input (ridge regression on the constant 1); None if there is none."""
    direction = ridge(inputs, inputs.new_ones(inputs.shape[0], 1), _RIDGE)[:, 0]
    return direction if float((inputs @ direction > 0).float().mean()) >= _SURE else None


def distance_heads(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    context: Float[Tensor, "N D"],
    embedded: Float[Tensor, "M D"],
    distances: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """New query and key weights of the first layer, whose first heads are to look back by `distances` (None: the usual
    ones for this many heads).

    `context` are samples of what keys are made from (after `hidden_norm`), `embedded` of a block's input. Later layers
    get inputs that nobody knows yet; and nothing is new when no steady direction is found.
    """
    queries_from = rms_norm(embedded, tensors["layers.0.input_layernorm.weight"], config.rms_eps)
    key_direction, query_direction = steady_direction(context), steady_direction(queries_from)
    if key_direction is None or query_direction is None:
        return {}
    names = {part: f"layers.0.self_attn.{part}_proj.weight" for part in "qk"}
    queries = tensors[names["q"]].clone().view(config.num_heads, config.head_dim, -1)
    keys = tensors[names["k"]].clone().view(config.num_kv_heads, config.head_dim, -1)
    group = config.num_heads // config.num_kv_heads
    for head, distance in enumerate(usual_distances(config.num_kv_heads) if distances is None else distances):
        key, query = constant_pair(config, distance)
        keys[head] = key[:, None] * key_direction
        queries[head * group : (head + 1) * group] = query[:, None] * query_direction
    gains = {f"layers.0.self_attn.{p}_norm.weight": torch.full((config.head_dim,), _GAIN) for p in "qk"}
    return {names["q"]: queries.flatten(0, 1), names["k"]: keys.flatten(0, 1), **gains}


def usual_distances(kv_heads: int) -> list[int]:
    """Distances of the first of `kv_heads` heads; the rest stay free."""
    looking = kv_heads - max(1, round(kv_heads * _FREE))
    return [DISTANCES[head % len(DISTANCES)] for head in range(looking)]


def constant_pair(
    config: DrafterConfig, distance: int
) -> tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]]:
    """(key, query) before rotation whose product after it is largest where the key stands `distance` behind."""
    half = config.head_dim // 2
    speed = config.rope_theta ** (-torch.arange(half).float() / half)
    size = (speed >= _SLOWEST).float()
    size *= (config.head_dim / size.sum()).sqrt()
    angle = distance * speed
    return torch.cat((size, torch.zeros(half))), torch.cat((size * angle.cos(), -size * angle.sin()))
