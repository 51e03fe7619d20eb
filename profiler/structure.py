"""The layers and their bytes on the meta device: exact, at no cost, and without seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ..cost_models.errors import ModelError
from .chain.layers import LayerChain
from .measurement_target import Subject
from .memory.meta_attention import attention_as_on_the_cpu
from .memory.meta_operations import OperationsAsOnTheCpu
from .micro_batch_sizes import left_out_note
from .size_result import SizeResult
from .size_run import SizeRun

_SIZES = (1, 2, 4, 8)


def counted(subject: Subject, sizes: Sequence[int] | None) -> tuple[list[SizeResult], list[str]]:
    """The bytes at `sizes` (None: a few), which are the CPU's, and notes.

    Raises ModelError as a pass through the layers does.
    """
    results: list[SizeResult] = []
    notes = _recurrent(subject.chain)
    with as_on_the_cpu() as missing:
        if missing is not None:
            notes.append(f"attention is counted with its whole matrix, more than the CPU saves: {missing}")
        for size in sizes or _SIZES:
            run = SizeRun(subject, size)
            try:
                run.count(lambda _layer: None)
            except ModelError as error:
                note = left_out_note(size, sizes, error)
                if note is None:
                    raise
                notes.append(note)
                continue
            results.append(SizeResult.of_run(run))
    return results, notes


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
    with attention_as_on_the_cpu() as missing, OperationsAsOnTheCpu():  # type: ignore[no-untyped-call]
        yield missing
