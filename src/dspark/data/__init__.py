"""What a drafter learns from: the target's own text, made, packed and read."""

from dspark.data.batch import Report
from dspark.data.described import Described
from dspark.data.endpoint import Endpoint
from dspark.data.journal import Journal, journal_path
from dspark.data.loops import cut_loops, loop_start
from dspark.data.openings import KINDS, parse_kinds
from dspark.data.packed import (
    FORMAT,
    Corpus,
    Provenance,
    read_corpus,
    read_packed,
    read_provenance,
    write_packed,
)
from dspark.data.respond import (
    RespondPlan,
    Tokenised,
    pack_responses,
    respond,
    respond_by_endpoint,
    responses_written,
    tokenise,
)
from dspark.data.sources import Prompt, read_prompts
from dspark.data.split import hold_out
from dspark.data.summary import Group, summarise
from dspark.data.synth import SynthPlan, choose, prompts_written, synthesise, write_prompts

__all__ = [
    "FORMAT",
    "KINDS",
    "Corpus",
    "Described",
    "Endpoint",
    "Group",
    "Journal",
    "Prompt",
    "Provenance",
    "Report",
    "RespondPlan",
    "SynthPlan",
    "Tokenised",
    "choose",
    "cut_loops",
    "hold_out",
    "journal_path",
    "loop_start",
    "pack_responses",
    "parse_kinds",
    "prompts_written",
    "read_corpus",
    "read_packed",
    "read_prompts",
    "read_provenance",
    "respond",
    "respond_by_endpoint",
    "responses_written",
    "summarise",
    "synthesise",
    "tokenise",
    "write_packed",
    "write_prompts",
]
