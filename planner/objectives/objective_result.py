"""The result of an objective: a plan, what was proven of it, and what it is compared with."""

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
    """`result`: the plan, with what was proven of the step of all plans. `answer`: the fastest plan, whose
    comparisons the plan file shows. `aim`: what the plan is the best of, where that is not its step."""

    result: SearchResult
    answer: JointSearchResult
    aim: Aim | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> ScoredPlan | None:
        """The plan, where one fits."""
        return self.result.best


def search_again(problem: Problem, seeds: Sequence[ScoredPlan]) -> SearchResult:
    """The fastest plan of a problem whose limits are others than those of which the `seeds` are plans."""
    if problem.options.planner != BEST:
        return find_best_plan(problem).result
    scored = fastest(problem.space, [plan.proposal for plan in seeds])
    return joint_search(problem, [] if scored is None else [scored])


def with_memory_limit(problem: Problem, memory_limit: float) -> Problem:
    """The same where no device may hold more bytes."""
    return replace(problem, options=replace(problem.options, memory_limit=memory_limit))


def peak_bytes(space: Space, plan: ScoredPlan) -> float:
    """What the device that needs most needs."""
    assembly = assemble(space, plan.proposal, plan.recompute)
    return max(sum(assembly.ledger(device).values()) for device in range(assembly.program.devices))
