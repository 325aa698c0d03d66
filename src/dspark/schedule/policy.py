"""Policies: how many tokens to draft and to verify. One interface, no state."""

from dataclasses import dataclass
from typing import Protocol

from dspark.errors import SettingsError

POLICIES = ("fixed:N",)
MAX_DRAFT = 16


class Policy(Protocol):
    """Decides from past information only; see docs/exactness.md, clause 4."""

    @property
    def most(self) -> int:
        """Longest draft it may ask for."""
        ...

    def draft_len(self, remaining: int) -> int:
        """Tokens to draft for a request that may still commit `remaining` tokens; 0 = no draft."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """`fixed:N`: always N, fewer only where the request ends before."""

    length: int

    @property
    def most(self) -> int:
        return self.length

    def draft_len(self, remaining: int) -> int:
        # The target adds a token of its own, so the last token of a request is never worth a draft.
        return max(0, min(self.length, remaining - 1))


def parse_policy(text: str) -> Policy:
    """Read a policy's spelling, the same in Python, command line and API.

    Raises:
        SettingsError: unknown policy or a length outside 1..16.
    """
    name, _, value = text.partition(":")
    if name != "fixed":
        raise SettingsError(f"policy is {text!r}; allowed are {', '.join(POLICIES)}, for example fixed:4.")
    if not value.isdecimal() or not 1 <= int(value) <= MAX_DRAFT:
        raise SettingsError(f"policy is {text!r}; N in fixed:N is a whole number from 1 to {MAX_DRAFT}.")
    return FixedPolicy(int(value))
