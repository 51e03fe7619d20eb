"""Equal layers in a row, as the blocks of a transformer: on the meta device one of them is counted for all.

Two layers are equal where they run the same operations on tensors of the same shapes, dtypes and storages,
in modules of the same classes with parameters of the same shapes; a run of all layers forward tells. What a
layer saves and needs besides depends on its neighbours too, so the first and the last of a row are counted by
themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .chain.layers import Layer
from .measurement_target import MeasurementTarget
from .passes.timing import forward_layers
from .torch_internals import TorchDispatchMode, storage_key, tree_leaves
from .user_model.loaded_model import ModelInput

_ENDS = 2
"""So many layers at each end of a row are counted by themselves: those whose neighbour is another layer, and
those whose neighbour's neighbour is."""
_Value = TypeVar("_Value")
_Description = tuple[object, ...]


@dataclass(frozen=True)
class EqualLayers:
    """A model, and for each of its layers the one that is counted for it."""

    subject: MeasurementTarget
    counted: tuple[int, ...]
    """By layer: itself, or an equal one in the same row."""

    @property
    def shortened(self) -> MeasurementTarget:
        """The model with the layers that are counted alone. As each row stays, they fit each other."""
        chain = self.subject.chain
        layers = tuple(chain.layers[index] for index in self._remaining)
        return dataclasses.replace(self.subject, chain=dataclasses.replace(chain, layers=layers))

    def by_layer(self, counts: Sequence[_Value]) -> list[_Value]:
        """Of all layers, from those of the shortened model; what follows these (a loss') is kept."""
        places = {index: place for place, index in enumerate(self._remaining)}
        return [*(counts[places[index]] for index in self.counted), *counts[len(self._remaining) :]]

    @property
    def is_shorter(self) -> bool:
        return len(self._remaining) < len(self.counted)

    @property
    def _remaining(self) -> list[int]:
        return sorted(set(self.counted))


def all_different(subject: MeasurementTarget) -> EqualLayers:
    """Every layer is counted by itself."""
    return EqualLayers(subject, tuple(range(len(subject.chain))))


def find_equal_layers(subject: MeasurementTarget, size: int) -> EqualLayers:
    """Runs the layers forward once, at a micro-batch of `size`, on the meta device.

    Raises ModelError as a pass through the layers does.
    """
    layers = subject.chain.layers
    if len(layers) <= 2 * _ENDS + 1:
        return all_different(subject)
    example = ModelInput.of(subject.loaded.example_input_for(size))
    example = example.to(subject.device, subject.dtype, subject.modes.memory_format).clone()
    recorder = _Recorder(layers)
    with partial(subject.modes.forward_context, subject.device)(), recorder:
        forward_layers(layers, example.layer_input, recorder, lambda _index, _tensors: None)
    counted: list[int] = []
    for _, row in groupby(range(len(layers)), key=lambda index: recorder.descriptions[index]):
        counted += _counted_in_row(list(row))
    return EqualLayers(subject, tuple(counted))


def _counted_in_row(row: list[int]) -> list[int]:
    middle = row[_ENDS:-_ENDS]
    return [*row[:_ENDS], *middle[:1] * len(middle), *row[-_ENDS:]] if middle else row


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Describes each layer by what it runs, as the watcher of a forward."""

    supports_higher_order_operators = True

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.descriptions: list[_Description] = []
        self._layers = layers
        self._lines: list[_Description] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._is_inside = False

    def before(self, index: int, layer_input: Any) -> None:
        self._storages.clear()
        self._is_inside = True
        module = self._layers[index].module
        self._lines = [
            _class_names(module),
            *((own.requires_grad, *self._describe(own)) for own in (*module.parameters(), *module.buffers())),
            tuple(
                (leaf.requires_grad, *self._describe(leaf)) if isinstance(leaf, Tensor) else ()
                for leaf in tree_leaves(layer_input)
            ),
        ]

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._is_inside = False
        self._lines.append(tuple(map(self._describe, tree_leaves(output))))
        self.descriptions.append(tuple(self._lines))
        self._lines = []

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None: ...

    def backward_ends(self) -> None: ...

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_inside:
            leaves = tree_leaves((args, kwargs or {}, result))
            self._lines.append((str(func), torch.is_grad_enabled(), *map(self._describe, leaves)))
        return result

    def _describe(self, leaf: Any) -> _Description:
        """Of a tensor: its layout, and which storage of the layer's it lies in, by order of appearance."""
        if not isinstance(leaf, Tensor):
            return (repr(leaf),)
        storage = leaf.untyped_storage()
        # Kept, so that no other storage takes its identity.
        number, _ = self._storages.setdefault(storage_key(storage), (len(self._storages), storage))
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return (number, storage.nbytes(), str(leaf.dtype), tuple(leaf.shape), strides, leaf.storage_offset())


def _class_names(module: nn.Module) -> _Description:
    return tuple(f"{type(own).__module__}.{type(own).__qualname__}" for own in module.modules())
