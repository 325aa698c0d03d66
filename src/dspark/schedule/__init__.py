"""How many draft tokens are worth verifying now? Pure functions and small policies."""

from dspark.schedule.policy import FixedPolicy, Policy, parse_policy

__all__ = ["FixedPolicy", "Policy", "parse_policy"]
