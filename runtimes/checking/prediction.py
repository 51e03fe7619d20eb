"""A step predicted from the seconds of its stages, and corrections fitted to cases that were run. No torch.

The corrections are the slowdown of stages that run together, the overhead of an action, and the latency and
bandwidth of a transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import ClassVar

import numpy as np

from ...cost_models.document import DeviceCount, Document, MadeBy
from ...cost_models.errors import PplanError, UsageError
from ...cost_models.program import Program
from ...cost_models.quantities import format_count
from ...cost_models.runtime import find_runtime
from ...cost_models.schedules import PUBLISHED
from ...cost_models.step_costs import Array, Costs
from ...cost_models.timeline import Timeline, simulate
from ...profiler.measured_links import fit_link
from ..documents import PipeExport, TorchExport
from ..torch_actions import action_rows, build_program, schedule_class, splits_backward
from .records import (
    Case,
    CaseResult,
    Corrections,
    CutLink,
    HeldOutCase,
    LinkSeconds,
    StageSeconds,
)


def predict_seconds(case: Case, corrections: Corrections | None = None) -> float:
    """Predict the seconds of a step of the case, from the planned seconds of its stages.

    Args:
        case: The case.
        corrections: Those of a calibration.

    Returns:
        The sum of all actions where the stages run one after another, else a simulated step.
    """
    if not is_serial(case):
        return predict_step(case, corrections).step_seconds
    # A planned backward includes what it recomputes.
    repeated = count_recomputed(case)
    saving = case.micro_batches - repeated if repeated else 0
    return sum(
        case.micro_batches * (stage.forward + stage.backward) - saving * stage.forward - stage.accumulation
        for stage in case.planned
    )


def predict_step(case: Case, corrections: Corrections | None = None) -> Timeline:
    """Simulate a step of torch.distributed.pipelining, from the planned seconds of the stages."""
    document, factors = case.torch, corrections or Corrections()
    program, splits = document.program, splits_backward(document.actions)
    overhead = factors.looped_overhead if is_looped(document) else factors.overhead
    scaled = [_scale_seconds(stage, factors.slowdown) for stage in case.planned]
    crossing_bytes = case.crossing_bytes or [0] * len(case.links)
    links = [_link(link, sent, factors) for link, sent in zip(case.links, crossing_bytes, strict=True)]
    latency, occupancy = _by_cut(program, links)
    costs = Costs(
        forward=_by_place(program, [stage.forward for stage in scaled]),
        backward=_by_place(program, [stage.input if splits else stage.backward for stage in scaled]),
        weight=_by_place(program, [stage.weight for stage in scaled]) if splits else None,
        accumulation=_by_place(program, [stage.accumulation for stage in scaled]),
        forward_latency=latency,
        forward_occupancy=occupancy,
        backward_latency=latency,
        backward_occupancy=occupancy,
        overhead=np.full(program.devices, overhead) if overhead else None,
        all_reduce=None if case.all_reduce is None else np.array(case.all_reduce),
        tied=tuple(weight.cost() for weight in case.tied),
    )
    return simulate(program, costs)


def is_looped(document: TorchExport) -> bool:
    """Whether PyTorch runs it by its loop over lists of actions, not by that of one stage a process."""
    return document.schedule not in ("ScheduleGPipe", "Schedule1F1B")


def _scale_seconds(stage: StageSeconds, factor: float) -> StageSeconds:
    return StageSeconds(**{name: seconds * factor for name, seconds in stage.model_dump().items()})


def _link(link: CutLink, crossing_bytes: int, corrections: Corrections) -> CutLink:
    return CutLink(
        latency=link.latency if corrections.latency is None else corrections.latency,
        occupancy=link.occupancy if corrections.bandwidth is None else crossing_bytes / corrections.bandwidth,
    )


def _by_place(program: Program, seconds: Sequence[float]) -> Array:
    """(devices, chunks, 1): the seconds of each part of the layers, where it is computed."""
    values = np.zeros((program.devices, program.chunks, 1))
    for pipe in program.pipes:
        for place, value in zip(pipe, seconds, strict=True):
            values[place] = value
    return values


def _by_cut(program: Program, links: Sequence[CutLink]) -> tuple[Array, Array]:
    """Latency and occupancy (1, cuts); nothing between two parts of one device."""
    remote = [source.device != destination.device for source, destination in pairwise(program.pipes[0])]
    return (
        np.array([[link.latency * is_remote for link, is_remote in zip(links, remote, strict=True)]]),
        np.array([[link.occupancy * is_remote for link, is_remote in zip(links, remote, strict=True)]]),
    )


def is_serial(case: Case) -> bool:
    """Whether its stages run one after another: torchgpipe and FairScale have one thread a device, and so
    one for all stages on the CPU (torchgpipe, `worker.py`: `spawn_workers`)."""
    return find_runtime(case.document.runtime).one_process and set(case.document.devices) == {"cpu"}


def count_recomputed(case: Case) -> int:
    """Micro-batches whose forward runs again."""
    if not isinstance(case.document, PipeExport):
        return 0
    count = case.micro_batches
    return {"never": 0, "always": count, "except_last": count - 1}[case.document.checkpoint]


MOST_OVERHEAD = 0.25
"""Of the longest action: what an overhead is sought up to."""
TINY = 1e-5
"""Of the same: how exactly it is found."""
SHORTEST_SECONDS = 1e-4
"""Actions below that say more of the stamps than of the device."""
LEAST_CASES = 2
"""Fewest cases of which one can be held out."""


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
    """Fit corrections to cases that were run.

    The fit minimizes the sum of |log(predicted / measured)| over the cases, which one disturbed case cannot
    dominate. The slowdown (a median over all stages) and the line through the measured transfers come from
    measurements that may be disturbed themselves. Each is taken only if the cases are predicted better with
    it. The overheads are sought, one for either loop of PyTorch.

    Args:
        cases: Cases that were run.
        results: Their measurements, in the same order.
        links: Measured transfers, if there are several processes.

    Returns:
        The best corrections, the simplest of equals.
    """
    pairs = list(zip(cases, results, strict=True))
    plain = Corrections()
    starts = [plain, plain.model_copy(update={"slowdown": _slowdown(pairs)})]
    if links is not None and len(set(links.sizes)) > 1:
        line = fit_link(links.sizes, links.seconds)
        link = {"latency": line.latency_seconds, "bandwidth": line.bandwidth_bytes_per_second}
        starts += [start.model_copy(update=link) for start in starts]
    candidates = [_with_overheads(pairs, start) for start in starts]
    return min(candidates, key=lambda corrections: sum(_missed(*pair, corrections) for pair in pairs))


def cross_validate(
    cases: Sequence[Case], results: Sequence[CaseResult], links: LinkSeconds | None
) -> list[HeldOutCase]:
    """Predict every case with corrections fitted to the other cases (leave-one-out).

    Args:
        cases: Cases that were run. With fewer than two, nothing can be held out.
        results: Their measurements, in the same order.
        links: Measured transfers, if there are several processes.

    Returns:
        Prediction and measurement of every case, held out in turn.
    """
    if len(cases) < LEAST_CASES:
        return []
    held_out = []
    for index, (case, result) in enumerate(zip(cases, results, strict=True)):
        training = [other for other in range(len(cases)) if other != index]
        corrections = fit_corrections([cases[i] for i in training], [results[i] for i in training], links)
        held_out.append(
            HeldOutCase(
                name=case.name,
                predicted_step_seconds=predict_seconds(case),
                calibrated_step_seconds=predict_seconds(case, corrections),
                measured_step_seconds=median(result.ran.step_seconds),
            )
        )
    return held_out


def _with_overheads(pairs: Sequence[tuple[Case, CaseResult]], corrections: Corrections) -> Corrections:
    """The corrections with the best overheads; a loop that no case runs gets that of the other."""
    overheads = {}
    for name, is_loop in (("overhead", False), ("looped_overhead", True)):
        matching_pairs = [pair for pair in pairs if is_looped(pair[0].torch) == is_loop]
        if matching_pairs:
            overheads[name] = _overhead(matching_pairs, corrections, name)
    default = next(iter(overheads.values()), 0.0)
    return corrections.model_copy(update={"overhead": default, "looped_overhead": default} | overheads)


def _slowdown(pairs: Sequence[tuple[Case, CaseResult]]) -> float:
    """1 where no stage takes long enough to tell."""
    ratios = []
    for case, result in pairs:
        for planned, ran in zip(case.planned, result.ran.stages, strict=True):
            seconds = planned.forward + planned.backward
            if seconds > SHORTEST_SECONDS:
                ratios.append((ran.forward + ran.backward) / seconds)
    return median(ratios) if ratios else 1.0


def _overhead(pairs: Sequence[tuple[Case, CaseResult]], corrections: Corrections, name: str) -> float:
    """Additional seconds of every action; 0 if the predictions are too long without."""
    longest = max(max(stage.forward, stage.backward) for case, _ in pairs for stage in case.planned)

    def missed(overhead: float) -> float:
        trial = corrections.model_copy(update={name: overhead})
        return sum(_missed(case, result, trial) for case, result in pairs)

    return find_minimum(missed, 0.0, MOST_OVERHEAD * longest, TINY * longest)


def _missed(case: Case, result: CaseResult, corrections: Corrections) -> float:
    return abs(math.log(predict_seconds(case, corrections) / median(result.ran.step_seconds)))


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
    """Other cases of the same stages and micro-batch size, at most `most`.

    Raises UsageError where there are too few to hold one out.
    """
    cases = list(islice(_calibration_cases(case), most))
    if len(cases) < LEAST_CASES:
        raise UsageError(
            f"check: `calibrate` needs {LEAST_CASES} other cases, to fit corrections to one and test them on "
            f"the other; {case.torch.order!r} on {format_count(len(case.torch.stages), 'device')} has "
            f"{len(cases)}",
            "Calibrate with a plan of another schedule on the same machine: "
            "pplan.solve(schedule='interleaved')",
        )
    return cases


def _calibration_cases(case: Case) -> Iterator[Case]:
    """Those of the same schedule first; a V of stages is no loop, so that no other schedule runs it."""
    document = case.torch
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
    old = case.torch
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
