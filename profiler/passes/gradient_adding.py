"""What it takes to add the gradients of a micro-batch to those of the micro-batches before it.

The first backward of a step keeps its gradients, where `zero_grad()` has set the parameters' to None; each
that follows adds its own to them in place (torch/csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..chain.layers import Layer
from .clocks import Clock

_LAUNCH_SECONDS = 30e-6
"""Of a host for one addition, at the most."""


def time_gradient_adding(layers: Sequence[Layer], clock: Clock, repeats: int) -> list[float]:
    """Median seconds of every layer, after one pass to warm up; a parameter that several layers use counts
    with the first. The model's own gradients stay as they are."""
    passes = [[_add(layer, clock) for layer in layers] for _ in range(1 + repeats)]
    medians: list[float] = np.median(passes[1:], axis=0).tolist()
    return medians


def _add(layer: Layer, clock: Clock) -> float:
    trained = [parameter for parameter in layer.parameters if parameter.requires_grad]
    there, new = ([torch.zeros_like(own, requires_grad=False) for own in trained] for _ in range(2))
    clock.settle()
    clock.hold_back(len(trained) * _LAUNCH_SECONDS)
    start = clock.stamp()
    for own, more in zip(there, new, strict=True):
        own += more
    end = clock.stamp()
    clock.settle()
    return clock.seconds(start, end) if trained else 0.0
