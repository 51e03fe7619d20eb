"""The plain model's losses, against a loop by hand; samples that differ."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pplan.profiler.user_model import ModelInput
from pplan.runtimes.checking.processes.trained_model import (
    LEARNING_RATE,
    plain_losses,
    vary_samples,
    without_dropout,
)


def loss(output: Tensor, target: object) -> Tensor:
    del target
    return output.square().mean()


def test_plain_losses() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    samples = ModelInput.of(torch.randn(6, 3))
    twin = copy.deepcopy(model)
    twin[2] = nn.Identity()
    wanted = []
    optimizer = torch.optim.SGD(twin.parameters(), lr=LEARNING_RATE)
    for _ in range(3):
        parts = [loss(twin(part), None) for part in samples.tensors[0].chunk(3)]
        total = torch.stack(parts).mean()
        optimizer.zero_grad()
        torch.autograd.backward(total)
        optimizer.step()
        wanted.append(total.item())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found, reason = plain_losses(model, samples, loss, 3, 3)
    assert reason == ""
    assert found == pytest.approx(wanted)
    assert len(set(wanted)) == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Noisy(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given + torch.rand_like(given)


def test_a_model_that_draws() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Noisy())
    found, reason = plain_losses(model, ModelInput.of(torch.randn(4, 3)), loss, 2, 2)
    assert (found, reason) == (None, "the model draws random numbers")


def test_dropout_comes_back() -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.4))
    with without_dropout(model):
        assert [child.p for child in model] == [0.0, 0.0]
    assert [child.p for child in model] == [0.3, 0.4]


def test_samples_differ() -> None:
    """Repeated ones would hide that micro-batches are mixed up."""
    made = vary_samples(ModelInput.of(torch.ones(2, 3)).repeated(6)).tensors[0]
    assert len({float(sample.sum()) for sample in made}) == 6
    words = torch.arange(8).repeat(4, 1)
    table = torch.randn(5, 2)
    ids, same = vary_samples(ModelInput.of((words, table))).tensors
    assert len({tuple(sample.tolist()) for sample in ids}) == 4
    assert all(sorted(sample.tolist()) == list(range(8)) for sample in ids)
    assert same is table
