"""Comparison of the split in use with the plan under the same costs.

The difference is broken down by what the busiest stage of each does with the step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from ...cost_models.document import Record
from ...cost_models.errors import UsageError
from ...cost_models.quantities import format_count
from ...cost_models.timeline import Timeline
from ..asynchronous import bubble
from ..build_plan import list_machine_warnings, plan_partition
from ..candidate import SEARCHED, ScoredPlan
from ..plan_file import Partition, PlannedStage, PlanRow, ProfileReference, plan_row
from ..plan_simulation import plan_stages
from ..problem import Problem
from ..scoring import fastest
from ..search.family import Family
from .explain_context import SECONDS, ExplainContext, score_plan, search_near, simulate_candidate
from .explain_options import ExplainOptions
from .step_limits import BusiestStage, find_busiest, list_recompute_seconds


class Side(Record):
    """One of the two compared plans."""

    plan: PlanRow
    bubble: float
    busiest: BusiestStage
    stages: list[PlannedStage]


class Cause(Record):
    """A part of the difference: seconds of the busiest stage, in the split and in the plan.

    Over all causes, both sum to the steps.
    """

    name: str
    current_seconds: float
    plan_seconds: float


class SplitComparison(Record):
    """The split in use against the plan.

    Attributes:
        current: The split.
        plan: The plan.
        slower: Step of the split over the plan's, minus 1.
        causes: Parts of the difference.
        best_setting: The split with the best schedule, micro-batches and recomputation. None if it is not
            faster.
        best_cuts: The split's setting with the best cuts. None if it is not faster.
        notes: For example what it lacks in memory.
    """

    current: Side
    plan: Side
    slower: float
    causes: list[Cause]
    best_setting: PlanRow | None
    best_cuts: PlanRow | None
    notes: list[str]


def compare_split(context: ExplainContext, current: ExplainOptions) -> SplitComparison:
    """Simulate the split, and compare it with the plan.

    Args:
        context: The plan and its problem.
        current: The split in use.

    Raises:
        UsageError: The balance has another number of layers, forbidden cuts or too many devices, or the
            schedule does not run with these numbers.
    """
    free = _free_problem(context.problem, current, as_split=False)
    split_problem = _free_problem(context.problem, current, as_split=True)
    partition = _as_partition(split_problem, current)
    if partition.gpus > split_problem.gpus:
        raise UsageError(
            f"`current`: the split takes {format_count(partition.gpus, 'device')}, "
            f"the plan is for {split_problem.gpus}",
            f"Explain a plan for as many: pplan solve gpus={partition.gpus}",
        )
    plan_of_split = plan_partition(
        split_problem, partition, model="", profile=ProfileReference(file="", sha256="")
    )
    split = score_plan(split_problem, plan_of_split)
    of_the_machine = list_machine_warnings(split_problem)
    plan = context.present
    mine, theirs = simulate_candidate(split_problem, split), context.timeline
    return SplitComparison(
        current=_side(split_problem, split, mine),
        plan=_side(context.problem, plan, theirs),
        slower=split.step_seconds / plan.step_seconds - 1,
        causes=_causes(mine, theirs),
        best_setting=_faster(_best_setting(free, partition), split),
        best_cuts=_faster(_best_cuts(split_problem, split), split),
        notes=[text for text in plan_of_split.warnings if text not in of_the_machine] + plan_of_split.notes,
    )


def _free_problem(problem: Problem, current: ExplainOptions, *, as_split: bool) -> Problem:
    """Return the problem without options that concern the plan's shape.

    With `as_split`, schedule and micro-batches are those of the split.
    """
    options = replace(
        problem.options,
        use_all=False,
        max_stages=None,
        cut_after=(),
        keep_together=(),
        pins=(),
    )
    if as_split and current.schedule is not None:
        options = replace(options, schedule=current.schedule)
    if as_split and current.micro_batches is not None:
        options = replace(options, micro_batches=current.micro_batches)
    return replace(problem, options=options)


def _as_partition(problem: Problem, current: ExplainOptions) -> Partition:
    layers, counted_layers = len(problem.chain), sum(current.balance)
    if counted_layers != layers:
        text = ",".join(map(str, current.balance))
        raise UsageError(
            f"current='{text}': holds {format_count(counted_layers, 'layer')}, the model has {layers}",
            "Give the number of layers of every stage, as in current='12,34'.",
        )
    return Partition("", tuple(accumulate(current.balance)), 1, current.replicas)


def _side(problem: Problem, plan: ScoredPlan, timeline: Timeline) -> Side:
    return Side(
        plan=plan_row(plan),
        bubble=bubble(problem.space, plan),
        busiest=find_busiest(timeline),
        stages=plan_stages(problem.space, plan),
    )


def _causes(current: Timeline, plan: Timeline) -> list[Cause]:
    mine, theirs = _spent(current), _spent(plan)
    return [
        Cause(name=name, current_seconds=mine[name], plan_seconds=theirs[name])
        for name in mine
        if mine[name] or theirs[name]
    ]


def _spent(timeline: Timeline) -> dict[str, float]:
    """Return what the busiest stage does with the step, in seconds that sum to the step."""
    stage = find_busiest(timeline).stage
    times, recomputed = timeline.stage_times[stage], list_recompute_seconds(timeline)
    recomputing = float(recomputed[timeline.order.device == stage].sum())
    return {
        "work of the busiest stage": times.compute - recomputing,
        "recompute": recomputing,
        "transfers": times.transfer,
        "warm-up and cool-down": times.warm_up_cool_down,
        "all-reduce and update": times.update,
    }


def _best_setting(problem: Problem, partition: Partition) -> ScoredPlan | None:
    """Return the split with the best configuration."""
    proposals = []
    for config in problem.configs:
        try:
            proposals.append(partition.proposal(config))
        except UsageError:
            continue  # the schedule does not run with these numbers
    return fastest(problem.space, [proposal for proposal in proposals if problem.allows(proposal)])


def _best_cuts(problem: Problem, split: ScoredPlan) -> ScoredPlan | None:
    """Return the best plan with the split's configuration, replicas and number of stages."""
    proposal = split.proposal
    if proposal.config.schedule not in SEARCHED:
        return None
    families = [
        Family(proposal.config, placement, (proposal.replicas[0],)) for placement in problem.placements[:1]
    ]
    return search_near(problem.space, families, [len(proposal.ends)], [proposal], SECONDS / 4).best


def _faster(plan: ScoredPlan | None, than: ScoredPlan) -> PlanRow | None:
    better = plan is not None and plan.step_seconds < than.step_seconds * (1 - 1e-6)
    return plan_row(plan) if better and plan is not None else None
