"""What adding gradients takes: each trained parameter once, and the model's own gradients as they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pplan.profiler.chain.layers import Layer
from pplan.profiler.passes.clocks import CpuClock
from pplan.profiler.passes.gradient_adding import time_gradient_adding


def layer(module: nn.Module, parameters: list[nn.Parameter]) -> Layer:
    return Layer("own", "Linear", module, None, tuple(parameters), (), None)


def gradients(module: nn.Module) -> list[object]:
    return [own.grad.tolist() for own in module.parameters() if own.grad is not None]


def test_every_trained_parameter_is_added_to_once(clock: Any, monkeypatch: Any) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad = False
    first(torch.ones(1, 3)).sum().backward()
    kept = gradients(first)
    layers = [layer(first, list(first.parameters())), layer(nn.ReLU(), []), layer(second, [second.bias])]

    def add(own: Tensor, other: Tensor) -> Tensor:
        clock.advance(float(own.numel()), 0.0)
        return own.add_(other)

    monkeypatch.setattr(Tensor, "__iadd__", add)
    assert time_gradient_adding(layers, clock, 3) == [12, 0, 0]
    assert gradients(first) == kept


def test_large_gradients_take_longer_than_small_ones() -> None:
    large, small = nn.Linear(1000, 1000), nn.Linear(2, 2)
    seconds = time_gradient_adding(
        [layer(own, list(own.parameters())) for own in (large, small)], CpuClock(), 3
    )
    assert seconds[0] > seconds[1] > 0
