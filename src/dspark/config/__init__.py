"""Frozen settings and the small data types that cross rooms. Nothing here computes."""

from dspark.config.records import Commit, Draft, RowRecord, StepRecord, StepTimes, Streams, Verdict
from dspark.config.sampling import Grammar, SamplingParams, SlotRule
from dspark.config.settings import EngineConfig

__all__ = [
    "Commit",
    "Draft",
    "EngineConfig",
    "Grammar",
    "RowRecord",
    "SamplingParams",
    "SlotRule",
    "StepRecord",
    "StepTimes",
    "Streams",
    "Verdict",
]
