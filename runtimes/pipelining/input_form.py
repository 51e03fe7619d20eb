"""A process's global batch as torch.distributed.pipelining cuts it: along dimension 0 of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cost_models.errors import UsageError
from ...profiler.torch_internals import name_leaves, tree_unflatten
from ...profiler.user_model.loaded_model import ModelInput

CONSTANTS = (NoneType, bool, int, float, str)
"""Types of arguments that hold no samples."""


@dataclass(frozen=True)
class InputForm:
    """The tensors of the model's input in order, by their names in the arguments.

    `shared` tells which of them belong to all samples and are not cut. `constants` are the arguments that
    are no tensors: the layers were traced with them.
    """

    names: tuple[str, ...]
    shared: tuple[bool, ...]
    constants: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, example: ModelInput) -> InputForm:
        """The form of an example."""
        leaves = _arguments(example)
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        shared = tuple(own.dim() == 0 or len(own) != example.batch for own in tensors.values())
        constants = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, CONSTANTS)}
        return cls(tuple(tensors), shared, constants)

    def repeat_shared(self, batch: object, samples: int, micro_batches: int) -> tuple[Tensor, ...]:
        """The tensors of a global batch; those that are shared once for every micro-batch.

        Raises UsageError where it has another number of samples or other arguments than the example input.
        """
        leaves = _arguments(ModelInput.of(batch, "the global batch"))
        self._check_arguments(leaves)
        tensors = [leaves[name] for name in self.names]
        for name, tensor, shared in zip(self.names, tensors, self.shared, strict=True):
            if not shared:
                what = "the input" if len(self.names) == 1 else f"the input's {name}"
                Samples.of_process(samples).check(what, tensor)
        return tuple(
            torch.stack([tensor] * micro_batches) if shared else tensor.contiguous()
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def _check_arguments(self, leaves: Mapping[str, object]) -> None:
        """Raises UsageError where these are not the arguments of the example input."""
        hint = "Give the arguments of the model's forward as in the example input."
        for name in self.names:
            if name not in leaves:
                raise UsageError(f"the input lacks {name}, which the example input has", hint)
            if not isinstance(leaves[name], Tensor):
                kind = type(leaves[name]).__name__
                raise UsageError(
                    f"the input's {name} is of type {kind}, in the example input it is a tensor", hint
                )
        for name in sorted(leaves.keys() - set(self.names)):
            leaf, traced = leaves[name], self.constants.get(name)
            if isinstance(leaf, Tensor) or (isinstance(leaf, CONSTANTS) and leaf != traced):
                what = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
                other = repr(traced) if name in self.constants else "not there"
                raise UsageError(f"the input's {name} is {what}, in the example input it is {other}", hint)

    def micro_batch(self, example: ModelInput, samples: int) -> tuple[Tensor, ...]:
        """One of `samples` samples as the first stage is handed it."""
        tensors = example.repeated(samples).tensors
        return tuple(
            tensor.contiguous().unsqueeze(0) if shared else tensor.contiguous()
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def drop_repeats(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The model's input, from what the first stage is handed."""
        return tuple(
            tensor.squeeze(0) if shared else tensor
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def shared_names(self, names: Collection[str]) -> set[str]:
        """The names of shared tensors, where these are the arguments of the example input; else none."""
        if not set(self.names) <= set(names):
            return set()
        return {name for name, shared in zip(self.names, self.shared, strict=True) if shared}


def _arguments(inputs: ModelInput) -> dict[str, Any]:
    """The leaves of the arguments by name: `[1]` is positional, `['mask']` a keyword argument."""
    return dict([*name_leaves(inputs.args)[0], *name_leaves(inputs.kwargs)[0]])


class Samples(NamedTuple):
    """The length that dimension 0 of a batch must have, and what to say where it has another."""

    number: int
    reason: str
    hint: str

    @classmethod
    def of_plan(cls, count: int) -> Samples:
        """The global batch."""
        return cls(count, f"the plan's holds {count}", f"Give the DataLoader batch_size={count}.")

    @classmethod
    def of_process(cls, count: int) -> Samples:
        """A replica's part of the global batch."""
        hint = "Give each process its replica's samples of the global batch: `share` picks them."
        return cls(count, f"a step of this process takes {count}", hint)

    def check(self, what: str, tensor: Tensor) -> None:
        """Raises UsageError where `tensor`, called `what`, holds another number of samples."""
        count = 0 if tensor.dim() == 0 else len(tensor)
        if count != self.number:
            smaller = "Leave out a smaller last batch: give the DataLoader drop_last=True."
            raise UsageError(
                f"{what} holds {count} samples, {self.reason}", smaller if count < self.number else self.hint
            )


def map_samples(
    change: Callable[[Tensor], Tensor],
    value: Any,
    what: str,
    samples: Samples,
    *,
    form: InputForm | None = None,
    constants: tuple[type, ...] = (NoneType,),
) -> Any:
    """Apply `change` to the tensors of samples in a tensor, tuple, list, dict, or any nesting of these.

    Args:
        change: Called with each tensor of samples.
        value: The structure. It is not changed.
        what: Its name in messages.
        samples: How many of them every tensor must hold.
        form: The model's input. Where `value` has its arguments, tensors that all samples share stay.
        constants: Types of other leaves, which stay as they are.

    Raises:
        UsageError: A leaf is of another type, there is no tensor, or one holds another number of samples.
    """
    leaves, spec = name_leaves(dict(value) if isinstance(value, Mapping) else value)
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        raise UsageError(f"{what} is of type {type(value).__name__} and holds no tensor", _SUPPORTED)
    shared = set() if form is None else form.shared_names([name for name, _ in leaves])
    changed: list[object] = []
    for name, leaf in leaves:
        label = f"{what}'s {name}" if name else what
        if not isinstance(leaf, (Tensor, *constants)):
            raise UsageError(f"{label} is of type {type(leaf).__name__}, which is not supported", _SUPPORTED)
        if isinstance(leaf, Tensor) and name not in shared:
            samples.check(label, leaf)
            changed.append(change(leaf))
        else:
            changed.append(leaf)
    return tree_unflatten(changed, spec)


_SUPPORTED = (
    "Give a tensor, or tuples, lists and dicts of tensors, nested as you like; dimension 0 is the batch."
)
