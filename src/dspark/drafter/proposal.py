"""Guess a block: one parallel pass, then one small causal step per slot."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.config import Draft, SamplingParams, SlotRule, Streams
from dspark.drafter.drafter import Drafter
from dspark.drafter.vocabulary import DraftVocabulary
from dspark.target.decoder import PassRow
from dspark.target.kv import KvPool
from dspark.verify import processed_probs, sample_draft

SOURCE = "dspark"

# (slot from 0, ids drafted before it [B, slot]) -> the rule of that slot for every row, its history included.
# The rule of a row is not used from the slot on where the row's draft ends; its ids there are padding.
RulesAt = Callable[[int, Int[Tensor, "B slot"]], Sequence[SlotRule]]

_UNUSED = SlotRule(SamplingParams(temperature=0))


@torch.no_grad()
def propose_block(
    drafter: Drafter,
    anchors: Int[Tensor, " B"],
    rows: Sequence[PassRow],
    pool: KvPool,
    lens: Sequence[int],
    rules_at: RulesAt,
    streams: Streams,
    refinements: int = 0,
) -> Draft:
    """Draft up to `lens[r]` tokens after each row's anchor.

    Row r is `PassRow(start, kv_len, block_size)` with its context 0..kv_len-1 in `pool` and room for kv_len +
    block_size positions (see `Backbone.block_pass`). The backbone always runs the whole trained block; only the wanted
    slots go through the head. With `refinements`, each earlier pass samples the whole block (`rules_at` is then asked
    for every slot) and feeds it back in place of the masks; the draft is sampled from the last pass only.

    `lens` of the result may be shorter than asked: a row ends where its rule leaves no token the drafter can propose.

    Raises:
        RequestError: from `processed_probs`.
    """
    assert len(rows) == len(lens) == anchors.shape[0]
    block = drafter.config.block_size
    assert all(0 <= n <= block for n in lens)
    if not any(lens):
        return Draft(anchors.new_empty((len(lens), 0)), tuple(lens), sources=(SOURCE,) * len(lens))
    ids = drafter.masked_block(anchors)
    for earlier in range(refinements if block > 1 else 0):
        hidden = drafter.block_pass(ids, rows, pool)
        whole, first_draw = [block - 1] * len(lens), block * (earlier + 1)
        guess = sample_block(drafter, anchors, hidden, whole, rules_at, streams, first_draw)
        ids = torch.cat((anchors[:, None], _masked_after(guess, drafter.config.mask_token_id)), dim=1)
    return sample_block(drafter, anchors, drafter.block_pass(ids, rows, pool), lens, rules_at, streams)


@torch.no_grad()
def sample_block(
    drafter: Drafter,
    anchors: Int[Tensor, " B"],
    hidden: Float[Tensor, "B K D"],
    lens: Sequence[int],
    rules_at: RulesAt,
    streams: Streams,
    first_draw: int = 0,
) -> Draft:
    """The causal half of `propose_block`: sample slot by slot from a block's hidden states.

    `probs` of the result are the distributions the ids were drawn from, None when every row is greedy (point masses).
    `first_draw` numbers the draws of slot 0 for `rejection`, whose draws must never be used twice; under `coupled` the
    noise belongs to the position and stays the same.
    """
    assert any(lens)
    base = drafter.base_logits(hidden[:, : max(lens)])
    state, previous = drafter.head.start(hidden[:, 0]), anchors
    draws = replace(streams, positions=tuple(p - first_draw for p in streams.positions)) if first_draw else streams
    lens, ids = tuple(lens), anchors.new_empty((len(lens), 0))
    probs, confidence, greedy = [], [], False
    for slot in range(base.shape[1]):
        embedded = drafter.head.embed(previous, like=hidden)
        bias, state = drafter.head.step(state, embedded, hidden[:, slot])
        rules, lens = _usable(rules_at(slot, ids), slot, lens, drafter.vocabulary)
        q = processed_probs(drafter.full_logits(base[:, slot] + bias), rules)
        previous = sample_draft(q, draws, slot + first_draw)
        ids = torch.cat((ids, previous[:, None]), dim=1)
        greedy = all(rule.params.greedy for rule in rules) if slot == 0 else greedy
        if not greedy:
            probs.append(q)
        if drafter.confidence is not None:
            confidence.append(drafter.confidence(hidden[:, slot], embedded))
        elif drafter.token_free is not None:
            confidence.append(drafter.token_free(hidden[:, slot]))
    return Draft(
        ids,
        lens,
        torch.stack(probs, dim=1) if probs else None,
        torch.stack(confidence, dim=1) if confidence else None,
        (SOURCE,) * len(lens),
    )


def _masked_after(draft: Draft, mask_token_id: int) -> Int[Tensor, "B K"]:
    """The draft's ids with masks where a row ended early."""
    slots = torch.arange(draft.ids.shape[1], device=draft.ids.device)
    ended = slots[None, :] >= torch.tensor(draft.lens, device=draft.ids.device)[:, None]
    return draft.ids.masked_fill(ended, mask_token_id)


def _usable(
    rules: Sequence[SlotRule], slot: int, lens: tuple[int, ...], vocabulary: DraftVocabulary | None
) -> tuple[list[SlotRule], tuple[int, ...]]:
    """The rules of one slot with a harmless one for rows that end before it, and the rows' lengths after it."""
    lens = tuple(
        slot if slot < n and not _possible(rule, vocabulary) else n for rule, n in zip(rules, lens, strict=True)
    )
    return [rule if slot < n else _UNUSED for rule, n in zip(rules, lens, strict=True)], lens


def _possible(rule: SlotRule, vocabulary: DraftVocabulary | None) -> bool:
    """Whether the rule leaves a token the drafter can propose.

    It depends on the tokens before this slot only, so ending a draft here is a plan rule `rejection` allows.
    """
    sets = [ids for ids in (rule.params.allowed_token_ids, rule.allowed_ids) if ids is not None]
    forbidden = rule.end_ids if len(rule.output_ids) < rule.params.min_tokens else ()
    if not sets:
        return rule.mask is None or _leaves_any(rule.mask, forbidden, vocabulary)
    return any(
        token not in forbidden
        and (vocabulary is None or token in vocabulary.members)
        and all(token in other for other in sets[1:])
        and (rule.mask is None or bool(rule.mask[token]))
        for token in sets[0]
    )


def _leaves_any(mask: Bool[Tensor, " V"], forbidden: Sequence[int], vocabulary: DraftVocabulary | None) -> bool:
    left = mask.index_fill(0, torch.tensor(list(forbidden), dtype=torch.long), False) if forbidden else mask
    return bool((left if vocabulary is None else left[vocabulary.ids.to(left.device)]).any())
