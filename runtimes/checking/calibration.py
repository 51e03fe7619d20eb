"""Corrections fitted to cases that were run: how much slower stages are together than alone, what an action
takes besides, and what a transfer takes. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from ...profiler.link_fit import fit_link
from .job import Case, CaseResult, Corrections, LinkSeconds
from .prediction import is_looped, predicted_step

MOST_OVERHEAD = 0.25
"""Of the longest action: what an overhead is sought up to."""
TINY = 1e-5
"""Of the same: how exactly it is found."""
SHORTEST_SECONDS = 1e-4
"""Actions below that say more of the stamps than of the device."""


def fitted(cases: Sequence[Case], results: Sequence[CaseResult], links: LinkSeconds | None) -> Corrections:
    """The corrections under which the cases are predicted best: in the sum of the logarithms' sizes, which a
    case that was disturbed cannot pull away.

    The link's are those of the measured transfers, the slowdown the median over all stages of their seconds
    in the pipeline over those alone, and the overheads, one for either loop of PyTorch, are sought.
    """
    fixed = Corrections(slowdown=_slowdown(results))
    if links is not None and len(set(links.sizes)) > 1:
        line = fit_link(links.sizes, links.seconds)
        fixed = fixed.model_copy(
            update={"latency": line.latency_seconds, "bandwidth": line.bandwidth_bytes_per_second}
        )
    pairs = list(zip(cases, results, strict=True))
    for name, looped in (("overhead", False), ("looped_overhead", True)):
        own = [pair for pair in pairs if is_looped(pair[0].document) == looped]
        if own:
            fixed = fixed.model_copy(update={name: _overhead(own, fixed, name)})
    if not any(is_looped(case.document) for case in cases):
        fixed = fixed.model_copy(update={"looped_overhead": fixed.overhead})
    if all(is_looped(case.document) for case in cases):
        fixed = fixed.model_copy(update={"overhead": fixed.looped_overhead})
    return fixed


def _slowdown(results: Sequence[CaseResult]) -> float:
    """1 where no stage takes long enough to tell."""
    ratios = []
    for result in results:
        for alone, ran in zip(result.predicted.stages, result.ran.stages, strict=True):
            together, before = ran.forward + ran.backward, alone.forward + alone.backward
            if before > SHORTEST_SECONDS:
                ratios.append(together / before)
    return median(ratios) if ratios else 1.0


def _overhead(pairs: Sequence[tuple[Case, CaseResult]], fixed: Corrections, name: str) -> float:
    """Seconds of every action besides; none where the predictions are too long without."""
    longest = max(max(own.forward, own.backward) for _, result in pairs for own in result.predicted.stages)

    def missed(overhead: float) -> float:
        tried = fixed.model_copy(update={name: overhead})
        return sum(_missed(case, result, tried) for case, result in pairs)

    return least(missed, 0.0, MOST_OVERHEAD * longest, TINY * longest)


def _missed(case: Case, result: CaseResult, fixed: Corrections) -> float:
    step = predicted_step(case, result.predicted.stages, fixed).step_seconds
    return abs(math.log(step / median(result.ran.step_seconds)))


def least(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Where a function with one valley is least, by golden sections."""
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = function(right)
    middle = (low + high) / 2
    return low if function(low) <= function(middle) else middle
