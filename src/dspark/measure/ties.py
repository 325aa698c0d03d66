"""Where two decodings of one prompt part: a near-tie that rounding turned, or a fault?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.config import SamplingParams, SlotRule
from dspark.target import PassRow, Target
from dspark.verify import gumbel, processed_probs, request_key


@dataclass(frozen=True, slots=True)
class Difference:
    """First position at which two answers differ.

    `gap` is how far apart the two tokens' scores are (logits / temperature, plus noise when sampling), computed
    afresh; `noise` is what pass size alone changes in a score. A difference is a tie when the gap is not above twice
    the noise: each of the two scores can move by that much.
    """

    prompt: int
    position: int
    token_a: int
    token_b: int
    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= 2 * self.noise


@torch.inference_mode()
def kernel_noise(target: Target, ids: Sequence[int]) -> float:
    """Largest change of a logit of these tokens between one pass over all and one pass each."""
    decoder, tokens = target.decoder, torch.tensor(list(ids), device=target.decoder.device)
    pool = decoder.new_pool(len(ids) + 128)
    whole = decoder.logits(decoder.run(tokens, [PassRow(0, 0, len(ids))], pool)[0])
    single = [decoder.logits(decoder.run(tokens[i : i + 1], [PassRow(0, i, 1)], pool)[0]) for i in range(len(ids))]
    return float((torch.cat(single) - whole).abs().max())


def differences(
    target: Target,
    prompts: Sequence[Sequence[int]],
    answers_a: Sequence[Sequence[int]],
    answers_b: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[Difference]:
    """Compare answers prompt by prompt; `params` greedy, or seeded without top_k, top_p, min_p and penalties."""
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, answers_a, answers_b, strict=True)):
        parted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if parted is None:
            if len(a) != len(b):
                shorter = min(len(a), len(b))
                found.append(Difference(index, shorter, -1, -1, float("inf"), 0.0))
            continue
        ids = [*prompt, *a[:parted]]
        scores = _scores(target, ids, params)
        noise = kernel_noise(target, ids[-64:]) / (params.temperature or 1.0)
        gap = abs(float(scores[a[parted]] - scores[b[parted]]))
        found.append(Difference(index, parted, a[parted], b[parted], gap, noise))
    return found


@torch.inference_mode()
def _scores(target: Target, ids: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """What decoding takes the argmax of after `ids`, over the whole vocabulary."""
    decoder = target.decoder
    pool = decoder.new_pool(len(ids) + 128)
    hidden, _ = decoder.run(torch.tensor(list(ids), device=decoder.device), [PassRow(0, 0, len(ids))], pool)
    logits = decoder.logits(hidden[-1:])
    if params.greedy:
        return logits[0].double()
    assert params.seed is not None
    probs = processed_probs(logits, [SlotRule(params)])[0]
    noise = gumbel(request_key(params.seed), len(ids), torch.arange(probs.shape[0], device=probs.device))
    return probs.double().log() + noise
