"""All that pplan uses of the runtimes without their promising to keep it; no other file names such a thing.

As `profiler/torch_internals.py`, of torch.distributed.pipelining in torch 2.14 and of DeepSpeed 0.19.8. Each
is looked for where it is used, so that the other runtimes work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from ...profiler.torch_internals import Internal, check_internals
from ..formats.torch_actions import OWN_ORDER


def _backward_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    return stage_backward_input, stage_backward_weight


def _pipe_module() -> Any:
    from deepspeed.runtime.pipe.module import PipelineModule

    return PipelineModule


def _pipe_engine() -> Any:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return PipelineEngine


def _compatible_operations() -> object:
    import deepspeed.ops

    return deepspeed.ops.__compatible_ops__


BACKWARD_PARTS = Internal(
    "torch.distributed.pipelining._backward.stage_backward_input and stage_backward_weight",
    _backward_parts,
    "measuring a stage's backward in two parts as the zero-bubble schedules run it",
    "Measure with profiler/passes/backward_parts.py, which computes the same gradients.",
)
OWN_SCHEDULE = Internal(
    f"torch.distributed.pipelining.schedules.{OWN_ORDER}._load_csv",
    lambda: getattr(schedules, OWN_ORDER)._load_csv,
    "schedules in pplan's own order",
    "Export only the schedules of PyTorch's classes, or set `pipeline_order` as its own schedules do.",
)
NEIGHBOURS = Internal(
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops",
    lambda: PipelineStage._get_init_p2p_neighbors_ops,  # type: ignore[attr-defined,unused-ignore]
    "several stages of one process over gloo, which cannot greet itself",
    "Where PyTorch no longer greets neighbours, `Stage` is PipelineStage; else skip the greeting's new name.",
)
TORCH_INTERNALS = (BACKWARD_PARTS, OWN_SCHEDULE, NEIGHBOURS)
DEEPSPEED_PARTITION = Internal(
    "deepspeed.runtime.pipe.module.PipelineModule._partition_layers, _set_bounds, _topo",
    lambda: (_pipe_module()._partition_layers, _pipe_module()._set_bounds),
    "the plan's partition in place of DeepSpeed's own rules",
    "Give every layer a parameter count that makes partition_method='parameters' cut where the plan does.",
    package="deepspeed",
    tested="0.19.8",
)
DEEPSPEED_INSTRUCTIONS = Internal(
    "deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP",
    lambda: _pipe_engine()._INSTRUCTION_MAP,
    "timing the forwards and backwards of a stage",
    "Wrap the engine's methods that the instructions call.",
    package="deepspeed",
    tested="0.19.8",
)
DEEPSPEED_OPERATIONS = Internal(
    "deepspeed.ops.__compatible_ops__",
    _compatible_operations,
    "DeepSpeed on a CPU without the operation that it would compile for a minute",
    "Nothing: DeepSpeed compiles its operation, which takes a minute and a compiler.",
    package="deepspeed",
    tested="0.19.8",
    is_required=False,
)
DEEPSPEED_INTERNALS = (DEEPSPEED_PARTITION, DEEPSPEED_INSTRUCTIONS, DEEPSPEED_OPERATIONS)


def backward_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """stage_backward_input and stage_backward_weight. Raises MachineError."""
    check_internals([BACKWARD_PARTS], torch.__version__)
    return _backward_parts()


def load_order(schedule: Any, file: Path) -> None:
    """Gives PyTorch's schedule the order of a file of computations. Raises MachineError."""
    check_internals([OWN_SCHEDULE], torch.__version__)
    schedule._load_csv(str(file), format="compute_only")


class Stage(PipelineStage):
    """From PyTorch 2.11 on every stage first greets its neighbours; gloo cannot when both are one process."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        greetings = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc,unused-ignore]
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]


def partitioned(kind: Any, parts: Sequence[int], version: str) -> Any:
    """DeepSpeed's PipelineModule with these bounds of its stages. Raises MachineError."""
    check_internals([DEEPSPEED_PARTITION], version)

    def partition_layers(module: Any, method: str = "") -> None:
        del method
        stage = module._topo.get_coord(module.global_rank).pipe
        module.parts = parts
        module._set_bounds(parts[stage], parts[stage + 1])

    return type("PlannedPipelineModule", (kind,), {"_partition_layers": partition_layers})


def without_compiled_operations() -> None:
    """DeepSpeed compiles nothing for processes on one CPU: that takes a minute."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def wrap_instructions(engine: Any, wrappers: Mapping[type, Callable[[Any], Any]]) -> None:
    """Has DeepSpeed's engine look up these in place of what it runs for kinds of instructions.

    Raises MachineError.
    """
    import deepspeed

    check_internals([DEEPSPEED_INSTRUCTIONS], deepspeed.__version__)
    table = dict(engine._INSTRUCTION_MAP)
    engine._INSTRUCTION_MAP = table | {kind: wrap(table[kind]) for kind, wrap in wrappers.items()}
