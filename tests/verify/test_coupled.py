"""Rule `coupled`: the text depends on the seed alone, and is a fair sample."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config import Draft, SamplingParams, Streams
from dspark.verify import accept, request_key, sample_draft

from .statistics_checks import fits
from .toy import V, decode, lookup_drafter, make_lookup, make_model, plain_sequences, sampling_drafter

LENGTH = 8
TARGET = make_model(1, SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1))


def random_drafter(salt: int):
    """Guesses that have nothing to do with either model."""

    def propose(prefixes, streams, k):
        generator = torch.Generator().manual_seed(salt + sum(streams.steps))
        return Draft(torch.randint(0, V, (len(prefixes), k), generator=generator), (k,) * len(prefixes))

    return propose


DRAFTERS = {
    "good": sampling_drafter(make_model(1, SamplingParams(temperature=1.2))),
    "bad": sampling_drafter(make_model(2)),
    "lookup": lookup_drafter(make_lookup(3)),
    "greedy": lookup_drafter(make_lookup(1)),
    "random": random_drafter(5),
}


def plain(seeds) -> list:
    return decode(TARGET, DRAFTERS["random"], 0, seeds, LENGTH, coupled=True)


@settings(max_examples=40, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    k=st.integers(1, 5),
)
def test_text_is_that_of_plain_decoding_alone(seeds, drafter, k):
    texts = decode(TARGET, DRAFTERS[drafter], k, seeds, LENGTH, coupled=True)
    assert texts == [plain([seed])[0] for seed in seeds]


def test_noise_keyed_by_slot_gives_another_text():
    """The wrong variant: the number of the slot in place of the absolute position."""

    def by_slot(streams: Streams) -> Streams:
        return replace(streams, positions=(0,) * len(streams.positions))

    seeds = range(5)
    texts = [decode(TARGET, DRAFTERS["good"], k, seeds, LENGTH, coupled=True, streams_of=by_slot) for k in (0, 3)]
    assert texts[0] != texts[1]
    assert [decode(TARGET, DRAFTERS["good"], k, seeds, LENGTH, coupled=True) for k in (0, 3)] == [plain(seeds)] * 2


def test_a_kept_prefix_is_as_long_as_the_draft_is_right():
    seeds = range(20)
    for seed, text in zip(seeds, plain(seeds), strict=True):
        streams = Streams((True,), (request_key(seed),), (3,), (0,))
        targets = torch.stack([TARGET(text[:n]) for n in range(4)])
        for wrong_at in range(4):
            guess = [(token + (slot == wrong_at)) % V for slot, token in enumerate(text[:3])]
            verdict = accept(Draft(torch.tensor([guess]), (3,)), targets, streams)
            assert (verdict.num_accepted, verdict.next_ids) == ((wrong_at,), (text[wrong_at],))


def test_a_drafter_equal_to_the_target_is_always_right():
    """Every draft slot meets the noise of its own position."""
    n, k = 50, 3
    streams = Streams((True,) * n, tuple(map(request_key, range(n))), (3,) * n, (0,) * n)
    draft = sampling_drafter(TARGET)([()] * n, streams, k)
    targets = torch.stack([TARGET(tuple(block[:m])) for block in draft.ids.tolist() for m in range(k + 1)])
    assert accept(draft, targets, streams).num_accepted == (k,) * n


SKEWED = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)


@pytest.mark.parametrize("axis", ["positions", "seeds", "choices"])
def test_the_sampler_is_fair(axis):
    n = 4000
    at = range(n)
    keys = {
        "positions": [request_key(0)] * n,
        "seeds": [request_key(i) for i in at],
        "choices": [request_key(0, i) for i in at],
    }[axis]
    positions = tuple(at) if axis == "positions" else (17,) * n
    streams = Streams((True,) * n, tuple(keys), positions, (0,) * n)
    draft = Draft(torch.zeros(n, 0, dtype=torch.long), (0,) * n)
    tokens = accept(draft, SKEWED.expand(n, -1), streams).next_ids
    assert fits(tokens, dict(enumerate(SKEWED.tolist())))
    flat = SKEWED.pow(0.8) / SKEWED.pow(0.8).sum()  # the check sees a slightly wrong distribution
    assert not fits(tokens, dict(enumerate(flat.tolist())))


def test_whole_texts_are_fair_over_seeds():
    texts = decode(TARGET, DRAFTERS["bad"], 2, range(1500), 2, coupled=True)
    assert fits(texts, plain_sequences(TARGET, 2))


# --- how often drafts are kept: between (1-TV)/(1+TV) and 1-TV (arXiv 2408.07978) ------------------------------------

ROWS = 1500


def kept_share(p: torch.Tensor, q: torch.Tensor, drafter_coupled: bool) -> float:
    keys = tuple(request_key(seed) for seed in range(ROWS))
    streams = Streams((True,) * ROWS, keys, (0,) * ROWS, (0,) * ROWS)
    guesses = sample_draft(q.expand(ROWS, -1), replace(streams, coupled=(drafter_coupled,) * ROWS), 0)
    targets = p.expand(2 * ROWS, -1)
    return sum(accept(Draft(guesses[:, None], (1,) * ROWS), targets, streams).num_accepted) / ROWS


@pytest.mark.parametrize("salt", [0, 1, 2])
def test_coupled_drafts_are_kept_as_often_as_theory_says(salt):
    p, q = (torch.randn(2, 6, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)).softmax(-1)
    tv = float((p - q).abs().sum() / 2)
    low, high, noise = (1 - tv) / (1 + tv), 1 - tv, 4 * 0.5 / ROWS**0.5
    assert low - noise < kept_share(p, q, drafter_coupled=True) < high + noise
    assert kept_share(p, q, drafter_coupled=False) < low - noise  # a drafter with noise of its own
