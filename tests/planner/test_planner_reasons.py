"""Why a named planner has no plan: the cause that is named is the one without which it has one."""

from __future__ import annotations

from collections.abc import Callable

from pplan.planner.planners import PLANNERS
from pplan.planner.planners.base import refusal_reason
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]


def test_no_memory_is_blamed_where_none_is_known(make_problem: MakeProblem) -> None:
    """Of any schedule and any planner."""
    for schedule in ("interleaved", "looped-bfs", "zb-h2", "zb-v", "naive", "chimera", "autopipe"):
        problem = make_problem(schedule=schedule)
        for planner in PLANNERS.values():
            reason = refusal_reason(planner, problem)
            assert "fit" not in reason, (schedule, planner.name)
            assert "requested" not in reason, (schedule, planner.name)
