"""A user's model as the layers that a plan counts, split for each runtime: safe at cuts, with copies of
weights.

torchgpipe, FairScale and DeepSpeed hand the tensors that cross a cut from layer to layer as they are. A layer
that overwrites them then spoils what is recomputed from; and all three lose or refuse gradients where a
tensor without one, a mask say, crosses next to one with. Hooks on the layers at the ends of a stage prevent
both.

If layers of several stages use a weight, each of these stages has a copy, and all copies stay equal. As
Megatron-LM trains the embedding and the head, and DeepSpeed its tied layers: the copies begin alike; after
the last backward of a step their gradients are added up over all processes that hold one, before any of them
is updated. Adding up the same numbers, an optimizer that looks at one parameter at a time keeps them equal.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cost_models.errors import ExportError, MachineError, UsageError
from ...cost_models.runtime import find_runtime
from ...profiler.layer import KEEP_BATCH, LayerSequential, modules_used, register_references, tensors_used
from ...profiler.layers import sequential
from ...profiler.torch_private import copy_registries
from ...profiler.user_model import ModelInput
from ..documents import (
    BuiltExport,
    FairscaleExport,
    PipeExport,
    TorchgpipeExport,
    check_layers,
    import_package,
)
from .ranks import RankCoordinates
from .runtime_internals import runs_backward
from .stage import (
    CutTensor,
    InputForm,
    OutputForm,
    StageShapes,
    add_zero_gradients,
    as_tuple,
    attach_all,
    pack_tensor,
    trace_shapes,
    warn_of_second_runs,
    written_buffers,
)


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
    weights = []
    for tensor, stages in _shared_tensors(layers, parts):
        if not isinstance(tensor, nn.Parameter):
            raise shared_tensor_error(stages[0], stages[1], tensor, "buffer")
        weights.append(CopiedWeight(tensor, tuple(stages)))
    return weights


def _shared_tensors(layers: nn.Sequential, parts: Sequence[int]) -> list[tuple[Tensor, list[int]]]:
    """Tensors that several stages use, without buffers that no layer writes, and these stages, ascending."""
    read_only = {id(buffer) for buffer in read_only_buffers(layers)}
    users: dict[int, tuple[Tensor, list[int]]] = {}
    for stage, (first, end) in enumerate(pairwise(parts)):
        for layer in layers[first:end]:
            for tensor in tensors_used(layer):
                _, stages = users.setdefault(id(tensor), (tensor, []))
                stages.extend([stage] if stage not in stages else [])
    return [user for key, user in users.items() if len(user[1]) > 1 and key not in read_only]


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
    of the stages that use one has the model's own. `origins`: by layer and the name of a tensor of it, the
    identity of the model's tensor, and whether that is on an earlier stage, too."""

    layers: nn.Sequential
    copies: dict[int, nn.Parameter]
    origins: list[dict[str, tuple[int, bool]]]

    @classmethod
    def of(
        cls, layers: nn.Sequential, copies: dict[int, nn.Parameter], tied: Sequence[CopiedWeight]
    ) -> StageLayers:
        """The record of a stage's layers before they are moved to a device."""
        models = {id(copy): id(tied[index].parameter) for index, copy in copies.items()}
        origins = [
            {
                name: (models.get(id(value), id(value)), models.get(id(value), id(value)) != id(value))
                for name, value in layer.state_dict(keep_vars=True).items()
            }
            for layer in layers
        ]
        return cls(layers, copies, origins)


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
        return StageLayers.of(layers[first:end], copies, tied)
    used = [tensor for layer in layers[first:end] for tensor in tensors_used(layer)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in used}
    memo |= {id(weight.parameter): copies[index] for index, weight in stage_weights.items()}
    own_layers = copy.deepcopy(layers[first:end], memo)
    register_references(own_layers)
    return StageLayers.of(own_layers, copies, tied)


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
        all_replicas, same_replica = _groups(tables, devices)
        copies = {stage: stage_layers[stage].copies[index] for stage in stages if stage in weight.stages}
        if copies and all_replicas is not None:
            first, *others = [parameter.detach() for parameter in copies.values()]
            dist.broadcast(first, src=coordinates.ranks[devices[0]][0], group=all_replicas)
            for other in others:
                other.copy_(first)
        if copies and weight.parameter.requires_grad:
            stage_names = tuple(
                (stages[stage], _name(stages[stage], stage_copy)) for stage, stage_copy in copies.items()
            )
            replicas = 1 if sharded else len(coordinates.ranks[0])
            copies_here.append(_TiedCopy(stage_names, same_replica if sharded else all_replicas, replicas))
    return TiedGradients(copies_here)


def _tables(coordinates: RankCoordinates) -> list[tuple[tuple[int, ...], ...]]:
    """The ranks of all pipelines of the job: every process has to know of every group that is made."""
    ranks = coordinates.ranks
    if sum(map(len, ranks)) == dist.get_world_size():
        return [ranks]
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, ranks)
    return sorted(set(tables))


def _groups(tables: Sequence[Sequence[Sequence[int]]], devices: Sequence[int]) -> tuple[Any, Any]:
    """For one weight on these devices of a pipeline: the group of all their replicas that this process is in,
    and of the same replica of each device; None where it would have one member."""
    members = [[ranks[device] for device in devices] for ranks in tables]
    all_replicas = [[rank for ranks in pipeline for rank in ranks] for pipeline in members]
    same_replica = [list(ranks) for pipeline in members for ranks in zip(*pipeline, strict=True)]
    return _group(all_replicas), _group(same_replica)


def _group(ranks: list[list[int]]) -> Any:
    """The group of this process, of disjoint ones that all processes of the job make."""
    return dist.new_subgroups_by_enumeration(ranks)[0] if len(ranks[0]) > 1 else None


def _name(module: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, candidate in module.named_parameters() if candidate is parameter)


def names_of_copies(
    tied: Sequence[CopiedWeight], stage: int, module: nn.Module, stage_layers: StageLayers
) -> list[str]:
    """Names of the copies in a stage's module that an earlier stage has, too: their replicas' gradients are
    added up with that one's."""
    return [_name(module, stage_layers.copies[i]) for i in stage_layers.copies if tied[i].stages[0] != stage]


Crossings = tuple[CutTensor, ...]


@dataclass(frozen=True)
class StageInputHook:
    """The forward pre-hook of a stage's first layer.

    `packed`: what comes over the cut, where that is packed. `overwritten`: of the tensors that it is given,
    those of which the stage works on clones (None: all).
    """

    packed: Crossings | None
    overwritten: tuple[bool, ...] | None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        tensors = as_tuple(inputs[0])
        if self.packed is not None:
            tensors = _unpack_all(tensors, self.packed)
        which = (True,) * len(tensors) if self.overwritten is None else self.overwritten
        inputs_of_layer = tuple(
            tensor.clone() if is_overwritten else tensor
            for tensor, is_overwritten in zip(tensors, which, strict=True)
        )
        return (inputs_of_layer[0] if isinstance(inputs[0], Tensor) else inputs_of_layer,)


@dataclass(frozen=True)
class StageOutputHook:
    """The forward hook of a stage's last layer.

    `packs`: its tensors are packed for the cut. `is_output`: they are the model's output, of which a runtime
    takes only a tensor or a tuple of tensors. `form` remembers the rest.
    """

    packs: bool
    is_output: bool
    form: OutputForm

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:  # noqa: ARG002
        if self.is_output:
            tensors = tuple(self.form.take(output))
            return tensors[0] if len(tensors) == 1 else tensors
        packed = attach_all([pack_tensor(tensor) for tensor in as_tuple(output)], always=True)
        return packed[0] if isinstance(output, Tensor) else tuple(packed)


def guard_cuts(
    layers: nn.Sequential,
    parts: Sequence[int],
    example: ModelInput | None,
    samples: int,
    *,
    packs_all: bool = False,
    joined_by: str | None = None,
    recomputes: bool = False,
    form: OutputForm | None = None,
) -> list[nn.Module]:
    """The layers, those at cuts as twins with a hook where that is needed: all names stay, and parameters.

    `samples`: of a micro-batch. Without an `example`, or where the meta device cannot run the model, it is
    not known what crosses the cuts: then every stage works on clones. `packs_all`: tensors that have
    gradients are packed, too: where stages are processes, they are to be contiguous. `joined_by`:
    the runtime, where it joins the outputs of micro-batches. `recomputes`: it runs layers again in backward,
    and where it joins outputs, backward from every tensor of them. `form` remembers the model's output.

    Raises ExportError where a tensor of the output holds no samples, or has no gradient to run from.
    """
    shapes = _trace(layers, parts, example, samples)
    crossings: list[Crossings | None] = (
        [None] * (len(parts) - 1) if shapes is None else [shape.crossings for shape in shapes]
    )
    if joined_by is not None and shapes is not None:
        _check_output(shapes[-1].outputs, samples, joined_by, recomputes=recomputes)
    packed = [False, *(_is_packed(about, always=packs_all) for about in crossings[1:]), False]
    safe = list(layers)
    if recomputes:
        keep_statistics(layers, safe)
    for stage, (first, end) in enumerate(pairwise(parts)):
        about = crossings[stage]
        overwritten = None if about is None else tuple(crossing.is_overwritten for crossing in about)
        if packed[stage] or overwritten is None or any(overwritten):
            safe[first] = _copy_with_own_hooks(safe[first])
            arriving = StageInputHook(about if packed[stage] else None, overwritten)
            safe[first].register_forward_pre_hook(arriving, prepend=True)
        # A module of torch's own returns no dict.
        is_output = end == parts[-1] and not type(safe[end - 1]).__module__.startswith("torch.nn.")
        if packed[stage + 1] or is_output:
            safe[end - 1] = _copy_with_own_hooks(safe[end - 1])
            hook = StageOutputHook(packed[stage + 1], is_output, form or OutputForm())
            safe[end - 1].register_forward_hook(hook)
    return safe


class FirstRunBuffers:
    """The hooks of a layer by which only its first forward changes its buffers.

    A runtime that recomputes runs the layer again in backward: that run works on copies.
    """

    def __init__(self, layer: nn.Module, written: Collection[int]) -> None:
        self._places = [
            (module, name)
            for module in modules_used(layer)
            for name, buffer in module.named_buffers(recurse=False)
            if id(buffer) in written
        ]
        self._first: list[tuple[nn.Module, str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, layer: nn.Module, inputs: Any) -> None:  # noqa: ARG002
        """Put copies in the place of the buffers."""
        if runs_backward():
            self._first = [(module, name, module.get_buffer(name)) for module, name in self._places]
            for module, name, buffer in self._first:
                setattr(module, name, buffer.clone())

    def leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002
        """Put the buffers back."""
        for module, name, buffer in self._first:
            setattr(module, name, buffer)
        self._first = []


def keep_statistics(layers: nn.Sequential, safe: list[nn.Module]) -> None:
    """Replace layers whose forward changes buffers by twins that change them once for a micro-batch.

    Args:
        layers: The layers of the model.
        safe: The same, or twins. It is changed.
    """
    written = {id(buffer) for buffer in written_buffers(layers)}
    for number, layer in enumerate(safe):
        buffers = FirstRunBuffers(layer, written)
        if len(buffers):
            safe[number] = _copy_with_own_hooks(layer)
            safe[number].register_forward_pre_hook(buffers.enter)
            safe[number].register_forward_hook(buffers.leave, always_call=True)


def _trace(
    layers: nn.Sequential, parts: Sequence[int], example: ModelInput | None, samples: int
) -> list[StageShapes] | None:
    """What each stage is handed and hands on; None where that is not known."""
    if example is None:
        return None
    form = InputForm.of(example)
    return trace_shapes(layers, parts, form.micro_batch(example, samples), form)


def _check_output(outputs: Sequence[Tensor], samples: int, runtime: str, *, recomputes: bool) -> None:
    undivided = [
        f"tensor {number} of its output, {f'of shape {tuple(tensor.shape)}' if tensor.dim() else 'a scalar'}"
        for number, tensor in enumerate(outputs)
        if tensor.dim() == 0 or len(tensor) % samples
    ]
    if refusal := find_runtime(runtime).refuse_outputs(undivided):
        raise ExportError(*refusal)
    for number, tensor in enumerate(outputs):
        if recomputes and not tensor.requires_grad:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ExportError(
                f"tensor {number} of the model's output, {dtype}, has no gradient: {runtime}, where it "
                "recomputes, runs backward from every tensor of the output, and fails",
                "Make a plan with recompute='never', or leave that tensor out of the output.",
            )


def _copy_with_own_hooks(layer: nn.Module) -> nn.Module:
    """The same parameters, buffers, submodules and names, and hooks of its own: the user's is not changed."""
    twin = object.__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    copy_registries(twin, hooks_only=True)
    return twin


def _is_packed(about: Crossings | None, *, always: bool) -> bool:
    return about is not None and (always or not all(crossing.has_gradient for crossing in about))


def _unpack_all(packed: tuple[Tensor, ...], about: Crossings) -> tuple[Tensor, ...]:
    """The unpacked tensors. The runtime may ask a gradient of those without one: they get zeros."""
    pairs = list(zip(packed, about, strict=True))
    tensors = [crossing.receive(tensor) for tensor, crossing in pairs]
    carried = tuple(
        tensor for tensor, crossing in pairs if tensor.requires_grad and not crossing.has_gradient
    )
    anchor = next((i for i, tensor in enumerate(tensors) if tensor.requires_grad), None)
    if carried and anchor is not None:
        tensors[anchor] = add_zero_gradients(tensors[anchor], carried)
    return tuple(tensors)


def match_layers(
    document: BuiltExport, model: nn.Module, example: ModelInput | None, names: Sequence[str] | None
) -> nn.Sequential:
    """`model` as it is where it is an nn.Sequential of the layers of the plan, else made so: also where
    several of its layers register the same parameter or buffer, which runtimes refuse.

    Raises ExportError where it is another model, is to be made sequential without an `example`, or makes
    something else of so few samples.
    """
    matches = isinstance(model, LayerSequential) or (
        isinstance(model, nn.Sequential) and len(model) == document.parts[-1] and not _registers_twice(model)
    )
    samples, granularity = document.replica_samples, document.granularity
    layers = model if matches or example is None else sequential(model, example, granularity=granularity)
    fault = layers.faults.of(samples) if isinstance(layers, LayerSequential) else ""
    if fault:
        raise ExportError(
            f"micro-batches of {samples} samples a replica are not the model's: {fault}",
            f"Change the model, or make a plan with larger micro-batches. {KEEP_BATCH}",
        )
    return check_layers(document, layers, names)


def check_groups(layers: nn.Sequential, stages: int) -> None:
    """Raises ExportError where a layer of one of several stages waits for the processes of all of them."""
    for name, module in layers.named_modules():
        if stages > 1 and isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            raise ExportError(
                f"{name} is a SyncBatchNorm of all processes: those of other stages never reach it",
                "Use nn.BatchNorm, and build the training with sync_batch_norm=True.",
            )


def _registers_twice(model: nn.Sequential) -> bool:
    by_layer = sum(len([*layer.parameters(), *layer.buffers()]) for layer in model)
    return by_layer != len([*model.parameters(), *model.buffers()])


def check_sharing(
    layers: nn.Sequential, parts: Sequence[int], devices: Sequence[object] | None = None
) -> None:
    """Raises ExportError where stages share a parameter, or a buffer that may be written, and are on
    different `devices` (None: all are)."""
    for tensor, (first, *later) in _shared_tensors(layers, parts):
        for stage in later:
            if devices is None or devices[first] != devices[stage]:
                raise shared_tensor_error(first, stage, tensor, "parameter or buffer")


def prepare_pipe(
    document: TorchgpipeExport | FairscaleExport,
    model: nn.Module,
    example_input: object,
    devices: Sequence[torch.device | str | int] | None,
    layer_names: Sequence[str] | None,
) -> PreparedPipe:
    """Return what the constructor of torchgpipe or FairScale takes.

    Raises ExportError, UsageError, MachineError, as the runtimes' `build`.
    """
    example = None if example_input is None else ModelInput.of(example_input)
    _check_input(document, example)
    parts, size = document.parts, document.micro_batch_size
    layers = match_layers(document, model, example, layer_names)
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
    # Every stage registers the buffers that it uses, and they move with it.
    stages = [split_stage(layers, parts, stage, ()) for stage in range(len(parts) - 1)]
    names, form = [name for name, _ in layers.named_children()], OutputForm()
    split = chain.from_iterable(stage.layers for stage in stages)
    own = LayerSequential(OrderedDict(zip(names, split, strict=True)))
    own.written_buffers = getattr(layers, "written_buffers", None)
    safe = guard_cuts(
        own,
        parts,
        example,
        size,
        joined_by=document.kind,
        recomputes=recomputes,
        form=form,
    )
    origins = [layer for stage in stages for layer in stage.origins]
    safe_layers = nn.Sequential(OrderedDict(zip(names, safe, strict=True)))
    return PreparedPipe(safe_layers, arguments, origins, form)


@dataclass(frozen=True, eq=False)
class PreparedPipe:
    """What torchgpipe's or FairScale's constructor takes: layers that are safe at the cuts, and keywords.

    `origins`: by layer, as of `StageLayers`. `form`: of the model's output, once it has run.
    """

    layers: nn.Sequential
    arguments: dict[str, Any]
    origins: list[dict[str, tuple[int, bool]]]
    form: OutputForm

    def construct(self, runtime: str, module: str, kind: str) -> Any:
        """Make the runtime's own object, of the class `kind` in a module of its package."""
        with warnings.catch_warnings():
            # FairScale points to a module that PyTorch has removed since.
            warnings.filterwarnings("ignore", "fairscale.nn.Pipe has been upstreamed", DeprecationWarning)
            return getattr(import_package(runtime, module), kind)(self.layers, **self.arguments)


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
