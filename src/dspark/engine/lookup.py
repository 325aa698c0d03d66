"""Drafts by looking up: what followed the same last tokens earlier in this request, else in a corpus table.

Both are functions of committed tokens, so drafts are point masses, and so are their estimates: how often guesses of the
same kind were right before. Any plan may use them (docs/exactness.md, clause 4).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from dspark.artifacts.table import CorpusTable
from dspark.config import Draft, Streams
from dspark.engine.batcher import Row
from dspark.engine.proposer import Outlook, StatelessProposer
from dspark.engine.request import Request
from dspark.schedule import Offer
from dspark.schedule.calibration import bucket_of
from dspark.schedule.outcomes import OutcomeRates, Shortfall

OWN, TABLE = "lookup", "table"  # as records name them
MIN_ORDER, MAX_ORDER = 1, 4  # longer matches in the request's own text add nothing
TRUSTED_ORDER = 2  # from here on the own text comes before the table; a shorter match is worth one token at most
DOUBT = 1.5  # added to totals: a continuation seen once out of once is no certainty
# A draft token costs a tenth of a plain step or more to verify, so one that survives less often does not pay; on
# held-out text 0.10 to 0.20 give the same speed within 2 % (docs/lookup.md).
FLOOR = 0.15

# First expectations, measured by benchmarks/lookup_simulation.py; eight outcomes of a kind weigh as much.
_OWN_FIRST = {  # first slot kept, by match length 1 to 4
    "greedy": (0.39, 0.56, 0.47, 0.89),
    "low": (0.28, 0.51, 0.58, 0.80),
    "middle": (0.28, 0.51, 0.58, 0.80),
    "high": (0.20, 0.42, 0.47, 0.67),
}
_OWN_DECAY = 0.8  # each slot that was kept leaves this much of the doubt
_TABLE_POWER = {"greedy": 1.0, "low": 1.25, "middle": 1.25, "high": 1.75}  # of the counts' probability
_TABLE_STEPS = 5  # kinds of table guesses by that probability
_MOST = 0.95  # what the surest kind of them is worth


@dataclass(frozen=True, slots=True)
class LookupGuess:
    """One request's draft. `estimates[k]` is the chance that token k is kept if all before it are: what the token's
    kind is worth, `expected[k]`, times how far the request's guesses fall short of that. `kinds` are what is shared by
    all requests, `owner` range of temperature and request. `order` is the length of the match, 0 where nothing was
    found."""

    ids: tuple[int, ...] = ()
    source: str = "none"
    order: int = 0
    estimates: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()
    kinds: tuple[Hashable, ...] = ()
    owner: tuple[str, int] | None = None

    @property
    def survival(self) -> tuple[float, ...]:
        """Chance that tokens 0..k are all kept."""
        return tuple(accumulate(self.estimates, mul))

    def cut(self, length: int) -> "LookupGuess":
        """Its first tokens."""
        if length >= len(self.ids):
            return self
        return replace(
            self,
            ids=self.ids[:length],
            estimates=self.estimates[:length],
            expected=self.expected[:length],
            kinds=self.kinds[:length],
        )


class NgramIndex:
    """For every n-gram of a growing token list, the position after its latest occurrence."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_ORDER + 1)]

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            position = len(self._ids)
            for order in range(MIN_ORDER, min(MAX_ORDER, position) + 1):
                self._after[order][tuple(self._ids[position - order :])] = position
            self._ids.append(token_id)

    def continuation(self, length: int) -> tuple[list[int], int]:
        """What followed the longest earlier match of the last tokens, and the match's length; ([], 0) without one.

        A match that runs into the end repeats itself.
        """
        for order in range(min(MAX_ORDER, len(self._ids)), MIN_ORDER - 1, -1):
            found = self._after[order].get(tuple(self._ids[-order:]))
            if found is not None:
                period = len(self._ids) - found
                return [self._ids[found + i % period] for i in range(length)], order
        return [], 0


def table_chain(
    table: CorpusTable, last_ids: Sequence[int], length: int, floor: float = FLOOR
) -> tuple[list[int], list[float], int]:
    """Follow the table from `last_ids` on: (ids, their probabilities by its counts, order of the first match).

    Ends where the product of the probabilities falls below `floor`.
    """
    ids: list[int] = []
    chances: list[float] = []
    context, first_order, survival = list(last_ids), 0, 1.0
    while len(ids) < length:
        found = table.find(context)
        if found is None:
            break
        chance = found.seen / (found.total + DOUBT)
        survival *= chance
        if survival < floor:
            break
        first_order = first_order or found.order
        ids.append(found.token_id)
        chances.append(chance)
        context.append(found.token_id)
    return ids, chances, first_order


class LookupProposer(StatelessProposer):
    """N-gram lookup in the request's own prompt and output, then in an optional corpus table.

    A match of one token in the own text is worth one guess, after the table. Estimates learn from every step, also
    from those whose guess was not verified: the committed tokens say whether it would have been kept.
    """

    name = OWN
    sources = (OWN, TABLE)

    def __init__(self, table: CorpusTable | None = None):
        self._table = table
        self._reach = table.longest if table else 0
        self._indexes: dict[int, NgramIndex] = {}
        self._rates = OutcomeRates(prior)
        self._shortfalls: dict[str, Shortfall] = defaultdict(Shortfall)  # by range of temperature
        self._open: dict[int, tuple[int, LookupGuess]] = {}  # by request: tokens it had, and the guess made then

    def guess(self, request: Request, length: int) -> LookupGuess:
        """What may follow the request's tokens, `length` ids at most; no ids where nothing is found."""
        index = self._indexes.setdefault(request.id, NgramIndex())
        index.extend(request.tokens(len(index)))
        owner = bucket, _ = bucket_of(request.params.temperature), request.id
        own, order = index.continuation(length)
        if order < TRUSTED_ORDER and self._table is not None:
            last_ids = request.tokens(max(0, request.num_tokens - self._reach))
            ids, chances, reached = table_chain(self._table, last_ids, length)
            if ids:
                kinds = [(TABLE, bucket, _step(chance)) for chance in chances]
                return self._estimated(owner, ids, TABLE, reached, kinds)
        if not own:
            return LookupGuess()
        if order < TRUSTED_ORDER:
            own = own[:1]
        return self._estimated(owner, own, OWN, order, [(OWN, bucket, order)] * len(own))

    def observe_outcome(self, guess: LookupGuess, committed: Sequence[int]) -> None:
        """Learn from the tokens that the request got where `guess` was made.

        A point mass is kept exactly where the target says the same, under both acceptance rules.
        """
        decided = min(len(guess.ids), len(committed))
        accepted = next((k for k in range(decided) if guess.ids[k] != committed[k]), decided)
        self._rates.observe_each(guess.kinds[:decided], accepted)
        if guess.owner is not None:
            bucket, request_id = guess.owner
            self._shortfalls[bucket].observe(request_id, guess.expected[:decided], accepted)

    def offers(self, row: Row, outlook: Outlook) -> tuple[Offer, ...]:
        guess = self._guess_for(row.request, min(row.max_draft, self.most, row.request.remaining - 1))
        return (Offer(guess.source, guess.survival, watched=True),) if guess.ids else ()

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        guesses = [self._guess_for(r.request, n) if n else LookupGuess() for r, n in zip(rows, lens, strict=True)]
        lens = [len(guess.ids) for guess in guesses]
        width = max(lens, default=0)
        # One tensor each for all rows: many small ones cost more than the guesses.
        ids = [[*guess.ids, *(0,) * (width - n)] for guess, n in zip(guesses, lens, strict=True)]
        chances = [[*guess.estimates, *(0.0,) * (width - n)] for guess, n in zip(guesses, lens, strict=True)]
        shape = len(guesses), width
        return Draft(
            torch.tensor(ids, dtype=torch.int64).reshape(shape),
            tuple(lens),
            confidence=torch.tensor(chances, dtype=torch.float32).reshape(shape),
            sources=tuple(guess.source for guess in guesses),
        )

    def observe(self, row: Row, taps: Tensor | None, kept: int) -> None:
        opened = self._open.pop(row.request.id, None)
        if opened is not None:
            begin, guess = opened
            self.observe_outcome(guess, row.request.tokens(begin))

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)
        self._open.pop(request.id, None)
        self._shortfalls[bucket_of(request.params.temperature)].release(request.id)

    def _guess_for(self, request: Request, length: int) -> LookupGuess:
        """The guess of this step, made once however often it is asked for."""
        begin, guess = self._open.get(request.id, (-1, LookupGuess()))
        if begin != request.num_tokens:
            guess = self.guess(request, length)
            self._open[request.id] = (request.num_tokens, guess)
        return guess.cut(length)

    def _estimated(
        self, owner: tuple[str, int], ids: Sequence[int], source: str, order: int, kinds: Sequence[Hashable]
    ) -> LookupGuess:
        bucket, request_id = owner
        factor, expected = self._shortfalls[bucket].factor(request_id), self._rates.rates(kinds)
        estimates = tuple(chance * factor for chance in expected)
        return LookupGuess(tuple(ids), source, order, estimates, expected, tuple(kinds), owner)


def _step(chance: float) -> int:
    return round(chance * _TABLE_STEPS)


def prior(kind: Hashable, slot: int) -> float:
    """What to expect of a kind of guess that nobody has tried."""
    assert isinstance(kind, tuple)
    source, bucket, number = kind
    if source == TABLE:
        return float(min(number / _TABLE_STEPS, _MOST) ** _TABLE_POWER[bucket])
    return float(1 - (1 - _OWN_FIRST[bucket][number - 1]) * _OWN_DECAY**slot)
