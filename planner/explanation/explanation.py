"""Explanation of a plan: its limits, the runner-up plans, its sensitivity, what-ifs and a split in use.

A what-if solves the problem with one change: more GPUs, double the bandwidth or memory, recomputation forced
or forbidden; if the step waits for launches, launches that take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, TypeVar

from ...cost_models.document import Document, Record
from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ...cost_models.quantities import format_seconds
from ...cost_models.runtime import OFFLOAD
from ...cost_models.topology import Topology
from ..candidate import ScoredPlan
from ..plan_file import TIE, Plan, PlanRow, plan_row
from ..problem import Problem
from .current_split import SplitComparison, compare_split
from .explain_context import (
    MOST_SECONDS,
    SECONDS,
    ExplainContext,
    make_context,
    resolve,
    with_bandwidth,
    with_memory,
    without_launches,
)
from .explain_options import ExplainOptions
from .rivals import RunnerUp, Sensitivity, runners_up, sensitivities
from .step_limits import StepLimits, find_limits, is_memory_known


class WhatIf(Record):
    """The best plan found after a change, or the `reason` why none exists."""

    change: str
    plan: PlanRow | None = None
    faster: float | None = None
    """Step of the plan over the new one, minus 1: negative if the change makes it slower."""
    proven: bool = False
    """True if it is proven that no plan of the changed problem is faster."""
    reason: str = ""


Change = Callable[[Problem], Problem]
Part = TypeVar("Part")
_RIVALS_SHARE, _SENSITIVITIES_SHARE = 0.35, 0.5
"""Shares of the processor time that is then left."""
_SEARCHES = 23
"""Number of searches for a plan on several nodes.

They are the plan's, its limits', four of runners-up, three times four of sensitivities, and five of what-ifs
(six if it waits for launches).
"""


def solve_what_ifs(
    context: ExplainContext, seeds: Sequence[ScoredPlan], plan: Plan, *, launches: bool
) -> Iterator[WhatIf]:
    """Yield the best plan after each change.

    Args:
        context: The plan and its problem.
        seeds: Plans from which the searches start, so that an improvement never leads to a slower plan.
        plan: The plan's file, for the names of devices and the number that share every layer.
        launches: Whether the step waits for launches, so that their change is included.
    """
    topology = context.problem.topology
    changes: list[tuple[str, Change]] = [
        ("double the bandwidth", lambda p: replace(p, topology=with_bandwidth(p.topology, 2))),
        *([("double the memory", lambda p: with_memory(p, 2))] if is_memory_known(context) else []),
        ("recompute always", lambda p: _recomputing(p, "always")),
        ("recompute never", lambda p: _recomputing(p, "never")),
    ]
    if len(topology.kinds) == 1:
        more = count_more(topology)
        per_node = topology.gpus_per_node if len(topology.levels) > 1 else 0
        changes.insert(0, (_more_in_words(plan, more, per_node), lambda p: _with_more(p, more)))
    if set(context.present.recompute) - {"never", OFFLOAD} and _may_offload(context.problem):
        changes.append((f"recompute {OFFLOAD}", lambda p: _recomputing(p, OFFLOAD)))
    if launches:
        changes.append(("launches in no time", without_launches))
    for words, change in changes:
        if context.budget.over:
            return
        with suppress(UsageError):  # the runtime or the levels do not allow it
            yield _solve_what_if(context, seeds, words, change)


def _solve_what_if(
    context: ExplainContext, seeds: Sequence[ScoredPlan], words: str, change: Change
) -> WhatIf:
    result = resolve(change(context.problem), seeds, SECONDS / 2, fully=True)
    if result.best is None:
        return WhatIf(change=words, reason="no plan fits")
    faster = context.present.step_seconds / result.best.step_seconds - 1
    return WhatIf(
        change=words, plan=plan_row(result.best, exact=result.exact), faster=faster, proven=result.exact
    )


def count_more(topology: Topology) -> int:
    """Return how many devices the next larger machine has more.

    Part of a server gets one more device; several servers are filled or get another one. If all devices are
    joined alike, `_MANY_ALIKE` or more are doubled.
    """
    gpus, size = topology.gpus, topology.gpus_per_node
    if len(topology.levels) == 1:
        return gpus if gpus >= _MANY_ALIKE else 1
    return 1 if gpus < size else size - gpus % size


_MANY_ALIKE = 8
"""Devices of a machine without servers from which the next larger machine has twice as many."""


def _more_in_words(plan: Plan, more: int, per_node: int) -> str:
    sharers, device = plan.profile.tensor_parallel, plan.device_kind
    if more == per_node > 1:
        return f"one more server of {more * sharers} {device}s"
    if more > 1:
        return f"{more * sharers} more {device}s"
    return f"one more {device}" if sharers == 1 else f"one more group of {sharers} {device}s"


def _with_more(problem: Problem, more: int) -> Problem:
    return replace(problem, topology=problem.topology.with_gpus(problem.gpus + more))


def _recomputing(problem: Problem, mode: str) -> Problem:
    return replace(problem, options=replace(problem.options, recompute=mode))


def _may_offload(problem: Problem) -> bool:
    """Return whether plans whose stages offload can be searched."""
    with suppress(UsageError):
        return _recomputing(problem, OFFLOAD).space.host is not None
    return False


class Explanation(Document):
    """Explanation of a plan.

    `better` is a faster plan under the same options if solving again finds one, for example because the plan
    is not from the joint search or was `made_for` another objective. `holds` is then empty, because the plan
    is not the answer. `current` is only set if a split in use was given.
    """

    kind: ClassVar[str] = "explanation"

    model: str
    plan: PlanRow
    limits: StepLimits
    better: PlanRow | None = None
    made_for: str = ""
    """Objective of the plan in words. Empty for the shortest step."""
    second_best: RunnerUp
    as_fast: PlanRow | None = None
    """A plan with other cuts, replicas or devices that takes as long."""
    other_stages: RunnerUp
    holds: list[Sensitivity] = []
    what_if: list[WhatIf] = []
    current: SplitComparison | None = None
    notes: list[str] = []


def explain_plan(
    plan: Plan,
    chain: Chain,
    topology: Topology,
    profiles: Mapping[str, Chain] | None = None,
    options: ExplainOptions | None = None,
    progress: Callable[[float], None] | None = None,
) -> Explanation:
    """Explain a plan of this chain on this topology, and why the split in use is slower.

    Args:
        plan: The plan.
        chain: Its layers.
        topology: Devices and links.
        profiles: The same layers as measured on the kinds of devices with their own profile, by its name in
            the topology.
        options: The split in use.
        progress: Function that is called with the approximate share of the work that is done.

    Raises:
        UsageError: The chain does not allow the cuts of the plan or the split.
    """
    context = make_context(plan, chain, topology, profiles)
    done = 0

    def add(searches: int) -> None:
        nonlocal done
        done += searches
        if progress is not None:
            progress(min(done / _SEARCHES, 1.0))

    def each(parts: Iterable[Part], searches: int) -> Iterator[Part]:
        """The parts, each of so many searches."""
        for part in parts:
            yield part
            add(searches)

    # An impossible split is refused before the long work.
    split = compare_split(context, options) if options and options.current is not None else None
    present = context.present
    resolved = resolve(context.problem, [present]).best
    better = None
    if resolved is not None and resolved.step_seconds < present.step_seconds * (1 - TIE):
        better = plan_row(resolved)
    seeds: list[ScoredPlan] = [present] if resolved is None else [present, resolved]
    add(1)
    limits = find_limits(context, seeds)
    add(1)
    busiest = limits.busiest.stage
    rivals = runners_up(context.within(_RIVALS_SHARE), seeds, busiest)
    add(4)
    pool = [*seeds, *rivals.plans]
    launches = any(share.kind == "host" for share in limits.kinds)
    holds = list[Sensitivity]()
    if better is None and context.fits:
        holds = list(each(sensitivities(context.within(_SENSITIVITIES_SHARE), pool, busiest), 4))
    changed = list(each(solve_what_ifs(context, pool, plan, launches=launches), 1))
    return Explanation(
        model=plan.model,
        plan=plan_row(present),
        limits=limits,
        better=better,
        made_for=_made_for(plan),
        second_best=rivals.second_best,
        as_fast=None if rivals.as_fast is None else plan_row(rivals.as_fast),
        other_stages=rivals.other_stages,
        holds=holds,
        what_if=changed,
        current=split,
        notes=_notes(context, plan),
    )


def _made_for(plan: Plan) -> str:
    if plan.objective is not None:
        return _AIMS.get(plan.objective.name, plan.objective.name)
    return "few weights to move" if plan.is_replanned else ""


_AIMS = {
    "memory": "the least memory",
    "cost": "the fewest dollars a sample",
    "robust": "the 90th percentile of its step",
    "slow-devices": "the mean step with slow devices",
}


def _notes(context: ExplainContext, plan: Plan) -> list[str]:
    step, predicted = context.present.step_seconds, plan.prediction.step_seconds
    notes = [] if context.fits else ["the plan does not fit into the memory of its devices"]
    if context.budget.was_interrupted:
        notes.append(
            f"other plans were searched for {MOST_SECONDS:g} s of processor time: runner-up plans may be "
            "missing, and bandwidths, times and changes that are not listed were not tried"
        )
    if plan.sharing:
        sharers = plan.profile.tensor_parallel
        words = "one device has a layer" if sharers == 1 else f"{sharers} devices share every layer"
        notes.append(f"in all other plans here {words}, as in this one")
    if plan.is_replanned:
        notes.append("the other plans here may use all devices, those that were lost, too")
    if format_seconds(step) != format_seconds(predicted):
        notes.append(
            f"the plan takes {format_seconds(step)} a step here, it says {format_seconds(predicted)}: "
            f"it was made for {plan.topology or 'another machine'}"
        )
    return notes
