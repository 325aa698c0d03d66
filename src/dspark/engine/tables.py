"""Which corpus table an engine uses."""

import logging
from pathlib import Path

from dspark.artifacts import cache_dir
from dspark.artifacts.table import TABLE_FILE, TABLE_SUFFIX, CorpusTable, read_table, read_table_target
from dspark.config import EngineConfig
from dspark.errors import DataError
from dspark.target import Target

logger = logging.getLogger("dspark")


def find_table(config: EngineConfig, target: Target) -> CorpusTable | None:
    """The table a configuration asks for: a file, none, or with "auto" the first one counted with this target's
    tokenizer, preferably over its own text.

    "auto" looks beside the drafter that was named, beside shipped and cached drafters, and in the cache's `tables`.

    Raises:
        DataError: the file that was named is missing, damaged, of another version or of another tokenizer.
    """
    if config.corpus_table == "none":
        return None
    if config.corpus_table != "auto":
        path = Path(config.corpus_table).expanduser()
        return read_table(path, target.spec.vocab_size, target.fingerprint.tokenizer)
    for path in _fitting(config.drafter, target):
        try:
            return read_table(path, target.spec.vocab_size)
        except DataError as error:
            logger.warning("Passing over a corpus table: %s", error)
    return None


def _fitting(drafter: str, target: Target) -> list[Path]:
    """Tables of this tokenizer, those of the target's own text first."""
    fitting: list[tuple[bool, Path]] = []
    for path in _candidates(drafter):
        try:
            made_by = read_table_target(path)
        except DataError as error:  # nobody asked for this one
            logger.warning("Passing over a corpus table: %s", error)
            continue
        if made_by.tokenizer == target.fingerprint.tokenizer:
            fitting.append((not made_by.matches(target.fingerprint), path))
    return [path for _, path in sorted(fitting, key=lambda found: found[0])]


def _candidates(drafter: str) -> list[Path]:
    """Table files in the order in which they are preferred."""
    named = [] if drafter in ("auto", "none") else [Path(drafter).expanduser() / TABLE_FILE]
    shelves = (Path(__file__).parent.parent / "drafters", cache_dir() / "drafters")
    beside = [path for shelf in shelves for path in sorted(shelf.glob(f"*/{TABLE_FILE}"))]
    own = sorted((cache_dir() / "tables").glob(f"*{TABLE_SUFFIX}"))
    return [path for path in (*named, *beside, *own) if path.is_file()]
