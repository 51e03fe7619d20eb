"""What simpler tools would do, under the same costs and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cost_models.errors import UsageError
from ..cost_models.quantities import counted
from .candidate import ScoredPlan
from .joint_search import OUT_OF_TIME, JointSearchResult, plan_with
from .plan_records import Baseline
from .plan_stages import run_in_words
from .planners import planner_named
from .problem import Problem
from .search.space import divide_batch

FREE = ("one-gpu", "data-parallel")
"""They do their best whatever the options: with any micro-batches, and in any runtime."""


@dataclass(frozen=True)
class ScoredBaseline:
    """A baseline, and the samples of a micro-batch on one device (None: it has none)."""

    record: Baseline
    size: int | None = None


def score_baselines(problem: Problem, answer: JointSearchResult) -> list[ScoredBaseline]:
    """One GPU, data parallelism, and what each of the named planners came to."""
    if problem.budget.over:
        results = {name: answer.by_planner.get(name, OUT_OF_TIME) for name in FREE}
    else:
        free = accumulating(problem)
        results = {name: plan_with(planner_named(name), free) for name in FREE}
    rows = [_row(name, plan) for name, plan in results.items()]
    return rows + [_row(name, plan) for name, plan in answer.by_planner.items() if name not in FREE]


def accumulating(problem: Problem) -> Problem:
    """What one GPU, or each of many, may do by accumulating gradients, whatever the options; where the
    profile reaches no other micro-batch size, with the requested one."""
    options = problem.options
    free = replace(
        options,
        mini_batch=problem.mini_batch,
        micro_batches=None,
        schedule="1f1b",
        recompute="auto",
        runtime=None,
        precision=problem.precision.name,
        gradient_dtype=problem.precision.gradient_dtype,
        use_all=False,
        max_stages=None,
        cut_after=(),
        pins=(),
    )
    try:
        return replace(problem, options=free)
    except UsageError:
        return replace(problem, options=replace(free, micro_batches=options.micro_batches))


def _row(name: str, plan: ScoredPlan | str) -> ScoredBaseline:
    if isinstance(plan, str):
        return ScoredBaseline(Baseline(name=name, step_seconds=None, reason=plan))
    proposal = plan.proposal
    size = divide_batch(plan.config.micro_batch_size, min(proposal.replicas))
    return ScoredBaseline(Baseline(name=name, step_seconds=plan.step_seconds, detail=_in_words(plan)), size)


def _in_words(plan: ScoredPlan) -> str:
    """Its stages and their replicas, where it has several, and how it runs."""
    replicas, run = plan.proposal.replicas, run_in_words(plan)
    stages = counted(len(replicas) // plan.config.virtual_stages, "stage")
    if max(replicas) > 1:
        return f"{stages}, replicas {'-'.join(map(str, replicas[:16]))}; {run}"
    return f"{stages}; {run}" if len(replicas) > 1 else run
