"""The place of a process in a job: its device of the pipeline, its replica, and the matrices that it
shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ...cost_models.errors import MachineError, UsageError
from ..documents import TorchExport
from .runtime_internals import replicate

Replicate = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class RankCoordinates:
    """A process's place: its device of the pipeline, its replica of that, and the groups of both.

    `pipeline`: the processes that hand each other micro-batches. `replicas`: a mesh of those
    that hold the same stages, None where there are none. `ranks`: of all processes of the plan, by device of
    the pipeline and replica.
    """

    index: int
    replica: int
    pipeline: dist.ProcessGroup
    replicas: DeviceMesh | None
    ranks: tuple[tuple[int, ...], ...]


NOT_BEGUN = "Call torch.distributed.init_process_group() first, in a script started with torchrun."


def count_sharers(pipeline: int, replicas: int, *, shares: bool = False, hint: str = NOT_BEGUN) -> int:
    """The number of processes for each replica of each device of the pipeline.

    Args:
        pipeline: Devices of the pipeline.
        replicas: Replicas of every stage.
        shares: Whether several processes may share the matrices of a stage.
        hint: What to do before `init_process_group`.

    Raises:
        MachineError: torch.distributed is not initialized, or has another number of processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise MachineError("torch.distributed is not initialized, the stages are processes of it", hint)
    processes, needed = dist.get_world_size(), pipeline * replicas
    if processes % needed or (processes > needed and not shares):
        start = f"Start {needed}: torchrun --nproc-per-node {needed} SCRIPT"
        raise MachineError(
            f"{processes} processes, but {pipeline} devices of the pipeline x {replicas} replicas",
            f"Start {needed} for each of the devices that share a matrix." if shares else start,
        )
    return processes // needed


def make_mesh(document: TorchExport, device_type: str, *, shares: bool) -> DeviceMesh:
    """All processes: by device of the pipeline, replica, and place among those that share matrices, which are
    neighbours. Raises MachineError where they do not come out."""
    sizes = len(document.stages), document.replicas
    sharers = count_sharers(*sizes, shares=shares)
    if shares:
        return init_device_mesh(device_type, (*sizes, sharers), mesh_dim_names=("pp", "dp", "tp"))
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp"))


def find_coordinates(mesh: DeviceMesh, document: TorchExport) -> RankCoordinates:
    """This process's. Raises MachineError where the mesh has other sizes than the plan needs."""
    names, needed = mesh.mesh_dim_names or (), {"pp": len(document.stages), "dp": document.replicas}
    for name, size in needed.items():
        dimension_size = mesh.size(names.index(name)) if name in names else 1
        if dimension_size != size or "pp" not in names:
            raise MachineError(
                f'the mesh of {names} has {dimension_size} processes along "{name}", the plan needs {size}',
                f'Give a mesh with the dimensions "pp" of {needed["pp"]} and "dp" of {needed["dp"]}.',
            )
    pipeline: Any = mesh.get_group("pp")
    index, ranks = dist.get_rank(pipeline), _ranks(mesh, document)
    if document.replicas == 1:
        return RankCoordinates(index, 0, pipeline, None, ranks)
    return RankCoordinates(index, mesh.get_local_rank("dp"), pipeline, mesh["dp"], ranks)


def _ranks(mesh: DeviceMesh, document: TorchExport) -> tuple[tuple[int, ...], ...]:
    """By device of the pipeline and replica, the ranks of the mesh that differ from this process in no other
    dimension."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in ("pp", "dp"))
    rank_table = mesh[names].mesh
    table = rank_table.T if names == ("dp", "pp") else rank_table
    return tuple(map(tuple, table.reshape(len(document.stages), document.replicas).tolist()))


def replicate_stage(
    module: nn.Module, mesh: DeviceMesh, how: Replicate, *, splits_backward: bool, apart: Sequence[str] = ()
) -> nn.Module:
    """A stage whose replicas begin alike, and average its gradients after the last backward of a step.

    `apart`: names of parameters whose gradients are added up elsewhere; sharded ones are averaged all the
    same. Where `splits_backward`, DistributedDataParallel does not see the weight gradients come: then it is
    the module as it was, and `average_gradients` is to be called.
    """
    if how not in ("ddp", "fsdp"):
        raise UsageError(f"replicate {how!r} is unknown", "Use 'ddp' or 'fsdp'.")
    trainable = [
        n for n, parameter in module.named_parameters() if parameter.requires_grad and n not in apart
    ]
    if how == "ddp" and not splits_backward and trainable:
        return replicate(module, mesh.get_group(), apart)
    for tensor in (*module.parameters(), *module.buffers()):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        dist.broadcast(own.detach(), group=mesh.get_group(), group_src=0)
    if how == "fsdp":
        fully_shard(module, mesh=mesh)
    return module


def average_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Averages gradients as DistributedDataParallel does, for schedules whose weight gradients it does not
    see."""
    group = mesh.get_group()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        if work is not None:
            work.wait()
    for gradient in gradients:
        gradient.div_(mesh.size())


TensorPlan: TypeAlias = Mapping[str, ParallelStyle | str]
"""Styles by the names of modules, with wildcards, as transformers' `base_model_tp_plan` has them."""
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def tensor_dimension(mesh: DeviceMesh) -> DeviceMesh:
    """Its dimension "tp". Raises MachineError where it has none."""
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise MachineError(
            f"the mesh of {mesh.mesh_dim_names} has no dimension for the processes that share matrices",
            'Give a mesh with a dimension "tp", or omit `mesh`.',
        )
    return mesh["tp"]


def styles_by_module(
    layers: nn.Sequential, plan: Mapping[str, object], argument: str = "tensor_parallel"
) -> dict[str, ParallelStyle]:
    """Of the modules of all layers, by name. Raises UsageError for a name of no module, or an unknown style,
    in the `argument` of that name."""
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if isinstance(style, str):
            style = _STYLES[style]() if style in _STYLES else None
        if not isinstance(style, ParallelStyle):
            raise UsageError(
                f"{argument}[{pattern!r}]={plan[pattern]!r}: not known",
                f"Use {' or '.join(_STYLES)}, or a ParallelStyle of torch.",
            )
        names = [name for name, _ in layers.named_modules() if fnmatchcase(f".{name}", f"*.{pattern}")]
        if not names:
            raise UsageError(
                f"{argument}[{pattern!r}]: no module of the model has this name",
                "Name the modules as model.named_modules() does, with * for any part.",
            )
        styles |= dict.fromkeys(names, style)
    return styles


def share_matrices(layers: nn.Sequential, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Splits those of a stage's layers over the mesh; the processes go on with the weights of the first."""
    group = mesh.get_group()
    for tensor in (*layers.parameters(), *layers.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    for name, module in list(layers.named_modules()):
        if name in styles:
            check_sizes(module, styles[name], mesh.size())
            parallelize_module(module, mesh, styles[name])


def check_sizes(module: nn.Module, style: ParallelStyle, size: int) -> None:
    """Raises UsageError for a matrix that so many processes cannot share alike."""
    if not isinstance(module, nn.Linear):
        return
    split = module.out_features if isinstance(style, ColwiseParallel) else module.in_features
    if split % size:
        raise UsageError(
            f"tensor_parallel: {module} cannot be shared by {size} processes: {split} is no multiple",
            "Give other processes, or leave the module out.",
        )
