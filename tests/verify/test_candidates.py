"""Clause 5: several candidates for one position."""

from itertools import permutations

import pytest
import torch

from dspark.verify import (
    ACCEPT,
    RECOVER,
    accept_fixed_children,
    accept_sampled_children,
    gumbel,
    request_key,
    sampled_children_rule,
    stream_gumbel,
    uniform,
)

from .statistics_checks import fits

EXACT = 1e-12
BIASED = 1e-3
IDS = torch.arange(4)
P = torch.tensor([0.45, 0.05, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.15, 0.5, 0.25, 0.1], dtype=torch.float64)
PAIRS = {
    "different": (P, Q),
    "equal": (P, P),
    "q misses a token": (P, torch.tensor([0.0, 0.6, 0.3, 0.1], dtype=torch.float64)),
    "p misses a token": (torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64), Q),
    "greedy target": (torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64), Q),
}


def without_replacement(q: torch.Tensor, m: int) -> dict[tuple[int, ...], float]:
    """Every ordered draw of m different tokens from q, with its probability."""
    result = {}
    for children in permutations([token for token in range(len(q)) if q[token] > 0], m):
        chance, left = 1.0, 1.0
        for token in children:
            chance *= float(q[token]) / left
            left -= float(q[token])
        result[children] = chance
    return result


def top_m(q: torch.Tensor, m: int) -> dict[tuple[int, ...], float]:
    return {tuple(q.topk(m).indices.tolist()): 1.0}


def outcome(p, q, children_chances, rule=sampled_children_rule) -> torch.Tensor:
    """The distribution of the token that comes out, summed over children and acceptances."""
    total = torch.zeros(len(p), dtype=torch.float64)
    for children, chance in children_chances.items():
        keep, rest = rule(p, q, children)
        for child, kept in zip(children, keep, strict=True):
            total[child] += chance * kept
            chance *= 1 - kept
        total += chance * rest
    return total


def bias(p, q, children_chances, **variant) -> float:
    return float((outcome(p, q, children_chances, **variant) - p).abs().max())


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_children_drawn_without_replacement_are_lossless(pair, m):
    p, q = PAIRS[pair]
    assert bias(p, q, without_replacement(q, m)) < EXACT


def test_the_sampled_rule_on_top_m_children_is_biased():
    assert bias(P, Q, top_m(Q, 2)) > BIASED


def test_not_removing_drawn_children_from_q_is_biased():
    def with_replacement(p, q, children):
        keep = []
        for child in children:
            chances, rest = sampled_children_rule(p, q, [child])
            keep += chances
            p = rest
        return keep, p

    assert bias(P, Q, without_replacement(Q, 2), rule=with_replacement) > BIASED


def test_children_that_cannot_have_been_drawn_are_refused():
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0])
    for children in ([0], [1, 1]):
        with pytest.raises(ValueError, match="must be drawn from q"):
            sampled_children_rule(P, one_hot, children)


def test_the_door_follows_the_rule():
    children = [1, 2]
    keep, rest = sampled_children_rule(P, Q, children)
    noise = gumbel(request_key(0), 0, IDS)
    just_under, just_over = keep[0] - 1e-9, keep[0] + 1e-9
    assert accept_sampled_children(P, Q, children, [just_under, 0.5], noise) == (0, 1)
    assert accept_sampled_children(P, Q, children, [just_over, keep[1] * 0.5], noise) == (1, 2)
    tokens = []
    for step in range(1500):
        index, token = accept_sampled_children(
            P, Q, children, [1 - 1e-12, 1 - 1e-12], stream_gumbel(request_key(0), RECOVER, step, 0, IDS)
        )
        assert index is None
        tokens.append(token)
    assert fits(tokens, dict(enumerate(rest.tolist())))


def drawn_children(step: int, m: int) -> list[int]:
    """The m best of log q + Gumbel: a draw without replacement."""
    return (Q.log() + gumbel(request_key(8), step, IDS)).topk(m).indices.tolist()


def sampled_tokens(children_of) -> list[int]:
    key = request_key(9)
    return [
        accept_sampled_children(
            P,
            Q,
            children_of(step),
            [uniform(key, ACCEPT, step, slot) for slot in range(2)],
            stream_gumbel(key, RECOVER, step, 0, IDS),
        )[1]
        for step in range(2500)
    ]


def test_the_door_is_lossless_for_sampled_and_biased_for_top_m_children():
    target = dict(enumerate(P.tolist()))
    assert fits(sampled_tokens(lambda step: drawn_children(step, 2)), target)
    assert not fits(sampled_tokens(lambda step: Q.topk(2).indices.tolist()), target)


def test_fixed_children_follow_the_targets_own_token():
    children, tokens = [1, 2], []
    for position in range(2000):
        index, token = accept_fixed_children(P, children, gumbel(request_key(4), position, IDS))
        assert index == (children.index(token) if token in children else None)
        tokens.append(token)
    assert fits(tokens, dict(enumerate(P.tolist())))
