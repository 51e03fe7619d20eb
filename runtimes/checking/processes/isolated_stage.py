"""A stage measured alone: its forward and backward without the others, as its process will run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ....profiler.passes.clocks import Clock
from ....profiler.torch_internals import backward_parts
from ...pipelining.cut_tensors import pack_tensor
from ..job import StageSeconds
from .action_stamps import clock_for

REPEATS, WARM_UPS, FIRSTS = 5, 2, 3
Pass = tuple[float, float, float]
"""Seconds of the forward, of the backward or its first part, and of the second."""


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Its buffers are afterwards what they were: a pass that only measures counts in no statistics, which
    the next pass may compute with."""
    own = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in own:
                buffer.copy_(value)
                setattr(part, name, buffer)


def stage_inputs(layers: nn.Sequential, first: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the stage that begins with layer `first` is sent for a micro-batch: the layers before are run, on
    the CPU and without gradients."""
    if not first:
        return inputs
    with torch.no_grad(), kept_buffers(layers[:first]):
        output: Any = inputs[0] if len(inputs) == 1 else inputs
        for layer in layers[:first]:
            output = layer(output)
    tensors = (output,) if isinstance(output, Tensor) else tuple(output)
    return tuple(pack_tensor(tensor).detach().clone() for tensor in tensors)


def measure_isolated(
    module: nn.Module,
    inputs: Sequence[Tensor],
    device: torch.device,
    *,
    loss: Callable[..., Tensor] | None,
    is_first: bool,
    splits: bool,
    repeats: int = REPEATS,
) -> StageSeconds:
    """Medians over `repeats` micro-batches, after some that do not count, and over some more that find no
    gradients to add to, as the first of a step. The module's buffers stay as they are.

    `loss`: the last stage's. `splits`: the gradient of the input and those of the weights apart, as PyTorch
    computes them; on the first stage it computes both with the weights'.
    """
    clock = clock_for(device)

    def one_pass() -> tuple[Pass, Pass]:
        stage_inputs = tuple(_leaf(tensor.to(device), wants=not is_first) for tensor in inputs)
        return _pass(module, stage_inputs, clock, loss=loss, is_first=is_first, splits=splits)

    with kept_buffers(module):
        passes, firsts = [one_pass() for _ in range(WARM_UPS + repeats)], []
        for _ in range(FIRSTS):
            _forget_gradients(module)
            firsts.append(sum(one_pass()[0][1:]))
    _forget_gradients(module)
    seconds = [device_seconds for device_seconds, _ in passes[WARM_UPS:]]
    forward, input, weight = (median(values) for values in zip(*seconds, strict=True))
    backward = median(first + second for _, first, second in seconds)
    hosts = [host for _, host in passes[WARM_UPS:]] if clock.has_host else [(0.0, 0.0, 0.0)]
    return StageSeconds(
        forward=forward,
        backward=backward,
        input=input if splits else 0.0,
        weight=weight if splits else 0.0,
        accumulation=min(max(backward - median(firsts), 0.0), weight if splits else backward),
        forward_launch=median(first for first, _, _ in hosts),
        backward_launch=median(second + third for _, second, third in hosts),
    )


def _pass(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    clock: Clock,
    *,
    loss: Callable[..., Tensor] | None,
    is_first: bool,
    splits: bool,
) -> tuple[Pass, Pass]:
    """The device's and the host's."""
    input_gradients, weight_gradients = backward_parts()
    stamps = [clock.stamp()]
    output = module(*inputs)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    if loss is not None:
        outputs = [loss(output, None)]
    stamps.append(clock.stamp())
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    gradients = None if loss is not None else [torch.ones_like(tensor) for tensor in differentiable]
    if not differentiable:
        stamps += [stamps[-1]] * 2
    elif splits and not is_first:
        _, groups = input_gradients(differentiable, gradients, list(inputs), module.parameters())
        stamps.append(clock.stamp())
        weight_gradients(module.parameters(), groups)
        stamps.append(clock.stamp())
    else:
        # PyTorch's schedules compute the first stage's gradients with those of its weights.
        stamps += [clock.stamp()] if splits else []
        torch.autograd.backward(differentiable, gradients)
        stamps += [clock.stamp()] * (1 if splits else 2)
    clock.settle()
    intervals = [
        (clock.seconds(one, other), clock.host_seconds(one, other)) for one, other in pairwise(stamps)
    ]
    (first, on_host), (second, then_on_host), (third, last_on_host) = intervals
    return (first, second, third), (on_host, then_on_host, last_on_host)


def _forget_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _leaf(tensor: Tensor, *, wants: bool) -> Tensor:
    return tensor.detach().requires_grad_(wants and tensor.is_floating_point())
