"""Sampling a block: right previous token, right slot, right distribution, right draws."""

from dataclasses import replace

import pytest
import torch

from dspark.config import SamplingParams, SlotRule
from dspark.drafter import build_drafter, proposal, propose_block
from dspark.errors import RequestError
from dspark.target.decoder import PassRow
from dspark.target.linear import PlainLinear
from dspark.verify import draw, gumbel, processed_probs

from .toys import MASK, VOCAB, lively_tensors, make_config, make_drafter, make_target, random_taps, same_rule, streams

HEADS = ["none", "markov", "gated", "rnn"]


def prepared(drafter, lengths=(9,), block=4):
    """Pool with context, and the rows of a block pass behind it."""
    pool = drafter.new_pool(128 * len(lengths))
    for r, n in enumerate(lengths):
        drafter.append_context(random_taps(n, seed=n).to(drafter.dtype), [PassRow(128 * r, 0, n)], pool)
    return pool, [PassRow(128 * r, n, block) for r, n in enumerate(lengths)]


def draft_of(drafter, anchors=(7,), lengths=(9,), lens=None, rules_at=None, noise=None, **kwargs):
    pool, rows = prepared(drafter, lengths, drafter.config.block_size)
    batch = len(lengths)
    return propose_block(
        drafter,
        torch.tensor(anchors),
        rows,
        pool,
        lens or (drafter.config.block_size,) * batch,
        rules_at or same_rule(batch),
        noise or streams(batch),
        **kwargs,
    )


@pytest.fixture
def calls(monkeypatch):
    """Records (q, streams, slot) of every call of sample_draft."""
    seen, real = [], proposal.sample_draft

    def recorder(q, noise, slot):
        seen.append((q.clone(), noise, slot))
        return real(q, noise, slot)

    monkeypatch.setattr(proposal, "sample_draft", recorder)
    return seen


# --- alignment ------------------------------------------------------------------------------------------------------


def permutation_drafter(target):
    """Its head alone decides: W2 W1 puts all weight on `next_token[x_{k-1}]`, so drafts follow the permutation."""
    next_token = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    config = make_config(markov_rank=VOCAB)
    tensors = lively_tensors(config)
    tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB).double()
    tensors["markov_head.markov_w2.weight"] = torch.zeros(VOCAB, VOCAB).double()
    tensors["markov_head.markov_w2.weight"][next_token, torch.arange(VOCAB)] = 1e4
    return build_drafter(config, tensors, target, PlainLinear), next_token


def test_slot_k_is_the_token_at_anchor_plus_k(target):
    """On a text whose tokens follow a permutation the draft must be the text after the anchor, offline and served."""
    drafter, next_token = permutation_drafter(target)
    text = [5]
    while len(text) < 20:
        text.append(int(next_token[text[-1]]))
    text = torch.tensor(text)
    taps, p, block = random_taps(20), 9, drafter.config.block_size
    pool = drafter.new_pool(128)
    drafter.append_context(taps[:p], [PassRow(0, 0, p)], pool)
    row = [PassRow(0, p, block)]
    draft = propose_block(drafter, text[p : p + 1], row, pool, (block,), same_rule(1, temperature=0), streams(1))
    labels = text[p + 1 : p + 1 + block]
    assert draft.ids[0].tolist() == labels.tolist()

    blocks = drafter.embed(drafter.masked_block(text[p : p + 1]))
    hidden = drafter.backbone.block_hidden(taps, blocks, torch.tensor([p]))

    def teacher_forced(first_previous: int) -> list[int]:
        previous = text[first_previous : first_previous + block][None]
        bias = drafter.head.block_bias(drafter.head.embed(previous, like=hidden), hidden)
        return (drafter.base_logits(hidden) + bias).argmax(-1)[0].tolist()

    assert teacher_forced(p) == labels.tolist()
    for wrong in (p - 1, p + 1):  # previous token off by one
        assert teacher_forced(wrong) != labels.tolist()


@pytest.mark.parametrize("head", HEADS)
def test_served_logits_are_the_trained_ones(target, calls, head):
    """Teacher-forcing the training pass with the sampled draft gives the very distributions it was sampled from."""
    none = {"markov_rank": 0, "confidence_with_markov": False} if head == "none" else {}
    drafter = make_drafter(target, head=head, **none)
    draft = draft_of(drafter)
    anchor = torch.tensor([7])
    hidden = drafter.backbone.block_hidden(
        random_taps(9, seed=9), drafter.embed(drafter.masked_block(anchor)), torch.tensor([9])
    )

    def offline(previous):
        embedded = drafter.head.embed(previous, like=hidden)
        logits = drafter.base_logits(hidden) + drafter.head.block_bias(embedded, hidden)
        return logits.softmax(-1), drafter.confidence(hidden, embedded)

    previous = torch.cat((anchor[:, None], draft.ids[:, :-1]), dim=1)
    probs, confidence = offline(previous)
    torch.testing.assert_close(draft.probs, probs)
    torch.testing.assert_close(draft.confidence, confidence)
    if head != "none":  # x_k in place of x_{k-1}
        wrong_probs, wrong_confidence = offline(draft.ids)
        assert (draft.probs - wrong_probs).abs().amax() > 1e-3
        assert (draft.confidence - wrong_confidence).abs().amax() > 1e-3


def test_the_anchor_and_the_context_matter(target):
    drafter = make_drafter(target)
    probs = draft_of(drafter).probs[0, 0]
    assert (draft_of(drafter, anchors=(8,)).probs[0, 0] - probs).abs().amax() > 1e-3
    assert (draft_of(drafter, lengths=(8,)).probs[0, 0] - probs).abs().amax() > 1e-3


# --- the distribution that is returned ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6, "logit_bias": {3: 4.0}}])
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 12}])
def test_probs_are_exactly_what_ids_were_drawn_from(target, calls, params, changes):
    drafter = make_drafter(target, **changes)
    draft = draft_of(drafter, (7, 8, 9), (9, 3, 20), rules_at=same_rule(3, **params))
    assert [slot for _, _, slot in calls] == [0, 1, 2, 3]
    for slot, (q, _, _) in enumerate(calls):
        assert torch.equal(q, draft.probs[:, slot])
        assert (q.gather(1, draft.ids[:, slot, None]) > 0).all()
    assert draft.sources == ("dspark",) * 3


def test_sampled_frequencies_follow_probs(target):
    """Chi-square over many requests with the same context: the second token, given the most frequent first one."""
    drafter = make_drafter(target, draft_vocab_size=6, block_size=2)
    n = 3000
    pool, [row] = prepared(drafter, block=2)
    rows = [row] * n  # the same slots for all: every row writes the same scratch
    anchors = torch.full((n,), 7)
    draft = propose_block(drafter, anchors, rows, pool, (2,) * n, same_rule(n, temperature=1.3), streams(n))
    first = draft.ids[:, 0].mode().values
    for ids, probs in (
        (draft.ids[:, 0], draft.probs[0, 0]),
        (draft.ids[draft.ids[:, 0] == first, 1], draft.probs[draft.ids[:, 0] == first][0, 1]),
    ):
        expected = probs * len(ids)
        counts = torch.bincount(ids, minlength=VOCAB).double()
        assert counts[expected == 0].sum() == 0
        likely = expected > 5
        chi2 = ((counts - expected).square() / expected)[likely].sum()
        assert chi2 < 25  # 5 degrees of freedom: p = 1.4e-4
        skewed = probs.roll(1) * len(ids)
        assert ((counts - skewed).square() / skewed.clamp(min=1e-9)).sum() > 100  # a wrong q is far outside


def test_greedy_batches_are_point_masses_and_mixed_ones_are_not(target):
    drafter = make_drafter(target)
    greedy = draft_of(drafter, (7, 7), (9, 9), rules_at=same_rule(2, temperature=0))
    assert greedy.probs is None
    rules = [SlotRule(SamplingParams(temperature=0)), SlotRule(SamplingParams())]
    mixed = draft_of(drafter, (7, 7), (9, 9), rules_at=lambda slot, ids: rules)
    assert torch.equal(mixed.ids[0], greedy.ids[0])
    assert torch.equal(mixed.probs[0], torch.nn.functional.one_hot(greedy.ids[0], VOCAB).double())
    assert (mixed.probs[1] < 1).all()


def test_batch_of_n_drafts_what_batches_of_one_draft(target):
    drafter = make_drafter(target, head="rnn")
    lengths, anchors, noise = (3, 60, 17), (7, 8, 9), streams(3)
    together = draft_of(drafter, anchors, lengths, noise=noise)
    for r in range(3):
        single = replace(noise, coupled=(False,), keys=noise.keys[r : r + 1], positions=(0,), steps=(0,))
        alone = draft_of(drafter, anchors[r : r + 1], lengths[r : r + 1], noise=single)
        assert torch.equal(alone.ids[0], together.ids[r])
        torch.testing.assert_close(alone.probs[0], together.probs[r])
        torch.testing.assert_close(alone.confidence[0], together.confidence[r])


# --- rules, lengths, vocabularies -----------------------------------------------------------------------------------


def test_rules_see_the_tokens_before_their_slot(target):
    drafter, seen = make_drafter(target), []

    def rules_at(slot, ids):
        seen.append((slot, ids.tolist()))
        return [SlotRule(SamplingParams())] * 2

    ids = draft_of(drafter, (7, 8), (9, 4), lens=(3, 2), rules_at=rules_at).ids.tolist()
    assert seen == [(k, [row[:k] for row in ids]) for k in range(3)]


def test_history_of_the_slot_reaches_the_penalties(target):
    """Tokens 0..3 lead by little: the penalty makes the draft avoid what it drafted before, given its own history."""
    config = make_config(head="none", markov_rank=0, confidence=False)
    head = torch.full((VOCAB, 1), -9.0).double()
    head[:4, 0] = torch.tensor([1.0, 0.75, 0.5, 0.25])
    drafter = build_drafter(config, lively_tensors(config), target, PlainLinear)
    drafter = replace(drafter, lm_head=lambda hidden: head.T.expand(hidden.shape[0], VOCAB))
    params = SamplingParams(temperature=0, presence_penalty=2.0)

    def with_history(slot, ids):
        return [SlotRule(params, output_ids=ids[0].tolist())]

    assert draft_of(drafter, rules_at=with_history).ids[0].tolist() == [0, 1, 2, 3]
    assert draft_of(drafter, rules_at=lambda slot, ids: [SlotRule(params)]).ids[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("lens", [(4, 4), (3, 1), (0, 2), (1, 0)])
def test_only_wanted_slots_are_sampled_and_the_rest_of_the_block_still_runs(target, calls, lens):
    drafter = make_drafter(target)
    full = draft_of(drafter, (7, 8), (9, 4))
    calls.clear()
    draft = draft_of(drafter, (7, 8), (9, 4), lens=lens)
    assert draft.lens == lens and len(calls) == max(lens) == draft.ids.shape[1] == draft.confidence.shape[1]
    for r, n in enumerate(lens):
        assert torch.equal(draft.ids[r, :n], full.ids[r, :n])
        torch.testing.assert_close(draft.probs[r, :n], full.probs[r, :n])


def test_nothing_wanted_is_nothing_run(target, calls):
    drafter = make_drafter(target)
    pool, rows = prepared(drafter)
    before = [t.clone() for t in pool.caches]
    draft = propose_block(drafter, torch.tensor([7]), rows, pool, (0,), same_rule(1), streams(1))
    assert draft.lens == (0,) and draft.ids.shape == (1, 0) and draft.probs is None and not calls
    assert all(torch.equal(a, b) for a, b in zip(before, pool.caches, strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_reduced_vocabulary_is_the_full_one_cut_and_renormalised(tied):
    """Head rows come from the target's own head (tied or not), at the ids d2t names."""
    target = make_target(tied)
    full = make_drafter(target, markov_rank=0, head="none", confidence=False)
    config = make_config(markov_rank=0, head="none", confidence=False, draft_vocab_size=9)
    tensors = lively_tensors(make_config(markov_rank=0, head="none", confidence=False))
    ids = torch.tensor([1, 2, 5, 8, 13, 21, 30, 34, 38])
    cut = build_drafter(config, tensors | {"d2t": ids - torch.arange(9)}, target, PlainLinear)
    whole, reduced = draft_of(full).probs[0, 0], draft_of(cut).probs[0, 0]
    expected = torch.zeros(VOCAB).double()
    expected[ids] = whole[ids] / whole[ids].sum()
    torch.testing.assert_close(reduced, expected)
    # d2t read as ids instead of offsets gives other rows.
    assert not torch.equal(ids, ids - torch.arange(9))
    hidden = torch.randn(3, 16).double()
    torch.testing.assert_close(cut.base_logits(hidden), hidden @ target.head_weight[ids].T)
    torch.testing.assert_close(full.base_logits(hidden), hidden @ target.head_weight.T)


def test_a_draft_ends_where_the_rule_leaves_it_nothing(target, calls):
    drafter = make_drafter(target, draft_vocab_size=12)
    outside = next(t for t in range(VOCAB) if t not in drafter.vocabulary.members)
    inside = min(drafter.vocabulary.members)
    free, blocked = SlotRule(SamplingParams()), SlotRule(SamplingParams(), allowed_ids=[outside])

    def rules_at(slot, ids):
        return [blocked if slot == 2 else free, free]

    draft = draft_of(drafter, (7, 8), (9, 4), rules_at=rules_at)
    assert draft.lens == (2, 4)
    reference = draft_of(drafter, (7, 8), (9, 4))
    assert torch.equal(draft.ids[1], reference.ids[1])
    assert torch.equal(draft.ids[0, :2], reference.ids[0, :2])
    # Ended is ended: a rule that allows something again does not revive the row, and one allowed token keeps it alive.
    revived = SlotRule(SamplingParams(), allowed_ids=[outside, inside])
    kept = draft_of(drafter, (7, 8), (9, 4), rules_at=lambda slot, ids: [revived if slot == 2 else free, free])
    assert kept.lens == (4, 4) and kept.ids[0, 2] == inside


@pytest.mark.parametrize(
    ("rule", "possible"),
    [
        (SlotRule(SamplingParams(allowed_token_ids=[1, 2]), allowed_ids=[2, 3]), True),
        (SlotRule(SamplingParams(allowed_token_ids=[1, 2]), allowed_ids=[3]), False),
        (SlotRule(SamplingParams(min_tokens=5), allowed_ids=[2], end_ids=(2,)), False),
        (SlotRule(SamplingParams(min_tokens=1), output_ids=[4], allowed_ids=[2], end_ids=(2,)), True),
    ],
)
def test_what_is_possible_agrees_with_processed_probs(target, rule, possible):
    """Where the whole vocabulary is drafted, a draft ends exactly where `processed_probs` would refuse."""
    if not possible:
        with pytest.raises(RequestError):
            processed_probs(torch.zeros(1, VOCAB), [rule])
    draft = draft_of(make_drafter(target), rules_at=lambda slot, ids: [rule])
    assert draft.lens == ((4,) if possible else (0,))


# --- noise ----------------------------------------------------------------------------------------------------------


def test_coupled_drafts_meet_the_noise_of_their_position(target):
    drafter = make_drafter(target)
    noise = streams(1, coupled=True, position=10)
    draft = draft_of(drafter, noise=noise)
    for slot in range(4):
        q = draft.probs[0, slot]
        assert draw(q, lambda ids, at=10 + slot: gumbel(noise.keys[0], at, ids)) == draft.ids[0, slot]


def test_token_free_confidence_stands_in_and_ignores_tokens(target):
    drafter = make_drafter(target, confidence=False, token_free_confidence=True)
    a, b = (draft_of(drafter, noise=streams(1, key=key)) for key in (1, 2))
    assert not torch.equal(a.ids, b.ids)
    assert torch.equal(a.confidence, b.confidence)
    with_tokens = make_drafter(target, token_free_confidence=True)
    a, b = (draft_of(with_tokens, noise=streams(1, key=key)) for key in (1, 2))
    assert torch.equal(a.confidence[:, 0], b.confidence[:, 0]) and not torch.equal(a.confidence, b.confidence)
    assert draft_of(make_drafter(target, confidence=False)).confidence is None


# --- refinement -----------------------------------------------------------------------------------------------------


def test_refinement_feeds_the_sampled_block_back(target, calls):
    drafter = make_drafter(target)
    draft = draft_of(drafter, refinements=1)
    earlier, final = calls[:3], calls[3:]  # the last slot of a block is no input of the next pass
    guess = torch.cat([proposal.sample_draft(q, s, slot) for q, s, slot in earlier])
    pool, rows = prepared(drafter)
    ids = torch.cat((torch.tensor([7]), guess))[None]
    hidden = drafter.block_pass(ids, rows, pool)
    again = proposal.sample_block(drafter, torch.tensor([7]), hidden, (4,), same_rule(1), streams(1))
    assert torch.equal(again.ids, draft.ids)
    torch.testing.assert_close(again.probs, draft.probs)
    assert all(torch.equal(q, draft.probs[:, slot]) for q, _, slot in final[:4])
    assert (draft_of(drafter).probs[0, 0] - draft.probs[0, 0]).abs().amax() > 1e-4


def test_refinement_never_draws_twice_under_rejection_and_keeps_the_position_when_coupled(target, calls):
    draft_of(make_drafter(target), refinements=2, noise=streams(1, position=10))
    slots = [slot for _, _, slot in calls]
    assert len(set(slots)) == len(slots) == 3 + 3 + 4 and slots[-4:] == [0, 1, 2, 3]
    positions = [noise.positions[0] + slot for _, noise, slot in calls]
    assert positions == [10, 11, 12, 10, 11, 12, 10, 11, 12, 13]


def test_refinement_masks_what_an_ended_row_did_not_draft(monkeypatch):
    drafter = make_drafter(make_target(tied=False))
    inputs, real = [], type(drafter).embed
    monkeypatch.setattr(type(drafter), "embed", lambda self, ids: inputs.append(ids) or real(self, ids))
    impossible = SlotRule(SamplingParams(allowed_token_ids=[1]), allowed_ids=[3])
    draft_of(
        drafter, refinements=1, rules_at=lambda slot, ids: [impossible if slot == 1 else SlotRule(SamplingParams())]
    )
    assert inputs[0].tolist() == [[7, MASK, MASK, MASK]]
    assert inputs[1][0, 1] != MASK and inputs[1][0, 2:].tolist() == [MASK, MASK]
