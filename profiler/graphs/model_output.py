"""The tensors that a model returns: their names, and whether dimension 0 holds the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ..torch_internals import name_leaves
from .flow import Flow
from .size_recovery import TensorMeta


@dataclasses.dataclass(frozen=True)
class OutputForm:
    """A tensor of the model's output. `shape` is that of one sample, or the whole where it holds none."""

    name: str
    """Its place in the output, as in Python: `['loss']`; empty where it is the output."""
    shape: tuple[int, ...]
    dtype: str
    has_samples: bool


def output_forms(flow: Flow) -> tuple[OutputForm, ...]:
    """The tensors of the model's output, in order.

    Dimension 0 holds the samples where its size changes with their number. Of a model that takes only one
    batch size, dimension 0 is taken for the samples.
    """
    finish, values = flow.traced.finish, flow.trial.values
    first = flow.trial.first.output
    other: Any = fx.map_arg(flow.output.args[0], lambda node: values[node][1]) if values else None
    pairs = [
        dict(_named_tensors(output if finish is None else finish(output)))
        for output in (first, other)
        if output is not None
    ]
    return tuple(
        _form(name, tensor, pairs[-1].get(name, tensor) if values else None)
        for name, tensor in pairs[0].items()
    )


def _form(name: str, tensor: TensorMeta | Tensor, other: TensorMeta | Tensor | None) -> OutputForm:
    has_samples = bool(tensor.shape) and (other is None or tensor.shape[:1] != other.shape[:1])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return OutputForm(name, tuple(tensor.shape[has_samples:]), dtype, has_samples)


def _named_tensors(value: Any) -> Iterator[tuple[str, TensorMeta | Tensor]]:
    """The tensors in the output of a trial run, which describes all but those in dataclasses."""
    for name, leaf in name_leaves(value)[0]:
        if isinstance(leaf, TensorMeta | Tensor):
            yield name, leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                for inner, tensor in _named_tensors(getattr(leaf, field.name)):
                    yield f"{name}.{field.name}{inner}", tensor
