"""Lookup: which guesses it makes, what it claims of them, and that they change no text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.artifacts import Fingerprint
from dspark.artifacts.table import CorpusTable
from dspark.config import SamplingParams
from dspark.data import Corpus
from dspark.data.table import TableSettings, count_table
from dspark.engine.lookup import FLOOR, MAX_ORDER, LookupGuess, LookupProposer, table_chain
from dspark.engine.request import Request
from tests.engine import support as s
from tests.engine.test_identity import CRITICAL, MODES, PROMPTS, chi_square, exact_probabilities, frequencies

NOBODY = Fingerprint("w", "t", "c")


def counted(*texts: list[int], **changes) -> CorpusTable:
    """A table of texts whose first token is the prompt."""
    offsets = (0, *np.cumsum([len(text) for text in texts]).tolist())
    count = len(texts)
    corpus = Corpus(torch.tensor(sum(texts, [])), offsets, (1,) * count, (0.0,) * count, ("chat",) * count)
    return count_table(corpus, TableSettings(**({"min_count": 1} | changes)), NOBODY)


class Silent:
    """Text nobody reads."""

    def push(self, token_id, kind, may_stop):
        return False


def request(ids: list[int], temperature: float = 0.0, number: int = 0) -> Request:
    """A running request with these tokens, the last of which it answered."""
    made = Request(
        number, ids[:-1], SamplingParams(temperature=temperature), 10_000, frozenset(), Silent(), key=0, coupled=False
    )
    made.output_ids.append(ids[-1])
    return made


def guess(ids: list[int], table: CorpusTable | None = None, length: int = 4) -> LookupGuess:
    return LookupProposer(table).guess(request(ids), length)


def test_the_longest_match_in_the_own_text_comes_first():
    table = counted([1, 2, 9, 9, 9], [1, 2, 9, 9, 9])
    found = guess([5, 1, 2, 3, 4, 6, 1, 2], table)
    assert (found.ids, found.source, found.order) == ((3, 4, 6, 1), "lookup", 2)
    found = guess([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2])
    assert (found.ids[0], found.order) == (3, 3)  # though 4 followed [1, 2] later


def test_of_equal_matches_the_latest_counts():
    assert guess([1, 2, 3, 1, 2, 4, 1, 2]).ids[0] == 4


def test_a_match_that_runs_into_the_end_repeats_itself():
    assert guess([4, 1, 2, 1, 2, 1], length=6).ids == (2, 1, 2, 1, 2, 1)


def test_a_match_of_one_token_is_worth_one_guess_and_comes_after_the_table():
    own = [3, 1, 7, 8, 2, 1]
    alone = guess(own)
    assert (alone.ids, alone.source, alone.order) == ((7,), "lookup", 1)
    helped = guess(own, counted(*[[2, 1, 5, 6]] * 20))
    assert (helped.ids, helped.source, helped.order) == ((5, 6), "table", 2)
    assert guess(own, counted([4, 4, 4])).source == "lookup"


def test_nothing_found():
    nothing = guess([1, 2, 3], counted([7, 8]))
    assert nothing == LookupGuess() and nothing.source == "none" and nothing.survival == ()


def test_the_table_sees_prompt_and_output_together():
    made = request([1, 2])  # 1 is prompt, 2 output
    assert LookupProposer(counted(*[[1, 2, 6], [9, 2, 7], [9, 2, 7]])).guess(made, 4).ids[0] == 6


table_texts = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=20), min_size=1, max_size=6)


@given(table_texts, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 6), st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_a_chain_follows_the_table_until_it_hardly_survives(texts, last, length, floor):
    table = counted(*texts)
    ids, chances, order = table_chain(table, last, length, floor)
    context, survival = list(last), 1.0
    for token_id, chance in zip(ids, chances, strict=True):
        found = table.find(context)
        assert found.token_id == token_id and 0 < chance < found.seen / found.total
        context.append(token_id)
        survival *= chance
    assert survival >= floor or not ids
    assert order == (table.find(last).order if ids else 0)
    following = table_chain(table, context, 1, 0.0)[1]
    assert len(ids) == length or not following or survival * following[0] < floor


def test_a_longer_draft_begins_as_a_shorter_one():
    table = counted(*[list(range(10))] * 50)
    whole = guess([4, 0, 1], table, length=8)
    assert whole.ids == tuple(range(2, 10)) and whole.survival[-1] >= FLOOR
    assert guess([4, 0, 1], table, length=3) == whole.cut(3)
    assert whole.cut(8) is whole and whole.cut(0).ids == ()


def follow(proposer: LookupProposer, tokens: list[int], temperature: float, number: int = 0) -> list[LookupGuess]:
    """The guesses of plain steps through a text."""
    running, guesses = request(tokens[:2], temperature, number), []
    for token_id in tokens[2:]:
        guesses.append(proposer.guess(running, MAX_ORDER))
        running.output_ids.append(token_id)
        proposer.observe_outcome(guesses[-1], [token_id])
    proposer.release(running)
    return guesses


tokens = st.lists(st.integers(0, 3), min_size=3, max_size=40)


@given(tokens, tokens, tokens, st.sampled_from([0.0, 0.7, 1.0]))
@settings(max_examples=40, deadline=None)
def test_guesses_and_estimates_depend_on_the_past_only(past, one, other, temperature):
    table = counted([0, 1, 2, 3, 1, 2, 0, 0], [2, 1, 1, 3, 0])
    a = follow(LookupProposer(table), past + one, temperature)
    b = follow(LookupProposer(table), past + other, temperature)
    seen = len(past) - 1  # the guess after the last token they share is the last that may be equal
    assert a[:seen] == b[:seen]
    for found in a:
        assert len(found.ids) == len(found.estimates) == len(found.kinds)
        assert all(0 < estimate < 1 for estimate in found.estimates)


def test_a_look_into_the_future_is_found_out():
    """The wrong variant: estimates that know the outcome before they are asked for fail the check above."""

    class Peeking(LookupProposer):
        def guess(self, request, length):
            found = super().guess(request, length)
            self.observe_outcome(found, FUTURE[request.num_tokens :])
            return super().guess(request, length)

    past, results = [0, 1, 2, 0, 1], []
    for FUTURE in (past + [2, 0, 1, 2], past + [3, 3, 3, 3]):  # noqa: N806
        results.append(follow(Peeking(), FUTURE, 0.0)[: len(past) - 1])
    assert results[0] != results[1]


def test_estimates_follow_what_was_kept_source_by_source():
    table = counted(*[[0, 1, 5]] * 3)
    proposer = LookupProposer(table)
    repeating, fresh = [3, 4] * 30, request([7, 0, 1], number=1)
    before_own, before_table = guess([3, 4, 3, 4]).estimates, proposer.guess(fresh, 1).estimates
    follow(proposer, repeating, 0.0)
    after_own = proposer.guess(request([3, 4, 3, 4], number=2), 4).estimates
    assert after_own[0] > before_own[0]
    assert proposer.guess(fresh, 1).estimates == before_table  # of another kind
    for _ in range(30):
        proposer.observe_outcome(proposer.guess(fresh, 1), [9])
    assert proposer.guess(fresh, 1).estimates[0] < before_table[0] / 2
    hot = proposer.guess(request([7, 0, 1], temperature=1.0, number=3), 1)
    assert hot.estimates == LookupProposer(table).guess(request([7, 0, 1], temperature=1.0), 1).estimates


def test_a_request_that_goes_other_ways_than_guessed_is_believed_less_than_one_that_follows():
    table = counted(*[[0, 1, 5]] * 3)
    proposer = LookupProposer(table)
    astray, along = request([7, 0, 1], number=1), request([7, 0, 1], number=2)
    for _ in range(12):
        proposer.observe_outcome(proposer.guess(astray, 1), [9])
        proposer.observe_outcome(proposer.guess(along, 1), [5])
    bad, good = proposer.guess(astray, 1), proposer.guess(along, 1)
    assert bad.expected == good.expected  # the same kind
    assert bad.estimates[0] < 0.8 * good.estimates[0]
    proposer.release(astray)
    assert bad.estimates < proposer.guess(astray, 1).estimates <= good.estimates


# In an engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answered(target):
    """Every mode's plain answers, and a table counted over the greedy and seeded ones."""
    plain = s.toy_engine(target)
    answers = {name: plain.generate(PROMPTS, params) for name, params in MODES.items()}
    texts = [[a.prompt_ids[-1], *a.token_ids] for name in ("greedy", "seeded") for a in answers[name]]
    return answers, counted(*texts)


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:4", "fixed:16"])
@pytest.mark.parametrize("mode", MODES)
def test_text_is_that_of_plain_decoding(mode, policy, target, answered):
    answers, table = answered
    engine = s.toy_engine(target, LookupProposer(table), policy=policy, max_batch=4)
    sources, claims = set(), []
    engine.listeners.append(lambda record: sources.update(row.source for row in record.rows if row.verified))
    engine.listeners.append(lambda record: claims.extend(c for row in record.rows for c in row.confidence))
    outputs = engine.generate(PROMPTS, MODES[mode])
    assert [o.token_ids for o in outputs] == [a.token_ids for a in answers[mode]]
    if mode in ("greedy", "seeded"):
        assert "table" in sources and sum(o.stats.accepted for o in outputs) > 40
    assert sources <= {"lookup", "table"}
    assert all(0 < claim < 1 for claim in claims)


def test_records_name_both_sources(target, answered):
    engine = s.toy_engine(target, LookupProposer(answered[1]), policy="fixed:4")
    outputs = engine.generate(PROMPTS, MODES["greedy"])
    counts = {name: sum(o.stats.sources.get(name, 0) for o in outputs) for name in ("lookup", "table", "none")}
    assert counts["lookup"] and counts["table"]
    assert sum(counts.values()) == sum(o.stats.steps for o in outputs)


def test_rejection_sampling_follows_the_target(target):
    table = counted(*[[PROMPTS[0][-1], 65, 66, 67], [66, 68, 65, 65], [68, 67, 66]] * 9)
    proposer = LookupProposer(table)
    assert chi_square(frequencies(target, proposer), exact_probabilities(target)) < CRITICAL
    assert proposer.guess(request([1, PROMPTS[0][-1]], 1.0), 2).source == "table"
