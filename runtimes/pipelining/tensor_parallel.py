"""Matrices of a stage's layers shared by several processes, as torch.distributed.tensor.parallel does it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ...cost_models.errors import MachineError, UsageError
from ..documents import TorchExport

TensorPlan: TypeAlias = Mapping[str, ParallelStyle | str]
"""Styles by the names of modules, with wildcards, as transformers' `base_model_tp_plan` has them."""
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def mesh_with_tensor_dimension(document: TorchExport, device_type: str) -> DeviceMesh:
    """All processes: by device of the pipeline, replica, and place among those that share matrices, which are
    neighbours. Raises MachineError where they do not come out."""
    if not (dist.is_available() and dist.is_initialized()):
        raise MachineError(
            "torch.distributed is not initialized, the stages are processes of it",
            "Call torch.distributed.init_process_group() first, in a script started with torchrun.",
        )
    pipeline, replicas, processes = len(document.stages), document.replicas, dist.get_world_size()
    if processes % (pipeline * replicas):
        raise MachineError(
            f"{processes} processes, but {pipeline} devices of the pipeline x {replicas} replicas",
            f"Start {pipeline * replicas} for each of the devices that share a matrix.",
        )
    sizes = (pipeline, replicas, processes // (pipeline * replicas))
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))


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
