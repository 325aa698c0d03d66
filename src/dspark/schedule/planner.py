"""`scheduled`: the plan with most expected tokens per millisecond, over the whole batch.

A step with B rows that verifies m draft tokens commits B + (the sum of their survivals) tokens on average and takes
what the profile says. Candidates (row, slot) are admitted by falling survival; how many is the global maximum, since
cost curves are staircases on which the first fall is not the last (DSpark, arXiv 2607.05147, Algorithm 1, stops there).

What makes a plan lossless under rule `rejection` is that it never judges a token by what that token led to. Candidates
are therefore opened one by one, in the order of their rank: a slot's survival depends on the tokens before it, all of
them admitted, and what lies behind it is what older steps lead to expect. See docs/exactness.md, clause 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, zip_longest
from operator import add, mul, truediv

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray as Array

from dspark.schedule.costs import CostCurves
from dspark.schedule.policy import MAX_DRAFT, NO_DRAFT, Choice, Offer, RowView, StepView

# Gain over plain decoding that a plan for several requests has to promise before anything is drafted: looking for their
# drafts costs 1 to 3 % of a step, drawing kept tokens with a temperature 1 %, and plans that promise little
# bring less than that.
LEAST_GAIN = 0.08
# Gain that a pass of the drafter for one request has to promise over the best plan without it. Of several estimates the
# highest is most likely too high, and a pass that costs a third of a step is dear where it is.
PASS_GAIN = 0.1
_NEVER = 1e-9  # survival below which a token is not expected at all
SMALL = 16  # candidates up to which plain lists are faster than arrays
_TOGETHER = 32  # candidates that are looked at in one go
_REACH = 2  # slots drafted beyond the plan where confidences will tell how many of them to verify


@dataclass(frozen=True, slots=True)
class PlannedPolicy:
    """`scheduled`: verify what pays on this machine, at this load; draft only where that pays too."""

    costs: CostCurves
    most: int = MAX_DRAFT

    def draft_lens(self, step: StepView) -> tuple[Choice, ...]:
        return plan_drafts(step, self.costs)

    def verify_lens(
        self, step: StepView, choices: Sequence[Choice], lens: Sequence[int], confidence: Sequence[Sequence[float]]
    ) -> tuple[int, ...]:
        return plan_verification(step, choices, lens, confidence, self.costs)


def plan_drafts(step: StepView, costs: CostCurves) -> tuple[Choice, ...]:
    """A source and a length for every row, from past information only.

    A pass of the drafter is shared, so the rows that would gain most from it come first, and every likely number of
    rows is tried: none, 1, 2, 4, ... and all.
    """
    if len(step.rows) == 1:
        return (_plan_alone(step, costs),)
    cheap = [_best_offer(row, drafter_pass=False) for row in step.rows]
    drafted = [_best_offer(row, drafter_pass=True) for row in step.rows]
    by_cheap = [offer.survival[: row.room] if offer else () for row, offer in zip(step.rows, cheap, strict=True)]
    by_pass = [offer.survival[: row.room] if offer else () for row, offer in zip(step.rows, drafted, strict=True)]
    before, after = list(map(sum, by_cheap)), list(map(sum, by_pass))
    # Most steps of many requests end here: a step with drafts takes longer than one without in any case.
    if sum(map(max, before, after)) < len(step.rows) * LEAST_GAIN - _NEVER:
        return (NO_DRAFT,) * len(step.rows)
    times = _step_times(step, costs, sum(map(max, map(len, by_cheap), map(len, by_pass))))
    best, lens = _best_lens(by_cheap, times, len(step.rows) * (1 + LEAST_GAIN) / times[0], {}, (0.0, 0.0))
    order = sorted((i for i, offer in enumerate(drafted) if offer), key=lambda i: (before[i] - after[i], i))
    sampled = list(accumulate((step.rows[i].sampled for i in order), initial=0))
    gains = list(accumulate((_gained(by_cheap[i], by_pass[i]) for i in order), initial=0.0))
    chosen = 0
    for n in _group_sizes(len(order))[1:]:
        drafting = [ms * step.draft_drift for ms in costs.draft_times(n, sampled[n])]
        # No set of tokens without the pass beats `best`, so with it one can only by what the pass itself brings.
        if gains[n] <= best * drafting[1] * (1 - _NEVER):
            continue
        with_pass = {
            i: _REACH if offer is not None and offer.confident else 0 for i in order[:n] if (offer := drafted[i])
        }
        survivals = [by_pass[i] if i in with_pass else own for i, own in enumerate(by_cheap)]
        rate, found = _best_lens(survivals, times, best, with_pass, drafting)
        if rate > best:
            best, lens, chosen = rate, found, n
    for i in order[:chosen]:
        cheap[i] = drafted[i]
    return _choices(step.rows, cheap, lens)


def _gained(before: Sequence[float], after: Sequence[float]) -> float:
    """What slots of one draft survive more often than those of another, in tokens; never negative."""
    return sum(map(max, zip_longest(before, after, fillvalue=0.0))) - sum(before)


def _best_lens(
    survivals: Sequence[Sequence[float]],
    times: Sequence[float],
    best: float,
    with_pass: Mapping[int, int],
    drafting: Sequence[float],
) -> tuple[float, list[int]]:
    """The most expected tokens per ms, if it is more than `best`, and the rows' draft lengths for it; else `best` and
    no draft. Ties go to the smaller slot, then the earlier row. Lists: arrays take longer for so few.

    Args:
        times: of a step with 0, 1, ... draft tokens, without drafting.
        with_pass: the rows whose draft the drafter makes, and how many slots it drafts beyond what is planned.
        drafting: what the drafter takes for 0, 1, ... slots. It runs as long as the longest of its drafts, for all of
            them; its pass is counted even where none of them is admitted, since without it is another plan.
    """
    lens = [0] * len(survivals)
    # What a pass of one slot would bring; most numbers of rows end here, since sorting plain numbers is quicker.
    tokens = accumulate(sorted(chain.from_iterable(survivals), reverse=True), initial=len(survivals))
    if max(map(truediv, tokens, map(add, times, repeat(drafting[1])))) < best * (1 - _NEVER):
        return best, lens
    ranked = sorted((-chance, slot, row) for row, own in enumerate(survivals) for slot, chance in enumerate(own))
    kept, depth, count = 0.0, 1, 0
    for admitted, (minus, slot, row) in enumerate(ranked, 1):
        kept -= minus
        if row in with_pass:
            depth = max(depth, min(slot + 1 + with_pass[row], len(survivals[row])))
        rate = (len(survivals) + kept) / (times[admitted] + drafting[depth])
        if rate > best:
            best, count = rate, admitted
    for _, _, row in ranked[:count]:
        lens[row] += 1
    return best, lens


def _plan_alone(step: StepView, costs: CostCurves) -> Choice:
    """`plan_drafts` for one request, without arrays: at batch 1 a plan has to cost less than it saves."""
    (row,) = step.rows
    most = max((min(row.room, len(offer.survival)) for offer in row.offers), default=0)
    times = _step_times(step, costs, most)
    least, best, passes = 1 / times[0], NO_DRAFT, False
    for offer in sorted(row.offers, key=lambda offer: offer.drafter_pass):
        if offer.drafter_pass and not passes:
            least, passes = least * (1 + PASS_GAIN), True
        survival, kept = offer.survival[: row.room], 1.0
        reach = _reach(offer)
        drafting = costs.draft_times(int(offer.drafter_pass), int(row.sampled))
        for length, chance in enumerate(survival, 1):
            kept += chance
            rate = kept / (times[length] + drafting[min(length + reach, len(survival))] * step.draft_drift)
            if rate > least:
                least, best = rate, Choice(offer, min(length + reach, len(survival)))
    return best


def gain(step: StepView, choices: Sequence[Choice], verified: int, accepted: int, costs: CostCurves) -> float:
    """How much faster than plain decoding a step was, as a share, that kept `accepted` of `verified` draft tokens and
    took what is predicted."""
    times = _step_times(step, costs, verified)
    ms = times[verified] + drafting_ms(step, costs, choices)
    return (1 + accepted / len(step.rows)) * times[0] / ms - 1


def plan_verification(
    step: StepView,
    choices: Sequence[Choice],
    lens: Sequence[int],
    confidence: Sequence[Sequence[float]],
    costs: CostCurves,
) -> tuple[int, ...]:
    """How many of each row's drafted tokens to verify: admit the candidates in rank order until none behind pays.

    Of rows that are `free` everything is known. Of the others a slot is known once all before it are admitted; behind
    it the past's expectation holds, scaled to what is known. The length a draft came out with is not used for them
    either, since it may depend on its tokens.
    """
    if len(lens) == 1:
        return (_verify_alone(step, choices[0], lens[0], confidence[0], costs),)
    known: list[Sequence[float]] = []
    expected: list[Sequence[float]] = []
    base, fixed = float(len(lens)), 0
    for row, choice, length, chances in zip(step.rows, choices, lens, confidence, strict=True):
        past = choice.offer.survival[: choice.length] if choice.offer else ()
        if choice.trial:
            base, fixed, past, length = base + sum(past), fixed + choice.length, (), 0
        now = _cumulative(chances[:length]) if chances else past[:length]
        known.append(now)
        expected.append(now if row.free else past)
    width = max(1, *map(len, known), *map(len, expected))
    ranked = rank(table(known, width))
    foreseen = ranked.survival if expected == known else rank(table(expected, width)).survival
    times = _step_times(step, costs, fixed + len(foreseen))
    step_ms = np.array(times[fixed:]) + drafting_ms(step, costs, choices)
    planned = ranked.lens(stopping_count(base, ranked.survival, foreseen, step_ms), len(lens))
    return tuple(n if c.trial else p for c, n, p in zip(choices, lens, planned, strict=True))


def _verify_alone(step: StepView, choice: Choice, length: int, chances: Sequence[float], costs: CostCurves) -> int:
    """`plan_verification` for one request, without arrays."""
    # Where nothing was learnt by drafting, the plan for drafting was the plan.
    if choice.trial or choice.offer is None or not length or not chances:
        return length
    past = choice.offer.survival[: choice.length]
    now = _cumulative(chances[:length])
    expected = now if step.rows[0].free else past
    kept = list(accumulate(now, initial=1.0))
    foreseen = list(accumulate((max(s, _NEVER) for s in expected), initial=0.0))
    scale = [known / max(s, _NEVER) for known, s in zip(now, expected, strict=False)]
    drafting = drafting_ms(step, costs, (choice,))
    return _first_stop(kept, foreseen, scale, [ms + drafting for ms in _step_times(step, costs, len(expected))])


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates (row, slot) of a batch by falling survival; ties go to the smaller slot, then to the earlier row."""

    survival: Float[Array, " N"]
    row: Int[Array, " N"]
    slot: Int[Array, " N"]

    def lens(self, count: int, rows: int) -> list[int]:
        """How many of each row's slots are among the first `count`: always its first ones."""
        return np.bincount(self.row[:count], minlength=rows).tolist()


def table(survivals: Sequence[Sequence[float]], width: int = MAX_DRAFT) -> Float[Array, "B W"]:
    """Each row's survivals, which must not rise and are `width` at most; -1 where it has none."""
    nothing = (-1.0,) * width
    return np.array([(*survival, *nothing[len(survival) :]) for survival in survivals])


def rank(survivals: Float[Array, "B W"]) -> Ranked:
    """Order the slots of all rows."""
    by_slot = survivals.T.ravel()  # so that a stable sort breaks ties by slot, then by row
    order = np.argsort(-by_slot, kind="stable")[: int((by_slot >= 0).sum())]
    slots, rows = np.divmod(order, len(survivals))
    return Ranked(by_slot[order], rows, slots)


def expected_tokens(base: float, survival: Float[Array, " N"]) -> Float[Array, " N_plus_1"]:
    """Tokens a step commits on average when it verifies the first 0..N candidates."""
    return base + np.concatenate(([0.0], np.cumsum(survival)))


def stopping_count(
    base: float, known: Float[Array, " N"], expected: Float[Array, " M"], step_ms: Float[Array, " M_plus_1"]
) -> int:
    """How many candidates to admit when each is known only once all before it are admitted.

    Before candidate i the rate of stopping there stands against the best rate further on, with the survivals behind
    foreseen as `expected`, scaled so that they agree at i. The answer depends on known[:count + 1] only. Where
    `expected` is `known` this is the first global maximum of the rate.
    """
    size = len(known)
    kept = expected_tokens(base, known)
    rates = kept / step_ms[: size + 1]
    if known is expected:
        return int(rates.argmax())
    foreseen = expected_tokens(0.0, np.maximum(expected, _NEVER))
    scale = known / np.diff(foreseen)[:size]
    if size <= SMALL:
        return _first_stop(kept.tolist(), foreseen.tolist(), scale.tolist(), step_ms.tolist())
    for first in range(0, size, _TOGETHER):
        here = slice(first, min(first + _TOGETHER, size))
        ahead = (foreseen[first + 1 :] - foreseen[here, None]) * scale[here, None]
        # Admitting candidate i leads to i + 1 and more: what lies before that is no choice.
        further = np.triu((kept[here, None] + ahead) / step_ms[first + 1 :])
        stops = further.max(axis=1) <= rates[here]
        if stops.any():
            return first + int(stops.argmax())
    return size


def _first_stop(kept: list[float], foreseen: list[float], scale: list[float], step_ms: list[float]) -> int:
    """The same without arrays, which is faster for a few candidates."""
    for i, factor in enumerate(scale):
        rate, now = kept[i] / step_ms[i], kept[i] - foreseen[i] * factor
        further = zip(foreseen[i + 1 :], step_ms[i + 1 :], strict=True)
        if all((now + tokens * factor) / ms <= rate for tokens, ms in further):
            return i
    return len(scale)


def _step_times(step: StepView, costs: CostCurves, most: int) -> list[float]:
    """A step with 0..most draft tokens and no drafting: predicted, corrected by how older steps differed from that; of
    one request every size has a correction of its own."""
    curve = costs.step_times(step.tokens, most, step.pass_rows, step.context, step.sampled_rows)
    plain, base = curve[0], _decoding_ms(step, costs, curve[0])
    more, extra, rest = step.more_drift, step.extra_drift, step.rest_drift
    corrected = [(base + (ms - plain) * more) * extra for ms in curve[: most + 1]]
    if step.size_drifts:
        corrected = [ms * size for ms, size in zip(corrected, step.size_drifts, strict=False)]
    corrected = [max(base, ms) * rest for ms in corrected]
    corrected[0] = base * rest
    return corrected


def _decoding_ms(step: StepView, costs: CostCurves, plain: float) -> float:
    """The part of a plain step, which takes `plain` ms in all, that decodes. Prompts have to be read whatever is
    drafted: counted in, their time would make every token of this pass look dear, and a poor draft look worth it."""
    rows = len(step.rows)
    if step.tokens <= rows:
        return plain
    return min(plain, costs.step_times(rows, 0, rows, step.context, step.sampled_rows)[0])


def drafting_ms(step: StepView, costs: CostCurves, choices: Sequence[Choice]) -> float:
    """What the drafting that the choices asked for is predicted to have taken."""
    drafted = [i for i, c in enumerate(choices) if c.length and c.offer is not None and c.offer.drafter_pass]
    if not drafted:
        return 0.0
    by_slots = costs.draft_times(len(drafted), sum(step.rows[i].sampled for i in drafted))
    return by_slots[max(choices[i].length for i in drafted)] * step.draft_drift


def _best_offer(row: RowView, drafter_pass: bool) -> Offer | None:
    """The row's best offer of one kind, the first of equals."""
    best = None
    for offer in row.offers if row.room else ():
        if offer.drafter_pass == drafter_pass and (best is None or offer.kept(row.room) > best.kept(row.room)):
            best = offer
    return best


def _reach(offer: Offer | None) -> int:
    """Slots to draft beyond what is planned."""
    return _REACH if offer is not None and offer.confident else 0


def _group_sizes(most: int) -> list[int]:
    """0, 1, 2, 4, 8, 16, ... and all."""
    return sorted({0, most, *(1 << k for k in range(most.bit_length()) if 1 << k < most)})


def _choices(rows: Sequence[RowView], offers: Sequence[Offer | None], lens: Sequence[int]) -> tuple[Choice, ...]:
    choices = []
    for row, offer, length in zip(rows, offers, lens, strict=True):
        if offer is None or not length:
            choices.append(NO_DRAFT)
        else:
            choices.append(Choice(offer, min(length + _reach(offer), len(offer.survival), row.room)))
    return tuple(choices)


def _cumulative(chances: Sequence[float]) -> list[float]:
    return list(accumulate(chances, mul))
