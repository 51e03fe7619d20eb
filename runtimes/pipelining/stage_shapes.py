"""What crosses each cut: shapes, kinds, and what the stage behind overwrites. Found out without a byte.

Told so, PyTorch does not run the stages to find out: that would cost the first step a fraction of a second,
and in older PyTorch (2.11) count a batch in the statistics of batch norm that is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...cost_models.errors import ExportError
from ...profiler.torch_internals import backward_parts, tensor_version
from ...profiler.user_model.loaded_model import copy_model, copy_to_meta
from ...profiler.user_model.seeding import fixed_seed
from .cut_tensors import CutTensor, as_layer_input
from .input_form import InputForm
from .runtime_internals import fake_tensors
from .stage_module import StageModule


@dataclass(frozen=True)
class StageShapes:
    """The tensors of one micro-batch on the meta device: a stage's inputs, outputs, and the form of its
    inputs."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    crossings: tuple[CutTensor, ...]


def trace_shapes(
    layers: nn.Sequential,
    parts: Sequence[int],
    inputs: Sequence[Tensor],
    form: InputForm,
    *,
    splits_backward: bool = False,
    device: torch.device | None = None,
) -> list[StageShapes] | None:
    """For each stage, with `inputs` of that form to the first; None where no trace runs.

    The meta device knows no autocast: where the layers are under one, or switch one on, or do not run on
    meta, they are traced with tensors that are said to be on `device` (default: the CPU). Layers that look at
    values run there for real, on a copy of a stage at a time.

    PyTorch computes weight gradients apart only on what lies between an input with a gradient and the output:
    where `splits_backward`, a stage behind frozen ones has such an input all the same, and its gradient is
    zero.

    Raises ExportError where PyTorch cannot run the two parts of a stage's backward.
    """
    place = device or torch.device("cpu")
    for trace in (_trace_on_meta, _trace_pretending, _trace_for_real):
        try:
            stages = trace(layers, parts, tuple(inputs), form, splits_backward, place)
        except ExportError:
            raise
        except Exception:
            # Whatever a model does there that it does not do elsewhere.
            continue
        if stages is not None:
            return stages
    return None


def _trace_on_meta(
    layers: nn.Sequential,
    parts: Sequence[int],
    inputs: tuple[Tensor, ...],
    form: InputForm,
    splits_backward: bool,
    place: torch.device,
) -> list[StageShapes] | None:
    """None where an autocast is on, of which the meta device knows nothing."""
    meta_layers: Any = copy_to_meta(layers, "the model")
    meta_inputs = tuple(tensor.to("meta") for tensor in inputs)
    with _notice_autocast() as noticed:
        stages = list(_trace_stages(meta_layers.__getitem__, parts, meta_inputs, form, splits_backward))
    return None if noticed or torch.is_autocast_enabled(place.type) else stages


def _trace_pretending(
    layers: nn.Sequential,
    parts: Sequence[int],
    inputs: tuple[Tensor, ...],
    form: InputForm,
    splits_backward: bool,  # noqa: ARG001 - such tensors have no two parts of a backward
    place: torch.device,
) -> list[StageShapes]:
    meta_layers: Any = copy_to_meta(layers, "the model")
    with fake_tensors():
        _pretend(meta_layers, place)
        fake_inputs = tuple(_pretended(tensor.to("meta"), place) for tensor in inputs)
        stages = list(_trace_stages(meta_layers.__getitem__, parts, fake_inputs, form, splits_backward=False))
    return [_on_meta(stage) for stage in stages]


def _trace_for_real(
    layers: nn.Sequential,
    parts: Sequence[int],
    inputs: tuple[Tensor, ...],
    form: InputForm,
    splits_backward: bool,
    place: torch.device,
) -> list[StageShapes]:
    def copy_stage(stage: slice) -> Any:
        return copy_model(layers[stage], "the model").to(place)

    own_inputs = tuple(tensor.to(place) for tensor in inputs)
    with fixed_seed(0):
        stages = _trace_stages(copy_stage, parts, own_inputs, form, splits_backward)
        return [_on_meta(stage) for stage in stages]


@contextmanager
def _notice_autocast() -> Iterator[list[bool]]:
    """Inside, every torch.autocast that is entered adds to the list."""
    entered: list[bool] = []
    enter: Any = torch.autocast.__enter__

    def noticing(context: Any) -> Any:
        entered.append(True)
        return enter(context)

    with mock.patch.object(torch.autocast, "__enter__", noticing):
        yield entered


def _pretend(layers: nn.Module, device: torch.device) -> None:
    """Inside `fake_tensors`: makes parameters and buffers, which are on meta, look as if on `device`."""
    for module in layers.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_pretended(parameter, device), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _pretended(buffer, device))


def _pretended(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor.detach(), device=device).requires_grad_(tensor.requires_grad)


def _on_meta(stage: StageShapes) -> StageShapes:
    """With tensors of the meta device alone."""

    def plain(tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return meta.requires_grad_(tensor.requires_grad)

    inputs, outputs = (tuple(map(plain, tensors)) for tensors in (stage.inputs, stage.outputs))
    return dataclasses.replace(stage, inputs=inputs, outputs=outputs)


def _trace_stages(
    take: Callable[[slice], Any],
    parts: Sequence[int],
    inputs: tuple[Tensor, ...],
    form: InputForm | None,
    splits_backward: bool,
) -> Iterator[StageShapes]:
    crossings = tuple(CutTensor.of(tensor) for tensor in inputs)
    for number, (first, end) in enumerate(pairwise(parts)):
        layers = take(slice(first, end))
        crossings = _mark_overwritten(layers, crossings, inputs, form)
        stage = StageModule(layers, crossings, form=form, is_last=end == parts[-1])
        if splits_backward and number:
            _check_parts(stage, inputs, number)
        outputs = stage(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        frozen = splits_backward and not any(tensor.requires_grad for tensor in outputs)
        leaves = tuple(_leaf(tensor, always=frozen) for tensor in outputs)
        yield StageShapes(inputs, leaves, crossings)
        crossings, inputs, form = stage.output_tensors, leaves, None


_TWICE = "backward through the graph a second time"


def _check_parts(stage: StageModule, inputs: tuple[Tensor, ...], number: int) -> None:
    """Raises ExportError where PyTorch would go twice through a part of the stage for its weights' gradients:
    it groups weights by the operations at which their ways meet, and overlooks that a weight with ways to
    several of them makes these one group (torch 2.14)."""
    input_part, weight_part = backward_parts()
    outputs = stage(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    starts = [tensor for tensor in outputs if tensor.requires_grad]
    try:
        _, groups = input_part(starts, list(map(torch.empty_like, starts)), list(inputs), stage.parameters())
        weight_part(stage.parameters(), groups)
    except RuntimeError as error:
        if _TWICE in str(error):
            raise ExportError(
                f"stage {number} uses a weight in several places, together with others: PyTorch's backward "
                "in two parts (stage_backward_weight) fails for it",
                "Use a schedule whose backward is whole: 1f1b, gpipe, interleaved.",
            ) from error


def _mark_overwritten(
    layers: nn.Sequential,
    crossings: tuple[CutTensor, ...],
    inputs: tuple[Tensor, ...],
    form: InputForm | None,
) -> tuple[CutTensor, ...]:
    """`crossings` with a mark on those that the layers change in place: their version goes up."""
    stage_inputs = StageModule(layers, crossings, form=form).receive(inputs)
    clones = tuple(tensor.clone() for tensor in stage_inputs)
    versions = [tensor_version(tensor) for tensor in clones]
    layers(as_layer_input(clones, crossings))
    changes = (tensor_version(tensor) > old for tensor, old in zip(clones, versions, strict=True))
    return tuple(
        dataclasses.replace(about, is_overwritten=is_changed)
        for about, is_changed in zip(crossings, changes, strict=True)
    )


def _leaf(tensor: Tensor, *, always: bool) -> Tensor:
    return tensor.detach().requires_grad_(always or tensor.requires_grad)
