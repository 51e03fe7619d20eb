"""Sizes that are asked for before a cut and used behind it: right at batch sizes never seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.profiler.layers import sequential

SIZES: dict[str, Callable[[Tensor], Any]] = {
    "size": lambda x: x.size(0),
    "sum": lambda x: x.shape[0] * 4 + 1,
    "difference": lambda x: x.shape[0] * 3 - 2,
    "elements": lambda x: x.numel(),
    "root": lambda x: x.shape[1] ** -0.5,
    "quotient": lambda x: 1.0 / x.shape[0],
    "product": lambda x: (x.shape[0] - 1) * x.shape[0] // 2,
    "part": lambda x: x.shape[-2:].numel(),
    "dimensions": lambda x: x.dim(),
    "comparison": lambda x: x.shape[0] > 2,
    "device": lambda x: torch.full((1,), 3.0, device=x.device),
    "dtype": lambda x: torch.full((1,), 3.0, dtype=x.dtype),
}
CROSSING: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x.relu(),
    "flat": lambda x: x.relu().flatten(),
    "longer": lambda x: torch.cat([x, x, x[:1]]).relu(),
    "without": lambda x: x.relu().sum(0),
}
"""What crosses the cut: its sizes are others than those asked for, and in the last is none of the batch."""


class Asks(nn.Module):
    def __init__(self, size: str, crossing: str) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(()))
        self.size, self.crossing = SIZES[size], CROSSING[crossing]

    def forward(self, x: Tensor) -> Tensor:
        size = self.size(x)
        hidden = self.crossing(self.first(x))
        output: Tensor = hidden.sin() * self.weight * size
        return output


@pytest.mark.parametrize("crossing", CROSSING)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_found_again(size: str, crossing: str) -> None:
    model = Asks(size, crossing)
    layers = sequential(model, torch.randn(2, 4), granularity="fine", verify=False)
    assert len(layers) > 1
    for batch in (1, 2, 5, 11):
        x = torch.randn(batch, 4)
        assert torch.equal(layers(x), model(x))


class Converts(Asks):
    """Back to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        hidden = self.first(x).relu()
        output: Tensor = (hidden.sin() * self.weight).to(kind)
        return output


def test_dtypes_are_those_of_the_tensors_at_hand() -> None:
    model = Converts("size", "whole")
    layers = sequential(model, torch.randn(2, 4), granularity="fine", verify=False).double()
    assert layers(torch.randn(3, 4, dtype=torch.float64)).dtype is torch.float64


class Holds(Asks):
    """Takes a number out of a tensor, which no size tells."""

    def forward(self, x: Tensor) -> Tensor:
        number = (x * 0).sum().item()
        hidden = self.first(x.clamp(-1, 1)).relu()
        output: Tensor = hidden.sin() * self.weight + number
        return output


def test_what_tensors_hold_is_no_constant() -> None:
    """The number is 0 in every trial, and not for an input that has no end."""
    model = Holds("size", "whole")
    layers = sequential(model, torch.ones(2, 4), granularity="fine", verify=False)
    assert layers(torch.full((3, 4), torch.inf)).isnan().all()
    assert torch.equal(layers(torch.ones(3, 4)), model(torch.ones(3, 4)))
