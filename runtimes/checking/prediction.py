"""A step predicted from the seconds of its stages, by the simulator. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...cost_models.schedules import Program
from ...cost_models.simulator.costs import Array, Costs
from ...cost_models.timeline import Timeline, simulate
from ..formats.torch_actions import build_program, splits_backward
from ..formats.torch_export import TorchExport
from .job import Case, Corrections, Link, StageSeconds


def program_for(document: TorchExport) -> Program:
    """What its processes run."""
    devices = len(document.stages)
    return build_program(document.order, devices, document.micro_batches, len(document.stages[0]))


def predicted_step(case: Case, stages: Sequence[StageSeconds], corrections: Corrections | None) -> Timeline:
    """A step of the case, of stages that take so long alone."""
    program = program_for(case.document)
    fixed = corrections or Corrections()
    splits = splits_backward(case.document.actions)
    slowed = [_slowed(own, fixed.slowdown) for own in stages]
    links = [_link(link, sent, fixed) for link, sent in zip(case.links, case.crossing_bytes, strict=True)]
    latency, occupancy = _by_cut(program, links)
    overhead = fixed.looped_overhead if is_looped(case.document) else fixed.overhead
    costs = Costs(
        forward=_by_place(program, [own.forward for own in slowed]),
        backward=_by_place(program, [own.input if splits else own.backward for own in slowed]),
        weight=_by_place(program, [own.weight for own in slowed]) if splits else None,
        forward_latency=latency,
        forward_occupancy=occupancy,
        backward_latency=latency,
        backward_occupancy=occupancy,
        overhead=np.full(program.devices, overhead) if overhead else None,
        all_reduce=None if case.all_reduce is None else np.array(case.all_reduce),
    )
    return simulate(program, costs)


def is_looped(document: TorchExport) -> bool:
    """Whether PyTorch runs it by its loop over lists of actions, not by that of one stage a process."""
    return document.schedule not in ("ScheduleGPipe", "Schedule1F1B")


def _slowed(own: StageSeconds, factor: float) -> StageSeconds:
    return StageSeconds(**{name: seconds * factor for name, seconds in own.model_dump().items()})


def _link(given: Link, sent: int, fixed: Corrections) -> Link:
    return Link(
        latency=given.latency if fixed.latency is None else fixed.latency,
        occupancy=given.occupancy if fixed.bandwidth is None else sent / fixed.bandwidth,
    )


def _by_place(program: Program, seconds: Sequence[float]) -> Array:
    """(devices, chunks, 1): the seconds of each part of the layers, where it is computed."""
    values = np.zeros((program.devices, program.chunks, 1))
    for pipe in program.pipes:
        for place, own in zip(pipe, seconds, strict=True):
            values[place] = own
    return values


def _by_cut(program: Program, links: Sequence[Link]) -> tuple[Array, Array]:
    """Latency and occupancy (1, cuts); nothing between two parts of one device."""
    remote = [here.device != there.device for here, there in pairwise(program.pipes[0])]
    return (
        np.array([[link.latency * far for link, far in zip(links, remote, strict=True)]]),
        np.array([[link.occupancy * far for link, far in zip(links, remote, strict=True)]]),
    )
