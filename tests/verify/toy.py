"""Tiny language models whose every sequence can be enumerated, and the decoding loop over them.

A model here is a function from a prefix (tuple of token ids) to a distribution over V tokens, or to an int: a point
mass at that id. Distributions of sequences are dicts from tuples to probabilities.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

from dspark.config import Draft, SamplingParams, SlotRule, Streams
from dspark.verify import accept, accept_prob, processed_probs, request_key, residual, sample_draft

V = 4
PROMPT = (1, 3, 3)

Prefix = tuple[int, ...]
Model = Callable[[Prefix], Tensor | int]
Sequences = dict[Prefix, float]


def table_logits(prefix: Prefix, salt: int, spread: float = 1.5) -> Tensor:
    """Fixed random float64 logits of a prefix."""
    name = salt
    for token in prefix:
        name = name * (V + 1) + token + 1
    return torch.randn(V, generator=torch.Generator().manual_seed(name), dtype=torch.float64) * spread


def make_model(
    salt: int,
    params: SamplingParams | None = None,
    allowed_ids: Sequence[int] | None = None,
    end_ids: Sequence[int] = (),
    vocabulary: Sequence[int] | None = None,
) -> Model:
    """A model that samples with `params`, the history of every slot included; `vocabulary` cuts its head."""

    @cache
    def model(prefix: Prefix) -> Tensor:
        logits = table_logits(prefix, salt)
        if vocabulary is not None:
            logits[[token for token in range(V) if token not in vocabulary]] = -torch.inf
        rule = SlotRule(params or SamplingParams(), PROMPT, prefix, end_ids, allowed_ids)
        return processed_probs(logits[None], [rule])[0]

    return model


def make_lookup(salt: int) -> Model:
    """Point masses, as lookup and greedy drafts are."""
    return lambda prefix: int(table_logits(prefix, salt).argmax())


def dense(distribution: Tensor | int) -> Tensor:
    if isinstance(distribution, int):
        return torch.nn.functional.one_hot(torch.tensor(distribution), V).double()
    return distribution


# --- exact enumeration ----------------------------------------------------------------------------------------------


def plain_sequences(p: Model, length: int, prefix: Prefix = ()) -> Sequences:
    """The distribution of sequences of `length` tokens that start with `prefix`."""
    if len(prefix) >= length:
        return {prefix[:length]: 1.0}
    result: Sequences = {}
    for token, chance in enumerate(dense(p(prefix)).tolist()):
        if chance > 0:
            for sequence, rest in plain_sequences(p, length, (*prefix, token)).items():
                result[sequence] = chance * rest
    return result


def verify_all(block: Prefix, q: Model) -> int:
    return len(block)


def speculative_sequences(
    p: Model,
    q: Model,
    k: int,
    *,
    claimed_q: Model | None = None,
    plan: Callable[[Prefix, Model], int] = verify_all,
    keep_chance: Callable[[float, float], float] = accept_prob,
    rest: Callable[[Tensor, Tensor | int], Tensor] = residual,
) -> Sequences:
    """The distribution of k + 1 tokens: one speculative step by rule `rejection`, finished by plain decoding.

    The block is drawn from q; `plan` then looks at the whole of it and says how many tokens are verified, against
    `claimed_q` (q itself in every right variant).
    """
    claimed_q = claimed_q or q
    result: Sequences = {}

    def finish(prefix: Prefix, chance: float) -> None:
        for sequence, tail in plain_sequences(p, k + 1, prefix).items():
            result[sequence] = result.get(sequence, 0.0) + chance * tail

    for block in product(range(V), repeat=k):
        chance = 1.0
        for slot, token in enumerate(block):
            chance *= float(dense(q(block[:slot]))[token])
        if chance == 0:
            continue
        length = plan(block, q)
        for slot, token in enumerate(block[:length]):
            target, drafter = dense(p(block[:slot])), claimed_q(block[:slot])
            keep = keep_chance(float(target[token]), float(dense(drafter)[token]))
            if keep < 1:
                for other, share in enumerate(rest(target, drafter).tolist()):
                    if share > 0:
                        finish((*block[:slot], other), chance * (1 - keep) * share)
            chance *= keep
        finish(block[:length], chance)
    return result


def distance(one: Sequences, other: Sequences) -> float:
    """Largest difference of the probability of any sequence."""
    return max(abs(one.get(s, 0.0) - other.get(s, 0.0)) for s in {*one, *other})


# --- decoding through the public door -------------------------------------------------------------------------------

Drafter = Callable[[list[Prefix], Streams, int], Draft]


def sampling_drafter(q: Model, draw: Callable[[Tensor, Streams, int], Tensor] = sample_draft) -> Drafter:
    """Drafts k tokens slot by slot from q."""

    def propose(prefixes: list[Prefix], streams: Streams, k: int) -> Draft:
        paths, probs = list(prefixes), []
        for slot in range(k):
            rows = torch.stack([dense(q(path)) for path in paths])
            tokens = draw(rows, streams, slot).tolist()
            paths = [(*path, token) for path, token in zip(paths, tokens, strict=True)]
            probs.append(rows)
        ids = torch.tensor([path[len(path) - k :] for path in paths], dtype=torch.long)
        return Draft(ids, (k,) * len(paths), torch.stack(probs, dim=1) if k else None)

    return propose


def lookup_drafter(guess: Model) -> Drafter:
    """Drafts point masses."""

    def propose(prefixes: list[Prefix], streams: Streams, k: int) -> Draft:
        paths = list(prefixes)
        for _ in range(k):
            paths = [(*path, int(dense(guess(path)).argmax())) for path in paths]
        ids = torch.tensor([path[len(path) - k :] for path in paths], dtype=torch.long).reshape(len(paths), k)
        return Draft(ids, (k,) * len(paths))

    return propose


def decode(
    p: Model,
    drafter: Drafter,
    k: int,
    seeds: Sequence[int],
    length: int,
    coupled: bool,
    streams_of: Callable[[Streams], Streams] = lambda streams: streams,
) -> list[Prefix]:
    """`length` tokens for every seed, all in one batch. k = 0 is plain decoding."""
    texts: list[Prefix] = [()] * len(seeds)
    steps = [0] * len(seeds)
    while open_rows := [row for row, text in enumerate(texts) if len(text) < length]:
        prefixes = [texts[row] for row in open_rows]
        streams = streams_of(
            Streams(
                (coupled,) * len(open_rows),
                tuple(request_key(seeds[row]) for row in open_rows),
                tuple(len(PROMPT) + len(prefix) for prefix in prefixes),
                tuple(steps[row] for row in open_rows),
            )
        )
        draft = drafter(prefixes, streams, k)
        ids = draft.ids.tolist()
        slots = [(*prefix, *block[:n]) for prefix, block in zip(prefixes, ids, strict=True) for n in range(k + 1)]
        verdict = accept(draft, torch.stack([dense(p(slot)) for slot in slots]), streams)
        for i, row in enumerate(open_rows):
            texts[row] = (*texts[row], *ids[i][: verdict.num_accepted[i]], verdict.next_ids[i])
            steps[row] += 1
    return [text[:length] for text in texts]
