"""Weights that layers of several stages use: each of these stages has a copy, and all copies stay equal.

As Megatron-LM trains the embedding and the head, and DeepSpeed its tied layers: the copies begin alike; after
the last backward of a step their gradients are added up over all processes that hold one, before any of them
is updated. Adding up the same numbers, an optimizer that looks at one parameter at a time keeps them equal.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cost_models.errors import ExportError
from ...profiler.chain.layer_sequential import LayerSequential
from ...profiler.user_model.shared_parameters import register_references, tensors_used
from .rank_coordinates import RankCoordinates


@dataclass(frozen=True, eq=False)
class CopiedWeight:
    """A parameter of the model that the layers of several `stages` use (ascending)."""

    parameter: nn.Parameter
    stages: tuple[int, ...]


def find_tied_weights(layers: nn.Sequential, parts: Sequence[int]) -> list[CopiedWeight]:
    """The weights that several stages use, ordered by the first layer that uses them: the same in every
    process.

    Raises ExportError where stages share a buffer that some layer writes, or may: no other would see it.
    """
    read_only = {id(buffer) for buffer in read_only_buffers(layers)}
    users: dict[int, tuple[Tensor, list[int]]] = {}
    for stage, (first, end) in enumerate(pairwise(parts)):
        for layer in layers[first:end]:
            for tensor in tensors_used(layer):
                _, stages = users.setdefault(id(tensor), (tensor, []))
                stages.extend([stage] if stage not in stages else [])
    weights = []
    for tensor, stages in users.values():
        if len(stages) > 1 and not isinstance(tensor, nn.Parameter) and id(tensor) not in read_only:
            raise shared_tensor_error(stages[0], stages[1], tensor, "buffer")
        if len(stages) > 1 and isinstance(tensor, nn.Parameter):
            weights.append(CopiedWeight(tensor, tuple(stages)))
    return weights


def read_only_buffers(layers: nn.Sequential) -> list[Tensor]:
    """Buffers that several layers use and none writes, where the layers were made of a model and know it."""
    names = layers.read_only_buffers if isinstance(layers, LayerSequential) else ()
    buffers = dict(layers.named_buffers())
    return [buffers[name] for name in names if name in buffers]


def check_equal_buffers(layers: nn.Sequential) -> None:
    """Raises ExportError where processes have other values of the buffers that stages share: all are to call
    it."""
    buffers = read_only_buffers(layers)
    if not buffers or not dist.is_initialized():
        return
    digests = [_digest(buffer) for buffer in buffers]
    all_digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_digests, digests)
    if any(other != digests for other in all_digests):
        raise ExportError(
            "processes have different values of a buffer that several stages use",
            "Build the model in every process from the same seed, or load the same checkpoint first.",
        )


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def shared_tensor_error(one: int, other: int, tensor: Tensor, kind: str) -> ExportError:
    """The error where two stages use a tensor and must not."""
    return ExportError(
        f"stages {one} and {other} share a {kind} of shape {tuple(tensor.shape)}, which cannot be on both",
        "Make a plan for this model and runtime: pplan solve cuts between no layers that share it.",
    )


@dataclass(frozen=True, eq=False)
class StageLayers:
    """A stage's layers; `copies`: by tied weight that it uses, the parameter that they have of it. The first
    of the stages that use one has the model's own."""

    layers: nn.Sequential
    copies: dict[int, nn.Parameter]


def split_stage(
    layers: nn.Sequential, parts: Sequence[int], stage: int, tied: Sequence[CopiedWeight]
) -> StageLayers:
    """The layers of one stage, which register copies of the weights that earlier stages register, too. All
    else is the model's own; modules are new where there are copies."""
    first, end = parts[stage : stage + 2]
    stage_weights = {index: weight for index, weight in enumerate(tied) if stage in weight.stages}
    copies = {
        index: weight.parameter
        if weight.stages[0] == stage
        else nn.Parameter(weight.parameter.detach().clone(), weight.parameter.requires_grad)
        for index, weight in stage_weights.items()
    }
    shared = {id(buffer) for buffer in read_only_buffers(layers)}
    registered = {id(buffer) for buffer in layers[first:end].buffers()}
    has_references = any(
        id(tensor) in shared - registered for layer in layers[first:end] for tensor in tensors_used(layer)
    )
    if not has_references and all(weight.stages[0] == stage for weight in stage_weights.values()):
        return StageLayers(layers[first:end], copies)
    used = [tensor for layer in layers[first:end] for tensor in tensors_used(layer)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in used}
    memo |= {id(weight.parameter): copies[index] for index, weight in stage_weights.items()}
    own_layers = copy.deepcopy(layers[first:end], memo)
    register_references(own_layers)
    return StageLayers(own_layers, copies)


@dataclass(frozen=True, eq=False)
class _TiedCopy:
    """A tied weight as this process has it: names of its copies in its stages, and who holds it besides."""

    copies: tuple[tuple[nn.Module, str], ...]
    group: dist.ProcessGroup | None
    replicas: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [module.get_parameter(name) for module, name in self.copies]


class TiedGradients:
    """Keeps the copies of this process equal to those of all others."""

    def __init__(self, copies: Sequence[_TiedCopy]) -> None:
        self._copies = copies

    def __len__(self) -> int:
        return len(self._copies)

    def add_up(self) -> None:
        """Adds up the gradients of all copies after the last backward of a step, averaged over replicas."""
        for weight in self._copies:
            gradients = [_gradient(parameter) for parameter in weight.parameters]
            if gradients:
                total = gradients[0]
                for other in gradients[1:]:
                    total.add_(other)
                if weight.group is not None:
                    dist.all_reduce(total.div_(weight.replicas), group=weight.group)
                for other in gradients[1:]:
                    other.copy_(total)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of this process: of a sharded parameter its part."""
    if parameter.grad is None:
        parameter.grad = parameter.new_zeros(parameter.shape)
    gradient: Any = parameter.grad
    local_gradient: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local_gradient


def tie_stages(
    tied: Sequence[CopiedWeight],
    stages: dict[int, nn.Module],
    stage_layers: dict[int, StageLayers],
    coordinates: RankCoordinates,
    device_of: Mapping[int, int],
    *,
    sharded: bool,
) -> TiedGradients:
    """The copies in the `stages` of this process, which are on their device and not yet wrapped, made equal
    to the first stage's. Where weights are tied, all processes of the job are to call it.

    `device_of`: by stage, its device of the pipeline. Where replicas are `sharded`, each adds up its part
    with the same replica of the other stages.
    """
    copies_here, tables = [], _tables(coordinates) if tied else []
    for index, weight in enumerate(tied):
        devices = list(dict.fromkeys(device_of[stage] for stage in weight.stages))
        groups = _Groups.of(tables, devices)
        copies = {stage: stage_layers[stage].copies[index] for stage in stages if stage in weight.stages}
        if copies and groups.all_replicas is not None:
            first, *others = [parameter.detach() for parameter in copies.values()]
            dist.broadcast(first, src=coordinates.ranks[devices[0]][0], group=groups.all_replicas)
            for other in others:
                other.copy_(first)
        if copies and weight.parameter.requires_grad:
            stage_names = tuple(
                (stages[stage], _name(stages[stage], stage_copy)) for stage, stage_copy in copies.items()
            )
            replicas = 1 if sharded else len(coordinates.ranks[0])
            copies_here.append(
                _TiedCopy(stage_names, groups.same_replica if sharded else groups.all_replicas, replicas)
            )
    return TiedGradients(copies_here)


def _tables(coordinates: RankCoordinates) -> list[tuple[tuple[int, ...], ...]]:
    """The ranks of all pipelines of the job: every process has to know of every group that is made."""
    ranks = coordinates.ranks
    if sum(map(len, ranks)) == dist.get_world_size():
        return [ranks]
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, ranks)
    return sorted(set(tables))


@dataclass(frozen=True, eq=False)
class _Groups:
    """Process groups that this process is in, None where a group would have one member: `all_replicas` of
    some devices of its pipeline, and the `same_replica` of each of these devices."""

    all_replicas: Any
    same_replica: Any

    @classmethod
    def of(cls, tables: Sequence[Sequence[Sequence[int]]], devices: Sequence[int]) -> _Groups:
        """The groups for one weight on these devices, of every pipeline."""
        own_rank, all_replicas, same_replica = dist.get_rank(), None, None
        for ranks in tables:
            members = [ranks[device] for device in devices]
            all_ranks = [rank for device_ranks in members for rank in device_ranks]
            group = dist.new_group(all_ranks) if len(all_ranks) > 1 else None
            all_replicas = group if own_rank in all_ranks else all_replicas
            replicas = len(members[0])
            for replica in range(replicas if len(devices) > 1 else 0):
                same_replica_ranks = [device_ranks[replica] for device_ranks in members]
                group = dist.new_group(same_replica_ranks) if replicas > 1 else group
                same_replica = group if own_rank in same_replica_ranks else same_replica
        return cls(all_replicas, same_replica)


def _name(module: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, candidate in module.named_parameters() if candidate is parameter)


def names_of_copies(
    tied: Sequence[CopiedWeight], stage: int, module: nn.Module, stage_layers: StageLayers
) -> list[str]:
    """Names of the copies in a stage's module that an earlier stage has, too: their replicas' gradients are
    added up with that one's."""
    return [_name(module, stage_layers.copies[i]) for i in stage_layers.copies if tied[i].stages[0] != stage]
