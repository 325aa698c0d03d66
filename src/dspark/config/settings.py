"""Settings of an engine. Unknown keys are errors, never ignored."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dspark.errors import SettingsError

PROPOSERS = ("auto", "none", "lookup", "dspark")
MODEL_PROPOSER = "model:"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float16", "bfloat16", "float32", "float64")
ACCEPTANCE_RULES = ("auto", "rejection", "coupled")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(f"{name} is {value!r}; allowed are {', '.join(allowed)}.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs.

    Raises:
        SettingsError: a value is unknown or outside its range.
    """

    model: str = "smollm2"  # alias, folder, GGUF file or hub id
    drafter: str = "auto"  # "auto" = the one that fits the target's fingerprint, "none", or a folder
    proposer: str = "auto"
    policy: str = "auto"
    profile: str = "auto"  # what passes cost here: "auto" = cached, or measured when first needed; "none", or a file
    guard: bool = True  # policies that look for what pays (history, scheduled, auto) may pause drafting
    acceptance: str = "auto"  # auto: `coupled` for requests with a seed, else `rejection`
    device: str = "auto"
    dtype: str = "auto"  # cpu: float16 weights with float32 arithmetic; cuda: bfloat16
    exact: bool = False  # bitwise the same numbers whatever shares the pass
    kv_gb: float = 1.0
    prefix_cache: bool = True  # what ended requests have cached stays for prompts that begin alike
    max_batch: int = 32
    max_pass_tokens: int = 512
    context: int | None = None  # None = the model's own limit
    threads: int | None = None
    corpus_table: str = "auto"  # of `lookup`: "auto" = one counted with this tokenizer, if any; "none", or a file

    def __post_init__(self) -> None:
        if not self.proposer.startswith(MODEL_PROPOSER):
            if self.proposer not in PROPOSERS:
                raise SettingsError(
                    f"proposer is {self.proposer!r}; allowed are {', '.join(PROPOSERS)} and {MODEL_PROPOSER}PATH."
                )
        elif self.proposer == MODEL_PROPOSER:
            raise SettingsError("proposer is 'model:' without a path; write model:PATH with a folder, file or hub id.")
        uses_drafter = self.proposer in ("auto", "dspark")
        if self.drafter not in ("auto", "none") and not uses_drafter:
            raise SettingsError(
                f"drafter is {self.drafter!r} and proposer is {self.proposer!r}, which uses none; "
                "leave one of them out."
            )
        if self.corpus_table not in ("auto", "none") and self.proposer not in ("auto", "lookup"):
            raise SettingsError(
                f"corpus_table is {self.corpus_table!r} and proposer is {self.proposer!r}, which uses none; "
                "leave one of them out."
            )
        if self.drafter == "none" and self.proposer == "dspark":
            raise SettingsError("drafter is 'none' and proposer is 'dspark', which needs one; leave one of them out.")
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("acceptance", self.acceptance, ACCEPTANCE_RULES)
        self._at_least("kv_gb", self.kv_gb, 0.0001)
        self._at_least("max_batch", self.max_batch, 1)
        self._at_least("max_pass_tokens", self.max_pass_tokens, 8)
        if self.max_batch > self.max_pass_tokens:
            raise SettingsError(
                f"max_batch is {self.max_batch}; allowed is up to max_pass_tokens ({self.max_pass_tokens}), "
                "because every request runs at least one token a pass."
            )
        if self.max_pass_tokens > 512 and self.exact:
            raise SettingsError(
                f"max_pass_tokens is {self.max_pass_tokens}; exact mode allows up to 512, beyond which the matrix "
                "kernels no longer give a row the same bits."
            )
        if self.context is not None:
            self._at_least("context", self.context, 2)
        if self.threads is not None:
            self._at_least("threads", self.threads, 1)

    @staticmethod
    def _at_least(name: str, value: float, least: float) -> None:
        if not value >= least:
            raise SettingsError(f"{name} is {value!r}; allowed is {least} or more.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngineConfig":
        """Build from plain data. Raises SettingsError for an unknown key."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise SettingsError(f"Unknown engine setting {name!r}; known are {', '.join(known)}.")
        return cls(**values)
