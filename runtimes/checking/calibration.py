"""Corrections fitted to cases that were run: how much slower stages are together than alone, what an action
takes besides, and what a transfer takes; the cases that are run for it, and its file. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import ClassVar

from ...cost_models.document import DeviceCount, Document, MadeBy
from ...cost_models.errors import PplanError
from ...cost_models.schedules import PUBLISHED
from ...profiler.link_fit import fit_link
from ..formats.torch_actions import action_rows, build_program, schedule_class
from ..formats.torch_export import TorchExport
from .job import Case, CaseResult, Corrections, LinkSeconds
from .prediction import is_looped, predict_step

MOST_OVERHEAD = 0.25
"""Of the longest action: what an overhead is sought up to."""
TINY = 1e-5
"""Of the same: how exactly it is found."""
SHORTEST_SECONDS = 1e-4
"""Actions below that say more of the stamps than of the device."""


class Calibration(Document):
    """What a check with `calibrate` fitted, for `calibration` of later checks on the same machine."""

    kind: ClassVar[str] = "calibration"

    backend: str
    device_name: str
    processes: DeviceCount
    corrections: Corrections
    made_by: MadeBy = MadeBy()


def fit_corrections(
    cases: Sequence[Case], results: Sequence[CaseResult], links: LinkSeconds | None
) -> Corrections:
    """The corrections under which the cases are predicted best: in the sum of the logarithms' sizes, which a
    case that was disturbed cannot pull away.

    The link's are those of the measured transfers, the slowdown the median over all stages of their seconds
    in the pipeline over those alone, and the overheads, one for either loop of PyTorch, are sought.
    """
    corrections = Corrections(slowdown=_slowdown(results))
    if links is not None and len(set(links.sizes)) > 1:
        line = fit_link(links.sizes, links.seconds)
        corrections = corrections.model_copy(
            update={"latency": line.latency_seconds, "bandwidth": line.bandwidth_bytes_per_second}
        )
    pairs = list(zip(cases, results, strict=True))
    for name, is_loop in (("overhead", False), ("looped_overhead", True)):
        matching_pairs = [pair for pair in pairs if is_looped(pair[0].document) == is_loop]
        if matching_pairs:
            corrections = corrections.model_copy(update={name: _overhead(matching_pairs, corrections, name)})
    if not any(is_looped(case.document) for case in cases):
        corrections = corrections.model_copy(update={"looped_overhead": corrections.overhead})
    if all(is_looped(case.document) for case in cases):
        corrections = corrections.model_copy(update={"overhead": corrections.looped_overhead})
    return corrections


def _slowdown(results: Sequence[CaseResult]) -> float:
    """1 where no stage takes long enough to tell."""
    ratios = []
    for result in results:
        for alone, ran in zip(result.predicted.stages, result.ran.stages, strict=True):
            together, before = ran.forward + ran.backward, alone.forward + alone.backward
            if before > SHORTEST_SECONDS:
                ratios.append(together / before)
    return median(ratios) if ratios else 1.0


def _overhead(pairs: Sequence[tuple[Case, CaseResult]], corrections: Corrections, name: str) -> float:
    """Seconds of every action besides; none where the predictions are too long without."""
    longest = max(
        max(stage.forward, stage.backward) for _, result in pairs for stage in result.predicted.stages
    )

    def missed(overhead: float) -> float:
        trial = corrections.model_copy(update={name: overhead})
        return sum(_missed(case, result, trial) for case, result in pairs)

    return find_minimum(missed, 0.0, MOST_OVERHEAD * longest, TINY * longest)


def _missed(case: Case, result: CaseResult, corrections: Corrections) -> float:
    step = predict_step(case, result.predicted.stages, corrections).step_seconds
    return abs(math.log(step / median(result.ran.step_seconds)))


def find_minimum(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """The minimum of a function with one valley, by golden-section search."""
    share = (math.sqrt(5) - 1) / 2
    lower, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = function(lower), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, lower, at_left
            lower = high - share * (high - low)
            at_left = function(lower)
        else:
            low, lower, at_left = lower, right, at_right
            right = low + share * (high - low)
            at_right = function(right)
    middle = (low + high) / 2
    return low if function(low) <= function(middle) else middle


def vary_case(case: Case, most: int = 3) -> list[Case]:
    """Cases of the same stages and micro-batches, at most so many; none of them is the case itself."""
    return list(islice(_calibration_cases(case), most))


def _calibration_cases(case: Case) -> Iterator[Case]:
    """Those of the same schedule first; a V of stages is no loop, so that no other schedule runs it."""
    document = case.document
    devices, order = len(document.stages), document.order
    looped = len(document.stages[0]) > 1
    others: tuple[str, ...] = ("looped-bfs", "interleaved") if looped else ("gpipe", "1f1b")
    if order in ("zb-v", "dualpipe-v") or (looped and order not in PUBLISHED):
        others = ()
    schedules = [order, *(other for other in others if other != order)]
    for count in (2, 3, 1, 4):
        for schedule in schedules:
            if (schedule, count * devices) == (order, document.micro_batches):
                continue
            if schedule not in PUBLISHED:
                continue  # its actions are those of these numbers alone
            try:
                yield with_schedule(case, schedule, count * devices)
            except PplanError:
                continue


def with_schedule(case: Case, schedule: str, micro_batches: int) -> Case:
    """The case under another schedule with as many micro-batches of the same size. Raises UsageError."""
    old = case.document
    program = build_program(schedule, len(old.stages), micro_batches, len(old.stages[0]))
    document = TorchExport.model_validate(
        old.model_dump(by_alias=True)
        | {
            "order": schedule,
            "schedule": schedule_class(schedule, program),
            "micro_batches": micro_batches,
            "mini_batch": micro_batches * old.micro_batch_size,
            "actions": action_rows(program),
        }
    )
    return case.model_copy(update={"name": f"{case.name}-{schedule}-{micro_batches}", "document": document})
