"""One problem attacked: what pplan says of it against all of its plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.planner.objectives.frontier import frontier_of
from pplan.planner.objectives.objective import COST, MEMORY, THROUGHPUT
from pplan.planner.objectives.solved import solve_for
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.problem import Problem
from pplan.planner.solve import problem_of, solve

from . import aims, explained, frontiers
from .enumeration import Enumeration, Scope
from .problems import Case
from .results import Result

REFERENCE = ProfileReference(file="attacked.profile.json", sha256="0" * 64)
TOLERANCE = 1e-8
"""Share within which two seconds are one: ten of the planner's own."""
SEARCHED = ("1f1b", "gpipe")
LATE = ("pipedream", "pipedream-2bw")

Solver = Callable[[Case, Problem], Plan]


def quickly_solved(case: Case, problem: Problem) -> Plan:
    """The same without what the answer is compared with, which takes as long again."""
    return solve_for(case.objective, problem, model="attacked", profile=REFERENCE, compared=False)


def solved(case: Case, problem: Problem) -> Plan:
    """What the public entry answers."""
    if case.objective.name == "step-time":
        return solve(
            case.chain,
            case.topology,
            case.wishes,
            model="attacked",
            profile=REFERENCE,
            profiles=case.profiles,
        )
    return quickly_solved(case, problem)


def attacked(case: Case, solver: Solver = solved) -> Result:
    """All that is said of a problem, checked. `solver`: what answers it."""
    result = Result(case.seed, case.kind)
    try:
        problem = problem_of(case.chain, case.topology, case.wishes, REFERENCE, case.profiles)
    except UsageError as error:
        result.refused = error.what
        return result
    if case.kind == "frontier":
        frontiers.check(problem, frontier_of, result)
        return result
    try:
        plan = solver(case, problem)
    except UsageError as error:
        result.refused = error.what
        return result
    except InfeasibleError:
        _nothing_fits(problem, result)
        return result
    _Attack(case, problem, plan, result).run()
    return result


def _nothing_fits(problem: Problem, result: Result) -> None:
    """A planner of a name may know fewer plans than there are."""
    if problem.wishes.planner != "best":
        return
    every = Enumeration(problem, problem_schedules(problem), scope="orders")
    known = next(every.below(), None)
    result.plans += every.plans
    result.simulated += every.simulated
    result.check("nothing fits", None if known is None else f"said that no plan fits; {known} does")


def problem_schedules(problem: Problem) -> Sequence[str]:
    """In the running."""
    return Enumeration(problem, ()).rules.schedules


def scope_of(problem: Problem, plan: Plan) -> Scope:
    """The devices that the bound is about: any, where schedules are in the running that are not searched;
    else the searched orders."""
    del plan
    return "orders" if set(problem_schedules(problem)) <= set(SEARCHED) else "any"


@dataclass
class _Attack:
    """A plan under attack."""

    case: Case
    problem: Problem
    plan: Plan
    result: Result

    def run(self) -> None:
        """All checks that go with the objective."""
        name = self.case.objective.name
        if name != "step-time":
            self._objective(name)
        if name in ("step-time", THROUGHPUT):
            late = LATE if name == THROUGHPUT and self.case.wishes.schedule == "auto" else ()
            self._bound([*problem_schedules(self.problem), *late])
            self._alternatives()
        if self.case.kind == "explain":
            explained.check(self.problem, self.plan, self.result)

    def _bound(self, schedules: Sequence[str]) -> None:
        """The bound on the step, and that nothing is faster than an exact answer."""
        said, scope = self.plan.prediction, scope_of(self.problem, self.plan)
        below = said.step_seconds if said.exact else said.lower_bound_seconds
        every = Enumeration(self.problem, schedules, scope=scope)
        best = every.best(below * (1 - TOLERANCE))
        self.result.plans += every.plans
        self.result.simulated += every.simulated
        step = inf if best is None else best.step_seconds
        low = step < said.lower_bound_seconds * (1 - TOLERANCE)
        where = f"{self.plan.schedule} plan, {scope}"
        self.result.check(
            "bound", f"bound {said.lower_bound_seconds:.9g} s ({where}); {best}" if low else None
        )
        if said.exact:
            better = step < said.step_seconds * (1 - TOLERANCE)
            self.result.check(
                "exact", f"exact {said.step_seconds:.9g} s ({where}); {best}" if better else None
            )

    def _alternatives(self) -> None:
        """No plan of a runtime is faster than an exact alternative for it, of the schedules that are
        searched."""
        for row in self.plan.alternatives:
            if not row.exact:
                continue
            named = self.case.wishes.schedule
            wishes = replace(
                self.case.wishes, runtime=row.runtimes[0], mini_batch=self.problem.mini_batch, planner="best"
            )
            every = Enumeration(replace(self.problem, wishes=wishes), ())
            every.schedules = [name for name in SEARCHED if name in every.rules.schedules]
            best = every.best(row.step_seconds * (1 - TOLERANCE))
            self.result.plans += every.plans
            self.result.simulated += every.simulated
            words = f"{row.runtimes[0]}, schedule {named}: {row.step_seconds:.9g} s; {best}"
            self.result.check("alternatives", None if best is None else words)

    def _objective(self, name: str) -> None:
        if self.plan.objective is None:
            return
        if name == MEMORY:
            aims.least_memory(
                self.problem, self.plan, self.case.objective.slack, self._fastest(), self.result
            )
        elif name == COST:
            aims.least_cost(self.problem, self.plan, self.case.objective.prices, self.result)

    def _fastest(self) -> float:
        """The step of what is answered for the fastest."""
        case = self.case
        answer = solve(
            case.chain,
            case.topology,
            case.wishes,
            model="attacked",
            profile=REFERENCE,
            profiles=case.profiles,
        )
        return answer.prediction.step_seconds


__all__ = ["attacked", "problem_schedules", "quickly_solved", "scope_of", "solved"]
