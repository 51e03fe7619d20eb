"""Result of an objective: a plan, what was proven about it, and its comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..candidate import ScoredPlan
from ..joint_search import BEST, JointSearchResult, find_best_plan, joint_search
from ..plan_file import Aim
from ..problem import Problem
from ..scoring import assemble, fastest
from ..search.branch_and_bound import SearchResult
from ..search.space import Space


@dataclass(frozen=True)
class ObjectiveResult:
    """Plan of an objective.

    Attributes:
        result: The plan, with what was proven about the step of all plans.
        answer: The fastest plan, whose comparisons the plan file shows.
        aim: Value of the objective and its proof. None if it is the step.
        notes: Notes for the plan file.
    """

    result: SearchResult
    answer: JointSearchResult
    aim: Aim | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> ScoredPlan | None:
        """The plan; None if none fits."""
        return self.result.best


def search_again(problem: Problem, seeds: Sequence[ScoredPlan]) -> SearchResult:
    """Return the fastest plan of a problem with other limits than those of the `seeds`."""
    if problem.options.planner != BEST:
        return find_best_plan(problem).result
    scored = fastest(problem.space, [plan.proposal for plan in seeds])
    return joint_search(problem, [] if scored is None else [scored])


def with_memory_limit(problem: Problem, memory_limit: float) -> Problem:
    """Return the problem with a limit of bytes for every device."""
    return replace(problem, options=replace(problem.options, memory_limit=memory_limit))


def peak_bytes(space: Space, plan: ScoredPlan) -> float:
    """Return the bytes that the fullest device needs."""
    assembly = assemble(space, plan.proposal, plan.recompute)
    return max(sum(assembly.ledger(device).values()) for device in range(assembly.program.devices))
