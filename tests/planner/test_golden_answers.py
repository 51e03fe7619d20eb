"""Whole answers of small problems of all kinds: the plan with its alternatives, and why it is so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pplan.planner.explanation.explanation import explain_plan
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.problem import Problem

EXPLAINED = (
    *("two devices", "little memory"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("two kinds", "torch")),
)


def solve(problem: Problem) -> Plan:
    """As `pplan solve` does, with baselines and alternatives."""
    reference = ProfileReference(file="toy.profile.json", sha256="0" * 64, dtype=problem.dtype)
    return solve_objective(Objective(), problem, model="toy", profile=reference)


def test_plans(
    case_name: str,
    cases: Mapping[str, Any],
    golden: Callable[[str, str], None],
    as_text: Callable[[object], str],
) -> None:
    """golden: planner/*.txt"""
    problem = cases[case_name].problem()
    plan = solve(problem)
    golden(f"planner/{case_name.replace(' ', '_')}.txt", as_text(plan.model_dump(exclude={"made_by"})))


@pytest.mark.parametrize("name", EXPLAINED)
def test_explanations(
    name: str, cases: Mapping[str, Any], golden: Callable[[str, str], None], as_text: Callable[[object], str]
) -> None:
    """golden: planner/explained/*.txt"""
    problem = cases[name].problem()
    plan = solve(problem)
    explanation = explain_plan(plan, problem.chain, problem.topology)
    golden(f"planner/explained/{name.replace(' ', '_')}.txt", as_text(explanation))
