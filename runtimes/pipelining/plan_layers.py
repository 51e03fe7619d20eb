"""A user's model as the layers that a plan counts, and as torchgpipe and FairScale take them for a plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from ...cost_models.errors import ExportError, MachineError, UsageError
from ...profiler.chain.layer_sequential import LayerSequential
from ...profiler.graphs.output_shapes import KEEP_BATCH
from ...profiler.sequential import sequential
from ...profiler.user_model.loaded_model import ModelInput
from ...profiler.user_model.shared_parameters import tensors_used
from ..documents import ExportDocument, PipeExport, check_layers, stage_bounds
from .cut_hooks import guard_cuts
from .recomputation import warn_of_second_runs
from .weight_copies import read_only_buffers, shared_tensor_error, split_stage


def match_layers(
    document: ExportDocument,
    count: int,
    model: nn.Module,
    example: ModelInput | None,
    names: Sequence[str] | None,
    *,
    granularity: str,
    samples: int,
) -> nn.Sequential:
    """`model` as it is where it is an nn.Sequential of the `count` layers of the plan, else made so: also
    where several of its layers register the same parameter or buffer, which runtimes refuse.

    `samples`: of a micro-batch of one replica.

    Raises ExportError where it is another model, is to be made sequential without an `example`, or makes
    something else of so few samples.
    """
    matches = isinstance(model, LayerSequential) or (
        isinstance(model, nn.Sequential) and len(model) == count and not _registers_twice(model)
    )
    layers = model if matches or example is None else sequential(model, example, granularity=granularity)
    fault = layers.faults.of(samples) if isinstance(layers, LayerSequential) else ""
    if fault:
        raise ExportError(
            f"micro-batches of {samples} samples a replica are not the model's: {fault}",
            f"Change the model, or make a plan with larger micro-batches. {KEEP_BATCH}",
        )
    return check_layers(document, count, layers, names)


def check_groups(layers: nn.Sequential, stages: int) -> None:
    """Raises ExportError where a layer of one of several stages waits for the processes of all of them."""
    for name, module in layers.named_modules():
        if stages > 1 and isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            raise ExportError(
                f"{name} is a SyncBatchNorm of all processes: those of other stages never reach it",
                "Give it the process group of its stage's replicas, or use nn.BatchNorm.",
            )


def _registers_twice(model: nn.Sequential) -> bool:
    by_layer = sum(len([*layer.parameters(), *layer.buffers()]) for layer in model)
    return by_layer != len([*model.parameters(), *model.buffers()])


def check_sharing(
    layers: nn.Sequential, parts: Sequence[int], devices: Sequence[object] | None = None
) -> None:
    """Raises ExportError where stages share a parameter, or a buffer that may be written, and are on
    different `devices` (None: all are)."""
    holder: dict[int, int] = {}
    read_only = {id(buffer) for buffer in read_only_buffers(layers)}
    for stage, (first, end) in enumerate(pairwise(parts)):
        for layer in layers[first:end]:
            for tensor in tensors_used(layer):
                if id(tensor) in read_only:
                    continue
                before = holder.setdefault(id(tensor), stage)
                if before != stage and (devices is None or devices[before] != devices[stage]):
                    raise shared_tensor_error(before, stage, tensor, "parameter or buffer")


def prepare_pipe(
    document: PipeExport,
    model: nn.Module,
    example_input: object,
    devices: Sequence[torch.device | str | int] | None,
    layer_names: Sequence[str] | None,
) -> tuple[nn.Sequential, dict[str, Any]]:
    """The layers, safe at the plan's cuts, and the keyword arguments of the runtime's constructor.

    Raises ExportError, UsageError, MachineError, as the runtimes' `build`.
    """
    example = None if example_input is None else ModelInput.of(example_input)
    _check_input(document, example)
    parts = stage_bounds(document.balance)
    size = document.micro_batch_size
    layers = match_layers(
        document,
        parts[-1],
        model,
        example,
        layer_names,
        granularity=document.granularity,
        samples=size,
    )
    recomputes = document.checkpoint == "always" or (
        document.checkpoint == "except_last" and document.chunks > 1
    )
    if recomputes:
        warn_of_second_runs(layers, document.kind)
    arguments = document.arguments()
    if devices is not None:
        arguments["devices"] = _as_devices(devices, len(document.balance))
    _check_devices(document, arguments["devices"])
    check_sharing(layers, parts, [torch.device(device) for device in arguments["devices"]])
    layers = _with_own_buffers(layers, parts)
    safe = guard_cuts(layers, parts, example, size, joined_by=document.kind, recomputes=recomputes)
    names = [name for name, _ in layers.named_children()]
    return nn.Sequential(OrderedDict(zip(names, safe, strict=True))), arguments


def _with_own_buffers(layers: nn.Sequential, parts: Sequence[int]) -> nn.Sequential:
    """Every stage registers the buffers that it uses, and they move with it."""
    stages = [split_stage(layers, parts, stage, ()).layers for stage in range(len(parts) - 1)]
    names = [name for name, _ in layers.named_children()]
    return nn.Sequential(OrderedDict(zip(names, chain.from_iterable(stages), strict=True)))


def _check_input(document: PipeExport, example: ModelInput | None) -> None:
    for tensor in () if example is None else example.tensors:
        if tensor.dim() == 0 or len(tensor) != example.batch:  # type: ignore[union-attr]
            raise ExportError(
                f"the input has a tensor of shape {tuple(tensor.shape)} that all samples share, "
                f"{document.kind} cuts every tensor of the input into micro-batches",
                "Let the model make or hold it. Or pplan export torch, which cuts samples only.",
            )


def _as_devices(devices: Sequence[torch.device | str | int], stages: int) -> list[torch.device]:
    if isinstance(devices, str) or len(devices) != stages:
        raise UsageError(
            f"devices={devices!r}: the plan has {stages} stages", "Give one device for each, in their order."
        )
    return [torch.device("cuda", name) if isinstance(name, int) else torch.device(name) for name in devices]


def _check_devices(document: PipeExport, devices: Sequence[torch.device | str]) -> None:
    """Raises MachineError where CUDA devices of the plan are not there."""
    device_count = torch.cuda.device_count()
    for device in map(torch.device, devices):
        if device.type == "cuda" and (device.index or 0) >= device_count:
            raise MachineError(
                f"the plan has a stage on {device}, this machine has {device_count} CUDA devices",
                f"Give build the devices to use, or try it without: "
                f"pplan.export({document.kind!r}, device='cpu').",
            )
