"""Shapes of what a layer hands on, at several batch sizes: whether only the batch changes them.

A layer that drops the batch dimension of one sample (`x.squeeze()`), or whose other sizes depend on the
number of samples, computes something else of a micro-batch than of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...cost_models.errors import ModelError
from ..torch_internals import tree_leaves
from ..user_model.flat_output import flat
from .size_recovery import TensorMeta

Shapes = tuple[tuple[int, ...], ...]
"""Shape of each tensor."""
KEEP_BATCH = (
    "Keep dimension 0 for the samples, as in squeeze(1) instead of squeeze(), and let no other size depend "
    "on their number: micro-batches have fewer samples."
)


class ShapeDependsOnBatch(ModelError):
    """A layer hands on another shape, apart from the batch, at one batch size than at others."""


@dataclass(frozen=True)
class BatchFaults:
    """Reasons why micro-batches compute something else than the batch. Empty for no fault."""

    single: str = ""
    """Reason against micro-batches of one sample."""
    any_size: str = ""
    """Reason against any micro-batches, such as samples that are compared with each other."""

    def of(self, samples: int) -> str:
        """Return the fault of micro-batches of this many samples."""
        return self.any_size or (self.single if samples == 1 else "")

    @property
    def note(self) -> str:
        """A warning for whoever makes micro-batches of these layers."""
        if self.any_size:
            return f"micro-batches compute something else than the batch: {self.any_size}"
        return f"give each micro-batch 2 samples or more: {self.single}" if self.single else ""


@dataclass(frozen=True)
class OutputShapes:
    """Shapes of the tensors that a layer hands on, at two or more batch sizes (ascending)."""

    layer: str
    by_size: tuple[tuple[int, Shapes], ...]

    def check(self, size: int, output: Any) -> None:
        """Raise ShapeDependsOnBatch unless `output`, of `size` samples, fits the shapes at other sizes."""
        leaves, _ = flat(output)
        what = self.difference(size, tuple(tuple(one.shape) for one in leaves if isinstance(one, Tensor)))
        if what:
            raise ShapeDependsOnBatch(what, KEEP_BATCH)

    def difference(self, size: int, shapes: Shapes) -> str:
        """Text on the first tensor of which more than one dimension changes with the batch; "" for none.

        Outputs of another number of tensors are not compared.
        """
        others = [own for other, own in self.by_size if other != size and len(own) == len(shapes)]
        largest = next((other for other, own in reversed(self.by_size) if own in others), 0)
        for number, shape in enumerate(shapes):
            every = [shape, *(own[number] for own in others)]
            if _has_one_batch_dimension(every):
                continue
            several = f"tensor {number} of " if len(shapes) > 1 else ""
            return (
                f"layer {self.layer} hands on {several}shape {shape} for {_samples(size)}, and {every[-1]} "
                f"for {_samples(largest)}: more than its batch dimension changes"
            )
        return ""


def shapes_in(value: Any) -> Shapes:
    """Shapes of the tensors that a trial run described."""
    return tuple(leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, TensorMeta))


def _has_one_batch_dimension(shapes: Iterable[tuple[int, ...]]) -> bool:
    first, *others = shapes
    if any(len(shape) != len(first) for shape in others):
        return False
    return sum(len(set(sizes)) > 1 for sizes in zip(first, *others, strict=True)) <= 1


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count > 1)}"
