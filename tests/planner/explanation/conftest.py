"""A solved plan with the chain and the devices that it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.build_plan import plan_without_comparison
from pplan.planner.explanation.explain_context import ExplainContext, make_context
from pplan.planner.explanation.explanation import Explanation, explain_plan
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem


@dataclass(frozen=True)
class Solved:
    """A plan, and what it was made from."""

    plan: Plan
    chain: Chain
    topology: Topology

    @property
    def question(self) -> ExplainContext:
        return make_context(self.plan, self.chain, self.topology)

    def explained(self, **more: object) -> Explanation:
        return explain_plan(self.plan, self.chain, self.topology, **more)  # type: ignore[arg-type]


@pytest.fixture
def solved() -> Callable[..., Solved]:
    """A function of (chain, topology, **options): the plan, without what it is compared with."""

    def solve(chain: Chain, topology: Topology, **options: object) -> Solved:
        problem = Problem(chain, topology, PlanOptions(**options))  # type: ignore[arg-type]
        answer = find_best_plan(problem)
        assert answer.best is not None
        reference = ProfileReference(file="toy.profile.json", sha256="0" * 64)
        plan = plan_without_comparison(problem, answer.best, answer.result, model="toy", profile=reference)
        return Solved(plan, chain, topology)

    return solve
