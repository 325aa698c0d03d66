"""Rule `rejection` leaves the target's distribution as it is: exactly, and through the public door."""

from functools import partial

import pytest
import torch

from dspark.config import Draft, SamplingParams, SlotRule, Streams
from dspark.verify import (
    ACCEPT,
    RECOVER,
    accept,
    accept_prob,
    draw,
    processed_probs,
    residual,
    sample_draft,
    stream_gumbel,
    uniform,
)

from .statistics_checks import fits
from .toy import (
    V,
    decode,
    dense,
    distance,
    lookup_drafter,
    make_lookup,
    make_model,
    plain_sequences,
    sampling_drafter,
    speculative_sequences,
    table_logits,
)

EXACT = 1e-12
BIASED = 1e-3

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.8},
    "bias": {"logit_bias": {0: 1.5, 2: -1.0}},
    "mask": {"allowed_token_ids": [0, 1, 3]},
    "min_tokens": {"min_tokens": 2},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 0.5},
        "allowed_token_ids": [0, 1, 2],
        "min_tokens": 1,
    },
}


def drafts(params: SamplingParams) -> dict:
    return {
        "same settings": make_model(2, params, end_ids=(3,)),
        "own settings": make_model(2, SamplingParams(temperature=1.7, top_p=0.95)),
        "reduced vocabulary": make_model(2, SamplingParams(), vocabulary=(1, 2)),
        "greedy draft": make_model(2, SamplingParams(temperature=0.0)),
        "lookup": make_lookup(2),
        "the target itself": make_model(1, params, end_ids=(3,)),
    }


def bias_of(p, q, k=2, **variant) -> float:
    return distance(speculative_sequences(p, q, k, **variant), plain_sequences(p, k + 1))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", drafts(SamplingParams()))
def test_exactly_the_targets_distribution(setting, draft):
    params = SamplingParams(**SETTINGS[setting])
    p, q = make_model(1, params, end_ids=(3,)), drafts(params)[draft]
    assert bias_of(p, q) < EXACT


def test_exactly_the_targets_distribution_three_deep():
    assert bias_of(make_model(1), make_model(2), k=3) < EXACT


# --- wrong variants fail the same check -----------------------------------------------------------------------------


def test_claiming_another_q_than_the_sampled_one_is_biased():
    p, warped, raw = make_model(1), make_model(2, SamplingParams(top_p=0.7)), make_model(2)
    assert bias_of(p, warped, claimed_q=raw) > BIASED
    assert bias_of(p, raw, claimed_q=warped) > BIASED


def test_processing_the_residual_again_is_biased():
    params = SamplingParams(top_p=0.8)

    def processed_residual(p, q):
        return processed_probs(residual(p, q).log()[None], [SlotRule(params)])[0]

    assert bias_of(make_model(1, params), make_model(2), rest=processed_residual) > BIASED


def test_recovering_from_p_is_biased():
    assert bias_of(make_model(1), make_model(2), rest=lambda p, q: p) > BIASED


def test_keeping_by_p_alone_is_biased_for_sampled_drafts():
    assert bias_of(make_model(1), make_model(2), keep_chance=lambda p_x, q_x: p_x) > BIASED


def test_forgetting_the_history_of_the_slot_is_biased():
    """Penalties with the history of the request, without the draft tokens before the slot."""
    params = SamplingParams(frequency_penalty=1.5)
    p, q = make_model(1, params), make_model(2)

    def p_without_slots(prefix):
        return processed_probs(table_logits(prefix, 1)[None], [SlotRule(params)])[0]

    right = plain_sequences(p, 3)
    assert distance(speculative_sequences(p, q, 2), right) < EXACT
    assert distance(speculative_sequences(p_without_slots, q, 2), right) > BIASED


# --- numbers at the edge --------------------------------------------------------------------------------------------


def test_accept_prob_at_the_edges():
    assert accept_prob(0.0, 0.0) == 0  # the target cannot produce it
    assert accept_prob(1e-30, 0.0) == 1
    assert accept_prob(5e-324, 1.0) == 5e-324
    assert accept_prob(0.25, 0.5) == 0.5
    assert accept_prob(0.5, 0.25) == 1


def test_residual_without_mass_is_p():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p.double())
    assert torch.equal(residual(torch.tensor([0.0, 1.0]), 1), torch.tensor([0.0, 1.0]).double())


def test_accept_leaves_its_inputs_alone():
    p = make_model(1)
    rows = torch.stack([p(()), p((0,)), p((0, 1))])
    q = torch.stack([make_model(2)(()), make_model(2)((0,))])[None]
    before = rows.clone(), q.clone()
    for step in range(20):
        accept(Draft(torch.tensor([[0, 1]]), (2,), q), rows, Streams((False,), (3,), (5,), (step,)))
    assert torch.equal(rows, before[0]) and torch.equal(q, before[1])


def test_rows_of_different_lengths_and_rules_share_a_batch():
    """Every row's verdict is what it would be alone; padding is never read."""
    p, q = make_model(1, SamplingParams(temperature=2.0)), make_model(2)
    lens, blocks = (0, 3, 1, 2), [[9, 9, 9], [0, 2, 1], [3, 9, 9], [1, 1, 9]]
    targets = [torch.stack([p(tuple(block[:n])) for n in range(k + 1)]) for k, block in zip(lens, blocks, strict=True)]
    probs = torch.stack([torch.stack([q(tuple(b[:n])) if n < k else torch.full((V,), torch.nan) for n in range(3)])
                         for k, b in zip(lens, blocks, strict=True)])  # fmt: skip
    outcomes = set()
    for step in range(30):
        positions = tuple(step + r for r in range(4))
        streams = Streams((False, True, False, False), (1, 2, 3, 4), positions, (step,) * 4)
        batch = accept(Draft(torch.tensor(blocks), lens, probs), torch.cat(targets), streams)
        for r in range(4):
            alone = accept(
                Draft(torch.tensor(blocks[r : r + 1]), lens[r : r + 1], probs[r : r + 1]),
                targets[r],
                Streams((streams.coupled[r],), (streams.keys[r],), (streams.positions[r],), (step,)),
            )
            assert (alone.num_accepted[0], alone.next_ids[0]) == (batch.num_accepted[r], batch.next_ids[r])
        outcomes.add(batch.num_accepted)
    assert len(outcomes) > 3


def test_misuse_is_refused():
    streams = Streams((False,), (0,), (0,), (0,))
    ids = torch.tensor([[1]])
    with pytest.raises(ValueError, match="chains, not trees"):
        accept(Draft(ids, (1,), parents=torch.tensor([[-1]])), torch.eye(V)[:2], streams)
    with pytest.raises(ValueError, match="need 2 target rows, got 3"):
        accept(Draft(ids, (1,)), torch.eye(V)[:3], streams)


# --- through the public door ----------------------------------------------------------------------------------------

SAMPLES = 1500
DRAFT_SALT = 7  # a drafter far from the target: wrong variants show in few samples


def text_fits(p, drafter, k=2, length=2) -> bool:
    texts = decode(p, drafter, k, range(SAMPLES), length, coupled=False)
    return fits(texts, plain_sequences(p, length))


@pytest.mark.parametrize("setting", ["plain", "all"])
def test_sampled_drafts_give_the_targets_text(setting):
    params = SamplingParams(**SETTINGS[setting])
    assert text_fits(
        make_model(1, params, end_ids=(3,)), sampling_drafter(make_model(DRAFT_SALT, params, end_ids=(3,)))
    )


def test_point_mass_drafts_give_the_targets_text():
    assert text_fits(make_model(1), lookup_drafter(make_lookup(DRAFT_SALT)))


def test_plain_decoding_gives_the_targets_text():
    assert text_fits(make_model(1), sampling_drafter(make_model(DRAFT_SALT)), k=0)


def test_a_sampled_draft_may_be_passed_off_as_a_point_mass():
    """It is one, once drawn: nothing but the number of kept tokens suffers."""

    def without_probs(prefixes, streams, k):
        draft = sampling_drafter(make_model(DRAFT_SALT))(prefixes, streams, k)
        return Draft(draft.ids, draft.lens)

    assert text_fits(make_model(1), without_probs)


def test_a_wrong_q_is_seen_through_the_door():
    def claims_uniform(prefixes, streams, k):
        draft = sampling_drafter(make_model(DRAFT_SALT))(prefixes, streams, k)
        return Draft(draft.ids, draft.lens, torch.full_like(draft.probs, 1 / V))

    assert not text_fits(make_model(1), claims_uniform)


# --- independent streams --------------------------------------------------------------------------------------------


def shares_recover_stream(rows, streams, slot):
    noises = [
        partial(stream_gumbel, key, RECOVER, step, slot) for key, step in zip(streams.keys, streams.steps, strict=True)
    ]
    return torch.tensor([draw(row, noise) for row, noise in zip(rows, noises, strict=True)])


def shares_accept_stream(rows, streams, slot):
    u = [[uniform(key, ACCEPT, step, slot)] for key, step in zip(streams.keys, streams.steps, strict=True)]
    return (rows.cumsum(1) < torch.tensor(u, dtype=torch.float64)).sum(1)


@pytest.mark.parametrize(
    ("shared", "p", "q"),
    [
        # Recovered tokens compete with the draft's, so that the winner's noise matters a second time.
        (shares_recover_stream, [0.0, 0.7, 0.3, 0.0], [0.5, 0.49, 0.01, 0.0]),
        # Token 0 is drawn by small uniforms, and small uniforms keep it.
        (shares_accept_stream, [0.3, 0.5, 0.2, 0.0], [0.6, 0.3, 0.1, 0.0]),
    ],
)
def test_drafting_needs_a_stream_of_its_own(shared, p, q):
    p, q = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)

    def tokens(draw_tokens):
        return decode(lambda _: p, sampling_drafter(lambda _: q, draw_tokens), 1, range(2500), 1, coupled=False)

    target = {(token,): chance for token, chance in enumerate(p.tolist())}
    assert fits(tokens(sample_draft), target)
    assert not fits(tokens(shared), target)


def test_a_step_never_repeats_the_draws_of_the_step_before():
    q, streams = torch.full((200, V), 1 / V), Streams((False,) * 200, tuple(range(200)), (9,) * 200, (0,) * 200)
    later = Streams(streams.coupled, streams.keys, streams.positions, (1,) * 200)
    first, second = sample_draft(q, streams, 1), sample_draft(q, later, 1)
    independent = {(a, b): V**-2 for a in range(V) for b in range(V)}
    assert fits(zip(first.tolist(), second.tolist(), strict=True), independent)
    assert not fits(zip(first.tolist(), first.tolist(), strict=True), independent)


def test_at_temperature_zero_both_rules_give_the_same_text():
    p = make_model(1, SamplingParams(temperature=0.0))
    plain = decode(p, lookup_drafter(make_lookup(DRAFT_SALT)), 0, range(3), 8, coupled=False)
    for coupled in (False, True):
        for drafter in (
            lookup_drafter(make_lookup(DRAFT_SALT)),
            sampling_drafter(make_model(DRAFT_SALT)),
            lookup_drafter(p),
        ):
            assert decode(p, drafter, 3, range(3), 8, coupled) == plain
    assert dense(p(())).max() == 1
