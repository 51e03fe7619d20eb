"""Layers at the ends of a stage, made safe for the runtimes that run layers and know of no cuts.

torchgpipe, FairScale and DeepSpeed hand the tensors that cross a cut from layer to layer as they are. A layer
that overwrites them then spoils what is recomputed from; and all three lose or refuse gradients where a
tensor without one, a mask say, crosses beside one with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ...cost_models.errors import ExportError
from ...cost_models.runtime import find_runtime
from ...profiler.torch_internals import copy_registries, tree_leaves
from ...profiler.user_model.loaded_model import ModelInput
from .cut_tensors import CutTensor, add_zero_gradients, attach_all, pack_tensor
from .input_form import InputForm
from .stage_shapes import StageShapes, trace_shapes

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
        tensors = _as_tuple(inputs[0])
        if self.packed is not None:
            tensors = _unpack(tensors, self.packed)
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
    takes only a tensor or a tuple of tensors.
    """

    packs: bool
    is_output: bool

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:  # noqa: ARG002
        if self.is_output:
            return _collect_tensors(output)
        packed = attach_all([pack_tensor(tensor) for tensor in _as_tuple(output)], always=True)
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
) -> list[nn.Module]:
    """The layers, those at cuts as twins with a hook where that is needed: all names stay, and parameters.

    `samples`: of a micro-batch. Without an `example`, or where the meta device cannot run the model, it is
    not known what crosses the cuts: then every stage works on clones. `packs_all`: tensors that have
    gradients are packed, too: where stages are processes, they are to be contiguous. `joined_by`:
    the runtime, where it joins the outputs of micro-batches. `recomputes`: it runs backward from every tensor
    of the output.

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
            safe[end - 1].register_forward_hook(StageOutputHook(packed[stage + 1], is_output))
    return safe


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


def _as_tuple(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def _collect_tensors(output: Any) -> Any:
    """`output`, or where that is a dict, say, its tensors: one, or a tuple of several."""
    if isinstance(output, Tensor) or (
        isinstance(output, tuple) and all(isinstance(part, Tensor) for part in output)
    ):
        return output
    tensors = tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return tensors[0] if len(tensors) == 1 else tensors


def _unpack(packed: tuple[Tensor, ...], about: Crossings) -> tuple[Tensor, ...]:
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
