"""What `explain` says is proven, held against all plans of the changed problems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from pplan.cost_models.errors import UsageError
from pplan.cost_models.topology import Topology
from pplan.planner.explanation.explanation import Explanation, explain_plan
from pplan.planner.plan_file import Plan
from pplan.planner.problem import Problem

from .enumeration import Enumeration, Scored
from .results import Result

TOLERANCE = 1e-8
WORTH = 2e-3
"""Share by which a plan must be faster to count against how far an answer holds: twice the planner's."""


def check(problem: Problem, plan: Plan, result: Result) -> None:
    """Every row that says so."""
    try:
        said = explain_plan(plan, problem.chain, problem.topology, problem.profiles)
    except UsageError:
        return
    fixed = replace(problem, options=replace(problem.options, mini_batch=plan.mini_batch, planner="best"))
    _what_if(fixed, said, result)
    _others(fixed, plan, said, result)
    _limits(fixed, plan, said, result)


def _every(problem: Problem, result: Result, stages: list[int] | None = None) -> Enumeration:
    del result
    return Enumeration(problem, Enumeration(problem, ()).rules.schedules, stages=stages)


def _best(every: Enumeration, result: Result, below: float) -> Scored | None:
    found = every.best(below)
    result.plans += every.plans
    result.simulated += every.simulated
    return found


def _what_if(problem: Problem, said: Explanation, result: Result) -> None:
    for row in said.what_if:
        changed = _changed(problem, row.change)
        if changed is None or not (row.proven or row.reason == "no plan fits"):
            continue
        below = inf if row.plan is None else row.plan.step_seconds * (1 - TOLERANCE)
        every = _every(changed, result)
        best = next(every.below(), None) if row.plan is None else _best(every, result, below)
        result.check("what-if", None if best is None else f"{row.change}: {row}; {best}")


def _changed(problem: Problem, change: str) -> Problem | None:
    """The problem after a change in words."""
    topology, options = problem.topology, problem.options
    try:
        if change in ("one more GPU", "one more CPU"):
            return replace(problem, topology=topology.with_gpus(topology.gpus + 1))
        if change == "double the bandwidth":
            return replace(problem, topology=_faster(topology, 2))
        if change == "double the memory":
            return _with_memory(problem, 2)
        if change.startswith("recompute "):
            return replace(problem, options=replace(options, recompute=change.removeprefix("recompute ")))
    except UsageError:
        return None
    return None


def _faster(topology: Topology, factor: float) -> Topology:
    levels = tuple(
        replace(
            level,
            link=replace(
                level.link, bandwidth_bytes_per_second=level.link.bandwidth_bytes_per_second * factor
            ),
        )
        for level in topology.levels
    )
    return replace(topology, levels=levels)


def _with_memory(problem: Problem, factor: float) -> Problem:
    groups = tuple(
        group._replace(
            device=replace(
                group.device,
                memory_bytes=None
                if group.device.memory_bytes is None
                else round(group.device.memory_bytes * factor),
            )
        )
        for group in problem.topology.groups
    )
    own = problem.options.memory_limit
    options = replace(problem.options, memory_limit=None if own is None else round(own * factor))
    return replace(problem, topology=replace(problem.topology, groups=groups), options=options)


def _others(problem: Problem, plan: Plan, said: Explanation, result: Result) -> None:
    """The second-best plans that are proven to be."""
    own, stages = said.plan.step_seconds, len(plan.stages) // plan.virtual_stages
    if said.other_stages.proven:
        row = said.other_stages.plan
        counts = [count for count in range(1, problem.gpus + 1) if count != stages]
        every = _every(problem, result, counts)
        best = _best(every, result, inf if row is None else row.step_seconds * (1 - TOLERANCE))
        result.check("other stages", None if best is None else f"{said.other_stages}; {best}")
    if said.second_best.proven:
        row = said.second_best.plan
        limit = inf if row is None else row.step_seconds * (1 - TOLERANCE)
        every = _every(problem, result)
        others = _different(plan, every.below(limit), own)
        best = min(others, key=lambda found: found.step_seconds, default=None)
        result.plans += every.plans
        result.simulated += every.simulated
        result.check("second best", None if best is None else f"{said.second_best}; {best}")


def _different(plan: Plan, found: Iterable[Scored], own: float) -> list[Scored]:
    """Those of other cuts or replicas, but for those as fast as the plan."""
    ends = tuple(stage.last_layer + 1 for stage in plan.stages)
    replicas = tuple(stage.replicas for stage in plan.stages)
    return [
        other
        for other in found
        if (other.proposal.ends, other.proposal.replicas) != (ends, replicas)
        and abs(other.step_seconds - own) > 1e-7 * own
    ]


def _limits(problem: Problem, plan: Plan, said: Explanation, result: Result) -> None:
    """Where memory is said to forbid nothing, no plan without its limit is faster; where no better plan was
    found to the end of a range, there is none."""
    del plan
    if said.better is not None:
        return
    if said.limits.without_memory_limit is None:
        free = _with_memory(problem, 1e6)
        best = _best(_every(free, result), result, said.plan.step_seconds * (1 - TOLERANCE))
        result.check("memory forbids", None if best is None else f"nothing is faster with more; {best}")
