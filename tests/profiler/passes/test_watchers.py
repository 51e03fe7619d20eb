"""Several watchers hear everything, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pplan.profiler.chain.layers import chain_of
from pplan.profiler.passes.timing import OutputGradients, run_layers
from pplan.profiler.passes.watchers import Together


class Listens:
    def __init__(self, name: str, heard: list[Any]) -> None:
        self.name, self.heard = name, heard

    def before(self, index: int, given: Any) -> None:
        self.heard.append((self.name, "before", index, tuple(given.shape)))

    def after(self, index: int, output: Any) -> None:
        self.heard.append((self.name, "after", index, tuple(output.shape)))

    def backward_starts(self) -> None:
        self.heard.append((self.name, "backward starts"))

    def gradient(self, index: int, gradient: Tensor) -> None:
        self.heard.append((self.name, "gradient", index, tuple(gradient.shape)))

    def backward_ends(self) -> None:
        self.heard.append((self.name, "backward ends"))


def test_each_hears_everything() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    given = torch.ones(1, 4)
    heard: list[Any] = []
    both = Together(Listens("a", heard), Listens("b", heard))
    run_layers(chain_of(model, given).layers, given, OutputGradients(0), both)
    alone: list[Any] = [
        ("before", 0, (1, 4)),
        ("after", 0, (1, 3)),
        ("before", 1, (1, 3)),
        ("after", 1, (1, 2)),
        ("backward starts",),
        ("gradient", 0, (1, 3)),
        ("backward ends",),
    ]
    assert heard == [(name, *told) for told in alone for name in "ab"]
