"""dspark: lossless speculative decoding for any Hugging Face decoder model, end to end on one machine.

>>> import dspark
>>> engine = dspark.Engine.from_pretrained("smollm2")
>>> engine.generate("The capital of France is", dspark.SamplingParams(temperature=0, max_tokens=8))[0].text
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.config import Grammar, SamplingParams
    from dspark.engine import Engine
    from dspark.errors import DsparkError

__version__ = "0.1.0"
__all__ = ["DsparkError", "Engine", "Grammar", "SamplingParams", "__version__"]

_HOMES = {
    "DsparkError": "dspark.errors",
    "Engine": "dspark.engine",
    "Grammar": "dspark.config",
    "SamplingParams": "dspark.config",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used, so that `dspark --help` need not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    # Importing torch makes millions of objects, all of which stay: looking for garbage among them costs half a second.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(_HOMES[name]), name)
    finally:
        if collecting:
            gc.enable()
