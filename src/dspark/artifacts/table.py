"""Corpus tables on disk: what the target most often says after its last few tokens.

One safetensors file. For each order n (tokens of context) it holds four columns of equal length: `n.keys` (hashes of
contexts, ascending), `n.next_ids` (the most frequent next token), `n.counts` (how often it followed) and `n.totals`
(how often anything did). Columns have the narrowest unsigned type that holds them. The metadata says format, version,
the target whose text was counted, and how. The file is mapped, so loading reads what lookups and checks touch.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dspark.artifacts.files import replacing
from dspark.artifacts.fingerprint import Fingerprint
from dspark.errors import DataError, DrafterError

FORMAT, VERSION = "dspark corpus table", 1
TABLE_SUFFIX = ".dspt"
TABLE_FILE = "table.dspt"  # its name beside a drafter
COLUMNS = ("keys", "next_ids", "counts", "totals")
_MULTIPLIER, _SHIFT, _MASK = 0x9E3779B97F4A7C15, 29, 2**64 - 1


class Continuation(NamedTuple):
    """The most frequent next token after a context of `order` tokens: seen `seen` times out of `total`."""

    token_id: int
    seen: int
    total: int
    order: int


@dataclass(frozen=True)
class TableOrder:
    """All contexts of one length, by ascending key."""

    keys: UInt[np.ndarray, " N"]
    next_ids: UInt[np.ndarray, " N"]
    counts: UInt[np.ndarray, " N"]
    totals: UInt[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def row_bytes(self) -> int:
        return sum(int(getattr(self, column).itemsize) for column in COLUMNS)

    def rows(self, kept: np.ndarray) -> "TableOrder":
        """Some rows, given by a mask or by ascending numbers."""
        return TableOrder(*(getattr(self, column)[kept] for column in COLUMNS))


class _Columns(NamedTuple):
    """An order's columns as memoryviews, whose plain ints bisect compares faster than numpy's. Keys are hashes, so all
    but their last `shift` bits say within a few rows where one stands: from `starts` of that on."""

    order: int
    shift: int
    starts: memoryview
    keys: memoryview
    next_ids: memoryview
    counts: memoryview
    totals: memoryview

    @classmethod
    def of(cls, order: int, rows: TableOrder) -> "_Columns":
        bits = max(1, len(rows).bit_length() - 1)
        firsts = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        starts = np.append(np.searchsorted(rows.keys, firsts), len(rows)).astype(np.uint32)
        return cls(
            order, 64 - bits, starts.data, rows.keys.data, rows.next_ids.data, rows.counts.data, rows.totals.data
        )


@dataclass(frozen=True)
class CorpusTable:
    """Continuations by context. `target` wrote the text; `counted` says how much of it, and how it was counted."""

    orders: Mapping[int, TableOrder]
    target: Fingerprint
    counted: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.orders.values()))

    @cached_property
    def _columns(self) -> list[_Columns]:
        """Longest order first."""
        return [_Columns.of(order, rows) for order, rows in sorted(self.orders.items(), reverse=True)]

    @property
    def longest(self) -> int:
        """Tokens of context that `find` looks at, at most."""
        return max(self.orders, default=0)

    def find(self, last_ids: Sequence[int]) -> Continuation | None:
        """What most often follows `last_ids`, by the longest of their ends that the table knows; microseconds."""
        keys = context_keys(last_ids, self.longest)
        for order, shift, starts, known, next_ids, counts, totals in self._columns:
            if order <= len(keys):
                key = keys[order - 1]
                first, end = starts[key >> shift], starts[(key >> shift) + 1]
                row = bisect_left(known, key, first, end)
                if row < end and known[row] == key:
                    return Continuation(next_ids[row], counts[row], totals[row], order)
        return None


def context_keys(last_ids: Sequence[int], longest: int) -> list[int]:
    """Keys of the last 1, 2, ... tokens, at most `longest`. Two contexts share one by accident only: about one pair
    in 2^64, and then a guess is worse, never the text."""
    key, keys = 0, []
    for token_id in reversed(last_ids[-longest:] if longest else ()):
        key = ((key ^ (token_id + 1)) * _MULTIPLIER) & _MASK
        key ^= key >> _SHIFT
        keys.append(key)
    return keys


def extend_keys(keys: UInt[np.ndarray, " N"], earlier_ids: UInt[np.ndarray, " N"]) -> UInt[np.ndarray, " N"]:
    """`context_keys` for many contexts: keys of contexts that are one token longer to the left."""
    with np.errstate(over="ignore"):
        longer = (keys ^ (earlier_ids.astype(np.uint64) + np.uint64(1))) * np.uint64(_MULTIPLIER)
    return longer ^ (longer >> np.uint64(_SHIFT))


def narrowest(values: np.ndarray) -> np.ndarray:
    """The same whole numbers in the smallest unsigned type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def write_table(path: Path, table: CorpusTable) -> None:
    """Write `table` to `path`: the whole file appears at once or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    columns = {
        f"{order}.{column}": np.ascontiguousarray(getattr(rows, column))
        for order, rows in table.orders.items()
        for column in COLUMNS
    }
    about = {
        "format": FORMAT,
        "version": str(VERSION),
        "target": json.dumps(table.target.to_dict()),
        "counted": json.dumps(dict(table.counted)),
    }
    try:
        with replacing(path) as part:
            part.write_bytes(save(columns, metadata=about))
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be written ({reason}); free space or permissions there.") from None


def read_table(path: Path, vocab_size: int, tokenizer: str | None = None) -> CorpusTable:
    """A table for a target of `vocab_size` tokens.

    Args:
        tokenizer: the tokenizer's part of the target's fingerprint; None skips that check.

    Raises:
        DataError: missing, damaged, another format or version, or counted over another tokenizer's tokens.
    """
    with _opened(path) as file:
        about = _about(path, file.metadata())
        made_by = _made_by(path, about, tokenizer)
        columns = {name: file.get_tensor(name).numpy() for name in list(file.keys())}
    orders: dict[int, TableOrder] = {}
    for name in sorted(name for name in columns if name.endswith(".keys")):
        order = name.removesuffix(".keys")
        parts = [columns.pop(f"{order}.{column}", None) for column in COLUMNS]
        if not order.isdecimal() or int(order) < 1 or any(part is None for part in parts):
            raise _damaged(path, f"order {order} is incomplete")
        orders[int(order)] = _checked(path, int(order), parts, vocab_size)
    if columns or not orders:
        raise _damaged(path, "it holds other arrays than a table's")
    try:
        counted = dict(json.loads(about.get("counted", "{}")))
    except ValueError:
        raise _damaged(path, "its metadata cannot be read") from None
    return CorpusTable(orders, made_by, counted)


def read_table_target(path: Path) -> Fingerprint:
    """Whose text a table was counted over; reads nothing else of it.

    Raises:
        DataError: missing, damaged, or another format or version.
    """
    with _opened(path) as file:
        return _made_by(path, _about(path, file.metadata()))


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is not a whole corpus table ({what}); make or copy it again.")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file behind safetensors' reader; what it cannot read is a sentence."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a corpus table, such as dspark data table writes.")
    try:
        # through torch, which maps the file, where safetensors' numpy reader would copy it
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError):
        raise _damaged(path, "cut short, or of another kind") from None


def _about(path: Path, metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    about = metadata or {}
    if about.get("format") != FORMAT:
        raise _damaged(path, "a file of another kind")
    if about.get("version") != str(VERSION):
        raise DataError(
            f"{path} has version {about.get('version')} and this version of dspark reads {VERSION}; make the table "
            "again or install the version that wrote it."
        )
    return about


def _made_by(path: Path, about: Mapping[str, str], tokenizer: str | None = None) -> Fingerprint:
    try:
        made_by = Fingerprint.from_dict(json.loads(about["target"]))
    except (KeyError, ValueError, TypeError, DrafterError):
        raise _damaged(path, "its metadata cannot be read") from None
    if tokenizer is not None and made_by.tokenizer != tokenizer:
        raise DataError(
            f"{path} was counted with the tokenizer of {made_by.name or 'another target'} ({made_by.tokenizer}) and "
            f"this target has another ({tokenizer}); make a table of this target's text."
        )
    return made_by


def _checked(path: Path, order: int, parts: Sequence[Any], vocab_size: int) -> TableOrder:
    """The columns as an order, after what could crash or mislead a lookup was ruled out."""
    rows = TableOrder(*parts)
    sizes = {part.shape for part in parts}
    if len(sizes) != 1 or rows.keys.ndim != 1 or any(part.dtype.kind != "u" for part in parts):
        raise _damaged(path, f"the columns of order {order} do not fit together")
    if rows.keys.dtype != np.uint64 or not (rows.keys[1:] > rows.keys[:-1]).all():
        raise _damaged(path, f"the keys of order {order} do not ascend")
    if not ((rows.counts >= 1) & (rows.counts <= rows.totals)).all():
        raise _damaged(path, f"a count of order {order} is above its total")
    if int(rows.next_ids.max(initial=0)) >= vocab_size:
        raise DataError(
            f"{path} continues with token id {rows.next_ids.max()} and the target has ids 0 to {vocab_size - 1}; make "
            "a table of this target's text."
        )
    return rows
