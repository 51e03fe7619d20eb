"""A stage measured alone: what it leaves as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pplan.runtimes.checking.processes.adapters import kept_buffers, measure_isolated, stage_inputs


class Smoothed(nn.Module):
    """Updates a buffer in forward, another by a new tensor, and computes with both."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(given.detach().mean(0))
            self.count = self.count + 1
        made: Tensor = self.linear(given - self.mean) / self.count
        return made


def buffers(module: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in module.named_buffers()}


@pytest.fixture
def layers() -> nn.Sequential:
    return nn.Sequential(Smoothed(), nn.BatchNorm1d(4), Smoothed())


@pytest.mark.parametrize("splits", [False, True])
def test_measuring_counts_in_no_statistics(layers: nn.Sequential, splits: bool) -> None:
    before, given = buffers(layers), torch.ones(3, 4)
    plain = copy.deepcopy(layers)(given)
    seconds = measure_isolated(
        layers, [given], torch.device("cpu"), loss=None, is_first=False, splits=splits, repeats=1
    )
    assert seconds.forward > 0
    assert buffers(layers) == before
    assert torch.equal(layers(given), plain)


def test_what_a_stage_is_sent_counts_in_no_statistics(layers: nn.Sequential) -> None:
    before, given = buffers(layers), torch.ones(3, 4)
    (sent,) = stage_inputs(layers, 2, (given,))
    assert buffers(layers) == before
    assert torch.equal(sent, copy.deepcopy(layers)[:2](given).detach())


def test_buffers_are_kept_through_errors_and_as_the_same_tensors(layers: nn.Sequential) -> None:
    own = dict(layers.named_buffers())

    def fail() -> None:
        with kept_buffers(layers):
            layers(torch.ones(3, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(buffer is own[name] for name, buffer in layers.named_buffers())
    assert buffers(layers)["0.count"] == [0.0]
