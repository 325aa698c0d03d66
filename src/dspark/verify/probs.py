"""The one definition of a sampling distribution, for target and drafter alike.

Order, as in vLLM's sampler: allowed tokens and grammar, min_tokens, logit bias, penalties (repetition, frequency,
presence); then, unless greedy, temperature, min_p, top_k, top_p. Where tokens tie, the smaller id comes first, so
exactly k tokens survive top_k and greedy equals top_k = 1.

A row's result depends, bitwise, on that row alone.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.config import SamplingParams, SlotRule
from dspark.errors import RequestError
from dspark.verify.largest import largest_ids

_INF = float("inf")
_NUCLEUS_WIDTH = 4096  # most nuclei are smaller, and ranking so few costs a fifth of sorting a vocabulary of 49152


def processed_logits(logits: Float[Tensor, "N V"], rules: Sequence[SlotRule]) -> Float[Tensor, "N V"]:
    """Logits after masks, bias, min_tokens and penalties: what greedy decoding takes the argmax of.

    Half precision comes back as float32. The input is never modified, but is returned itself when no rule edits it.

    Raises:
        RequestError: nothing is left of a row, or its logits are not numbers; or a rule names a token outside the
            vocabulary.
    """
    if len(rules) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits need as many rules, got {len(rules)}.")
    result = _at_least_float32(logits)
    edited = [row for row, rule in enumerate(rules) if _edits(rule)]
    if edited:
        result = result.clone() if result is logits else result
        for row in edited:
            _edit(result[row], rules[row])
    if not result.amax(dim=-1).isfinite().all():
        raise RequestError(
            "No token is possible, because allowed tokens, grammar and min_tokens together exclude the whole "
            "vocabulary (or the model's logits are not numbers); allow at least one more token."
        )
    return result


def processed_probs(logits: Float[Tensor, "N V"], rules: Sequence[SlotRule]) -> Float[Tensor, "N V"]:
    """The distribution each row's token is drawn from: p of a target row, q of a draft row.

    At temperature 0 it is one-hot at the largest logit (the first one on ties). Half precision comes back as float32.
    The input is not modified.

    Raises:
        RequestError: as `processed_logits`.
    """
    logits = processed_logits(logits, rules)
    params = [rule.params for rule in rules]
    greedy = [row for row, p in enumerate(params) if p.greedy]
    if len(greedy) == len(rules):
        return _one_hot(logits)
    if not greedy:
        return _sampling_probs(logits, params)
    sampled = [row for row, p in enumerate(params) if not p.greedy]
    probs = torch.empty_like(logits)
    probs[greedy] = _one_hot(logits[greedy])
    probs[sampled] = _sampling_probs(logits[sampled], [params[row] for row in sampled])
    return probs


def log_probs(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Natural logarithms of the model's own, unprocessed distribution: what requests see as logprobs."""
    return _at_least_float32(logits).log_softmax(dim=-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


# --- edits of single rows -------------------------------------------------------------------------------------------


def _edits(rule: SlotRule) -> bool:
    params = rule.params
    return bool(
        rule.mask is not None
        or _allowed_ids(rule) is not None
        or _ends_forbidden(rule)
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


def _ends_forbidden(rule: SlotRule) -> bool:
    return len(rule.output_ids) < rule.params.min_tokens and len(rule.end_ids) > 0


def _allowed_ids(rule: SlotRule) -> Collection[int] | None:
    always, here = rule.params.allowed_token_ids, rule.allowed_ids
    if always is None or here is None:
        return here if always is None else always
    return set(always).intersection(here)


def _edit(row: Float[Tensor, " V"], rule: SlotRule) -> None:
    """Apply one rule to one row, in place."""
    params = rule.params
    if rule.mask is not None:
        row.masked_fill_(~rule.mask.to(row.device), -_INF)
    allowed = _allowed_ids(rule)
    if allowed is not None:
        index = _index(allowed, row)
        kept = row[index]
        row.fill_(-_INF)
        row[index] = kept
    if _ends_forbidden(rule):
        row[_index(rule.end_ids, row)] = -_INF
    if params.logit_bias:
        row[_index(params.logit_bias.keys(), row)] += row.new_tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1:
        seen = _index({*rule.prompt_ids, *rule.output_ids}, row)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(rule.output_ids)
        penalties = [params.frequency_penalty * n + params.presence_penalty for n in counts.values()]
        row[_index(counts.keys(), row)] -= row.new_tensor(penalties)


def _index(token_ids: Collection[int], row: Float[Tensor, " V"]) -> Int[Tensor, " S"]:
    ids, last = list(token_ids), row.shape[0] - 1
    for extreme in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= extreme <= last:  # a negative id would silently index from the end
            raise RequestError(f"Token id {extreme} is outside the vocabulary; allowed are 0 to {last}.")
    return torch.tensor(ids, dtype=torch.long, device=row.device)


# --- from logits to probabilities -----------------------------------------------------------------------------------


def _one_hot(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    return torch.zeros_like(logits).scatter_(1, largest_ids(logits)[:, None], 1.0)


def _sampling_probs(logits: Float[Tensor, "N V"], params: Sequence[SamplingParams]) -> Float[Tensor, "N V"]:
    by_cut: dict[tuple[float, int, float], list[int]] = defaultdict(list)
    for row, p in enumerate(params):
        if p.min_p > 0 or 0 < p.top_k < logits.shape[1] or p.top_p < 1:
            by_cut[p.min_p, p.top_k, p.top_p].append(row)
    if not by_cut and all(p.temperature == 1 for p in params):
        return logits.softmax(dim=-1)
    # With the largest logit at 0 an extreme temperature gives -inf elsewhere, never inf or nan.
    limits = torch.finfo(logits.dtype)
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64).clamp(limits.tiny, limits.max)
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= temperature.to(logits)[:, None]
    for cut, rows in by_cut.items():
        if len(rows) == len(params):
            _truncate(scaled, *cut)
        else:
            part = scaled[rows]
            _truncate(part, *cut)
            scaled[rows] = part
    return scaled.softmax(dim=-1)


def _truncate(scaled: Float[Tensor, "N V"], min_p: float, top_k: int, top_p: float) -> None:
    """Put -inf, in place, where min_p, top_k and top_p remove a token. Every row's largest value is 0."""
    if min_p > 0:
        scaled.masked_fill_(scaled < math.log(min_p), -_INF)  # p / p_max = exp(scaled)
    if 0 < top_k < scaled.shape[1]:
        counts = torch.full((scaled.shape[0], 1), top_k, device=scaled.device)
        _keep_largest(scaled, scaled.topk(top_k, dim=-1).values, counts)
    if top_p < 1:
        _keep_largest(scaled, *_nucleus(scaled, top_p))


def _nucleus(scaled: Float[Tensor, "N V"], top_p: float) -> tuple[Float[Tensor, "N M"], Int[Tensor, "N 1"]]:
    """Leading values in falling order, and how many of them it takes to reach the mass `top_p`."""
    probs = scaled.softmax(dim=-1)
    ranked, ids = scaled.topk(min(_NUCLEUS_WIDTH, scaled.shape[1]), dim=-1)
    mass = probs.gather(1, ids).cumsum(dim=-1, dtype=torch.float64)
    if not (mass[:, -1] >= top_p).all():
        # Wider, the leading sums keep their bits: the other rows of this call see no difference.
        ranked, ids = scaled.sort(dim=-1, descending=True)
        mass = probs.gather(1, ids).cumsum(dim=-1, dtype=torch.float64)
    counts = (mass < top_p).sum(dim=-1, keepdim=True) + 1
    return ranked, counts.clamp_max(ranked.shape[1])


def _keep_largest(values: Float[Tensor, "N V"], ranked: Float[Tensor, "N M"], counts: Int[Tensor, "N 1"]) -> None:
    """Put -inf, in place, on all but the `counts` largest of each row, smaller ids first among equals.

    `ranked` holds each row's largest values in falling order.
    """
    edge = ranked.gather(1, counts - 1)
    keep = values >= edge
    if (keep.count_nonzero(dim=-1) > counts.squeeze(1)).any():  # tokens tie at the edge, and not all of them fit
        above, tied = values > edge, values == edge
        room = counts - above.count_nonzero(dim=-1)[:, None]
        keep = above | (tied & (tied.cumsum(dim=-1) <= room))
    values.masked_fill_(~keep, -_INF)
