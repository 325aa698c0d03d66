"""Where a benchmark runs, what that machine can do, and what a pass of the target asks of it."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from dspark.engine.profiling import cpu_model
from dspark.measure.bench.records import Machine, ModelSize, Peaks
from dspark.target import Target
from dspark.target.linear import resolve_dtype

PACKAGES = ("dspark", "torch", "transformers", "llama-cpp-python", "vllm", "openai")
_READ_BYTES = 512 * 2**20
_MATRIX = 2048
_TRIES = 8


def describe(device: torch.device) -> Machine:
    """This machine, as it is now."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return Machine(
        cpu=cpu_model(),
        cores=cores,
        threads=torch.get_num_threads(),
        memory_bytes=pages,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        versions=versions,
        load_before=load(),
    )


def load() -> float | None:
    """Average number of processes that wanted to run in the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


@torch.inference_mode()
def measure_peaks(device: torch.device, read_bytes: int = _READ_BYTES, matrix: int = _MATRIX) -> Peaks:
    """The fastest of several reads of a large array, and of several large matrix products; a second or two."""
    array = torch.ones(read_bytes // 4, device=device)
    read_s = _fastest(lambda: array.sum(), device)
    a = torch.rand(matrix, matrix, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    product_s = _fastest(lambda: a @ a, device)
    return Peaks(bytes_per_s=read_bytes / read_s, flop_per_s=2 * matrix**3 / product_s)


def model_size(target: Target, dtype: str) -> ModelSize:
    """Bytes and operations of one pass of the target; its embedding, looked up row by row, is left out."""
    spec = target.spec
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * heads + 2 * kv + 3 * spec.ffn_size)
    layers, head = spec.num_layers * layer, spec.hidden_size * spec.vocab_size
    itemsize: int = getattr(torch, resolve_dtype(dtype, target.decoder.device)).itemsize
    return ModelSize(
        weight_bytes=(layers + head) * itemsize,
        flop_per_token=2 * layers,
        kv_token_bytes=target.decoder.kv_token_bytes,
        head_flop=2 * head,
    )


class MemoryPeak:
    """Largest memory since `reset`: resident memory of the process, or what torch allocated on a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):  # Linux; elsewhere the peak is that of the process so far
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int | None:
        """None where the system does not say."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return None


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return min(once() for _ in range(_TRIES))
