"""A module as a chain of layers, and the cuts between them that must not be made."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from ..cost_models.errors import ModelError
from .copies import copied, copied_to_meta
from .held_earlier import tensors_used
from .layer_sequential import LayerSequential
from .models import check_example, model_name, refuse_lazy, seeded
from .out_of_memory import is_out_of_memory
from .tracing import traced_segments
from .user_code import at_user_line, first_line

_INPUT = -1
"""Where a layer's index stands for whose output it is: the model's input."""
_OTHER_DTYPE = r"dtype|scalar type|Input type .* should be the same|not implemented for '|desired output type"
"""How torch says that a layer takes another dtype."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The smallest thing that may sit alone on a stage: takes one tensor, and returns one (the last: any)."""

    name: str
    kind: str
    module: nn.Module
    """Runs the layer with the model's own modules and parameters."""
    path: str | None
    """Where the model keeps `module`; None where it was put together from several or from functions."""
    parameters: tuple[nn.Parameter, ...]
    """Those that no earlier layer uses."""
    buffers: tuple[Tensor, ...]
    cut_reason: str | None
    """Why no stage may end with this layer."""

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters if parameter.requires_grad)

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, eq=False)
class LayerChain:
    """The layers in the order they run; each feeds the next."""

    model_name: str
    layers: tuple[Layer, ...]
    overwrites_input: bool
    """Whether a layer changes the model's input in place."""

    def __len__(self) -> int:
        return len(self.layers)


class Segment(Protocol):
    """A layer-to-be: it knows its place in a model, and can be bound to the model or to a copy."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def is_composite(self) -> bool:
        """Whether it was put together from several operations."""

    def kind(self, model: nn.Module) -> str: ...
    def bind(self, model: nn.Module) -> nn.Module: ...
    def followed_by(self, other: Self) -> Self: ...


@dataclass(frozen=True)
class ModuleSegment:
    """One element of an nn.Sequential."""

    path: str

    @property
    def name(self) -> str:
        return self.path

    @property
    def is_composite(self) -> bool:
        return False

    def kind(self, model: nn.Module) -> str:
        return type(model.get_submodule(self.path)).__name__

    def bind(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.path)

    def followed_by(self, other: ModuleSegment) -> ModuleSegment:
        raise ModelError(
            f"layer {self.path} hands more than one tensor to layer {other.path}",
            "Put both into one module: between layers of an nn.Sequential one tensor is passed.",
        )


@dataclass(frozen=True)
class Crossing:
    """What a trial run showed of a layer's output."""

    is_tensor: bool
    overwritten_by: int | None
    """The later layer that changes it in place."""


@dataclass(frozen=True)
class Trial:
    """What a trial run showed: of every layer's output, and of the model's input."""

    crossings: tuple[Crossing, ...]
    overwrites_input: bool


def chain_of(model: nn.Module, example_input: Tensor, *, name: str | None = None) -> LayerChain:
    """Takes `model` apart into layers; deterministic, and without changing it.

    An nn.Sequential is its elements, nested ones taken apart too (`features.0`). Everything else is traced
    by torch.fx: every value that alone leads on is the end of a layer, and branches stay inside one. The
    input, shape (batch, ...), is only looked at for its shape and dtype where the model runs on torch's meta
    device. A cut is refused where a later layer overwrites the crossing tensor (its version counter tells,
    through views too) and between the users of a shared parameter or buffer.

    Raises ModelError: not traceable (with the line), more than one input, with hooks of its own, lazy, or
    failing on this input.
    """
    name = name or model_name(model)
    check_example(name, example_input)
    refuse_lazy(name, model)
    segments = list(_segments(model, name))
    if not segments:
        raise ModelError(f"{name} has no layers", "Give a model that computes something.")
    trial = _tried(segments, model, example_input, name)
    segments, crossings = _merged(segments, trial.crossings)
    modules = [segment.bind(model) for segment in segments]
    kinds = [segment.kind(model) for segment in segments]
    names = _names(model, segments)
    reasons = _shared_reasons(model, modules, names)
    for index, crossing in enumerate(crossings[:-1]):
        if crossing.overwritten_by is not None:
            by = crossing.overwritten_by
            reasons[index] = _overwritten(names[by], kinds[by], segments[by].is_composite, by == index + 1)
    firsts = _first_users(modules)
    layers = tuple(
        Layer(names[i], kinds[i], modules[i], segments[i].path, *firsts[i], reasons[i])
        for i in range(len(segments))
    )
    return LayerChain(name, layers, trial.overwrites_input)


def layer_failure(name: str, kind: str, given: object, error: BaseException) -> ModelError:
    """The error that says which layer failed on what."""
    shape = "x".join(str(side) for side in given.shape) if isinstance(given, Tensor) else type(given).__name__
    dtype = f" ({str(given.dtype).removeprefix('torch.')})" if isinstance(given, Tensor) else ""
    return ModelError(
        f"layer {name} ({kind}) failed on an input of shape {shape}{dtype}, "
        f"batch first: {first_line(error)}{at_user_line(error)}",
        _hint(str(error)),
    )


def _hint(said: str) -> str:
    """What may mend a layer's failure, by torch's words."""
    if "more than 1 value per channel" in said:
        return "Name micro-batch sizes of 2 or more, as in --micro-batch-sizes 2,4,8."
    if re.search(_OTHER_DTYPE, said):
        return (
            "Give an input of the dtype that the layer takes (a factory may return one with its module), "
            "or name another --dtype."
        )
    return "Give the shape of one sample that the model takes, without the batch, as in --input 3x224x224."


def _segments(model: nn.Module, name: str) -> Sequence[Segment]:
    if _has_hooks(model):
        raise ModelError(
            f"{name} has hooks of its own, which running its layers one by one would leave out",
            "Remove the hook, or wrap the model: nn.Sequential(model) keeps it, as one layer.",
        )
    if is_plain_sequential(model):
        return [ModuleSegment(path) for path in _elements(model, "")]
    return traced_segments(model, name)


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether running the elements one after another is all that the module does."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__call__ is nn.Module.__call__
        and not _has_hooks(module)
    )


def _has_hooks(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def _elements(module: nn.Module, prefix: str) -> list[str]:
    paths: list[str] = []
    for key, child in module._modules.items():
        if child is not None:
            path = prefix + key
            paths += _elements(child, path + ".") if is_plain_sequential(child) else [path]
    return paths


def _tried(segments: Sequence[Segment], model: nn.Module, example_input: Tensor, name: str) -> Trial:
    """Runs the layers on the meta device, at no cost, or where that fails for real, on a copy."""
    inputs = [example_input]
    if len(example_input) == 1:
        # Batch norm in training refuses one value a channel, whatever the model.
        inputs.append(example_input.repeat_interleave(2, dim=0))
    failures: list[Exception] = []
    for place, given in itertools.product((_on_meta, _for_real), inputs):
        try:
            with torch.no_grad(), seeded(0):
                return _run_through(segments, *place(model, name, given))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failures.append(error)
    raise failures[len(inputs)]


def _on_meta(model: nn.Module, name: str, example_input: Tensor) -> tuple[nn.Module, Tensor]:
    return copied_to_meta(model, name), torch.empty_like(example_input, device="meta")


def _for_real(model: nn.Module, name: str, example_input: Tensor) -> tuple[nn.Module, Tensor]:
    device = next((tensor.device for tensor in model.parameters()), example_input.device)
    return copied(model, name), example_input.detach().to(device, copy=True)


def _run_through(segments: Sequence[Segment], model: nn.Module, value: Tensor) -> Trial:
    overwritten: dict[int, int] = {}
    watched = {_INPUT: (value, value._version)}
    tensors: list[bool] = []
    current: object = value
    for index, segment in enumerate(segments):
        module = segment.bind(model)
        try:
            current = module(current)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise layer_failure(segment.name, segment.kind(model), current, error) from error
        for earlier in [i for i, (tensor, version) in watched.items() if tensor._version != version]:
            overwritten[earlier] = index
            del watched[earlier]
        tensors.append(isinstance(current, Tensor))
        if isinstance(current, Tensor):
            watched[index] = (current, current._version)
    crossings = tuple(Crossing(is_one, overwritten.get(i)) for i, is_one in enumerate(tensors))
    return Trial(crossings, _INPUT in overwritten)


def _merged(
    segments: Sequence[Segment], crossings: Sequence[Crossing]
) -> tuple[list[Segment], list[Crossing]]:
    """Joins what is connected by something other than one tensor."""
    joined: list[Segment] = []
    kept: list[Crossing] = []
    place: dict[int, int] = {}
    open_end = False
    for index, (segment, crossing) in enumerate(zip(segments, crossings, strict=True)):
        if open_end:
            joined[-1], kept[-1] = joined[-1].followed_by(segment), crossing
        else:
            joined.append(segment)
            kept.append(crossing)
        place[index] = len(joined) - 1
        open_end = not crossing.is_tensor
    return joined, [
        Crossing(c.is_tensor, None if c.overwritten_by is None else place[c.overwritten_by]) for c in kept
    ]


def _names(model: nn.Module, segments: Sequence[Segment]) -> list[str]:
    """An nn.Sequential that was made of a model's layers keeps their names: it is the same chain."""
    kept = model.layer_names if isinstance(model, LayerSequential) else ()
    return list(kept) if len(kept) == len(segments) else _unique([segment.name for segment in segments])


def _unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    unique: list[str] = []
    for name in names:
        candidate, count = name, 0
        while candidate in taken or (count and candidate in names):
            count += 1
            candidate = f"{name}_{count}"
        taken.add(candidate)
        unique.append(candidate)
    return unique


def _overwritten(name: str, kind: str, is_composite: bool, is_next: bool) -> str:
    if is_composite:
        # Its kind is that of the module which gives it its name, and need not be what works in place.
        return f"an in-place operation in {name} {'follows' if is_next else 'overwrites it'}"
    return f"in-place {kind} follows" if is_next else f"in-place {kind} {name} overwrites it"


def _shared_reasons(model: nn.Module, modules: Sequence[nn.Module], names: Sequence[str]) -> list[str | None]:
    """No cut between the first and the last user of a parameter or a buffer."""
    known: dict[int, str] = {}
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        known.setdefault(id(tensor), path)
    users: dict[int, list[int]] = {}
    for index, module in enumerate(modules):
        for tensor in tensors_used(module):
            users.setdefault(id(tensor), []).append(index)
    reasons: list[str | None] = [None] * len(modules)
    for key, layers in users.items():
        for index in range(layers[0], layers[-1]):
            word = known.get(key, "a tensor")
            reasons[index] = reasons[index] or f"{names[layers[0]]} and {names[layers[-1]]} share {word}"
    return reasons


def _first_users(
    modules: Sequence[nn.Module],
) -> list[tuple[tuple[nn.Parameter, ...], tuple[Tensor, ...]]]:
    seen: set[int] = set()

    def fresh(tensor: Tensor) -> bool:
        return id(tensor) not in seen and not seen.add(id(tensor))  # type: ignore[func-returns-value]

    return [
        (tuple(p for p in module.parameters() if fresh(p)), tuple(b for b in module.buffers() if fresh(b)))
        for module in modules
    ]
