"""Every figure on records written by hand, worked out beside them."""

import pytest

from dspark.config import RowRecord, StepRecord, StepTimes
from dspark.measure.bench import metrics
from dspark.measure.bench.records import Cell, Group, ModelSize, Peaks, RequestRecord
from dspark.measure.bench.tally import Tally


def row(verified, accepted, truncated=0, request=0, drafted=None, confidence=()):
    """A decoding step of one request."""
    return RowRecord(
        request, "lookup" if verified else "none", verified if drafted is None else drafted, verified, accepted,
        accepted + 1 - truncated, truncated, slot_accepted=tuple(n < accepted for n in range(verified)),
        confidence=confidence,
    )  # fmt: skip


def prompt(tokens, last=True, request=0):
    return RowRecord(request, "none", 0, 0, 0, int(last), 0, prefill=tokens)


def counts(*steps):
    """Of steps given as lists of rows."""
    tally = Tally()
    for number, rows in enumerate(steps):
        tokens = sum(r.prefill or r.verified + 1 for r in rows)
        tally(StepRecord(number, tokens, 0, StepTimes(1.0, 6.0, 3.0), tuple(rows)))
    return tally.counts()


def request(tokens, latency, ttft=None, gaps=()):
    return RequestRecord(0, 10, tokens, latency, ttft, gaps, "length", "w")


def test_acceptance_length_counts_the_bonus_and_steps_without_a_draft():
    found = counts([prompt(5)], [row(4, 4)], [row(0, 0)], [row(4, 1)])
    assert (found.steps, found.committed) == (3, 5 + 1 + 2)
    assert metrics.acceptance_length(found) == pytest.approx(8 / 3)


def test_an_end_token_inside_a_block_counts_and_what_is_behind_it_does_not():
    """Four drafts kept by the verdict, the second of them the end token: two of five tokens stay."""
    found = counts([row(4, 4, truncated=3)])
    assert (found.committed, found.truncated, found.accepted) == (2, 3, 4)
    assert metrics.acceptance_length(found) == 2
    assert found.committed == found.accepted + found.steps - found.truncated
    assert metrics.acceptance_rate(found) == 1.0, "the drafts were right, so the cut does not count against them"


def test_steps_that_accept_nothing():
    found = counts([row(3, 0)], [row(3, 0)])
    assert metrics.acceptance_length(found) == 1.0 and metrics.acceptance_rate(found) == 0.0
    assert metrics.slot_marginal(found) == (0.0, 0.0, 0.0)
    assert metrics.slot_conditional(found) == (0.0,), "no step reached the second slot"
    assert metrics.acceptance_histogram(found) == (1.0, 0.0, 0.0, 0.0)


def test_a_block_cut_before_verification_counts_what_was_verified():
    """Six drafted, two sent to the target, both kept."""
    found = counts([row(2, 2, drafted=6)], [row(6, 1)])
    assert (found.drafted, found.verified) == (12, 8)
    assert found.slot_drafted == (2,) * 6 and found.slot_verified == (2, 2, 1, 1, 1, 1)
    assert metrics.acceptance_rate(found) == pytest.approx(3 / 8)


def test_marginal_and_conditional_acceptance_per_slot():
    found = counts([row(3, 3)], [row(3, 1)], [row(3, 0)], [row(1, 1)], [row(0, 0)])
    assert found.draft_steps == 4, "a step without a draft is none of theirs"
    assert metrics.slot_marginal(found) == (3 / 4, 1 / 4, 1 / 4)
    assert metrics.slot_conditional(found) == (3 / 4, 1 / 2, 1.0), "the block of one never asked about slot 2"
    assert metrics.acceptance_histogram(found) == (1 / 4, 2 / 4, 0.0, 1 / 4)


def test_without_a_draft_there_is_no_acceptance():
    found = counts([row(0, 0)], [row(0, 0)])
    assert metrics.acceptance_length(found) == 1.0 and metrics.acceptance_rate(found) is None
    assert metrics.slot_marginal(found) == metrics.acceptance_histogram(found) == ()
    assert metrics.source_shares(found) == {"none": 1.0}
    empty = counts()
    assert metrics.acceptance_length(empty) is None and metrics.time_split(empty) is None


def test_time_is_split_over_steps_without_prompt_tokens():
    found = counts([prompt(5)], [row(2, 2)], [prompt(4, request=1), row(2, 2)])
    assert metrics.time_split(found) == pytest.approx((0.1, 0.6, 0.3))
    assert found.prefill_ms == 20.0 and found.steps == 2, "the row beside a prompt is a step all the same"


def test_sums_over_cells_pad_their_slots():
    total = metrics.summed([counts([row(3, 2)]), counts([row(1, 1)], [row(0, 0)])])
    assert total is not None and total.slot_accepted == (2, 1, 0) and total.steps == 3
    assert total.sources == {"lookup": 2, "none": 1}
    assert metrics.summed([]) is None


def test_bytes_and_operations_of_passes():
    """A prompt of 5, then a step with 2 drafts of which 1 is kept, then a plain step; caches of 0, 5 and 7 before."""
    found = counts([prompt(5)], [row(2, 1)], [row(0, 0)])
    assert (found.passes, found.pass_tokens, found.pass_sampled) == (3, 5 + 3 + 1, 1 + 3 + 1)
    assert found.pass_cached == 5 + (5 + 3) + (7 + 1)
    size = ModelSize(weight_bytes=1000, flop_per_token=10, kv_token_bytes=2, head_flop=4)
    used = metrics.use(found, 2.0, size, Peaks(bytes_per_s=15210.0, flop_per_s=100.0))
    assert used.bytes_per_s == (3 * 1000 + 21 * 2) / 2 and used.flop_per_s == (9 * 10 + 5 * 4) / 2
    assert (used.bytes_share, used.flop_share) == (pytest.approx(0.1), pytest.approx(0.55))
    assert metrics.use(found, 2.0, size, None).bytes_share is None


def test_a_prompt_in_chunks_samples_once():
    found = counts([prompt(4, last=False)], [prompt(3)])
    assert found.pass_sampled == 1 and found.pass_cached == 4 + 7 and found.steps == 0


def test_stated_against_observed_survival():
    found = counts([row(2, 1, confidence=(0.9, 0.5))], [row(1, 1, confidence=(0.95,))])
    low, high = metrics.reliability("m", found)
    assert (low.stated, low.observed, low.count) == (pytest.approx(0.45), 0.0, 1)
    assert (high.stated, high.observed, high.count) == (pytest.approx(0.925), 1.0, 2)
    assert metrics.reliability("m", counts([row(2, 1)])) == ()


def test_latencies_of_requests():
    several = [request(11, 2.0, 1.0, (100.0, 300.0)), request(1, 0.5, 0.5), request(5, 3.0)]
    ttft, tpot = metrics.ttft_ms(several), metrics.tpot_ms(several)
    assert ttft is not None and ttft.p50 == 750.0, "the one that came whole has no first token"
    assert tpot is not None and tpot.p50 == 100.0, "a single token has no time per further token"
    itl = metrics.itl_ms(several)
    assert itl is not None and itl.p50 == 200.0 and itl.p99 == pytest.approx(298.0)
    assert metrics.latency_s(several).p50 == 2.0
    assert metrics.ttft_ms([several[2]]) is None


def test_speed_of_users_and_of_all():
    cell = Cell("plain", Group("code", 0.0, 2), 0, 2.0, (request(10, 2.0), request(10, 1.0)))
    assert cell.tok_per_s == 10.0 and metrics.user_tok_per_s(cell) == 7.5


def test_quantiles_are_linear_between_values():
    found = metrics.quantiles([4.0, 1.0, 2.0, 3.0, 5.0])
    assert found is not None and (found.p50, found.p90, found.p99) == (3.0, pytest.approx(4.6), pytest.approx(4.96))
    assert metrics.quantiles([]) is None


def test_every_definition_is_a_sentence():
    assert all(text.endswith(".") for text in metrics.DEFINITIONS.values())
