import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.verify import (
    ACCEPT,
    COUPLED,
    DRAFT,
    RECOVER,
    draw,
    gumbel,
    mix64,
    mix64_tensor,
    request_key,
    stream_gumbel,
    uniform,
)

from .statistics_checks import chi_square_limit, fits

WORDS = st.integers(0, 2**64 - 1)
GAMMA = 0x9E3779B97F4A7C15
GOLDEN_KEYS = (12035550249420947055, 12351211841605719709)
GOLDEN_UNIFORM = 0.3197267931177218
GOLDEN_GUMBEL = (0.120299752063971, -1.2524968346561545)


def as_signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_mix64_gives_the_published_splitmix64_sequence():
    # First outputs of the reference implementation (Vigna) seeded with 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix64(1234567 + (i + 1) * GAMMA) for i in range(4)] == published


def test_the_tensor_version_gives_the_same_golden_integers():
    golden = {0: 0, 1: 6238072747940578789, 2**63: 2720858781877447050, 2**64 - 1: 13029008266876403067}
    assert {x: mix64(x) for x in golden} == golden
    tensor = mix64_tensor(torch.tensor([as_signed(x) for x in golden]))
    assert tensor.tolist() == [as_signed(x) for x in golden.values()]


@given(st.lists(WORDS, min_size=1, max_size=8))
def test_integer_and_tensor_versions_agree_everywhere(words):
    tensor = mix64_tensor(torch.tensor([as_signed(x) for x in words]))
    assert tensor.tolist() == [as_signed(mix64(x)) for x in words]


def test_keys_and_draws_do_not_drift():
    """A change of these numbers changes the text of every seeded request."""
    assert request_key(0) == GOLDEN_KEYS[0]
    assert request_key(42, 3) == GOLDEN_KEYS[1]
    assert uniform(request_key(42), ACCEPT, 7, 2) == GOLDEN_UNIFORM
    assert gumbel(request_key(42), 100, torch.tensor([0, 49151])).tolist() == pytest.approx(GOLDEN_GUMBEL, rel=1e-14)


@given(key=WORDS, position=st.integers(0, 2**20), ids=st.lists(st.integers(0, 49151), min_size=1, max_size=40))
def test_gumbel_of_a_token_does_not_depend_on_its_company(key, position, ids):
    together = gumbel(key, position, torch.tensor(ids))
    alone = torch.cat([gumbel(key, position, torch.tensor([token])) for token in ids])
    assert torch.equal(together, alone)


def test_every_part_of_a_name_changes_the_noise():
    ids = torch.arange(50)
    names = [(0, 0, 5), (1, 0, 5), (0, 1, 5), (0, 0, 6), (5, 0, 0)]
    draws = [gumbel(request_key(seed, choice), position, ids) for seed, choice, position in names]
    key = request_key(0)
    for stream in (COUPLED, DRAFT, ACCEPT, RECOVER):
        draws += [stream_gumbel(key, stream, step, slot, ids) for step, slot in ((0, 0), (0, 1), (1, 0), (5, 0))]
    values = torch.cat(draws)
    assert len(values.unique()) == len(values)


def test_uniforms_are_uniform_and_streams_unrelated():
    key, cells, n = request_key(7), 8, 20000
    accepts = [int(cells * uniform(key, ACCEPT, step, slot)) for step in range(n // 4) for slot in range(4)]
    recovers = [int(cells * uniform(key, RECOVER, step, slot)) for step in range(n // 4) for slot in range(4)]
    flat = {(a, b): cells**-2 for a in range(cells) for b in range(cells)}
    assert fits(zip(accepts, recovers, strict=True), flat)
    assert fits(zip(accepts, accepts[1:], strict=False), flat)
    assert not fits(zip(accepts, accepts, strict=True), flat)  # one stream for both


def unmix64(x: int) -> int:
    """The inverse of mix64, to reach the extreme hash values on purpose."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        y = x
        for _ in range(64 // shift):
            y = x ^ (y >> shift)
        x = y * pow(factor, -1, 2**64) % 2**64
    return x


@pytest.mark.parametrize("hashed, u", [(2**64 - 1, 1 - 2.0**-53), (0, 2.0**-53)])
def test_the_extreme_hash_values_give_finite_noise(hashed, u):
    key, position = request_key(5), 12
    state = mix64(mix64(key + (COUPLED + 1) * GAMMA) + (position + 1) * GAMMA)
    token = (unmix64(hashed) - state) * pow(GAMMA, -1, 2**64) - 1
    value = gumbel(key, position, torch.tensor([as_signed(token % 2**64)])).item()
    assert value == pytest.approx(-math.log(-math.log(u)), rel=1e-12)
    assert (2**53 - 1 + 0.5) * 2.0**-53 == 1  # with 53 bits the largest value would be infinite


@pytest.mark.parametrize("axis", ["positions", "seeds", "tokens"])
def test_gumbel_values_follow_the_gumbel_distribution(axis):
    n, cells = 16000, 16
    if axis == "tokens":
        values = gumbel(request_key(3), 11, torch.arange(n)).tolist()
    else:
        at = (lambda i: (request_key(3), i)) if axis == "positions" else (lambda i: (request_key(i), 11))
        values = torch.cat([gumbel(*at(i), torch.arange(4)) for i in range(n // 4)]).tolist()
    quantiles = [int(cells * math.exp(-math.exp(-value))) for value in values]
    assert fits(quantiles, dict.fromkeys(range(cells), 1 / cells))


def test_draw_gathers_small_supports_without_changing_the_token():
    """The same distribution with and without 90 impossible tokens behind it takes the other path through `draw`."""
    key, small = request_key(1), torch.tensor([0.1, 0.2, 0.3, 0.4])
    padded = torch.cat([small, torch.zeros(90)])
    tokens = [draw(small, lambda ids, i=i: gumbel(key, i, ids)) for i in range(200)]
    assert tokens == [draw(padded, lambda ids, i=i: gumbel(key, i, ids)) for i in range(200)]
    assert len(Counter(tokens)) == 4


def test_a_certain_token_needs_no_noise():
    def no_noise(ids):
        raise AssertionError("noise was asked for")

    assert draw(torch.tensor([0.0, 0.0, 1.0]), no_noise) == 2


def test_chi_square_limit_against_tables():
    # Published critical values at 0.001.
    for degrees, value in {4: 18.467, 10: 29.588, 60: 99.607}.items():
        assert chi_square_limit(degrees, 0.001) == pytest.approx(value, rel=0.02)
