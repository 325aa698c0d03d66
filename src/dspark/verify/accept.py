"""How many draft tokens stay, and which token follows them.

Two rules, chosen per row. Both leave the target's distribution untouched:

- `rejection` (Leviathan et al. 2023, Chen et al. 2023): keep x with probability min(1, p(x)/q(x)); at the first
  rejection draw from max(0, p - q); after a full accept draw one more token from p.
- `coupled` (shared-Gumbel coupling, arXiv 2408.07978): at every position the target's token is fixed by noise that
  belongs to the position; a draft token is kept when it is that token. The text is that of plain decoding.

Plain decoding is the case of no draft tokens.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.config import Draft, Streams, Verdict
from dspark.verify.noise import ACCEPT, DRAFT, RECOVER, draw, gumbel, stream_gumbel, uniform


def accept(draft: Draft, target_probs: Float[Tensor, "N V"], streams: Streams) -> Verdict:
    """Verify a batch of chains.

    `target_probs` are the processed distributions of all slots, row after row: row r of the batch owns
    `draft.lens[r] + 1` of them, for its draft slots and the token after them. N = sum(lens) + B.

    Raises:
        ValueError: the draft is a tree, or sizes do not fit.
    """
    if draft.parents is not None:
        raise ValueError("accept verifies chains, not trees; use dspark.verify.candidates at each node of a tree.")
    if target_probs.shape[0] != sum(draft.lens) + len(draft.lens):
        raise ValueError(
            f"drafts of lengths {draft.lens} need {sum(draft.lens) + len(draft.lens)} target rows, "
            f"got {target_probs.shape[0]}."
        )
    results = [
        _coupled(chain) if coupled else _rejection(chain)
        for chain, coupled in zip(_chains(draft, target_probs, streams), streams.coupled, strict=True)
    ]
    return Verdict(tuple(kept for kept, _ in results), tuple(token for _, token in results))


def accept_prob(p_x: float, q_x: float) -> float:
    """Probability min(1, p(x)/q(x)) of keeping a token x drawn from q; q(x) = 1 for point masses.

    A token the target cannot produce is never kept, whatever rounding did to q(x).
    """
    return p_x / q_x if p_x < q_x else float(p_x > 0)


def residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"] | int) -> Float[Tensor, " V"]:
    """The distribution after a rejection: max(0, p - q) normalised, in float64. An int is a point mass at that id.

    Never process it again: it is what is missing from q to p, not a model's opinion. Where rounding leaves no mass
    (q is p up to the last bit) the answer is p.
    """
    p = p.double()
    if isinstance(q, int):
        rest = p.clone()
        rest[q] = 0.0
    else:
        rest = (p - q.double()).clamp_min_(0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def sample_draft(q: Float[Tensor, "B V"], streams: Streams, slot: int) -> Int[Tensor, " B"]:
    """How a drafter draws its token number `slot` (0-based) from its processed distributions, one row per request.

    Rows of rule `coupled` meet the noise the target will meet at that position; rows of rule `rejection` a stream
    of their own. Drafters touch no other randomness.
    """
    tokens = [
        draw(
            row,
            partial(gumbel, streams.keys[r], streams.positions[r] + slot)
            if streams.coupled[r]
            else partial(stream_gumbel, streams.keys[r], DRAFT, streams.steps[r], slot),
        )
        for r, row in enumerate(q)
    ]
    return torch.tensor(tokens, dtype=torch.long, device=q.device)


@dataclass(frozen=True)
class _Chain:
    """One row's draft: its tokens, their p(x) and q(x), and what a further draw needs."""

    ids: list[int]
    p_x: list[float]
    q_x: list[float]
    p: Float[Tensor, "n_plus_1 V"]
    q: Float[Tensor, "n V"] | None  # None: point masses
    key: int
    position: int
    step: int


def _chains(draft: Draft, target_probs: Float[Tensor, "N V"], streams: Streams) -> list[_Chain]:
    lens = draft.lens
    starts = list(accumulate((n + 1 for n in lens), initial=0))
    rows = [r for r, n in enumerate(lens) for _ in range(n)]
    slots = [k for n in lens for k in range(n)]
    ids = draft.ids[rows, slots]
    flat = [starts[r] + k for r, k in zip(rows, slots, strict=True)]
    # One gather and one transfer for the whole batch; most rows need nothing else but their last draw.
    tokens = ids.tolist()
    p_x = target_probs[flat, ids].tolist()
    q_x = [1.0] * len(tokens) if draft.probs is None else draft.probs[rows, slots, ids].tolist()
    chains = []
    for r, n in enumerate(lens):
        here = slice(starts[r] - r, starts[r] - r + n)  # each earlier row has one target row more than draft tokens
        chains.append(
            _Chain(
                tokens[here],
                p_x[here],
                q_x[here],
                target_probs[starts[r] : starts[r + 1]],
                None if draft.probs is None else draft.probs[r, :n],
                streams.keys[r],
                streams.positions[r],
                streams.steps[r],
            )
        )
    return chains


def _rejection(chain: _Chain) -> tuple[int, int]:
    for slot, token in enumerate(chain.ids):
        if uniform(chain.key, ACCEPT, chain.step, slot) >= accept_prob(chain.p_x[slot], chain.q_x[slot]):
            probs = residual(chain.p[slot], token if chain.q is None else chain.q[slot])
            break
    else:
        slot, probs = len(chain.ids), chain.p[-1]
    return slot, draw(probs, partial(stream_gumbel, chain.key, RECOVER, chain.step, slot))


def _coupled(chain: _Chain) -> tuple[int, int]:
    # Slot by slot and no further than the first mismatch: noise over a whole vocabulary is the cost here.
    for slot, token in enumerate(chain.ids):
        if chain.p_x[slot] >= 1:  # the only possible token; `draw` would say so without noise
            continue
        target = draw(chain.p[slot], partial(gumbel, chain.key, chain.position + slot))
        if target != token:
            return slot, target
    last = len(chain.ids)
    return last, draw(chain.p[last], partial(gumbel, chain.key, chain.position + last))
