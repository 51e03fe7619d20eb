"""One problem attacked: what pplan says of it against all of its plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.planner.build_plan import build_problem
from pplan.planner.candidate import ScoredPlan
from pplan.planner.joint_search import plan_with
from pplan.planner.objectives.frontier import build_frontier
from pplan.planner.objectives.objective import COST, MEMORY, THROUGHPUT, Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.planners import BASELINES, find_planner
from pplan.planner.problem import Problem

from . import aims, explained, frontiers, terms
from .alone import port_seconds
from .enumeration import Enumeration, Scope, TooManyError
from .problems import Case
from .results import Result

REFERENCE = ProfileReference(file="attacked.profile.json", sha256="0" * 64)
TOLERANCE = 1e-8
"""Share within which two seconds are one: ten of the planner's own."""
ASKED = ("plain", "levels", "ports", "kinds", "tied", "long")
"""Kinds of problems of which the baselines are asked, too."""
TERMS = ("plain", "options", "memory", "tied", "states")
"""Kinds of problems of which the search's own bounds are attacked, too."""
SEARCHED = ("1f1b", "gpipe")
LATE = ("pipedream", "pipedream-2bw", "xpipe", "wpipe")

Solver = Callable[[Case, Problem], Plan]


def reference(case: Case) -> ProfileReference:
    """The profile that the chain would be of."""
    return REFERENCE.model_copy(update={"dtype": case.dtype})


def quickly_solved(case: Case, problem: Problem) -> Plan:
    """The same without what the answer is compared with, which takes as long again."""
    return solve_objective(case.objective, problem, model="attacked", profile=reference(case), compared=False)


def solved(case: Case, problem: Problem) -> Plan:
    """What the public entry answers."""
    if case.objective.name == "step-time":
        return solve_objective(Objective(), problem, model="attacked", profile=reference(case))
    return quickly_solved(case, problem)


def attacked(case: Case, solver: Solver = solved) -> Result:
    """All that is said of a problem, checked. `solver`: what answers it."""
    result = Result(case.seed, case.kind)
    try:
        _attack(case, solver, result)
    except TooManyError as error:
        result.left_out = str(error)
    return result


def _attack(case: Case, solver: Solver, result: Result) -> None:
    try:
        problem = build_problem(case.chain, case.topology, case.options, reference(case), case.profiles)
    except UsageError as error:
        result.refused = error.what
        return
    if case.kind == "frontier":
        frontiers.check(problem, build_frontier, result)
        return
    try:
        plan = solver(case, problem)
    except UsageError as error:
        result.refused = error.what
        return
    except InfeasibleError as error:
        _nothing_fits(problem, error, result)
        return
    if case.kind in TERMS and case.options.runtime is None:
        terms.check(problem, result)
    if case.kind in (*TERMS, *ASKED):
        terms.memory_bound(problem, result)
        terms.unfinished(problem, result)
        terms.stopped(problem, result)
    _Attack(case, problem, plan, result).run()


def _nothing_fits(problem: Problem, error: InfeasibleError, result: Result) -> None:
    """A planner of a name may know fewer plans than there are, and of schedules that are not searched it is
    only said that none was found."""
    if problem.options.planner != "best" or " found " in error.what:
        return
    names = problem_schedules(problem)
    if error.what.startswith("no plan of "):
        names = [name for name in names if name in SEARCHED]
    every = Enumeration(problem, names)
    known = next(every.below(), None)
    result.plans += every.plans
    result.simulated += every.simulated
    result.check("nothing fits", None if known is None else f"said that no plan fits; {known} does")


def problem_schedules(problem: Problem) -> Sequence[str]:
    """In the running."""
    return Enumeration(problem, ()).rules.schedules


def scopes_of(plan: Plan, schedules: Sequence[str]) -> dict[Scope, list[str]]:
    """By the devices that the bound is about, the schedules: those that are searched on the devices that were
    searched, unless the plan's file says otherwise; asynchronous ones on orders of them; the others on
    any."""
    universal = plan.prediction.bound_covers.startswith("all plans of")
    named = [] if universal else [name for name in schedules if name in SEARCHED]
    late = [name for name in schedules if name in LATE]
    others = [name for name in schedules if name not in (*named, *late)]
    return {"orders": late, "searched": named, "any": others}


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
        if name == "step-time" and self.case.options.planner == "best":
            self._allowed()
        if name in ("step-time", THROUGHPUT):
            late = LATE if name == THROUGHPUT and self.case.options.schedule == "auto" else ()
            own = [other for other in late if other != "wpipe" or "wpipe" in self.plan.searched]
            self._bound([*problem_schedules(self.problem), *own])
            self._alternatives()
            self._planners()
        if self.case.kind == "explain":
            explained.check(self.problem, self.plan, self.result)

    def _allowed(self) -> None:
        """The options leave the answer: its cuts, its micro-batches and the devices of its stages."""
        plan, rules = self.plan, Enumeration(self.problem, ()).rules
        if plan.schedule not in SEARCHED:
            return
        ends = tuple(stage.last_layer + 1 for stage in plan.stages)
        devices = tuple(tuple(stage.devices) for stage in plan.stages)
        left = (
            len(ends) <= rules.most_stages
            and plan.micro_batch_size in rules.sizes
            and ends in set(rules.ends(len(ends)))
            and rules.may_have(plan.micro_batch_size, devices)
        )
        words = f"{plan.micro_batch_size} samples, ends {ends}, devices {devices}"
        self.result.check("allowed", None if left else words)

    def _bound(self, schedules: Sequence[str]) -> None:
        """The bound on the step, and that nothing is faster than an exact answer."""
        said = self.plan.prediction
        below = max(said.lower_bound_seconds, said.step_seconds if said.exact else 0.0)
        best: list[tuple[float, str]] = []
        for scope, own in scopes_of(self.plan, schedules).items():
            every = Enumeration(self.problem, own, scope=scope)
            found = every.best(below * (1 - TOLERANCE))
            self.result.plans += every.plans
            self.result.simulated += every.simulated
            if found is not None:
                best.append((found.step_seconds, f"on {scope}: {found}"))
        step, text = min(best, default=(inf, ""))
        said_so = f"of a {self.plan.schedule} plan of {said.step_seconds:.9g} s"
        low = step < said.lower_bound_seconds * (1 - TOLERANCE)
        bound = f"bound {said.lower_bound_seconds:.9g} s, {said_so}; {text}"
        self.result.check("bound", bound if low else None)
        if self.plan.schedule not in LATE:
            least = port_seconds(self.problem, self.plan)
            less = said.step_seconds < least * (1 - TOLERANCE)
            self.result.check("ports", f"{said_so}; its ports need {least:.9g} s" if less else None)
        if said.exact:
            better = step < said.step_seconds * (1 - TOLERANCE)
            self.result.check("exact", f"exact, {said_so}; {text}" if better else None)

    def _planners(self) -> None:
        """No baseline is faster than the answer for the fastest."""
        if self.case.options.planner != "best" or self.case.kind not in ASKED:
            return
        step = self.plan.prediction.step_seconds
        for name in BASELINES:
            plan = plan_with(find_planner(name), self.problem)
            if isinstance(plan, ScoredPlan):
                faster = plan.step_seconds < step * (1 - TOLERANCE)
                words = f"the answer takes {step:.9g} s, that of {name} {plan.step_seconds:.9g} s: {plan}"
                self.result.check("planners", words if faster else None)

    def _alternatives(self) -> None:
        """No plan of a runtime is faster than an exact alternative for it, of the schedules that are
        searched."""
        for row in self.plan.alternatives:
            if not row.exact:
                continue
            named = self.case.options.schedule
            options = replace(
                self.case.options, runtime=row.runtimes[0], mini_batch=self.problem.mini_batch, planner="best"
            )
            every = Enumeration(replace(self.problem, options=options), ())
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
        problem = build_problem(case.chain, case.topology, case.options, reference(case), case.profiles)
        answer = solve_objective(Objective(), problem, model="attacked", profile=reference(case))
        return answer.prediction.step_seconds


__all__ = ["attacked", "problem_schedules", "quickly_solved", "scopes_of", "solved"]
