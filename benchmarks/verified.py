"""Plans that a benchmark makes, attacked: figures are only of plans that the tests' oracle agrees with."""

from __future__ import annotations

import sys
from pathlib import Path

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.oracle import attack

MOST_ACTIONS = 2**21
"""Micro-batches times stages of a plan whose step the oracle simulates."""


def verified(plan: Plan, profile: Profile | Path) -> Plan:
    """Check a plan with `pplan.lint`, and attack it with the oracle.

    Returns:
        The plan.

    Raises:
        AssertionError: Some figure of it is wrong.
    """
    content = profile.read_text(encoding="utf-8") if isinstance(profile, Path) else profile.to_json()
    wrong: list[object] = list(pplan.lint(plan, profile).differing)
    if len(plan.stages) * plan.micro_batches <= MOST_ACTIONS:
        wrong += attack(plan.to_json(), content)
    if wrong:
        lines = "\n".join(f"  {finding}" for finding in wrong)
        raise AssertionError(f"a plan of {plan.model} is wrong:\n{lines}")
    return plan
