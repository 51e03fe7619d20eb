"""A comparison of two trainings that shares nothing with the one under test."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pplan.profiler.user_model import ModelInput

Run = Callable[[ModelInput], Any]


def leaves(output: Any) -> list[Any]:
    """Tensors and plain values; of dataclasses, those of their fields."""
    found: list[Any] = []
    for leaf in tree_leaves(output):
        is_object = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        found += leaves(list(vars(leaf).values())) if is_object else [leaf]
    return found


def trained(model: nn.Module, run: Run, example: ModelInput) -> Iterator[list[Any]]:
    """Outputs, gradients, buffers and the next random numbers of passes of several sizes, some twice.

    After each the weights change by their gradients, as in training.
    """
    for seed, batch in enumerate((3, 3, 4, 5, 3)):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats the stack, too
        random.seed(seed)
        np.random.seed(seed)
        output = leaves(run(example.repeated(batch).clone()))
        tensors = [leaf for leaf in output if isinstance(leaf, Tensor)]
        losses = [tensor.square().sum() for tensor in tensors if tensor.requires_grad]
        if losses:
            torch.autograd.backward([torch.stack(losses).sum()])
        output = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in output]
        gradients = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.to_dense(), alpha=0.01)
        parameters = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
        yield [*output, *gradients, *parameters, torch.rand(1), random.random(), np.random.rand()]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        close = torch.allclose(found, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
        return found.dtype == expected.dtype and found.shape == expected.shape and close
    return type(found) is type(expected) and bool(found == expected)


@pytest.fixture(scope="session")
def assert_same_training() -> Callable[[nn.Module, nn.Module, nn.Module, object], None]:
    """`layers`, made of `model`, against `twin`, a copy that was never touched, on inputs like `example`."""

    def check(model: nn.Module, layers: nn.Module, twin: nn.Module, example: object) -> None:
        given = ModelInput.of(example)
        expected = trained(twin, lambda some: some.call(twin), given)
        found = trained(model, lambda some: layers(some.layer_input), given)
        for step, other in zip(expected, found, strict=True):
            assert [same(a, b) for a, b in zip(other, step, strict=True)] == [True] * len(step)

    return check
