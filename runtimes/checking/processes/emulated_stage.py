"""Stages that wait instead of computing, with gradients as PyTorch's schedules ask for them.

PyTorch computes the gradient of a stage's weights apart from that of its input, where a schedule asks for it:
it stops at the operations where both meet, and goes on from there later. So a stage here is a function whose
backward takes as long as the input's, and one whose backward takes as long as the weights', which meet in an
addition; an addition is PyTorch's own operation, which computes either gradient without the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..job import StageSeconds, StageWaits

Sleep = Callable[[float], None]
ELEMENT = 4
"""Bytes of a float32, which cross the cuts."""


class EmulatedStage(nn.Module):
    """Takes and returns float32 tensors of shape (samples, elements). `elements`: of a sample, as it returns
    them. `seconds` are slept, on meta not."""

    def __init__(self, seconds: StageSeconds, elements: int, sleep: Sleep = time.sleep) -> None:
        super().__init__()
        self.seconds, self.elements, self.sleep = seconds, elements, sleep
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        """Of the batch that it is given, one of as many samples."""
        waits = not given.is_meta
        split = self.seconds.input + self.seconds.weight > 0
        input_wait = self.seconds.input if split else self.seconds.backward
        weight_wait = self.seconds.weight if split else 0.0
        if waits:
            self.sleep(self.seconds.forward)
        # The first stage's input needs no gradient, but the layers behind its first one have one.
        anchor = None if given.requires_grad else self.weight
        made = _Waiting.apply(given, anchor, self.elements, input_wait if waits else 0.0, self.sleep)
        weight = _Weighing.apply(self.weight, weight_wait if waits else 0.0, self.sleep)
        output: Tensor = made + weight
        return output


class _Waiting(torch.autograd.Function):
    """Another tensor of as many samples, whose backward takes as long as the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, anchor: Tensor | None, elements: int, seconds: float, sleep: Sleep
    ) -> Tensor:
        ctx.seconds, ctx.sleep, ctx.shape, ctx.anchored = seconds, sleep, given.shape, anchor is not None
        return given.new_zeros((len(given), elements))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.seconds:
            ctx.sleep(ctx.seconds)
        own = gradient.new_zeros(ctx.shape) if ctx.needs_input_grad[0] else None
        return own, gradient.new_zeros(()) if ctx.anchored else None, None, None, None


class _Weighing(torch.autograd.Function):
    """The weight, whose backward takes as long as the gradient of the stage's weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, sleep: Sleep) -> Tensor:
        ctx.seconds, ctx.sleep = seconds, sleep
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.seconds:
            ctx.sleep(ctx.seconds)
        return gradient, None, None


def emulate_stages(waits: StageWaits, samples: int) -> nn.Sequential:
    """The stages, one element each, which hand on as many bytes as the model's, for micro-batches of
    `samples`; the last returns one number a sample."""
    per_sample = [max(sent // (ELEMENT * samples), 1) for sent in waits.crossing_bytes]
    pairs = zip(waits.stages, [*per_sample, 1], strict=True)
    return nn.Sequential(*(EmulatedStage(seconds, elements) for seconds, elements in pairs))


def emulated_loss(output: Tensor, target: object) -> Tensor:
    """The mean: there is nothing to learn."""
    del target
    return output.mean()
