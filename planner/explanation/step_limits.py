"""What limits the step: the critical path by kind and by stage, the busiest stage, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ...cost_models.document import Record
from ...cost_models.timeline import Timeline
from ..candidate import ScoredPlan
from ..plan_file import TIE, PlanSummary, summarize
from .critical_path import KINDS, Segment, critical_path
from .explain_context import ExplainContext
from .resolve import resolve, with_memory


class PathShare(Record):
    """What the critical path spends on a kind of thing, on a stage or on the way from one to another."""

    kind: str
    stage: int | None = None
    to_stage: int | None = None
    seconds: float
    share: float
    """Of the step."""


class BusiestStage(Record):
    """The stage that computes longest, recomputation and waits for launches included; `busy`: its share
    of the step."""

    stage: int
    seconds: float
    busy: float


class StepLimits(Record):
    """What the step waits for. `kinds` and `places` (largest first) both sum to the step.

    `without_memory_limit`: the best plan with as much memory as it asks for, where that is faster; None where
    none was found, and `memory_forbids_nothing` says whether there is none of those that are searched.
    `memory_known`: whether any device has a limit.
    """

    kinds: list[PathShare]
    places: list[PathShare]
    busiest: BusiestStage
    without_memory_limit: PlanSummary | None = None
    memory_forbids_nothing: bool = False
    memory_known: bool = True


def find_limits(context: ExplainContext, seeds: Sequence[ScoredPlan]) -> StepLimits:
    """What limits the plan; the search without a memory limit starts from the seeds."""
    timeline = context.timeline
    path, step = critical_path(timeline), timeline.step_seconds
    faster, is_proven = _without_memory_limit(context, seeds)
    return StepLimits(
        kinds=_by_kind(path, step),
        places=_by_place(path, step),
        busiest=find_busiest(timeline),
        without_memory_limit=faster,
        memory_forbids_nothing=faster is None and is_proven,
        memory_known=is_memory_known(context),
    )


def is_memory_known(context: ExplainContext) -> bool:
    """Whether any device of the machine has a limit."""
    return context.problem.space.limit(range(context.problem.gpus)) < inf


def find_busiest(timeline: Timeline) -> BusiestStage:
    """The stage that computes longest, the first of several."""
    busy, step = timeline.busy_seconds, timeline.step_seconds
    stage = busy.index(max(busy))
    return BusiestStage(stage=stage, seconds=busy[stage], busy=busy[stage] / step)


def _by_kind(path: Sequence[Segment], step: float) -> list[PathShare]:
    sums = {kind: sum(part.end - part.start for part in path if part.kind == kind) for kind in KINDS}
    return [
        PathShare(kind=kind, seconds=seconds, share=seconds / step)
        for kind, seconds in sums.items()
        if seconds
    ]


def _by_place(path: Sequence[Segment], step: float) -> list[PathShare]:
    sums: dict[tuple[str, int, int | None], float] = {}
    for part in path:
        key = (part.kind, part.stage, part.to_stage)
        sums[key] = sums.get(key, 0.0) + part.end - part.start
    shares = [
        PathShare(kind=kind, stage=stage, to_stage=other, seconds=seconds, share=seconds / step)
        for (kind, stage, other), seconds in sums.items()
    ]
    return sorted(shares, key=lambda share: -share.seconds)


def _without_memory_limit(
    context: ExplainContext, seeds: Sequence[ScoredPlan]
) -> tuple[PlanSummary | None, bool]:
    """The best plan without a limit, where it is faster; and whether no other is faster still."""
    problem = context.problem
    if not is_memory_known(context):
        return None, True
    result = resolve(with_memory(problem, None), seeds)
    best, limit = result.best, context.present.step_seconds * (1 - TIE)
    fastest_seed = min((seed.step_seconds for seed in seeds), default=limit)
    # What is as fast under the limit is not forbidden by it.
    if best is None or best.step_seconds >= min(limit, fastest_seed * (1 - TIE)):
        return None, result.exact
    return summarize(best), result.exact
