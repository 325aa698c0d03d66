"""Many clients: an OpenAI-compatible HTTP API over one engine."""

from dspark.serve.settings import ServeConfig

__all__ = ["ServeConfig"]
