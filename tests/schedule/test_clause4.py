"""Planned verify lengths leave the target's distribution alone (clause 4): exact enumeration of all drafts.

Confidences are the true chances of acceptance, so they are tied to the drafted tokens as closely as can be. Costs are
a staircase, so that a plan which looks ahead has something to gain.
"""

from functools import cache
from itertools import product

import pytest
import torch

from dspark.schedule import NO_DRAFT
from dspark.schedule.parse import parse_policy
from dspark.verify import accept_prob, residual
from tests.schedule import machines as m
from tests.verify.toy import V, dense, make_model

EXACT, BIASED = 1e-12, 1e-3
K = 2
P, Q = make_model(1), make_model(2)
P2, Q2 = make_model(7), make_model(8)
STAIRS = m.curves([10.0, 11.5, 11.6, 14.0, 14.2, 17.0, 17.1])
STEEP = m.curves([10.0, 17.5, 18.5])  # one token never pays, two may


@cache
def plain(p) -> torch.Tensor:
    """[V] * (K + 1): the target's own probability of every text."""
    result = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    for text in product(range(V), repeat=K + 1):
        result[text] = torch.stack([dense(p(text[:i]))[token] for i, token in enumerate(text)]).prod()
    return result


@cache
def after(p, q, block, length) -> torch.Tensor:
    """The probability of every text when the first `length` tokens of a drafted block are verified."""
    result = torch.zeros((V,) * (K + 1), dtype=torch.float64)

    def finish(prefix, chance):
        given = plain(p)[prefix].sum()
        result[prefix] += chance * plain(p)[prefix] / given

    chance = 1.0
    for slot, token in enumerate(block[:length]):
        target, drafter = dense(p(block[:slot])), dense(q(block[:slot]))
        keep = accept_prob(float(target[token]), float(drafter[token]))
        if keep < 1:
            for other, share in enumerate(residual(target, drafter).tolist()):
                if share > 0:
                    finish((*block[:slot], other), chance * (1 - keep) * share)
        chance *= keep
    finish(block[:length], chance)
    return result


@cache
def chance_of(q, block) -> float:
    return float(torch.stack([dense(q(block[:i]))[token] for i, token in enumerate(block)]).prod())


@cache
def confidence(p, q, block) -> tuple[float, ...]:
    """Slot k's true chance of acceptance: it depends on the tokens before k."""
    return tuple(float(torch.minimum(dense(p(block[:k])), dense(q(block[:k]))).sum()) for k in range(len(block)))


@cache
def expectation(p, q) -> tuple[float, ...]:
    """What older steps lead to expect: the mean chance of each slot."""
    blocks = list(product(range(V), repeat=K))
    weights = [chance_of(q, block) for block in blocks]
    return tuple(sum(w * confidence(p, q, b)[k] for w, b in zip(weights, blocks, strict=True)) for k in range(K))


def plan(policy, models, blocks, free):
    step = m.step_of([expectation(p, q) for p, q in models], free=free, drafter_pass=True, confident=True)
    now = [confidence(p, q, block) for (p, q), block in zip(models, blocks, strict=True)]
    return policy.verify_lens(step, m.whole(step), [K] * len(models), now)


def bias(policy, models, free=False) -> tuple[float, set]:
    """Largest difference of the joint probability of all texts, and the plans that came up."""
    joint, wanted, plans = 0.0, plain(models[0][0]), set()
    for p, _ in models[1:]:
        wanted = torch.tensordot(wanted, plain(p), 0)
    for blocks in product(list(product(range(V), repeat=K)), repeat=len(models)):
        lens = plan(policy, models, blocks, free)
        plans.add(lens)
        outcome, chance = None, 1.0
        for (p, q), block, length in zip(models, blocks, lens, strict=True):
            mine = after(p, q, block, length)
            outcome = mine if outcome is None else torch.tensordot(outcome, mine, 0)
            chance *= chance_of(q, block)
        joint = joint + chance * outcome
    return float((joint - wanted).abs().max()), plans


BATCHES = {"one request": ([(P, Q)], STEEP), "two requests that compete": ([(P, Q), (P2, Q2)], STAIRS)}


@pytest.mark.parametrize("policy", ["scheduled", "threshold:0.55"])
@pytest.mark.parametrize("batch", BATCHES)
def test_texts_follow_the_target(batch, policy):
    models, costs = BATCHES[batch]
    difference, plans = bias(parse_policy(policy, costs), models)
    assert len(plans) > 1  # the plan does look at this step's confidences
    assert difference < EXACT


@pytest.mark.parametrize("batch", BATCHES)
def test_a_plan_that_looks_ahead_is_found_out(batch):
    """The wrong variant: the same planner told that it may know everything, as for greedy rows."""
    models, costs = BATCHES[batch]
    assert bias(parse_policy("scheduled", costs), models, free=True)[0] > BIASED


class DropsUnsure:
    """Wrong on purpose: leaves out a token because the token itself is unlikely."""

    def __init__(self, models, blocks):
        self.models, self.blocks = models, blocks

    def verify_lens(self, step, choices, lens, confidence):
        ends = []
        for (_, q), block in zip(self.models, self.blocks, strict=True):
            unsure = (k for k in range(K) if float(dense(q(block[:k]))[block[k]]) < 0.4)
            ends.append(next(unsure, K))
        return tuple(ends)


def test_a_plan_that_judges_the_token_itself_is_found_out():
    joint = 0.0
    for block in product(range(V), repeat=K):
        (length,) = plan(DropsUnsure([(P, Q)], [block]), [(P, Q)], [block], False)
        joint = joint + chance_of(Q, block) * after(P, Q, block, length)
    assert float((joint - plain(P)).abs().max()) > BIASED


def test_beside_a_row_known_as_a_whole_the_sampled_row_stays_exact():
    """Whatever the other row drafted, known from end to end: given that, the sampled row's texts follow the target."""
    policy, models, plans = parse_policy("scheduled", STAIRS), [(P, Q), (P2, Q2)], set()
    for theirs in product(range(V), repeat=K):
        mine = 0.0
        for block in product(range(V), repeat=K):
            lens = plan(policy, models, (block, theirs), free=[False, True])
            plans.add(lens)
            mine = mine + chance_of(Q, block) * after(P, Q, block, lens[0])
        assert float((mine - plain(P)).abs().max()) < EXACT
    assert len({lens[0] for lens in plans}) > 1 and len({lens[1] for lens in plans}) > 1


@pytest.mark.parametrize("name", ["fixed:2", "length", "history", "threshold:0.5", "scheduled"])
def test_draft_lengths_are_decided_before_drafting(name):
    """By construction: the first decision is handed no confidence at all."""
    policy = parse_policy(name, STAIRS)
    step = m.step_of([expectation(P, Q), ()], free=False, drafter_pass=True, confident=True)
    first, second = policy.draft_lens(step)
    assert 0 <= first.length <= K and second == NO_DRAFT
