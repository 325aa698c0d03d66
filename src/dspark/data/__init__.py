"""What a drafter learns from: packed files of text the target itself generated."""

from dspark.data.loops import cut_loops, loop_start
from dspark.data.packed import FORMAT, Corpus, Provenance, read_corpus, read_packed, write_packed
from dspark.data.split import hold_out

__all__ = [
    "FORMAT",
    "Corpus",
    "Provenance",
    "cut_loops",
    "hold_out",
    "loop_start",
    "read_corpus",
    "read_packed",
    "write_packed",
]
