"""Clauses 4 and 6 of the exactness rules: what may decide how much of a sampled draft is verified."""

import pytest

from dspark.config import SamplingParams

from .toy import V, dense, distance, make_model, plain_sequences, speculative_sequences

EXACT = 1e-12
BIASED = 1e-3
K = 3
P, Q = make_model(1), make_model(2)


def sure(q, prefix, token) -> bool:
    return float(dense(q(prefix))[token]) >= 0.4


def first(condition, block, default=K) -> int:
    """The first slot for which the condition holds."""
    return next((slot for slot in range(len(block)) if condition(slot)), default)


def stop_after_unsure(block, q):
    return min(K, first(lambda k: not sure(q, block[:k], block[k]), block) + 1)


def drop_unsure(block, q):
    return first(lambda k: not sure(q, block[:k], block[k]), block)


def stop_before_flat_slot(block, q):
    """c_k depends on the tokens before k only, as the confidence head's does."""
    return first(lambda k: float(dense(q(block[:k])).max()) < 0.5, block)


def look_ahead(block, q):
    """Admits slot k by the confidence of slot k + 1, which has seen x_k (the paper's appendix A)."""
    return first(lambda k: float(dense(q(block[: k + 1])).max()) < 0.5, block)


def fixed(block, q):
    return 2


def bias_of(plan, p=P, q=Q) -> float:
    return distance(speculative_sequences(p, q, K, plan=plan), plain_sequences(p, K + 1))


@pytest.mark.parametrize("plan", [fixed, stop_after_unsure, stop_before_flat_slot])
def test_plans_that_know_only_the_past_are_lossless(plan):
    assert bias_of(plan) < EXACT


@pytest.mark.parametrize("plan", [drop_unsure, look_ahead])
def test_plans_that_saw_the_token_they_judge_are_biased(plan):
    assert bias_of(plan) > BIASED


@pytest.mark.parametrize("plan", [stop_after_unsure, drop_unsure, look_ahead])
def test_any_plan_is_lossless_when_greedy(plan):
    assert bias_of(plan, p=make_model(1, SamplingParams(temperature=0.0))) < EXACT


# --- grammar --------------------------------------------------------------------------------------------------------

GRAMMAR = (0, 2, 3)
MASKED_P = make_model(1, allowed_ids=GRAMMAR)


def truncate_invalid(block, q):
    return first(lambda k: block[k] not in GRAMMAR, block)


def test_masking_the_draft_before_sampling_is_lossless():
    assert bias_of(fixed, MASKED_P, make_model(2, allowed_ids=GRAMMAR)) < EXACT


def test_leaving_an_invalid_token_to_be_rejected_is_lossless():
    assert float(dense(Q(()))[1]) > 0.01 and len(GRAMMAR) < V
    assert bias_of(fixed, MASKED_P, Q) < EXACT


def test_truncating_at_an_invalid_token_is_biased():
    assert bias_of(truncate_invalid, MASKED_P, Q) > BIASED


def test_stopping_after_an_end_token_is_lossless_and_before_it_is_not():
    end = 2
    assert bias_of(lambda block, q: min(K, first(lambda k: block[k] == end, block) + 1)) < EXACT
    assert bias_of(lambda block, q: first(lambda k: block[k] == end, block)) > BIASED
