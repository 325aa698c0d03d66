"""Acceptance by rolling out real blocks: the served drafter drafts inside held-out text the target wrote.

Blocks go through the served path, `propose_block` on a cached context, not the training pass.

- T = 0: the target's text is what it would say after any of its prefixes, so the leading draft tokens equal to the
  text are those the target would accept; no target pass is needed beyond its taps.
- T = 1: a block is sampled inside text written at T = 1 and the target runs on it. Rule `rejection` without warpers
  keeps draft token x with min(1, p(x)/q(x)), so the product of these is the exact probability that a drafted chain
  survives; summing it in place of coin tosses counts the same with less noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch
from torch import Tensor

from dspark.config import SamplingParams, SlotRule, Streams
from dspark.data import Corpus
from dspark.drafter import Drafter, propose_block
from dspark.target import Decoder, PassRow
from dspark.target.kv import KEY_BLOCK
from dspark.train.features import PASS_TOKENS, Features
from dspark.verify import accept_prob, processed_probs, request_key

_GREEDY, _SAMPLED = SlotRule(SamplingParams(temperature=0)), SlotRule(SamplingParams(temperature=1))
_SAMPLED_FROM = 0.99  # text written at this temperature or above counts as T = 1
_ANCHORS_PER_TEXT = 4  # at T = 1, where each text costs a pass of the target over it


class FeatureSource(Protocol):
    def __getitem__(self, index: int) -> Features: ...


@dataclass(frozen=True)
class Rollout:
    """`survived[k-1]` blocks of `blocks` had their first k draft tokens accepted; at T = 1 the expected number."""

    blocks: int
    survived: tuple[float, ...]

    def acceptance_length(self, drafts: int) -> float:
        """Tokens kept per step with `drafts` draft tokens: accepted ones and the target's own."""
        return 1 + sum(self.survived[:drafts]) / max(1, self.blocks)

    @property
    def slot_acceptance(self) -> tuple[float, ...]:
        """Per slot: accepted, of the blocks in which every slot before was."""
        before = (self.blocks, *self.survived[:-1])
        return tuple(s / b if b else 0.0 for s, b in zip(self.survived, before, strict=True))


def rollout_anchors(corpus: Corpus, block_size: int, blocks: int, seed: int) -> dict[int, list[int]]:
    """About `blocks` anchors in sequences written at temperature 0, ascending per sequence.

    Every block lies wholly inside its response, so that each slot is judged on all blocks.
    """
    places = [
        (i, p)
        for i in range(len(corpus))
        if corpus.temperatures[i] == 0
        for p in range(corpus.prompt_lens[i], corpus.length(i) - block_size)
    ]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:blocks].sort().values
    chosen: dict[int, list[int]] = {}
    for place in order.tolist():
        sequence, anchor = places[place]
        chosen.setdefault(sequence, []).append(anchor)
    return chosen


def sampled_anchors(corpus: Corpus, block_size: int, blocks: int, seed: int) -> dict[int, list[int]]:
    """At most `blocks` anchors in sequences written at temperature 1, a few in each, ascending per sequence."""
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[int, list[int]] = {}
    left = blocks
    for i in torch.randperm(len(corpus), generator=generator).tolist():
        places = range(corpus.prompt_lens[i], corpus.length(i) - block_size)
        if corpus.temperatures[i] < _SAMPLED_FROM or not places or not left:
            continue
        few = torch.randperm(len(places), generator=generator)[: min(left, _ANCHORS_PER_TEXT)]
        chosen[i] = sorted(places[j] for j in few.tolist())
        left -= len(few)
    return chosen


def roll_out(drafter: Drafter, features: FeatureSource, corpus: Corpus, anchors: dict[int, list[int]]) -> Rollout:
    """Draft a block at every anchor and count the accepted prefixes."""
    block = drafter.config.block_size
    survived = [0.0] * block
    for sequence, places in anchors.items():
        for accepted in _accepted(drafter, features[sequence], corpus.sequence(sequence).tolist(), places):
            for slot in range(accepted):
                survived[slot] += 1
    return Rollout(sum(map(len, anchors.values())), tuple(survived))


def _accepted(drafter: Drafter, features: Features, ids: Sequence[int], anchors: Sequence[int]) -> list[int]:
    """Accepted draft tokens of each block of one sequence; the context grows from anchor to anchor."""
    block = drafter.config.block_size
    pool = drafter.new_pool(len(ids) + block)
    taps = features.taps.to(drafter.dtype)
    done, counts = 0, []
    for anchor in anchors:
        if anchor > done:
            drafter.append_context(taps[done:anchor], [PassRow(0, done, anchor - done)], pool)
            done = anchor
        draft = propose_block(
            drafter,
            torch.tensor([ids[anchor]], device=drafter.device),
            [PassRow(0, anchor, block)],
            pool,
            [block],
            lambda slot, drafted: [_GREEDY],
            Streams((False,), (0,), (anchor + 1,), (0,)),
        )
        guesses, labels = draft.ids[0].tolist(), ids[anchor + 1 : anchor + 1 + block]
        wrong = (k for k, (guess, label) in enumerate(zip(guesses, labels, strict=True)) if guess != label)
        counts.append(next(wrong, block))
    return counts


@torch.no_grad()
def roll_out_sampled(
    drafter: Drafter, target: Decoder, corpus: Corpus, anchors: dict[int, list[int]], seed: int = 0
) -> Rollout:
    """Sample a block at every anchor, run the target on it, and add up the chances that its prefixes survive."""
    survived = [0.0] * drafter.config.block_size
    for sequence, places in anchors.items():
        ids = corpus.sequence(sequence).to(target.device)
        for chances in _survivals(drafter, target, ids, places, request_key(seed, sequence)):
            survived = [total + chance for total, chance in zip(survived, chances, strict=True)]
    return Rollout(sum(map(len, anchors.values())), tuple(survived))


def _survivals(
    drafter: Drafter, target: Decoder, ids: Tensor, anchors: Sequence[int], key: int
) -> Iterator[list[float]]:
    """Per anchor, the chance that each prefix of its block survives.

    From the last anchor to the first: what a block writes to the caches lies behind every earlier anchor's context.
    """
    block, last = drafter.config.block_size, anchors[-1]
    pool, context = target.new_pool(last + block + KEY_BLOCK), drafter.new_pool(last + block)
    for first in range(0, last, PASS_TOKENS):
        row = PassRow(0, first, min(PASS_TOKENS, last - first))
        _, taps = target.run(ids[first : first + row.num_tokens], [row], pool, drafter.config.target_layer_ids)
        assert taps is not None
        drafter.append_context(taps.to(drafter.dtype), [row], context)
    for anchor in reversed(anchors):
        row = PassRow(0, anchor, block)
        start = ids[anchor : anchor + 1]
        streams = Streams((False,), (key,), (anchor + 1,), (anchor,))
        draft = propose_block(drafter, start, [row], context, [block], lambda slot, drafted: [_SAMPLED], streams)
        assert draft.probs is not None
        # Its last draft token's own successor is not asked for, so the pass ends one token earlier.
        hidden, _ = target.run(torch.cat((start, draft.ids[0, :-1])), [row], pool)
        p = processed_probs(target.logits(hidden), [_SAMPLED] * block)
        slots, drafted = torch.arange(block, device=p.device), draft.ids[0]
        pairs = zip(p[slots, drafted].tolist(), draft.probs[0, slots, drafted].tolist(), strict=True)
        yield list(accumulate((accept_prob(p_x, q_x) for p_x, q_x in pairs), mul))
