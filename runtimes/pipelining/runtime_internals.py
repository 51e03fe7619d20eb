"""All that pplan uses of the runtimes without their promising to keep it; no other file names such a thing.

As `profiler/torch_private.py`, of torch.distributed.pipelining in torch 2.14 and of DeepSpeed 0.19.8. Each
is looked for where it is used, so that the other runtimes work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from ...profiler.torch_private import Internal, check_internals
from ..torch_actions import OWN_ORDER


def _pipe_module() -> Any:
    from deepspeed.runtime.pipe.module import PipelineModule

    return PipelineModule


def _pipe_engine() -> Any:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return PipelineEngine


def _compatible_operations() -> object:
    import deepspeed.ops

    return deepspeed.ops.__compatible_ops__


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
IGNORED = Internal(
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    lambda: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model,
    "replicas of stages that share a weight, whose gradients are added up over all that hold it",
    "Use replicate='fsdp', or a plan without replicas.",
)
BACKWARD = Internal(
    "torch._C._current_graph_task_id",
    lambda: torch._C._current_graph_task_id,
    "batch norms that count a micro-batch once where torchgpipe, FairScale or DeepSpeed recompute",
    "Set a flag around the runtime's backward.",
)
TORCH_INTERNALS = (OWN_SCHEDULE, NEIGHBOURS, IGNORED, BACKWARD)
DEEPSPEED_PARTITION = Internal(
    "deepspeed.runtime.pipe.module.PipelineModule._partition_layers, _set_bounds, _topo",
    lambda: (_pipe_module()._partition_layers, _pipe_module()._set_bounds),
    "the plan's partition in place of DeepSpeed's own rules",
    "Give every layer a parameter count that makes partition_method='parameters' cut where the plan does.",
    package="deepspeed",
    tested="0.19.8",
)
DEEPSPEED_TIES = Internal(
    "deepspeed.runtime.pipe.module.PipelineModule._index_tied_modules, whose result keeps ranks, group, "
    "weight_attr and module by name",
    lambda: _pipe_module()._index_tied_modules,
    "weights that stages share",
    "Give DeepSpeed a TiedLayerSpec for each weight, of a module that holds it alone.",
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
DEEPSPEED_STEP = Internal(
    "deepspeed.runtime.pipe.engine.PipelineEngine._exec_optimizer_step",
    lambda: _pipe_engine()._exec_optimizer_step,
    "an update of 16-bit weights, or of ZeRO's, apart from the forward and backward",
    "Run the engine's schedule whole, and update in `step`.",
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
DEEPSPEED_INTERNALS = (
    *(DEEPSPEED_PARTITION, DEEPSPEED_TIES, DEEPSPEED_INSTRUCTIONS, DEEPSPEED_STEP),
    DEEPSPEED_OPERATIONS,
)


def runs_backward() -> bool:
    """Return whether this thread is inside a backward, where a forward is one that runs again."""
    return torch._C._current_graph_task_id() != -1


def load_order(schedule: Any, file: Path) -> None:
    """Gives PyTorch's schedule the order of a file of computations. Raises MachineError."""
    check_internals([OWN_SCHEDULE], torch.__version__)
    schedule._load_csv(str(file), format="compute_only")


def replicate(module: nn.Module, group: Any, apart: Sequence[str]) -> DistributedDataParallel:
    """DistributedDataParallel, without the parameters of the names `apart`. Raises MachineError."""
    if apart:
        check_internals([IGNORED], torch.__version__)
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(module, list(apart))
    return DistributedDataParallel(module, process_group=group)


class Stage(PipelineStage):
    """PyTorch's stage, whose neighbours may be stages of the same process.

    From PyTorch 2.11 on every stage first greets its neighbours; gloo cannot when both are one process. And
    where a schedule evaluates, there is no gradient to hand to a neighbour: PyTorch 2.14 asks for one.
    """

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for the stage before, in this process."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of the stage after, in this process."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        greetings = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc,unused-ignore]
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]


def partitioned_module(
    kind: Any, parts: Sequence[int], version: str, tied_modules: Callable[[Any], dict[str, dict[str, Any]]]
) -> Any:
    """DeepSpeed's PipelineModule with these bounds of its stages, and with the weights that stages share as
    `tied_modules` of it says: its own takes only layers that share all they have. Raises MachineError."""
    check_internals([DEEPSPEED_PARTITION, DEEPSPEED_TIES], version)

    def partition_layers(module: Any, method: str = "") -> None:
        del method
        stage = module._topo.get_coord(module.global_rank).pipe
        module.parts = parts
        module._set_bounds(parts[stage], parts[stage + 1])

    def index_tied_modules(module: Any) -> dict[str, dict[str, Any]]:
        return tied_modules(module)

    methods = {"_partition_layers": partition_layers, "_index_tied_modules": index_tied_modules}
    return type("PlannedPipelineModule", (kind,), methods)


def without_compiled_operations() -> None:
    """DeepSpeed compiles nothing for processes on one CPU: that takes a minute."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def take_step(engine: Any) -> None:
    """Has DeepSpeed's engine update the weights. Raises MachineError."""
    import deepspeed

    check_internals([DEEPSPEED_STEP], deepspeed.__version__)
    engine._exec_optimizer_step()


def wrap_instructions(engine: Any, wrappers: Mapping[type, Callable[[Any], Any]]) -> None:
    """Has DeepSpeed's engine look up these in place of what it runs for kinds of instructions.

    Raises MachineError.
    """
    import deepspeed

    check_internals([DEEPSPEED_INSTRUCTIONS], deepspeed.__version__)
    table = dict(engine._INSTRUCTION_MAP)
    engine._INSTRUCTION_MAP = table | {kind: wrap(table[kind]) for kind, wrap in wrappers.items()}
