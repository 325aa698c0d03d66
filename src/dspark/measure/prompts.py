"""Prompts to measure with, as named sets."""

from collections.abc import Sequence
from pathlib import Path

from dspark.data.sources import Prompt, read_prompts
from dspark.errors import DataError


def prompt_sets(paths: Sequence[Path], limit: int | None = None) -> dict[str, list[Prompt]]:
    """Each JSONL file, or each in a folder, is a set named after it; at most `limit` prompts of each.

    Raises:
        DataError: a file is missing, empty or of no known format, a folder holds none, or two sets share a name.
    """
    sets: dict[str, list[Prompt]] = {}
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path} holds no .jsonl file; give a JSONL file or a folder of them.")
        for file in files:
            if file.stem in sets:
                raise DataError(f"Two sets of prompts are called {file.stem}; rename one of the files.")
            sets[file.stem] = read_prompts([str(file)], limit)
    return sets
