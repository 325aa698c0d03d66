"""Features on disk: one file per text, named after the text, in a folder named after all else its numbers depend on.

Files appear whole or not at all, so a run killed at any moment leaves a folder the next one goes on with. The bound
counts everything under the root, other folders too; what does not fit is not written. Processes of one run share the
folder and divide what the bound still allows.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dspark.errors import TrainError

FORMAT = 2
_SUFFIX, _PART = ".safetensors", ".part"


class FeatureDisk:
    """Tensors of texts under one target, by the text's digest, so that data may grow and be divided otherwise.

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
        self._held = {p.stem: size for p, size in used.items() if p.parent == self._folder}
        self.used_bytes = sum(used.values())
        self.limit_bytes = self.used_bytes + (limit_bytes - self.used_bytes) / writers

    @property
    def left_bytes(self) -> float:
        """What the bound still allows."""
        return max(0.0, self.limit_bytes - self.used_bytes)

    def holds(self, text: str) -> bool:
        return text in self._held

    def bytes_of(self, texts: Iterable[str]) -> int:
        return sum(self._held.get(text, 0) for text in texts)

    def get(self, text: str) -> dict[str, Tensor] | None:
        """Tensors of a text; None when they are not there, or damaged (a lost disk cache costs time only)."""
        if text not in self._held:
            return None
        try:
            return load_file(self._path(text))
        except (OSError, SafetensorError):
            self.used_bytes -= self._held.pop(text)
            return None

    def put(self, text: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a text if the bound allows. Raises TrainError when the disk does not take it."""
        content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        if self.used_bytes + len(content) > self.limit_bytes:
            return
        part = self._folder / f"{text}.{os.getpid()}{_PART}"
        try:
            part.write_bytes(content)
            os.replace(part, self._path(text))
        except FileNotFoundError:
            return  # another process of this run, starting later, took it for what a kill left
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._refused(error) from None
        self._held[text] = len(content)
        self.used_bytes += len(content)

    def _path(self, text: str) -> Path:
        return self._folder / f"{text}{_SUFFIX}"

    def _refused(self, error: OSError) -> TrainError:
        reason = error.strerror or str(error)
        return TrainError(
            f"Features cannot be kept in {self._root} ({reason}); free some space there, lower --cache-dir-gb, or "
            "leave --cache-dir out."
        )
