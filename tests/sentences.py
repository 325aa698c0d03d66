"""What every error of ours looks like: one sentence that names what is wrong."""

import re
from collections.abc import Iterable

# A full stop, then a new sentence; paths, versions and quoted causes have no space and capital after theirs.
_SECOND_SENTENCE = re.compile(r"[.!?]\s+[A-Z]")


def assert_one_sentence(message: object, names: Iterable[str] = ()) -> None:
    """One line, one sentence, ending in a full stop, with every text of `names` in it."""
    text = str(message)
    assert "\n" not in text and "Traceback" not in text, text
    assert text.endswith(".") and not text.endswith(".."), text
    assert not _SECOND_SENTENCE.search(text), text
    missing = [name for name in names if name not in text]
    assert not missing, f"{missing} not in: {text}"
