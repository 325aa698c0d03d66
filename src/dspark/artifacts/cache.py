"""The cache folder. A folder in it is either complete or not there: it is built aside and renamed into place."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from dspark.errors import CacheError

CACHE_ENV = "DSPARK_CACHE"
MARKER = "dspark-complete.json"


def cache_dir() -> Path:
    """`$DSPARK_CACHE`, else `$XDG_CACHE_HOME/dspark`, else `~/.cache/dspark`."""
    if path := os.environ.get(CACHE_ENV):
        return Path(os.path.expanduser(path))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def is_published(folder: Path, version: int) -> bool:
    """Whether `folder` was completed by `publish_folder` with this format version."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("version") == version


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises CacheError when the disk under `folder` has less than `needed_bytes` free."""
    probe = folder
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    if free < needed_bytes:
        raise CacheError(
            f"{folder} has {free / 1e6:.0f} MB of disk left and {needed_bytes / 1e6:.0f} MB are needed; "
            f"free some space or set {CACHE_ENV} to another folder."
        )


def publish_folder(folder: Path, version: int, build: Callable[[Path], None], needed_bytes: int = 0) -> Path:
    """Have `build` fill a temporary folder, mark it complete, and rename it to `folder` in one step.

    A build that fails or is interrupted leaves nothing behind; of two processes building at once, one wins and both
    use its result.

    Raises:
        CacheError: the cache cannot be written, or the disk is full.
    """
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_space(folder.parent, needed_bytes)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        build(temporary)
        (temporary / MARKER).write_text(json.dumps({"version": version}), encoding="utf-8")
        if folder.exists() and not is_published(folder, version):
            shutil.rmtree(folder)
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheError(
            f"The cache folder {folder} cannot be written ({reason}); free space or permissions there, "
            f"or set {CACHE_ENV} to another folder."
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
