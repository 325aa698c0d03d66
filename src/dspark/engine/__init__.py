"""The only stateful decoding room: requests, cache bookkeeping, proposers, the step."""

from dspark.engine.engine import Engine
from dspark.engine.request import Chunk, Output, RequestStats, TokenLogprobs
from dspark.engine.text import Piece

__all__ = ["Chunk", "Engine", "Output", "Piece", "RequestStats", "TokenLogprobs"]
