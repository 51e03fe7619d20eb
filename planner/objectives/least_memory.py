"""Least memory: of the plans whose step is nearly the fastest, the one whose fullest device holds least.

The whole bytes of the fullest device are limited more and more, and the fastest plan under each limit is
searched. First the limit is bisected. When the range is small, each limit is one byte below the last plan,
until no plan is fast enough. Then no plan with less memory exists, as far as each search was exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from ...cost_models.quantities import format_bytes, format_seconds
from ..candidate import ScoredPlan
from ..coverage import describe_coverage, is_searched, to_searched_devices
from ..joint_search import find_best_plan, with_bound
from ..plan_file import TIE, Aim
from ..problem import Problem
from .objective_result import ObjectiveResult, peak_bytes, search_again, with_memory_limit

NEAR = 1 / 128
"""Share of the memory that is left open when the bisection ends."""
STEPS = 12
"""Most limits to try after the bisection, each one byte below the last plan."""


def least_memory(problem: Problem, slack: float) -> ObjectiveResult:
    """Find the plan with the least peak memory whose step is at most `slack` longer than the fastest one's.

    Args:
        problem: What is asked.
        slack: Share by which the step may be longer.
    """
    answer = find_best_plan(problem)
    fastest = answer.best
    if fastest is None:
        return ObjectiveResult(answer.result, answer)
    search = _MemorySearch(problem, fastest, fastest.step_seconds * (1 + slack) * (1 + TIE))
    search.bisect()
    # Nothing is proven about plans outside of the searched space.
    is_exact = answer.result.exact and is_searched(
        problem, to_searched_devices(problem, search.best.proposal)
    )
    exact = search.step_down() and is_exact
    peak, fastest_peak = (_whole_peak(problem, plan) for plan in (search.best, fastest))
    aim = Aim(
        name="memory",
        value=peak,
        unit="bytes",
        lower_bound=min(search.none_below, peak) if is_exact else 0.0,
        exact=exact,
        detail=f"the most that a device holds, with a step at most {100 * slack:g} % longer than the fastest",
        covers=describe_coverage(problem, answer.result),
    )
    note = (
        f"the fastest plan needs {format_seconds(fastest.step_seconds)} a step and "
        f"{format_bytes(fastest_peak)} on a device; with at most {100 * slack:g} % more time, "
        f"{format_bytes(peak)} are enough"
    )
    return ObjectiveResult(with_bound(problem, search.best, answer.result), answer, aim, (note,))


def _whole_peak(problem: Problem, plan: ScoredPlan) -> int:
    """Return the bytes of the fullest device, rounded up."""
    return ceil(peak_bytes(problem.space, plan))


@dataclass
class _MemorySearch:
    """Best plan so far, and the bytes below which no plan is fast enough."""

    problem: Problem
    best: ScoredPlan
    most_seconds: float
    none_below: int = 0
    proven: bool = True
    """True if the absence of plans was proven for every limit without a plan."""

    def __post_init__(self) -> None:
        self.peak = _whole_peak(self.problem, self.best)

    def fits(self, limit: int) -> bool:
        """Return whether a plan that is fast enough needs at most `limit` bytes."""
        result = search_again(with_memory_limit(self.problem, limit), [self.best])
        if result.best is not None and result.best.step_seconds <= self.most_seconds:
            self.best = result.best
            self.peak = min(_whole_peak(self.problem, result.best), limit)
            return True
        bound = inf if result.best is None and result.exact else result.bound_seconds
        self.proven = self.proven and bound > self.most_seconds
        if self.proven:
            self.none_below = limit
        return False

    def bisect(self) -> None:
        """Halve the range of limits until it is small."""
        low = 0
        while self.peak - low > max(NEAR * self.peak, 1):
            limit = (low + self.peak) // 2
            if not self.fits(limit):
                low = limit

    def step_down(self) -> bool:
        """Lower the limit to the least memory; return whether it is proven to be the least."""
        return any(not (self.peak and self.fits(self.peak - 1)) for _ in range(STEPS)) and self.proven
