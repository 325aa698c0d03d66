"""The journal of a long run: one line per finished item beside the output file, so that a kill loses only what runs.

The first line holds the settings of the run; a later run goes on only with the same ones. Lines are written whole and
in order, so a kill leaves at most one torn line at the end, which is dropped and computed again.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.errors import DataError

Settings = Mapping[str, Any]


def settings_digest(settings: Settings) -> str:
    """Short hash of settings given as plain data."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def check_same(path: Path, stored: Settings, settings: Settings) -> None:
    """Raises DataError naming the first setting in which `path` differs from this run."""
    now = json.loads(json.dumps(settings))
    for name, value in now.items():
        if name not in stored or stored[name] != value:
            raise DataError(
                f"{path} belongs to a run with {name} {_short(stored.get(name))} and this one has {_short(value)}; "
                "give the same settings as before, or choose another --out."
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def journal_path(out: Path) -> Path:
    """Where the journal of the run that makes `out` lies."""
    return out.with_name(f".{out.name}.journal")


class Journal:
    """Finished items by index, kept on disk as they come. Use as a context manager.

    Raises:
        DataError: the file belongs to a run of other settings, is in use by another process, or cannot be written.
    """

    def __init__(self, path: Path, settings: Settings):
        self.path = path
        self.entries: dict[int, Any] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._lock()
            self._load(settings)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def add(self, index: int, value: Any) -> None:
        """Keep one finished item. Raises DataError when the disk is full."""
        self._append({"i": index, "v": value})
        self.entries[index] = value

    def remove(self) -> None:
        """The output is complete; the journal is no longer needed."""
        self.path.unlink(missing_ok=True)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except OSError:
            raise DataError(f"{self.path} is in use by another run; wait for it, or choose another --out.") from None

    def _load(self, settings: Settings) -> None:
        header: Settings | None = None
        whole = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                value: Any = json.loads(line) if line.endswith(b"\n") else None
                if header is None:
                    header = value["settings"]
                else:
                    self.entries[int(value["i"])] = value["v"]
            except (ValueError, KeyError, TypeError):
                break  # torn by a kill, or never written before the power went
            whole += len(line)
        if header is not None:
            check_same(self.path, header, settings)
        os.ftruncate(self._file, whole)
        if header is None:
            self._append({"settings": settings})

    def _append(self, value: Any) -> None:
        line = (json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"{self.path} cannot be written ({error.strerror or error}); free space or permissions there and run the "
            "same command again, which goes on where it stopped."
        )
