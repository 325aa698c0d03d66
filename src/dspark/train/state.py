"""A run's folder: `state.pt` (everything a resume needs), the drafter itself, and two CSV logs.

Each file appears whole or not at all, so a kill at any moment loses at most the steps since the last save. A run draws
its batches as a function of (seed, step), so no generator's state needs saving.
"""

import csv
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.artifacts.files import replacing
from dspark.errors import TrainError

FORMAT = 2
STATE_FILE = "state.pt"
TRAIN_LOG, VALIDATION_LOG = "train.csv", "validation.csv"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Raises TrainError when the disk does not take it; the state before stays."""

    def save(part: Path) -> None:
        with part.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())

    replace_file(folder / STATE_FILE, save)


def read_state(folder: Path) -> dict[str, Any] | None:
    """The last saved state, on CPU; None when the folder has none.

    Raises:
        TrainError: damaged, or written by another version.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["format"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        raise TrainError(f"{path} is damaged; start again with another --out.") from None
    if version != FORMAT:
        raise TrainError(
            f"{path} has format {version!r} and this version of dspark reads {FORMAT}; resume with the version that "
            "wrote it, or start again with another --out."
        )
    return state


def check_same_run(folder: Path, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise TrainError unless a saved run has the settings, data and target of this one.

    Both hold `settings` (a dictionary), `data` (digest) and `target` (fingerprint of the weights).
    """
    theirs, ours = dict(stored["settings"]), dict(current["settings"])
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise TrainError(
                f"The run in {folder} was started with {name} {theirs.get(name)!r} and this one asks for "
                f"{ours.get(name)!r}; resume with the same settings, or start again with another --out."
            )
    for name, what in (("data", "data"), ("target", "target weights")):
        if stored[name] != current[name]:
            raise TrainError(
                f"The run in {folder} was started with other {what} ({stored[name]} against {current[name]}); resume "
                "with the same, or start again with another --out and --init-from this run."
            )


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside `path`, then put it in place. Raises TrainError when that fails."""
    try:
        with replacing(path) as part:
            write(part)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError | RuntimeError) -> TrainError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
    return TrainError(f"{path} cannot be written ({reason}); free some space there and use --resume.")


class CsvLog:
    """A CSV file whose first column is `step`. Opening it drops rows after `step`, which a resumed run writes again."""

    def __init__(self, path: Path, columns: Sequence[str], step: int):
        self._columns = ("step", *columns)
        kept = [row for row in _read_rows(path) if int(row["step"]) <= step] if step else []

        def write(part: Path) -> None:
            with part.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, extrasaction="ignore", restval="")
                writer.writeheader()
                writer.writerows(kept)

        replace_file(path, write)
        self._path = path

    def write(self, values: Mapping[str, object]) -> None:
        """Append one row; numbers keep five significant digits. Raises TrainError when the disk does not take it."""
        row = [f"{v:.5g}" if isinstance(v, float) else v for v in (values.get(c, "") for c in self._columns)]
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row)
        except OSError as error:
            raise _unwritable(self._path, error) from None


def _read_rows(path: Path) -> list[dict[str, str]]:
    """Whole rows of a log; a line cut short by a kill is not one."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return []
    return [row for row in rows if (row.get("step") or "").isdigit() and None not in row.values()]
