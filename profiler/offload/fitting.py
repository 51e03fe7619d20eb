"""Divides a model that does not fit on a device into segments of consecutive layers that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...cost_models.errors import MachineError, ModelError
from ...cost_models.memory import FRAGMENTATION_RESERVE, workspace_before_loss
from ...cost_models.quantities import format_bytes
from ..chain.layers import Layer
from ..memory.live_bytes import LiveBytes, Meter, lasting, storages
from ..memory.meta_kernels import attention_as_on_the_cpu
from ..memory.workspace import LossWorkspace, Workspace
from ..passes.timing import Context, OutputGradients, run_layers
from ..passes.watchers import CompositeWatcher, SavedBytes
from ..torch_internals import storage_key
from ..user_model.flat_output import tensors_in
from ..user_model.losses import Loss
from ..user_model.shared_parameters import tensors_used


@dataclass(frozen=True)
class LayerNeeds:
    """Bytes of one layer on a device, at one micro-batch size.

    `storages`: bytes between passes by storage: weights with their gradients, and buffers; a storage that
    several layers use has the same key in each. `saved`, `workspace`, `output`: as in the profile.
    """

    name: str
    storages: Mapping[int, int]
    saved: int
    workspace: int
    output: int


def layer_needs(
    layers: Sequence[Layer],
    saved_bytes: Sequence[int],
    workspace_bytes: Sequence[int],
    output_bytes: Sequence[int],
    *,
    amp: bool = False,
) -> tuple[LayerNeeds, ...]:
    """The needs of each layer, from its bytes at that size. `amp`: with what autocast converts."""
    return tuple(
        LayerNeeds(layer.name, _storage_bytes(layer.module, amp=amp), saved, workspace, output)
        for layer, saved, workspace, output in zip(
            layers, saved_bytes, workspace_bytes, output_bytes, strict=True
        )
    )


def count_needs(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    loss: Loss | None = None,
    *,
    amp: bool = False,
    kernels: Callable[[], AbstractContextManager[Any]] = attention_as_on_the_cpu,
) -> tuple[LayerNeeds, ...]:
    """The needs of each layer, from passes through the layers: on the meta device, where they cost no memory.

    `inputs`: the first layer's input, a tensor or several, where the model is. What an operation needs inside
    itself (a convolution's workspace) is not seen there. `kernels`: entered, attention on meta is as on the
    device that will run it. The last layer's are with `loss`, unless that does not run there. `amp`: autocast
    is not possible there, so activations count in their full size, and converted weights are added.
    """
    gradients = OutputGradients(0)
    device = tensors_in(inputs)[0].device
    attention = kernels() if device.type == "meta" else nullcontext()
    with attention, LiveBytes(device, lasting(model)) as meter:
        # The first makes the gradients.
        count_pass(model, layers, inputs, gradients, meter)
        saved, counted = count_pass(model, layers, inputs, gradients, meter)
        behind = _loss_counted(model, layers, inputs, gradients, meter, loss)
    saved_bytes, workspace = list(saved.saved_bytes), list(counted.memory(saved.saved_bytes).workspace)
    if behind is not None:
        of_loss, loss_saved = loss_bytes(*behind), behind[0].loss_saved_bytes
        saved_bytes[-1] += loss_saved
        workspace[-1] = int(workspace_before_loss(workspace[-1], loss_saved, of_loss.larger))
    return layer_needs(layers, saved_bytes, workspace, saved.output_bytes, amp=amp)


def _loss_counted(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    gradients: OutputGradients,
    meter: Meter,
    loss: Loss | None,
) -> tuple[SavedBytes, Workspace] | None:
    """None without a loss, and for one that does not run here: the user's may make its targets elsewhere."""
    if loss is None:
        return None
    try:
        return count_loss(model, layers, inputs, gradients, meter, loss)
    except ModelError:
        return None


def _storage_bytes(module: nn.Module, *, amp: bool = False) -> dict[int, int]:
    """Also what an earlier layer registers. Under autocast a copy of the parameters in half size besides.

    That copy is an estimate: autocast converts what its operations take, and all of it lives to the end of
    the forward at least.
    """
    tensors = list({id(tensor): tensor for tensor in tensors_used(module)}.values())
    sizes = {storage_key(storage): storage.nbytes() for storage in storages(tensors)}
    for tensor in tensors:
        key = storage_key(tensor)
        if tensor.requires_grad:
            sizes[key] += tensor.nbytes
        if amp and isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32:
            sizes[key] += tensor.nbytes // 2
    return sizes


def plan_segments(
    layers: Sequence[LayerNeeds], input_bytes: int, free_bytes: int, device: str = "the device"
) -> tuple[range, ...]:
    """The fewest runs of consecutive layers that each fit into `free_bytes` by themselves.

    A run needs its weights, gradients and buffers, its input, the gradient of its output, what it saves and
    its workspace, and the reserve of the ledger. `input_bytes`: of the first layer's input.

    Raises MachineError where a single layer does not fit.
    """
    count = len(layers)
    for index in range(count):
        alone = next(_needs_from(index, layers, input_bytes))
        if alone > free_bytes:
            raise MachineError(
                f"layer {layers[index].name} does not fit on {device} even alone: it needs "
                f"{format_bytes(alone)}, {format_bytes(free_bytes)} are free",
                "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
            )
    # By number of layers from the front: the fewest segments, and where the last of them starts.
    fewest, start = [0, *[count + 1] * count], [0] * (count + 1)
    for first in range(count):
        for last, needed in enumerate(_needs_from(first, layers, input_bytes), first):
            if needed <= free_bytes and fewest[first] + 1 < fewest[last + 1]:
                fewest[last + 1], start[last + 1] = fewest[first] + 1, first
    segments, end = [], count
    while end:
        segments.append(range(start[end], end))
        end = start[end]
    return tuple(reversed(segments))


def _needs_from(first: int, layers: Sequence[LayerNeeds], input_bytes: int) -> Iterator[int]:
    """What layers `first` to `first`, to `first + 1`, ... need."""
    storages_so_far: set[int] = set()
    weights = saved = peak = 0
    input_bytes_here = layers[first - 1].output if first else input_bytes
    for layer in layers[first:]:
        weights += sum(size for key, size in layer.storages.items() if key not in storages_so_far)
        storages_so_far.update(layer.storages)
        saved += layer.saved
        peak = max(peak, saved + layer.workspace)
        yield round((weights + input_bytes_here + layer.output + peak) * (1 + FRAGMENTATION_RESERVE))


def count_loss(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    gradients: OutputGradients,
    meter: Meter,
    loss: Loss,
    context: Context = nullcontext,
) -> tuple[SavedBytes, Workspace]:
    """What `loss_bytes` takes, from one untimed pass which the loss ends.

    As `count_pass`. The targets are made in this pass: they belong to the loss' workspace.
    """
    own = loss.without_targets()
    saved = SavedBytes(model, len(layers))
    workspace = Workspace(model, len(layers), meter, tensors_in(inputs))
    with saved.hooks():
        run_layers(layers, inputs, gradients, CompositeWatcher(saved, workspace), loss=own, context=context)
    return saved, workspace


def loss_bytes(saved: SavedBytes, workspace: Workspace) -> LossWorkspace:
    """The bytes of the loss that `count_loss` ran, when its meter can be read."""
    return workspace.loss(saved.saved_bytes, saved.loss_saved_bytes)


def count_pass(
    model: nn.Module, layers: Sequence[Layer], inputs: Any, gradients: OutputGradients, meter: Meter
) -> tuple[SavedBytes, Workspace]:
    """Saved and output bytes, and what tells those of the step when `meter` can be read, from one untimed
    pass, forward and backward.

    `meter` has been counting since before an earlier pass, which made the weights' gradients and what the
    libraries allocate once. `inputs`: the first layer's input, a tensor or several.
    """
    saved = SavedBytes(model, len(layers))
    workspace = Workspace(model, len(layers), meter, tensors_in(inputs))
    with saved.hooks():
        run_layers(layers, inputs, gradients, CompositeWatcher(saved, workspace))
    return saved, workspace
