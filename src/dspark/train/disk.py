"""Features on disk: one file per sequence, in a folder named after everything its numbers depend on.

Files appear whole or not at all, so a run killed at any moment leaves a folder the next one goes on with. The bound
counts everything under the root, other folders too; what does not fit is not written. Processes of one run share the
folder and divide what the bound still allows.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dspark.errors import TrainError

FORMAT = 1
_SUFFIX, _PART = ".safetensors", ".part"


class FeatureDisk:
    """Tensors of the sequences of one corpus under one target.

    Raises:
        TrainError: the folder cannot be written.
    """

    def __init__(self, root: Path, key: str, limit_bytes: float, writers: int = 1):
        self._root, self._folder = root, root / f"{key}-{FORMAT}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for part in self._folder.glob(f"*{_PART}"):  # of a killed run
                part.unlink(missing_ok=True)
            used = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
        except OSError as error:
            raise self._refused(error) from None
        self._held = {int(p.stem) for p in used if p.parent == self._folder and p.stem.isdigit()}
        self.used_bytes = sum(used.values())
        self.own_bytes = sum(size for path, size in used.items() if path.parent == self._folder)
        self.limit_bytes = self.used_bytes + (limit_bytes - self.used_bytes) / writers

    @property
    def room_bytes(self) -> float:
        """What the folder may hold in the end: what it has, and what the bound still allows."""
        return self.own_bytes + max(0.0, self.limit_bytes - self.used_bytes)

    def holds(self, index: int) -> bool:
        return index in self._held

    def get(self, index: int) -> dict[str, Tensor] | None:
        """Tensors of a sequence; None when they are not there, or damaged (a lost disk cache costs time only)."""
        if index not in self._held:
            return None
        try:
            return load_file(self._path(index))
        except (OSError, SafetensorError):
            self._held.discard(index)
            return None

    def put(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a sequence if the bound allows. Raises TrainError when the disk does not take it."""
        content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        if self.used_bytes + len(content) > self.limit_bytes:
            return
        part = self._folder / f"{index}.{os.getpid()}{_PART}"
        try:
            part.write_bytes(content)
            os.replace(part, self._path(index))
        except FileNotFoundError:
            return  # another process of this run, starting later, took it for what a kill left
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._refused(error) from None
        self._held.add(index)
        self.used_bytes += len(content)
        self.own_bytes += len(content)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}{_SUFFIX}"

    def _refused(self, error: OSError) -> TrainError:
        reason = error.strerror or str(error)
        return TrainError(
            f"Features cannot be kept in {self._root} ({reason}); free some space there, lower --cache-dir-gb, or "
            "leave --cache-dir out."
        )
