"""The layers and their bytes on the meta device: exact, at no cost, and without seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ..cost_models.errors import ModelError
from .chain.layers import Layer, LayerChain
from .counting_operations import operation_counter
from .equal_layers import EqualLayers
from .memory.meta_kernels import Kernels, attention_as_on_the_cpu, kernels_as_on_a_gpu
from .memory.meta_operations import ON_A_GPU, MetaOperations
from .profile_records import Unmeasured
from .size_result import SizeResult
from .size_run import SizeRun
from .size_sweep import Progress, is_left_out, refused_size

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
            results.append(SizeResult.of_run(run).for_layers(blocks))
    return results, refused, notes


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
