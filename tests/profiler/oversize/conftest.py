"""What the tests of segments share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn


@pytest.fixture
def convolutions() -> Callable[[], nn.Sequential]:
    """A small model of two-dimensional and flat layers, one of them in place; for inputs of 3 x 10 x 10."""
    return lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.Sigmoid(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 9, 7),
        nn.Tanh(),
        nn.Linear(7, 2),
    )
