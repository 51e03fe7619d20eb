"""What adding gradients takes: each trained parameter once, and the model's own gradients as they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pplan.profiler.chain.layers import Layer
from pplan.profiler.passes import gradient_adding
from pplan.profiler.passes.clocks import CpuClock
from pplan.profiler.passes.gradient_adding import time_gradient_adding


def layer(module: nn.Module, parameters: list[nn.Parameter]) -> Layer:
    return Layer("own", "Linear", module, None, tuple(parameters), (), None)


def test_every_trained_parameter_is_added_to_once(clock: Any, monkeypatch: Any) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(requires_grad=False)
    first(torch.ones(1, 3)).sum().backward()
    kept = [own.grad.clone() for own in first.parameters() if own.grad is not None]
    layers = [layer(first, list(first.parameters())), layer(nn.ReLU(), []), layer(second, [second.bias])]
    own_zeros = torch.zeros_like

    class Slow(torch.Tensor):
        """Adding takes a second for each number."""

        def __iadd__(self, other: Tensor) -> Tensor:
            clock.advance(float(self.numel()), 0.0)
            return self.add_(other)

    def zeros(like: Tensor, **options: Any) -> Tensor:
        return own_zeros(like, **options).as_subclass(Slow)

    monkeypatch.setattr(gradient_adding.torch, "zeros_like", zeros)
    assert time_gradient_adding(layers, clock, 3) == [12, 0, 0]
    assert [own.grad.tolist() for own in first.parameters()] == [own.tolist() for own in kept]


def test_large_gradients_take_longer_than_small_ones() -> None:
    large, small = nn.Linear(1000, 1000), nn.Linear(2, 2)
    seconds = time_gradient_adding(
        [layer(own, list(own.parameters())) for own in (large, small)], CpuClock(), 3
    )
    assert seconds[0] > seconds[1] > 0
