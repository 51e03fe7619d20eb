"""Seconds of stages: each measured alone, and by stamps around the actions of a step.

torchgpipe and FairScale run their partitions themselves. The forward of a stage is then what its module
takes. Its backward lies between the gradients of its output and of its input: both pass an identity of ours.
If the input wants no gradient, as the first stage's, the last gradient of a parameter ends it. A forward
while the backward is under way is one that runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ....profiler.passes.clocks import Clock, clock_for
from ....profiler.torch_internals import backward_parts
from ...pipelining.stage import pack_tensor
from ..records import StageSeconds

KINDS = ("forward", "loss", "backward", "again", "input", "weight")
"""Of actions; `again` is a forward that the backward runs."""


class ActionStamps:
    """The seconds of a process's actions, by stage and kind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: list[tuple[int, str, Any, Any]] = []
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def time_calls(self, stage: int, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with a stamp before and after."""

        def run_timed(*args: Any, **kwargs: Any) -> Any:
            start = self._clock.stamp()
            output = run(*args, **kwargs)
            self._pending.append((stage, kind, start, self._clock.stamp()))
            return output

        return run_timed

    def settle(self) -> None:
        """Reads the stamps of a step that is over."""
        self._clock.settle()
        for stage, kind, start, end in self._pending:
            self._seconds.setdefault((stage, kind), []).append(self._clock.seconds(start, end))
        self._pending.clear()

    def forget(self) -> None:
        """Drops the stamps so far, those of warm-ups."""
        self.settle()
        self._seconds.clear()

    def stages(self) -> dict[int, StageSeconds]:
        """Medians over all micro-batches of all steps, with the loss and with what a backward recomputes."""
        seconds: dict[int, StageSeconds] = {}
        for stage in {stage for stage, _ in self._seconds}:
            forward, loss, backward, again, input, weight = (
                median(self._seconds.get((stage, kind), [0.0])) for kind in KINDS
            )
            whole = backward + again or input + weight
            seconds[stage] = StageSeconds(forward=forward + loss, backward=whole, input=input, weight=weight)
        return seconds


class PartitionStamps(ActionStamps):
    """The seconds of one stage on its device. `backward_runs`: set while the step goes backward."""

    def __init__(self, number: int, partition: nn.Module, device: torch.device) -> None:
        super().__init__(clock_for(device))
        self.number, self.backward_runs = number, False
        self._forward: Any = None
        self._backward: list[Any] = []
        self._handles = [
            partition.register_forward_pre_hook(self._enter, prepend=True),
            partition.register_forward_hook(self._leave),
        ]
        self._parameters = [parameter for parameter in partition.parameters() if parameter.requires_grad]
        self._watched = False

    def settle(self) -> None:
        """Reads the stamps of a step that is over."""
        self._close()
        super().settle()

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        tensors = inputs[0] if isinstance(inputs[0], tuple) else (inputs[0],)
        if not any(tensor.requires_grad for tensor in tensors):
            self._watch_parameters()
        marked = _mark_gradients(inputs[0], self._end_backward)
        self._forward = self._clock.stamp()
        return (marked,)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:  # noqa: ARG002
        kind = "again" if self.backward_runs else "forward"
        self._pending.append((self.number, kind, self._forward, self._clock.stamp()))
        return _mark_gradients(output, self._begin_backward)

    def _watch_parameters(self) -> None:
        if not self._watched:
            self._watched = True
            self._handles += [
                parameter.register_post_accumulate_grad_hook(lambda _: self._end_backward())  # type: ignore[no-untyped-call]
                for parameter in self._parameters
            ]

    def _begin_backward(self) -> None:
        self._close()
        self._backward = [self._clock.stamp()]

    def _end_backward(self) -> None:
        if self._backward:
            self._backward[1:] = [self._clock.stamp()]

    def _close(self) -> None:
        """The backward that is over: until the last of the gradients."""
        if len(self._backward) == 2:
            self._pending.append((self.number, "backward", *self._backward))
        self._backward = []


def _mark_gradients(output: Any, on_gradient: Callable[[], None]) -> Any:
    """The same tensors; `on_gradient` is called when their gradients are known."""
    tensors = output if isinstance(output, tuple) else (output,)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return output
    with_gradient = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    identities = iter(_Mark.apply(on_gradient, *(tensors[number] for number in with_gradient)))
    result = tuple(
        next(identities) if number in with_gradient else tensor for number, tensor in enumerate(tensors)
    )
    return result if isinstance(output, tuple) else result[0]


class _Mark(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, on_gradient: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on_gradient = on_gradient
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.on_gradient()
        return (None, *gradients)


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
