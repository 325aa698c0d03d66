"""From a policy's spelling to the policy; the same spelling in Python, command line and API."""

import math

from dspark.errors import SettingsError
from dspark.schedule.costs import CostCurves
from dspark.schedule.planner import PlannedPolicy
from dspark.schedule.policy import (
    MAX_DRAFT,
    POLICIES,
    FixedPolicy,
    HistoryPolicy,
    LengthPolicy,
    Policy,
    ThresholdPolicy,
)

# Those that look for what pays, and may therefore stop drafting where it does not.
ADAPTIVE = ("history", "scheduled", "auto")
_WHOLE_BATCH = ("scheduled", "auto")


def check_policy(text: str) -> None:
    """Raises SettingsError for an unknown policy or a value outside its range."""
    name, colon, value = text.partition(":")
    if name not in [policy.partition(":")[0] for policy in POLICIES]:
        raise SettingsError(f"policy is {text!r}; allowed are {', '.join(POLICIES)}, for example fixed:4.")
    if name == "fixed":
        if not (value.isascii() and value.isdecimal()) or not 1 <= int(value) <= MAX_DRAFT:
            raise SettingsError(f"policy is {text!r}; N in fixed:N is a whole number from 1 to {MAX_DRAFT}.")
    elif name == "threshold":
        if not 0 <= _number(value) < 1:
            raise SettingsError(f"policy is {text!r}; c in threshold:c is a number from 0 up to, but not, 1.")
    elif colon:
        raise SettingsError(f"policy is {text!r}; {name} takes no value, write {name}.")


def parse_policy(text: str, costs: CostCurves | None = None) -> Policy:
    """The policy of a spelling; `costs` are this machine's, None where nobody has measured them.

    Raises:
        SettingsError: see `check_policy`; or `scheduled` without costs.
    """
    check_policy(text)
    name, _, value = text.partition(":")
    if name == "fixed":
        return FixedPolicy(int(value))
    if name == "threshold":
        return ThresholdPolicy(float(value))
    if name == "length":
        return LengthPolicy()
    if name == "history" or (name == "auto" and costs is None):
        return HistoryPolicy()
    if costs is None:
        raise SettingsError(
            "policy is 'scheduled', which plans by a profile of this machine, and there is none; "
            "run dspark profile, or use --policy auto."
        )
    return PlannedPolicy(costs)


def parse_row_policy(text: str) -> Policy:
    """The policy of one request in a batch that has another.

    Raises:
        SettingsError: see `check_policy`; or a policy that plans for the batch as a whole.
    """
    check_policy(text)
    if text in _WHOLE_BATCH:
        raise SettingsError(
            f"policy is {text!r}, which plans for all requests together and is not this engine's; "
            "leave it out, or choose fixed:N, length, history or threshold:c."
        )
    return parse_policy(text)


def is_adaptive(text: str) -> bool:
    """Whether a policy looks for what pays, so that the guard may pause it."""
    return text in ADAPTIVE


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
