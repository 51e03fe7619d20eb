"""What a change would bring: one more GPU, double the bandwidth or memory, recomputation forced or forbidden;
each solved again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...cost_models.document import Record
from ...cost_models.errors import UsageError
from ..candidate import ScoredPlan
from ..plan_stages import PlanSummary, summarize
from ..problem import Problem
from .explain_context import ExplainContext
from .resolve import SECONDS, resolve, with_bandwidth, with_memory, with_topology


class WhatIf(Record):
    """The best plan that was found after a change; None where there is none, and `reason` says why."""

    change: str
    plan: PlanSummary | None = None
    faster: float | None = None
    """The plan's step over the new one, less 1: negative where the change makes it slower."""
    proven: bool = False
    """Whether no plan of the changed problem is faster."""
    reason: str = ""


Change = Callable[[Problem], Problem]


def solve_what_ifs(question: ExplainContext, seeds: Sequence[ScoredPlan]) -> list[WhatIf]:
    """Each change by itself; the searches start from the seeds, so that a change for the better is never
    answered with a slower plan."""
    changes: list[tuple[str, Change]] = [
        ("one more GPU", _one_more),
        ("double the bandwidth", lambda p: with_topology(p, with_bandwidth(p.topology, 2))),
        ("double the memory", lambda p: with_memory(p, 2)),
        ("recompute always", lambda p: _recomputing(p, "always")),
        ("recompute never", lambda p: _recomputing(p, "never")),
    ]
    return [_answer(question, seeds, words, change) for words, change in changes]


def _answer(question: ExplainContext, seeds: Sequence[ScoredPlan], words: str, change: Change) -> WhatIf:
    try:
        result = resolve(change(question.problem), seeds, SECONDS / 2)
    except UsageError as error:
        return WhatIf(change=words, reason=error.what)
    if result.best is None:
        return WhatIf(change=words, reason="no plan fits")
    faster = question.present.step_seconds / result.best.step_seconds - 1
    return WhatIf(change=words, plan=summarize(result.best), faster=faster, proven=result.exact)


def _one_more(problem: Problem) -> Problem:
    return with_topology(problem, problem.topology.with_gpus(problem.gpus + 1))


def _recomputing(problem: Problem, mode: str) -> Problem:
    return replace(problem, options=replace(problem.options, recompute=mode))
