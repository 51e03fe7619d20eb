"""A step predicted from the seconds of its stages, for every runtime that a check runs. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...cost_models.runtime import find_runtime
from ...cost_models.schedules import Program, find_schedule
from ...cost_models.simulator.costs import Array, Costs, find_transfers, recompute_shares
from ...cost_models.timeline import Timeline, simulate
from ..documents import DeepspeedExport, TorchExport
from ..torch_actions import splits_backward
from .job import Case, Corrections, CutLink, RuntimeCase, StageSeconds


def predict_step(case: Case, stages: Sequence[StageSeconds], corrections: Corrections | None) -> Timeline:
    """A simulated step of the case, from stages measured alone."""
    program = case.document.program
    factors = corrections or Corrections()
    splits = splits_backward(case.document.actions)
    scaled_stages = [_scale_seconds(own, factors.slowdown) for own in stages]
    links = [_link(link, sent, factors) for link, sent in zip(case.links, case.crossing_bytes, strict=True)]
    latency, occupancy = _by_cut(program, links)
    overhead = factors.looped_overhead if is_looped(case.document) else factors.overhead
    costs = Costs(
        forward=_by_place(program, [own.forward for own in scaled_stages]),
        backward=_by_place(program, [own.input if splits else own.backward for own in scaled_stages]),
        weight=_by_place(program, [own.weight for own in scaled_stages]) if splits else None,
        accumulation=_by_place(program, [own.accumulation for own in scaled_stages]),
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
        micro_batch_seconds = sum(stage.forward + stage.backward for stage in stages)
        recompute_seconds = count_recomputed(case) * sum(stage.forward for stage in stages)
        return (
            case.micro_batches * micro_batch_seconds
            + recompute_seconds
            - sum(stage.accumulation for stage in stages)
        )
    return simulate(_pipe_program(case, len(stages)), _runtime_costs(case, stages)).step_seconds


def _pipe_program(case: RuntimeCase, stages: int) -> Program:
    name = "1f1b" if isinstance(case.document, DeepspeedExport) else "gpipe"
    return find_schedule(name).program(stages, case.micro_batches, 1)


def _runtime_costs(case: RuntimeCase, stages: Sequence[StageSeconds]) -> Costs:
    document = case.document
    runtime = find_runtime(document.runtime)
    shares = launch = relaunch = repeat = None
    if not isinstance(document, DeepspeedExport):
        shares = recompute_shares(document.checkpoint, _pipe_program(case, len(stages)))
        launch = _by_stage([stage.forward_launch for stage in stages])
        repeat = shares * launch
        relaunch = _by_stage([stage.backward_launch for stage in stages]) + repeat
    latency, occupancy = (
        np.array([[getattr(link, name) for link in case.links]]) for name in ("latency", "occupancy")
    )
    return Costs(
        forward=_by_stage([stage.forward for stage in stages]),
        backward=_by_stage([stage.backward for stage in stages]),
        accumulation=_by_stage([stage.accumulation for stage in stages]),
        recompute=shares,
        forward_launch=launch,
        backward_launch=relaunch,
        recompute_launch=repeat,
        forward_latency=latency,
        forward_occupancy=occupancy,
        backward_latency=latency,
        backward_occupancy=occupancy,
        all_reduce=None if case.all_reduce is None else np.array(case.all_reduce),
        tied=tuple(stage.cost() for stage in case.tied),
        transfers=find_transfers(runtime.transfers),
        hosts="one" if runtime.one_process else "each",
    )


def _by_stage(seconds: Sequence[float]) -> Array:
    """(devices, 1, 1)."""
    return np.array(seconds, dtype=np.float64).reshape(-1, 1, 1)
