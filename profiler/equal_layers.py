"""Equal layers in a row, as the blocks of a transformer, or kinds in turn: on the meta device one of each is
counted for all.

Two layers are equal where they run the same operations on tensors of the same shapes, dtypes and storages,
in modules of the same classes with parameters of the same shapes; a run of all layers forward tells. What a
layer saves and needs besides depends on its neighbours too, so the first and the last of a row are counted by
themselves (repeating_rows.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from .chain.layers import Layer
from .chain.operation_record import Description, OperationRecord
from .chain.repeating_rows import disjoint_rows
from .measurement_target import MeasurementTarget
from .passes.timing import forward_layers
from .user_model.loaded_model import ModelInput

_Value = TypeVar("_Value")


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


def find_equal_layers(subject: MeasurementTarget, size: int) -> EqualLayers | None:
    """Runs the layers forward once, at a micro-batch of `size`, on the meta device; None where those around
    layers that cannot be run are not all equal: then they may not be, either.

    Raises ModelError as a pass through the layers does.
    """
    representatives = subject.representatives or tuple(range(len(subject.chain)))
    runnable = sorted(set(representatives))
    layers = [subject.chain.layers[index] for index in runnable]
    example = ModelInput.of(subject.loaded.example_input_for(size))
    example = example.to(subject.device, subject.dtype, subject.modes.memory_format).clone()
    recorder = _Recorder(layers)
    with partial(subject.modes.forward_context, subject.device)(), recorder:
        forward_layers(layers, example.layer_input, recorder, lambda _index, _tensors: None)
    if not _are_rows(representatives, dict(zip(runnable, recorder.descriptions, strict=True))):
        return None
    counted = list(range(len(layers)))
    for row in disjoint_rows(recorder.descriptions):
        for place in row.repeated():
            counted[place] = counted[place - row.period]
    by_layer = {index: runnable[place] for index, place in zip(runnable, counted, strict=True)}
    return EqualLayers(subject, tuple(by_layer[index] for index in representatives))


def _are_rows(representatives: Sequence[int], descriptions: Mapping[int, Description]) -> bool:
    """Whether the period behind layers that cannot be run is as that before them, which stands for them."""
    dropped = [index for index, own in enumerate(representatives) if own != index]
    firsts = [index for index in dropped if index - 1 not in dropped]
    ends = [index + 1 for index in dropped if index + 1 not in dropped]
    for first, end in zip(firsts, ends, strict=True):
        own = representatives[first]
        behind = [descriptions.get(end + place) for place in range(first - own)]
        if behind != [descriptions.get(own + place) for place in range(first - own)]:
            return False
    return True


class _Recorder(OperationRecord):  # type: ignore[no-untyped-call]
    """Describes each layer, as the watcher of a forward."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._layers = layers

    def before(self, index: int, layer_input: Any) -> None:
        self.begin(self._layers[index].module, layer_input)

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self.end(output)

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None: ...

    def backward_ends(self) -> None: ...
