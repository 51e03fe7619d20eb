"""The loss that ends a training step: by name, with targets of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..cost_models.errors import ModelError, UsageError
from .user_model import at_user_line, failing_as, first_line, flat, import_named, normal_like, whole_numbers

LOSSES = ("cross-entropy", "mse", "none")
_TARGETS_SEED = 1


class Loss:
    """A scalar made of the model's output. `name`: what `load_loss` was given."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        self.name = name
        self.function = function

    def prepare(self, output: Any) -> None:
        """Makes what the loss needs besides the output, once for each shape: not part of its time."""

    def without_targets(self) -> Loss:
        """The same, which holds no targets yet: whoever counts bytes has them made while counting."""
        return self

    def of(self, output: Any) -> Tensor:
        """The loss, a scalar that needs a gradient. Raises ModelError."""

        def failed(error: Exception) -> ModelError:
            reason = f"{first_line(error)}{at_user_line(error)}"
            return ModelError(
                f"the loss {self.name} failed on the model's output: {reason}",
                "Name another with `loss`, or none.",
            )

        with failing_as(failed, through=ModelError):
            loss = self.function(output)
        return _checked(loss, self.name)


class TargetLoss(Loss):
    """The sum of a loss against random targets, over all floating tensors of the output that need a gradient.

    Auxiliary outputs are among them. A tensor without dimensions is a loss that the model computed itself,
    and is added as it is. Targets are drawn from `seed` once for each shape.
    """

    def __init__(
        self,
        name: str,
        target_for: Callable[[Tensor, int], Tensor],
        against: Callable[[Tensor, Tensor], Tensor],
        seed: int,
    ) -> None:
        super().__init__(name, self._summed)
        self._target_for, self._against, self._seed = target_for, against, seed
        self._targets: dict[tuple[Any, ...], Tensor] = {}

    def without_targets(self) -> TargetLoss:
        return TargetLoss(self.name, self._target_for, self._against, self._seed)

    def prepare(self, output: Any) -> None:
        for index, tensor in enumerate(_trained(output)):
            self._target(index, tensor)

    def _summed(self, output: Any) -> Tensor:
        parts = [self._one(index, tensor) for index, tensor in enumerate(_trained(output))]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _one(self, index: int, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 0 else self._against(tensor, self._target(index, tensor))

    def _target(self, index: int, tensor: Tensor) -> Tensor:
        key = (index, tuple(tensor.shape), tensor.dtype, tensor.device)
        if key not in self._targets:
            self._targets[key] = self._target_for(tensor, self._seed + _TARGETS_SEED + index)
        return self._targets[key]


def load_loss(name: str, seed: int = 0) -> Loss | None:
    """`cross-entropy`, `mse`, `package.module:function`, or `none` (None).

    Cross-entropy takes the last dimension of an output of shape (batch, tokens, classes) for the classes,
    else dimension 1. A function of the user's is called with the model's output, and returns a scalar.

    Raises UsageError for another name, ModelError for a function that cannot be imported.
    """
    if name == "none":
        return None
    if name == "cross-entropy":
        return TargetLoss(name, _classes_for, _cross_entropy, seed)
    if name == "mse":
        return TargetLoss(name, _values_for, functional.mse_loss, seed)
    if ":" not in name:
        raise UsageError(
            f"loss {name!r} is not known", f"Use one of {', '.join(LOSSES)}, or package.module:function."
        )
    role = "a function that takes the model's output and returns a scalar"
    return Loss(name, import_function("loss", name, role))


def _trained(output: Any) -> list[Tensor]:
    """Raises ModelError where there is none."""
    tensors = [
        leaf
        for leaf in flat(output)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not tensors:
        raise ModelError(
            "the model's output needs no gradient: nothing would be trained",
            "Leave requires_grad on for some parameter, and compute the output outside torch.no_grad().",
        )
    return tensors


def _class_dimension(output: Tensor) -> int:
    if output.dim() == 1:
        raise ModelError(
            f"cross-entropy needs a dimension of classes; the model's output has shape {tuple(output.shape)}",
            "Name another: loss='mse', loss='package.module:function', or none.",
        )
    return 2 if output.dim() == 3 else 1


def _classes_for(output: Tensor, seed: int) -> Tensor:
    if output.dim() == 0:
        return torch.zeros((), device=output.device)
    shape = list(output.shape)
    classes = shape.pop(_class_dimension(output))
    return whole_numbers(shape, classes, output.device, seed)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    if _class_dimension(output) == 2:
        # Classes must lie side by side: with them in the middle CUDA takes a hundred times as long.
        output, target = output.flatten(0, 1), target.flatten()
    return functional.cross_entropy(output, target)


def _values_for(output: Tensor, seed: int) -> Tensor:
    return normal_like(output, seed)


def _checked(loss: Any, name: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise ModelError(
            f"the loss {name} returned a value of {form}",
            "It is called with the model's output and returns a scalar.",
        )
    if not loss.requires_grad:
        raise ModelError(
            f"the loss {name} needs no gradient: nothing would be trained",
            "Compute it from the model's output with torch's own operations, outside torch.no_grad().",
        )
    return loss


def import_function(field: str, name: str, role: str) -> Callable[..., Any]:
    """The function `package.module:function` that `field` names; `role`: what it must be, in words. The
    working directory is put on the import path. Raises ModelError."""
    target = import_named(f"{field} {name!r}", name)
    if not callable(target) or isinstance(target, type):
        raise ModelError(
            f"{field} {name!r} is no function, but of type {type(target).__name__}",
            f"Name {role}.",
        )
    return target  # type: ignore[no-any-return]
