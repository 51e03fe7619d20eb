"""One pass through the layers, or through the whole model: forward and backward, and what watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...cost_models.errors import ModelError, PplanError
from ..chain.layers import Layer
from ..torch_internals import tensor_version
from ..user_model.failures import at_user_line, first_line, is_out_of_memory, layer_failure
from ..user_model.flat_output import flat, tensors_in
from ..user_model.loaded_model import ModelInput
from ..user_model.losses import Loss
from ..user_model.seeding import normal_like
from .clocks import Clock
from .launch_lead import Leads
from .modes import compiler_failure
from .watchers import Watcher

Context = Callable[[], AbstractContextManager[Any]]
"""What every forward runs in: autocast, or nothing."""
_LAUNCH_SECONDS = 30e-6
"""Of a host for one addition, at the most."""
_STABLE, _UNCHANGED = 10, 0.01
"""So many passes, and their median, by which share it may change, tell that a device has its steady clock."""


class OutputGradients:
    """The gradients that backward starts from: unit normal, drawn once for each shape, seeded."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._by_shape: dict[tuple[Any, ...], Tensor] = {}

    def of(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors in `output` that need a gradient, and theirs. Raises ModelError where there is none."""
        leaves, _ = flat(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors:
            raise ModelError(
                "the model's output needs no gradient: nothing would be trained",
                "Leave requires_grad on for some parameter, and compute the output outside torch.no_grad().",
            )
        return tensors, [self._for(index, tensor) for index, tensor in enumerate(tensors)]

    def forget(self) -> None:
        """Frees them; they are drawn again when they are asked for."""
        self._by_shape.clear()

    def _for(self, index: int, tensor: Tensor) -> Tensor:
        key = (index, tuple(tensor.shape), tensor.dtype, tensor.device)
        if key not in self._by_shape:
            self._by_shape[key] = normal_like(tensor, self._seed + index)
        return self._by_shape[key]


def run_layers(
    layers: Sequence[Layer],
    inputs: Any,
    gradients: OutputGradients,
    watcher: Watcher,
    *,
    loss: Loss | None = None,
    context: Context = nullcontext,
) -> None:
    """Forward through the layers one after another, then backward, as one autograd graph.

    `inputs`: what the first layer takes, a tensor or a tuple of tensors. Where a layer hands on tensors that
    it made itself, a hook on each tells when its gradient is complete: after every backward operation of the
    layers behind it, the accumulation of their gradients included, and before the first of the layer that
    made it. Autograd runs operations in the reverse order of their creation, so the first of a layer's hooks
    to fire marks the end of the layers behind; `watcher.gradient` is called for that one. Tensors that a
    layer hands through are complete at their first consumer, which says nothing. Hooks are put on before a
    later layer may overwrite the tensor, and then belong to the value before. They are set between `after`
    and `before`, outside the layers' time.

    `loss` runs as one layer more, of the index after the last; without, backward starts from `gradients`.
    """
    last = len(layers) - 1

    def watched(index: int, outputs: list[Tensor]) -> None:
        if index < last or loss is not None:
            hook_first(watcher, index, outputs)

    with context():
        value = forward_layers(layers, inputs, watcher, watched)
        if loss is not None:
            loss.prepare(value)
            watcher.before(last + 1, value)
            value = loss.of(value)
            watcher.after(last + 1, value)
    tensors, starts = ([value], [None]) if loss is not None else gradients.of(value)
    del value, inputs
    watcher.backward_starts()
    backward(tensors, starts)
    watcher.backward_ends()


def forward_layers(
    layers: Sequence[Layer], inputs: Any, watcher: Watcher, on_output: Callable[[int, list[Tensor]], None]
) -> Any:
    """The last layer's output; `on_output` is told which tensors each layer made that need a gradient."""
    value = inputs
    for index, layer in enumerate(layers):
        run, entering = layer.module, {id(tensor): tensor_version(tensor) for tensor in tensors_in(value)}
        watcher.before(index, value)
        try:
            value = run(value)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, PplanError):
                raise
            raise layer_failure(layer.name, layer.kind, value, error) from error
        watcher.after(index, value)
        # A tensor that came in and was overwritten is made anew; one without a graph is a parameter.
        own = [t for t in tensors_in(value) if t.requires_grad and entering.get(id(t)) != tensor_version(t)]
        on_output(index, [tensor for tensor in own if tensor.grad_fn is not None])
    return value


def hook_first(watcher: Watcher, index: int, tensors: Sequence[Tensor]) -> None:
    """Tells `watcher` when the first of these tensors has its gradient."""
    arrived = False

    def hook(gradient: Tensor) -> None:
        nonlocal arrived
        if not arrived:
            arrived = True
            watcher.gradient(index, gradient)

    for tensor in tensors:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def run_whole(
    model: nn.Module,
    inputs: ModelInput,
    gradients: OutputGradients,
    clock: Clock,
    *,
    leads: Leads = Leads(),  # noqa: B008
    context: Context = nullcontext,
) -> WholeTimes:
    """Forward and backward of the untouched model, between stamps at its ends only."""
    clock.hold_back(leads.forward)
    start = clock.stamp()
    try:
        with context():
            output = inputs.call(model)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, PplanError):
            raise
        raise layer_failure("(all)", type(model).__name__, inputs.layer_input, error) from error
    middle = clock.stamp()
    # Read before the next stamp is set; and backward's launches have the stream for themselves.
    clock.settle()
    forward = clock.seconds(start, middle)
    host = [clock.host_seconds(start, middle)]
    tensors, starts = gradients.of(output)
    del output
    clock.hold_back(leads.backward)
    again = clock.stamp()
    backward(tensors, starts)
    end = clock.stamp()
    clock.settle()
    host.append(clock.host_seconds(again, end))
    return WholeTimes(forward, clock.seconds(again, end), *(host if clock.has_host else ()))


def backward(tensors: Sequence[Tensor], starts: Sequence[Tensor | None]) -> None:
    """Raises ModelError, MachineError; where memory runs out, what the allocator raises."""
    with backward_failures():
        torch.autograd.backward(tensors, starts)


@contextmanager
def backward_failures() -> Iterator[None]:
    """Has what fails inside raise as `backward` says."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, PplanError):
            raise
        raise compiler_failure(error) or ModelError(
            f"the model's backward failed: {first_line(error)}{at_user_line(error)}",
            "Check that output.backward() runs on the model itself.",
        ) from error


def warm_until_stable(one_pass: Callable[[], float], clock: Clock, seconds: float) -> None:
    """Passes, each of which returns its seconds, until the last few take as long as those before them; for
    so many `seconds` at the most."""
    passes = list[float]()
    begun = clock.now()
    while clock.now() - begun < seconds:
        passes.append(one_pass())
        before, after = passes[-2 * _STABLE : -_STABLE], passes[-_STABLE:]
        if len(before) == _STABLE and abs(np.median(after) / np.median(before) - 1) < _UNCHANGED:
            return


@dataclass(frozen=True)
class WholeTimes:
    """Seconds of one pass through the untouched model; the host's where the clock has its own."""

    forward: float
    backward: float
    forward_host: float | None = None
    backward_host: float | None = None


def time_gradient_adding(layers: Sequence[Layer], clock: Clock, repeats: int) -> list[float]:
    """Median seconds that each layer takes to add a micro-batch's gradients to those of earlier ones.

    The first backward of a step keeps its gradients, where `zero_grad()` has set the parameters' to None;
    each that follows adds its own to them in place (torch/csrc/autograd/functions/accumulate_grad.h).
    One untimed pass comes first. A parameter that several layers use counts with the first. The model's own
    gradients stay as they are.
    """
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
