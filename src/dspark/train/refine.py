"""What the backbone sees in a refinement pass: blocks of its own samples in place of masks.

Serving with refinements feeds the sampled block back (`propose_block`), which helps only a backbone that has seen such
blocks. Some chunks, picked by (seed, step, number of the chunk), are therefore drafted first, without gradients, and
trained on what came out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.drafter import Drafter
from dspark.verify import mix64, request_key


@dataclass(frozen=True)
class Refinement:
    """How a chunk's blocks are drafted: at which temperature (0 is greedy), and with which randomness."""

    temperature: float
    generator: torch.Generator


def refinement(
    probability: float, seed: int, step: int, chunk: int, temperature: float, device: torch.device
) -> Refinement | None:
    """Whether chunk number `chunk` of a step is refined, as a function of these numbers; None keeps its masks."""
    key = mix64(request_key(seed, step) + chunk)
    if (key >> 32) * 2.0**-32 >= probability:
        return None
    return Refinement(temperature, torch.Generator(device).manual_seed(key & 0xFFFFFFFF))


@torch.no_grad()
def drafted_blocks(
    drafter: Drafter,
    context: Float[Tensor, "T L*D"],
    tokens: Int[Tensor, " A"],
    anchors: Int[Tensor, " A"],
    how: Refinement,
) -> Int[Tensor, "A K"]:
    """Input ids of a refinement pass: the anchors' `tokens`, then what the drafter samples after them from a pass
    over masks."""
    ids = drafter.masked_block(tokens)
    hidden = drafter.backbone.block_hidden(context, drafter.embed(ids), anchors)
    base = drafter.base_logits(hidden[:, :-1])
    state = drafter.head.start(hidden[:, 0])
    for slot in range(base.shape[1]):
        embedded = drafter.head.embed(ids[:, slot], like=hidden)
        bias, state = drafter.head.step(state, embedded, hidden[:, slot])
        logits = base[:, slot] + bias
        if how.temperature == 0:
            drafted = logits.argmax(dim=-1)
        else:
            probs = (logits / how.temperature).softmax(dim=-1)
            drafted = torch.multinomial(probs, 1, generator=how.generator).squeeze(-1)
        ids[:, slot + 1] = drafted if drafter.vocabulary is None else drafter.vocabulary.ids[drafted]
    return ids
