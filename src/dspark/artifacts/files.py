"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to fill, which takes its place at the end; what was there before stays when that fails.

    Raises:
        OSError: the folder, the file or its place cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):  # when the folder itself could not be made
            part.unlink(missing_ok=True)
