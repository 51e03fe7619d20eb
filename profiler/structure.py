"""The layers and their bytes on the meta device, one of several equal layers counted for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..cost_models.errors import ModelError
from .layer import Layer, LayerChain
from .measurement_target import MeasurementTarget
from .meta_device import ON_A_GPU, Kernels, MetaOperations, attention_as_on_the_cpu, kernels_as_on_a_gpu
from .operations import LayerOperations, operation_counter
from .passes import IdleWatcher, OutputGradients, forward_layers, run_layers
from .profile_file import Unmeasured
from .repeated_layers import Description, OperationRecord, disjoint_rows
from .size_run import SizeResult, SizeRun
from .size_sweep import Progress, is_left_out, refused_size
from .user_model import ModelInput

# Equal layers in a row, as the blocks of a transformer, or kinds in turn: on the meta device one of each is
# counted for all.
#
# Two layers are equal where they run the same operations on tensors of the same shapes, dtypes and storages,
# in modules of the same classes with parameters of the same shapes; a run of all layers forward tells. What a
# layer saves and needs besides depends on its neighbours too, so the first and the last of a row are counted
# by
# themselves (see `RepeatingRow`).

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


class _Recorder(OperationRecord, IdleWatcher):  # type: ignore[no-untyped-call]
    """Describes each layer, as the watcher of a forward."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._layers = layers

    def before(self, index: int, layer_input: Any) -> None:
        self.begin(self._layers[index].module, layer_input)

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self.end(output)


# The layers and their bytes on the meta device: exact, at no cost, and without seconds.

SIZES = (1, 2, 4, 8)
_FACTOR, _LARGEST, _STATES = 4, 128, 4
"""From size to size of an estimate beyond those, the largest, copies of the weights that training holds."""


def count_structure(
    blocks: EqualLayers,
    sizes: Sequence[int] | None,
    kernels: Kernels | None = None,
    progress: Callable[[Progress], None] | None = None,
    memory_bytes: int | None = None,
    *,
    operations: bool = False,
) -> tuple[list[SizeResult], list[Unmeasured], list[str]]:
    """The bytes at `sizes` (None: a few), as `kernels` save them (None: the CPU's), the sizes that the model
    does not take, and notes.

    `memory_bytes` of a device: without `sizes`, 32 and 128 too where it can hold the training of the whole
    model with them. `operations`: are counted too. Raises ModelError as a pass through the layers does.
    """
    subject = blocks.shortened
    results: list[SizeResult] = []
    refused: list[Unmeasured] = []
    notes = _recurrent(blocks.subject.chain)
    with (kernels or as_on_the_cpu)() as missing:
        if missing is not None:
            notes.append(f"attention is counted with its whole matrix, which is more: {missing}")
        for number, size in enumerate(sizes or _sizes(blocks, results, memory_bytes)):

            def tell(layer: Layer, size: int = size, number: int = number) -> None:
                if progress is not None:
                    share = number / len(sizes or SIZES)
                    progress(Progress("counting bytes", size, layer.name, min(share, 1.0)))

            counter = operation_counter(subject) if operations else None
            run = SizeRun(subject, size, operations=counter)
            try:
                run.count(tell)
            except ModelError as error:
                if not is_left_out(size, sizes, error) or (sizes and size == sizes[-1] and not results):
                    raise
                refused.append(refused_size(size, error))
                continue
            results.append(_for_all_layers(SizeResult.of_run(run), blocks))
    return results, refused, notes


def _for_all_layers(result: SizeResult, blocks: EqualLayers) -> SizeResult:
    """The result of all layers, from those that were counted for others too; without a step's peak."""
    names = (
        "saved_bytes",
        "saved_input_bytes",
        "output_bytes",
        "forward_workspace_bytes",
        "backward_workspace_bytes",
        "pending_gradient_bytes",
        "operations",
    )
    counts = {name: getattr(result, name) for name in names}
    by_layer: dict[str, Any] = {name: blocks.by_layer(own) for name, own in counts.items() if own}
    return replace(result, predicted_peak_bytes=None, **by_layer)


def count_operations(blocks: EqualLayers, size: int, kernels: Kernels) -> list[LayerOperations]:
    """The operations of every layer at a micro-batch of `size`, and last those of the loss, if there is one.

    The model lies on the meta device, and its gradients exist. `kernels`: of which device.
    """
    subject = blocks.shortened
    layers, context = subject.chain.layers, partial(subject.modes.forward_context, subject.device)
    example = ModelInput.of(subject.loaded.example_input_for(size))
    example = example.to(subject.device, subject.dtype, subject.modes.memory_format).clone()
    with kernels(), operation_counter(subject) as counter:
        gradients = OutputGradients(subject.seed)
        run_layers(layers, example.layer_input, gradients, counter, loss=subject.loss, context=context)
    return blocks.by_layer(counter.layers)


def _sizes(blocks: EqualLayers, results: list[SizeResult], memory_bytes: int | None) -> Iterator[int]:
    """The sizes to count where none is named; those past `SIZES` as the `results` so far let them fit."""
    yield from SIZES
    if memory_bytes is None:
        return
    states = _STATES * sum(layer.parameter_bytes for layer in blocks.subject.chain.layers)
    while results and results[-1].size < _LARGEST:
        if states + _FACTOR * sum(results[-1].saved_bytes) > memory_bytes:
            return
        yield _FACTOR * results[-1].size


def _recurrent(chain: LayerChain) -> list[str]:
    """A note on what cannot be counted: how much the CPU's own kernels keep, they tell when they run."""
    names = [
        layer.name
        for layer in chain.layers
        if any(isinstance(module, nn.RNNBase) for module in layer.module.modules())
    ]
    if not names:
        return []
    return [f"{', '.join(names)}: on a real device recurrent layers save other bytes than are counted here"]


@contextmanager
def as_on_the_cpu() -> Iterator[str | None]:
    """While entered, passes on the meta device save for backward what they save on the CPU.

    Yields None, or why attention is left out of that.
    """
    with attention_as_on_the_cpu() as missing, MetaOperations():
        yield missing


@contextmanager
def as_on_a_gpu(*, flash: bool) -> Iterator[str | None]:
    """As `as_on_the_cpu`, for a GPU; `flash` as in `kernels_as_on_a_gpu`."""
    with kernels_as_on_a_gpu(flash=flash) as missing, MetaOperations(ON_A_GPU):
        yield missing
