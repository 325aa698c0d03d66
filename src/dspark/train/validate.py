"""Acceptance by rolling out real blocks: the served drafter drafts inside held-out text the target wrote at T = 0.

At temperature 0 the target's text is what it would say after any of its prefixes, so the leading draft tokens equal to
the text are those the target would accept; no target pass is needed beyond its taps. Blocks go through the served
path, `propose_block` on a cached context, not the training pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dspark.config import SamplingParams, SlotRule, Streams
from dspark.data import Corpus
from dspark.drafter import Drafter, propose_block
from dspark.target import PassRow
from dspark.train.features import Features

_GREEDY = SlotRule(SamplingParams(temperature=0))


class FeatureSource(Protocol):
    def __getitem__(self, index: int) -> Features: ...


@dataclass(frozen=True)
class Rollout:
    """`survived[k-1]` blocks of `blocks` had their first k draft tokens accepted."""

    blocks: int
    survived: tuple[int, ...]

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


def roll_out(drafter: Drafter, features: FeatureSource, corpus: Corpus, anchors: dict[int, list[int]]) -> Rollout:
    """Draft a block at every anchor and count the accepted prefixes."""
    block = drafter.config.block_size
    survived = [0] * block
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
