"""A step predicted from the seconds of its stages, for every runtime that a check runs. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...cost_models.runtime import find_runtime
from ...cost_models.schedules import Program, find_schedule
from ...cost_models.simulator.costs import Array, Costs, find_transfers, recompute_shares
from ...cost_models.timeline import Timeline, simulate
from ..formats.deepspeed_export import DeepspeedExport
from ..formats.torch_actions import splits_backward
from ..formats.torch_export import TorchExport
from .job import Case, Corrections, CutLink, RuntimeCase, StageSeconds


def predict_step(case: Case, stages: Sequence[StageSeconds], corrections: Corrections | None) -> Timeline:
    """A step of the case, of stages that take so long alone."""
    program = case.document.program
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
        accumulation=_by_place(program, [own.accumulation for own in slowed]),
        forward_latency=latency,
        forward_occupancy=occupancy,
        backward_latency=latency,
        backward_occupancy=occupancy,
        overhead=np.full(program.devices, overhead) if overhead else None,
        all_reduce=None if case.all_reduce is None else np.array(case.all_reduce),
        tied=tuple(own.cost() for own in case.tied),
    )
    return simulate(program, costs)


def is_looped(document: TorchExport) -> bool:
    """Whether PyTorch runs it by its loop over lists of actions, not by that of one stage a process."""
    return document.schedule not in ("ScheduleGPipe", "Schedule1F1B")


def _slowed(own: StageSeconds, factor: float) -> StageSeconds:
    return StageSeconds(**{name: seconds * factor for name, seconds in own.model_dump().items()})


def _link(link: CutLink, sent: int, fixed: Corrections) -> CutLink:
    return CutLink(
        latency=link.latency if fixed.latency is None else fixed.latency,
        occupancy=link.occupancy if fixed.bandwidth is None else sent / fixed.bandwidth,
    )


def _by_place(program: Program, seconds: Sequence[float]) -> Array:
    """(devices, chunks, 1): the seconds of each part of the layers, where it is computed."""
    values = np.zeros((program.devices, program.chunks, 1))
    for pipe in program.pipes:
        for place, own in zip(pipe, seconds, strict=True):
            values[place] = own
    return values


def _by_cut(program: Program, links: Sequence[CutLink]) -> tuple[Array, Array]:
    """Latency and occupancy (1, cuts); nothing between two parts of one device."""
    remote = [here.device != there.device for here, there in pairwise(program.pipes[0])]
    return (
        np.array([[link.latency * far for link, far in zip(links, remote, strict=True)]]),
        np.array([[link.occupancy * far for link, far in zip(links, remote, strict=True)]]),
    )


def is_serial(case: RuntimeCase) -> bool:
    """Whether its stages run one after another: torchgpipe and FairScale have one thread a device, and so
    one for all stages on the CPU (torchgpipe, `worker.py`: `spawn_workers`)."""
    document = case.document
    return not isinstance(document, DeepspeedExport) and set(document.devices) == {"cpu"}


def count_recomputed(case: RuntimeCase) -> int:
    """Micro-batches whose forward runs again."""
    document, count = case.document, case.micro_batches
    if isinstance(document, DeepspeedExport):
        return 0  # measured alone, its backward has it in it
    return {"never": 0, "always": count, "except_last": count - 1}[document.checkpoint]


def predict_seconds(case: RuntimeCase, stages: Sequence[StageSeconds]) -> float:
    """A step of the case, of stages that take so long alone: `backward` without what is recomputed where the
    runtime is torchgpipe or FairScale.

    Serial stages: the sum of all actions. Else by the simulator, with the launches of one host for all.
    """
    if is_serial(case):
        each = sum(own.forward + own.backward for own in stages)
        once = count_recomputed(case) * sum(own.forward for own in stages)
        return case.micro_batches * each + once - sum(own.accumulation for own in stages)
    return simulate(_pipe_program(case, len(stages)), _runtime_costs(case, stages)).step_seconds


def _pipe_program(case: RuntimeCase, stages: int) -> Program:
    name = "1f1b" if isinstance(case.document, DeepspeedExport) else "gpipe"
    return find_schedule(name).program(stages, case.micro_batches, 1)


def _runtime_costs(case: RuntimeCase, stages: Sequence[StageSeconds]) -> Costs:
    document = case.document
    runtime = find_runtime(document.runtime)
    shares = launch = relaunch = None
    if not isinstance(document, DeepspeedExport):
        shares = recompute_shares(document.checkpoint, _pipe_program(case, len(stages)))
        launch = _by_stage([own.forward_launch for own in stages])
        relaunch = _by_stage([own.backward_launch for own in stages]) + shares * launch
    latency, occupancy = (
        np.array([[getattr(link, name) for link in case.links]]) for name in ("latency", "occupancy")
    )
    return Costs(
        forward=_by_stage([own.forward for own in stages]),
        backward=_by_stage([own.backward for own in stages]),
        accumulation=_by_stage([own.accumulation for own in stages]),
        recompute=shares,
        forward_launch=launch,
        backward_launch=relaunch,
        forward_latency=latency,
        forward_occupancy=occupancy,
        backward_latency=latency,
        backward_occupancy=occupancy,
        all_reduce=None if case.all_reduce is None else np.array(case.all_reduce),
        tied=tuple(own.cost() for own in case.tied),
        transfers=find_transfers(runtime.transfers),
        hosts="one" if runtime.one_process else "each",
    )


def _by_stage(seconds: Sequence[float]) -> Array:
    """(devices, 1, 1)."""
    return np.array(seconds, dtype=np.float64).reshape(-1, 1, 1)
