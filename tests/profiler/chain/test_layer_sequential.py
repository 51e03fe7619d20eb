"""Layers that stay in the mode they were traced in say so when it is changed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pplan.profiler.sequential import sequential


class Drops(nn.Module):
    def __init__(self, functional_too: bool) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.functional_too = functional_too

    def forward(self, given: Tensor) -> Tensor:
        value: Tensor = self.drop(self.norm(self.first(given)))
        return functional.dropout(value, 0.5, self.training) if self.functional_too else value


def test_functional_dropout_warns() -> None:
    layers = sequential(Drops(True), torch.randn(2, 4))
    layers.train()
    with pytest.warns(UserWarning, match="dropout.* stay in training mode") as caught:
        layers.eval()
    assert len(caught) == 1
    evaluating = sequential(Drops(True).eval(), torch.randn(2, 4))
    with pytest.warns(UserWarning, match="stay in evaluation mode"):
        evaluating.train()


def test_modules_follow_the_mode_without_a_word() -> None:
    model, given = Drops(False), torch.randn(2, 4)
    layers = sequential(model, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.eval()
        assert torch.equal(layers(given), model.eval()(given))
        layers.train()
