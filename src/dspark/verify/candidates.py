"""Several candidates for one position (a node of a tree and its children).

Which rule is right depends only on how the children came about:

- a function of the past (the drafter's top m, lookup): `accept_fixed_children`;
- drawn without replacement from q, their number fixed before drawing: `accept_sampled_children`
  (recursive rejection sampling without replacement, Jeon et al. 2024, arXiv 2402.14160).

The second rule on top-m children is biased: it divides by a q they were not drawn from.
"""

from collections.abc import Sequence

from jaxtyping import Float, Float64
from torch import Tensor

from dspark.verify.accept import accept_prob, residual
from dspark.verify.noise import draw


def accept_fixed_children(
    p: Float[Tensor, " V"], children: Sequence[int], gumbel_noise: Float64[Tensor, " V"]
) -> tuple[int | None, int]:
    """Draw y from p and follow the child that equals it.

    Returns the index of that child, None without one, and y. `gumbel_noise` is standard Gumbel noise of all token ids
    (with the position-keyed noise of rule `coupled`, y is plain decoding's token).
    """
    token = draw(p, lambda ids: gumbel_noise[ids])
    return (children.index(token) if token in children else None), token


def accept_sampled_children(
    p: Float[Tensor, " V"],
    q: Float[Tensor, " V"],
    children: Sequence[int],
    uniforms: Sequence[float],
    gumbel_noise: Float64[Tensor, " V"],
) -> tuple[int | None, int]:
    """Try children drawn from q without replacement, in the order they were drawn.

    `uniforms` holds one number in (0, 1) per child; `gumbel_noise` one value per token id for the final draw. All are
    independent of each other and of the drawing of the children. Returns the index of the child kept (None without
    one) and the token.

    Raises:
        ValueError: a child cannot have been drawn from q, or there are not as many uniforms as children.
    """
    keep, rest = sampled_children_rule(p, q, children)
    for index, (chance, u) in enumerate(zip(keep, uniforms, strict=True)):
        if u < chance:
            return index, children[index]
    return None, draw(rest, lambda ids: gumbel_noise[ids])


def sampled_children_rule(
    p: Float[Tensor, " V"], q: Float[Tensor, " V"], children: Sequence[int]
) -> tuple[list[float], Float64[Tensor, " V"]]:
    """Probability of keeping each child given that all before it were rejected, and the distribution when all are.

    p_1 = p, q_1 = q; child x_i is kept with min(1, p_i(x_i)/q_i(x_i)); p_{i+1} = norm(max(0, p_i - q_i)), or p_i
    where that has no mass; q_{i+1} = q_i without x_i, renormalised.

    Raises:
        ValueError: a child cannot have been drawn from q (it has no probability there, or comes twice).
    """
    p, q = p.double(), q.double()
    keep = []
    for child in children:
        if not q[child] > 0:
            raise ValueError(f"child {child} has no probability left in q; children must be drawn from q.")
        keep.append(accept_prob(float(p[child]), float(q[child])))
        p, q = residual(p, q), _without(q, child)
    return keep, p


def _without(q: Float64[Tensor, " V"], token: int) -> Float64[Tensor, " V"]:
    rest = q.clone()
    rest[token] = 0.0
    mass = rest.sum()
    return rest / mass if mass > 0 else rest
