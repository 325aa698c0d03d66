"""Counting a corpus table: what a target most often says after its last few tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dspark.artifacts import Fingerprint
from dspark.artifacts.table import COLUMNS, CorpusTable, TableOrder, extend_keys, narrowest
from dspark.data.packed import Corpus
from dspark.errors import DataError, SettingsError

LONGEST = 8
_HEADER_BYTES = 4096  # names, types and metadata of the file, with room
_LEAST_MB = 0.01


@dataclass(frozen=True, slots=True)
class TableSettings:
    """What is counted and how much of it is kept.

    Raises:
        SettingsError: a value is outside its range.
    """

    shortest: int = 1  # tokens of context
    longest: int = 4
    min_count: int = 2  # of a continuation
    max_mb: float = 8.0

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= LONGEST:
            raise SettingsError(
                f"orders are {self.shortest}-{self.longest}; allowed are 1 to {LONGEST}, the smaller first."
            )
        if self.min_count < 1:
            raise SettingsError(f"min_count is {self.min_count}; allowed is 1 or more.")
        if not self.max_mb >= _LEAST_MB:
            raise SettingsError(f"max_mb is {self.max_mb}; allowed is {_LEAST_MB} or more.")


def count_table(corpus: Corpus, settings: TableSettings, target: Fingerprint) -> CorpusTable:
    """The most frequent continuation of every context of `corpus`, pruned to the size asked for.

    Every response token is a continuation; its context may reach into the prompt. Ties go to the smaller id.

    Raises:
        DataError: nothing was seen as often as `min_count`.
    """
    orders: dict[int, TableOrder] = {}
    gains: dict[int, np.ndarray] = {}
    for order, rows, gain in _count_orders(corpus, settings):
        frequent = rows.counts >= settings.min_count
        orders[order], gains[order] = _narrow(rows.rows(frequent)), gain[frequent]
    if not any(map(len, orders.values())):
        raise DataError(
            f"No continuation was seen {settings.min_count} times; give more data or a smaller minimum count."
        )
    counted = {
        "sequences": len(corpus),
        "response_tokens": corpus.response_tokens,
        "data": corpus.digest(),
        "min_count": settings.min_count,
    }
    return CorpusTable(_prune(orders, gains, int(settings.max_mb * 1e6) - _HEADER_BYTES), target, counted)


def _count_orders(corpus: Corpus, settings: TableSettings) -> Iterator[tuple[int, TableOrder, np.ndarray]]:
    """(order, all its contexts, their gains), shortest order first."""
    ids = corpus.ids.numpy()
    lengths = np.diff(corpus.offsets)
    begins = np.repeat(corpus.offsets[:-1], lengths)
    places = np.arange(len(ids))
    places = places[places - begins >= np.repeat(corpus.prompt_lens, lengths)]  # of response tokens
    keys = np.zeros(len(places), np.uint64)
    shorter: TableOrder | None = None
    for order in range(1, settings.longest + 1):
        reach = places - begins[places] >= order
        places, suffixes = places[reach], keys[reach]
        keys = extend_keys(suffixes, ids[places - order])
        if order >= settings.shortest:
            shorter, gains = _count_order(keys, suffixes, ids[places], shorter)
            yield order, shorter, gains


def _count_order(
    keys: np.ndarray, suffixes: np.ndarray, next_ids: np.ndarray, shorter: TableOrder | None
) -> tuple[TableOrder, np.ndarray]:
    """The best continuation of every key, and its gain: how many more tokens it gets right than the best continuation
    of the context without its first token (whose key is in `suffixes`, and its row in `shorter`)."""
    places = np.lexsort((next_ids, keys))
    starts = np.flatnonzero(_first(keys[places], next_ids[places]))
    counts = np.diff(starts, append=len(places))
    places = places[starts]  # one for each pair of context and continuation
    first = _first(keys[places])
    starts, group = np.flatnonzero(first), np.cumsum(first) - 1
    totals = np.add.reduceat(counts, starts)
    best = np.lexsort((next_ids[places], -counts, group))[starts]
    rows = TableOrder(keys[places[starts]], next_ids[places[best]], counts[best], totals)
    if shorter is None:
        return rows, rows.counts
    expected = shorter.next_ids[np.searchsorted(shorter.keys, suffixes[places[starts]])]
    right_already = np.add.reduceat(np.where(next_ids[places] == expected[group], counts, 0), starts)
    return rows, rows.counts - right_already


def _first(*columns: np.ndarray) -> np.ndarray:
    """Where a row of sorted columns differs from the row before."""
    first = np.ones(len(columns[0]), bool)
    first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return first


def _narrow(rows: TableOrder) -> TableOrder:
    return TableOrder(rows.keys, *(narrowest(getattr(rows, column)) for column in COLUMNS[1:]))


def _prune(orders: Mapping[int, TableOrder], gains: Mapping[int, np.ndarray], most_bytes: int) -> dict[int, TableOrder]:
    """The rows that fit: most often right first, and of equals those of higher gain.

    Rows without gain guess as the shorter context does, but are surer of it, which lets a chain of guesses go on.
    """
    seen = np.concatenate([rows.counts.astype(np.int64) for rows in orders.values()])
    gain = np.concatenate([gains[order] for order in orders])
    size = np.concatenate([np.full(len(rows), rows.row_bytes) for rows in orders.values()])
    ranked = np.lexsort((-gain, -seen))
    kept = np.zeros(len(gain), bool)
    kept[ranked[np.cumsum(size[ranked]) <= most_bytes]] = True
    ends = np.cumsum([len(rows) for rows in orders.values()])
    parts = np.split(kept, ends[:-1])
    return {order: _narrow(rows.rows(part)) for (order, rows), part in zip(orders.items(), parts, strict=True)}
