"""Plans that a benchmark makes, verified: figures are only of plans that `pplan verify` agrees with."""

from __future__ import annotations

from pathlib import Path

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile


def verified(plan: Plan, profile: Profile | Path) -> Plan:
    """The plan. Raises AssertionError with the lines that differ."""
    report = pplan.verify(plan, profile)
    if not report.agrees:
        lines = "\n".join(
            f"  {line.name}: {line.detail}: the plan says {line.plan_value}, worked out {line.expected_value}"
            for line in report.differing
        )
        raise AssertionError(f"pplan verify does not agree with a plan of {plan.model}:\n{lines}")
    return plan
