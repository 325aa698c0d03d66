"""Any decoder language model, seen one way: weights, passes, keys and values, taps, tokenizer."""

from dspark.target.decoder import Decoder, PassRow
from dspark.target.kv import KvPool, SlotRanges
from dspark.target.load import Target, load_target, resolve_model
from dspark.target.spec import ModelSpec
from dspark.target.tokenizer import Tokenizer

__all__ = [
    "Decoder",
    "KvPool",
    "ModelSpec",
    "PassRow",
    "SlotRanges",
    "Target",
    "Tokenizer",
    "load_target",
    "resolve_model",
]
