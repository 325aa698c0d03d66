"""How many draft tokens are worth verifying now? Pure functions and small policies."""

from dspark.schedule.costs import CostCurves, Costs
from dspark.schedule.estimates import Estimates
from dspark.schedule.parse import check_policy, is_adaptive, parse_policy, parse_row_policy
from dspark.schedule.policy import (
    MAX_DRAFT,
    NO_DRAFT,
    Choice,
    FixedPolicy,
    MixedPolicy,
    Offer,
    Policy,
    RowView,
    StepView,
)

__all__ = [
    "MAX_DRAFT",
    "NO_DRAFT",
    "Choice",
    "CostCurves",
    "Costs",
    "Estimates",
    "FixedPolicy",
    "MixedPolicy",
    "Offer",
    "Policy",
    "RowView",
    "StepView",
    "check_policy",
    "is_adaptive",
    "parse_policy",
    "parse_row_policy",
]
