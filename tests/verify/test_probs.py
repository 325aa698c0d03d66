import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark.config import SamplingParams, SlotRule
from dspark.errors import RequestError
from dspark.verify import log_probs, processed_logits, processed_probs

VOCAB = 10


def reference(logits: list[float], rule: SlotRule) -> tuple[list[float], float]:
    """The distribution by the book, one token at a time; and how near a cut came to being decided by rounding."""
    p, x = rule.params, list(logits)
    ids = range(len(x))
    for token in ids:
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            x[token] = -math.inf
        if rule.allowed_ids is not None and token not in rule.allowed_ids:
            x[token] = -math.inf
        if token in rule.end_ids and len(rule.output_ids) < p.min_tokens:
            x[token] = -math.inf
        x[token] += p.logit_bias.get(token, 0.0)
        if token in rule.prompt_ids or token in rule.output_ids:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = list(rule.output_ids).count(token)
        x[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
    order = sorted(ids, key=lambda token: (-x[token], token))
    if p.temperature == 0:
        return [float(token == order[0]) for token in ids], 1.0
    top = x[order[0]]
    weight = [math.exp((value - top) / p.temperature) for value in x]
    steps = [x[a] - x[b] for a, b in zip(order, order[1:], strict=False) if x[a] != x[b]]
    slack = min([*steps, *(abs(w - p.min_p) for w in weight if p.min_p)], default=1.0)
    weight = [w if w >= p.min_p else 0.0 for w in weight]
    if p.top_k:
        weight = [w if token in order[: p.top_k] else 0.0 for token, w in enumerate(weight)]
    if p.top_p < 1:
        total, before = sum(weight), 0.0
        for token in order:
            share = weight[token] / total
            slack = min(slack, abs(before - p.top_p))
            if before >= p.top_p:
                weight[token] = 0.0
            before += share
    return [w / sum(weight) for w in weight], slack


tokens = st.integers(0, VOCAB - 1)
# Halves make ties, in the logits and at the edge of top_k and top_p.
logit_rows = st.lists(
    st.one_of(st.integers(-8, 8).map(lambda n: n / 2), st.floats(-6, 6).map(lambda x: round(x, 6))),
    min_size=VOCAB,
    max_size=VOCAB,
)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB, 100]),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(tokens, st.floats(-3, 3), max_size=2),
    allowed_token_ids=st.one_of(st.none(), st.sets(tokens, min_size=6)),
    min_tokens=st.integers(0, 4),
)
slot_rules = st.builds(
    SlotRule,
    params=sampling,
    prompt_ids=st.lists(tokens, max_size=5),
    output_ids=st.lists(tokens, max_size=5),
    end_ids=st.lists(tokens, max_size=2),
    allowed_ids=st.one_of(st.none(), st.sets(tokens, min_size=7)),
)
batches = st.lists(st.tuples(logit_rows, slot_rules), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(batches)
def test_agrees_with_the_distribution_by_the_book(batch):
    logits = torch.tensor([row for row, _ in batch], dtype=torch.float64)
    expected, slack = zip(*(reference(row, rule) for row, rule in batch), strict=True)
    assume(min(slack) > 1e-9)
    got = processed_probs(logits, [rule for _, rule in batch])
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(batches)
def test_a_row_does_not_depend_on_its_batch(batch):
    logits, rules = torch.tensor([row for row, _ in batch]), [rule for _, rule in batch]
    together = processed_probs(logits, rules)
    turned = processed_probs(logits.flip(0), rules[::-1]).flip(0)
    alone = torch.cat([processed_probs(logits[i : i + 1], [rule]) for i, rule in enumerate(rules)])
    assert torch.equal(together, turned)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_row_invariance_at_full_vocabulary(threads):
    """Wide enough for vector kernels, thread splits and both widths of the nucleus."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 49152, generator=generator) * torch.tensor([0.5, 1, 2, 3, 4, 5, 6, 8.0])[:, None]
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(top_p=0.95),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(top_p=0.95, min_p=0.01),
    ]
    rules = [SlotRule(p, prompt_ids=range(100)) for p in params]
    together = processed_probs(logits, rules)
    same_setting = processed_probs(logits, [rules[2]] * 8)
    for row, rule in enumerate(rules):
        assert torch.equal(together[row], processed_probs(logits[row : row + 1], [rule])[0])
        assert torch.equal(same_setting[row], processed_probs(logits[row : row + 1], [rules[2]])[0])


def test_a_wide_nucleus_is_the_smallest_set_that_reaches_top_p():
    """More tokens than the first ranking looks at."""
    logits = torch.randn(1, 20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    full = logits.softmax(-1)[0]
    kept = processed_probs(logits, [SlotRule(SamplingParams(top_p=0.9))])[0] > 0
    assert kept.sum() > 5000
    assert full[kept].sum() >= 0.9 > full[kept].sum() - full[kept].min()
    assert full[kept].min() > full[~kept].max()


@settings(max_examples=60, deadline=None)
@given(batches)
def test_the_input_is_not_modified(batch):
    logits, rules = torch.tensor([row for row, _ in batch]), [rule for _, rule in batch]
    before = logits.clone()
    processed_logits(logits, rules)
    processed_probs(logits, rules)
    log_probs(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "given_dtype, wanted",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_precision(given_dtype, wanted):
    logits = torch.tensor([[0.5, 1.0, -2.0]], dtype=given_dtype)
    rules = [SlotRule(SamplingParams(temperature=0.5, top_k=2))]
    for function in (processed_logits, processed_probs):
        assert function(logits, rules).dtype == wanted
    assert torch.equal(processed_probs(logits, rules), processed_probs(logits.to(wanted), rules))
    assert log_probs(logits).dtype == wanted


def probs_of(logits: list[float], slot: dict | None = None, **params) -> list[float]:
    row = torch.tensor([logits], dtype=torch.float64)
    return processed_probs(row, [SlotRule(SamplingParams(**params), **(slot or {}))])[0].tolist()


def test_ties_go_to_the_smaller_id():
    tied = [1.0, 2.0, 2.0, 2.0]
    assert probs_of(tied, temperature=0.0) == [0, 1, 0, 0]
    assert probs_of(tied, top_k=1) == [0, 1, 0, 0]
    assert probs_of(tied, top_k=2) == pytest.approx([0, 0.5, 0.5, 0])
    assert probs_of(tied, top_p=0.01) == [0, 1, 0, 0]


def test_temperature_zero_is_the_limit_of_small_temperatures():
    for temperature in (1e-6, 1e-40, 1e-300):
        assert probs_of([1.0, 3.0, 2.0], temperature=temperature) == [0, 1, 0]
        row = torch.tensor([[1.0, 3.0, 2.0]])
        assert processed_probs(row, [SlotRule(SamplingParams(temperature=temperature))]).tolist() == [[0, 1, 0]]
    assert probs_of([1.0, 3.0, 2.0], temperature=1e300) == pytest.approx([1 / 3] * 3)


def test_end_tokens_are_impossible_before_min_tokens():
    for written, possible in ((0, False), (2, False), (3, True)):
        slot = {"output_ids": (0,) * written, "end_ids": (1, 2)}
        probs = probs_of([0.0, 5.0, 5.0, 1.0], slot, min_tokens=3)
        assert (probs[1] > 0, probs[2] > 0) == (possible, possible)


def test_penalties_use_the_history_of_their_slot():
    """Two slots of one request: the second has one more token behind it."""
    logits = torch.tensor([[1.0, 1.0, -1.0]] * 2, dtype=torch.float64)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    rules = [SlotRule(params, prompt_ids=(2,), output_ids=(0,)), SlotRule(params, prompt_ids=(2,), output_ids=(0, 0))]
    expected = [[0.5 - 0.25 - 0.5, 1.0, -2.0], [0.5 - 0.25 - 1.0, 1.0, -2.0]]
    assert processed_logits(logits, rules).tolist() == expected


def test_mask_of_request_and_grammar_both_hold():
    probs = probs_of([1.0, 1.0, 1.0, 9.0], {"allowed_ids": [1, 2]}, allowed_token_ids=[0, 1, 2])
    assert probs == pytest.approx([0, 0.5, 0.5, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_nothing_is_refused(temperature):
    with pytest.raises(RequestError, match="No token is possible"):
        probs_of([1.0, 2.0], {"allowed_ids": [1]}, allowed_token_ids=[0], temperature=temperature)
    with pytest.raises(RequestError, match="No token is possible"):
        probs_of([math.nan, 2.0], temperature=temperature)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    with pytest.raises(RequestError, match=f"Token id {wrong} is outside the vocabulary; allowed are 0 to 3"):
        probs_of([0.0] * 4, logit_bias={wrong: 1.0})


def test_log_probs_are_of_the_unprocessed_distribution():
    logits = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(log_probs(logits).exp(), logits.softmax(-1))
