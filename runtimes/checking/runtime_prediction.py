"""A step of torchgpipe, FairScale or DeepSpeed, predicted from the seconds of its stages. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cost_models.runtime import runtime_named
from ...cost_models.schedules import Program, schedule_named
from ...cost_models.simulator.costs import Array, Costs, recompute_shares, transfers_named
from ...cost_models.timeline import simulate
from ..formats.deepspeed_export import DeepspeedExport
from .job import RuntimeCase, StageSeconds


def is_serial(case: RuntimeCase) -> bool:
    """Whether its stages run one after another: torchgpipe and FairScale have one thread a device, and so
    one for all stages on the CPU (torchgpipe, `worker.py`: `spawn_workers`)."""
    document = case.document
    return not isinstance(document, DeepspeedExport) and set(document.devices) == {"cpu"}


def recomputed(case: RuntimeCase) -> int:
    """Micro-batches whose forward runs again."""
    document, count = case.document, case.micro_batches
    if isinstance(document, DeepspeedExport):
        return 0  # measured alone, its backward has it in it
    return {"never": 0, "always": count, "except_last": count - 1}[document.checkpoint]


def predicted_seconds(case: RuntimeCase, stages: Sequence[StageSeconds]) -> float:
    """A step of the case, of stages that take so long alone: `backward` without what is recomputed where the
    runtime is torchgpipe or FairScale.

    Serial stages: the sum of all actions. Else by the simulator, with the launches of one host for all.
    """
    if is_serial(case):
        each = sum(own.forward + own.backward for own in stages)
        return case.micro_batches * each + recomputed(case) * sum(own.forward for own in stages)
    return simulate(_program(case, len(stages)), _costs(case, stages)).step_seconds


def _program(case: RuntimeCase, stages: int) -> Program:
    name = "1f1b" if isinstance(case.document, DeepspeedExport) else "gpipe"
    return schedule_named(name).program(stages, case.micro_batches, 1)


def _costs(case: RuntimeCase, stages: Sequence[StageSeconds]) -> Costs:
    document = case.document
    runtime = runtime_named(document.runtime)
    shares = launch = relaunch = None
    if not isinstance(document, DeepspeedExport):
        shares = recompute_shares(document.checkpoint, _program(case, len(stages)))
        launch = _by_stage([own.forward_launch for own in stages])
        relaunch = _by_stage([own.backward_launch for own in stages]) + shares * launch
    latency, occupancy = (
        np.array([[getattr(link, name) for link in case.links]]) for name in ("latency", "occupancy")
    )
    return Costs(
        forward=_by_stage([own.forward for own in stages]),
        backward=_by_stage([own.backward for own in stages]),
        recompute=shares,
        forward_launch=launch,
        backward_launch=relaunch,
        forward_latency=latency,
        forward_occupancy=occupancy,
        backward_latency=latency,
        backward_occupancy=occupancy,
        all_reduce=None if case.all_reduce is None else np.array(case.all_reduce),
        transfers=transfers_named(runtime.transfers),
        hosts="one" if runtime.one_process else "each",
    )


def _by_stage(seconds: Sequence[float]) -> Array:
    """(devices, 1, 1)."""
    return np.array(seconds, dtype=np.float64).reshape(-1, 1, 1)
