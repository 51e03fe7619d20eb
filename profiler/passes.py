"""One pass through the layers, or through the whole model, and the watchers that count and time it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..cost_models.errors import ModelError, PplanError
from .clocks import Clock, DirectionTimes, Leads, LeadTuner, Mask, Vector
from .layer import Layer
from .losses import Loss
from .memory import LossWorkspace, StepMemory, storages
from .modes import compiler_failure
from .torch_private import storage_key, tensor_version
from .user_model import (
    ModelInput,
    at_user_line,
    failing_as,
    first_line,
    flat,
    is_out_of_memory,
    layer_failure,
    normal_like,
    tensors_in,
)

# Watchers of a pass: what a pass tells them, several at once, and the one that counts saved bytes.


class Watcher(Protocol):
    """What a pass tells: where it is, forwards and, as gradients arrive, backwards."""

    def before(self, index: int, layer_input: Any) -> None:
        """Layer `index` runs next, on `layer_input`."""

    def after(self, index: int, output: Any) -> None:
        """Layer `index` has run."""

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None:
        """The gradient of layer `index`'s output is complete; the layer's own backward comes next."""

    def backward_ends(self) -> None: ...


class IdleWatcher:
    """Watches nothing."""

    def before(self, index: int, layer_input: Any) -> None: ...

    def after(self, index: int, output: Any) -> None: ...

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None: ...

    def backward_ends(self) -> None: ...


class CompositeWatcher:
    """Tells several watchers of the same pass, each in the order given."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def before(self, index: int, layer_input: Any) -> None:
        for watcher in self._watchers:
            watcher.before(index, layer_input)

    def after(self, index: int, output: Any) -> None:
        for watcher in self._watchers:
            watcher.after(index, output)

    def backward_starts(self) -> None:
        for watcher in self._watchers:
            watcher.backward_starts()

    def gradient(self, index: int, gradient: Tensor) -> None:
        for watcher in self._watchers:
            watcher.gradient(index, gradient)

    def backward_ends(self) -> None:
        for watcher in self._watchers:
            watcher.backward_ends()


@dataclass
class CountedBytes:
    """Bytes at one micro-batch size; lists have an entry for each layer. None: not counted."""

    saved_bytes: list[int]
    saved_input_bytes: list[int]
    output_bytes: list[int]
    loss_saved_bytes: int = 0
    loss_output_bytes: int = 0
    memory: StepMemory | None = None
    loss_workspace: LossWorkspace | None = None
    """None without a loss, too."""
    peak_bytes: int | None = None
    """Most bytes allocated in a step of the untouched model."""


class SavedBytes(IdleWatcher):
    """The watcher that counts saved bytes, for a pass run inside `hooks()`.

    Each storage is counted once, whole, for the first layer that saves it or a view of it; those of
    parameters and buffers are not. `saved_input_bytes` are a layer's inputs where an earlier layer already
    counted them and this layer or a later one needs them, each storage once. `output_bytes`: each tensor that
    the layer hands on once. A loss that ends the pass has figures of its own. A storage is told by its
    identity, and kept alive until backward starts, so that no other can take its place; the counts are whole
    from then on. Tensors that an autograd.Function keeps as attributes of its context are saved, too, though
    autograd does not report them (the counts of tokens of transformers' experts in float32).
    `earlier`: tensors that layers before these count.
    """

    def __init__(self, model: nn.Module, layers: int, earlier: Sequence[Tensor] = ()) -> None:
        self.counted = CountedBytes([0] * layers, [0] * layers, [0] * layers)
        self._layers = layers
        self._weights = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._not_counted = {storage_key(storage) for storage in self._weights}
        self._alive = {storage_key(storage): storage for storage in storages(earlier)}
        self._last_user = dict.fromkeys(self._alive, -1)
        self._inputs: dict[int, set[int]] = {}
        self._nodes: set[Any] = set()
        self._layer = 0
        self._is_forward = True

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Has autograd report what it saves."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def has_counted(self, tensor: Tensor) -> bool:
        """Return whether these layers or earlier ones count it, until backward starts."""
        return storage_key(tensor) in self._alive

    def before(self, index: int, layer_input: Any) -> None:
        self._layer = index
        if index < self._layers:
            keys = {storage_key(tensor) for tensor in tensors_in(layer_input)}
            self._inputs[index] = keys & self._alive.keys()

    def after(self, index: int, output: Any) -> None:
        outputs = list(tensors_in(output))
        self._pack_attributes([tensor.grad_fn for tensor in outputs])
        handed_on = sum(tensor.nbytes for tensor in outputs)
        if index < self._layers:
            self.counted.output_bytes[index] = handed_on
        else:
            self.counted.loss_output_bytes = handed_on

    def backward_starts(self) -> None:
        for layer, keys in self._inputs.items():
            needed = [self._alive[key].nbytes() for key in keys if self._last_user[key] >= layer]
            self.counted.saved_input_bytes[layer] = sum(needed)
        self._alive.clear()
        self._nodes.clear()
        self._is_forward = False

    def _pack_attributes(self, nodes: list[Any]) -> None:
        """Of the nodes of the graph that were made since the last call."""
        while nodes:
            node = nodes.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            for tensor in tensors_in(list(getattr(node, "__dict__", {}).values())):
                self._pack(tensor)
            nodes += [source for source, _ in node.next_functions]

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        # What a backward of the user's saves for itself is gone when it ends: it is no layer's.
        if self._is_forward and key not in self._not_counted:
            if key not in self._alive:
                self._alive[key] = storage
                self._count(storage.nbytes())
            self._last_user[key] = self._layer
        # Detached: a saved output would otherwise hold its own graph alive in a circle.
        return tensor.detach()

    def _count(self, saved: int) -> None:
        if self._layer < self._layers:
            self.counted.saved_bytes[self._layer] += saved
        else:
            self.counted.loss_saved_bytes += saved


# One pass through the layers, or through the whole model: forward and backward, and what watches it.

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
) -> PassTimes:
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
    return PassTimes(forward, clock.seconds(again, end), *(host if clock.has_host else ()))


def backward(tensors: Sequence[Tensor], starts: Sequence[Tensor | None]) -> None:
    """Raises ModelError, MachineError; where memory runs out, what the allocator raises."""
    with backward_failures():
        torch.autograd.backward(tensors, starts)


def backward_failures() -> AbstractContextManager[None]:
    """Has what fails inside raise as `backward` says."""
    return failing_as(
        lambda error: (
            compiler_failure(error)
            or ModelError(
                f"the model's backward failed: {first_line(error)}{at_user_line(error)}",
                "Check that output.backward() runs on the model itself.",
            )
        ),
        through=PplanError,
    )


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
class PassTimes:
    """Seconds of one pass through the untouched model, or through the loss; the host's where the clock has
    its own."""

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


# The watcher that times a pass, and the seconds of each layer.

_KINDS = ("forward", "backward", "forward_host", "backward_host")
AGAIN = 4
"""Passes that are made, at the most, until the device has waited for its host in none of the layers."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one pass, an entry for each layer; the host's where the clock has its own."""

    forward: Vector
    backward: Vector
    forward_host: Vector | None = None
    backward_host: Vector | None = None
    loss: PassTimes | None = None

    def with_parts(self, other: LayerTimes, forward: Mask, backward: Mask) -> LayerTimes:
        """With the seconds of another pass where the masks say so, an entry for each layer and the loss."""

        def either(mask: Mask, kind: str) -> Any:
            own, others = getattr(self, kind), getattr(other, kind)
            return None if own is None else np.where(mask[: len(own)], others, own)

        masks = (forward, backward, forward, backward)
        loss = self.loss
        if loss is not None and other.loss is not None:
            sources = (other.loss if mask[-1] else loss for mask in masks)
            loss = PassTimes(*(getattr(one, kind) for one, kind in zip(sources, _KINDS, strict=True)))
        columns = [either(mask, kind) for mask, kind in zip(masks, _KINDS, strict=True)]
        return LayerTimes(columns[0], columns[1], columns[2], columns[3], loss)


@dataclass(frozen=True)
class Holds:
    """Seconds that a device is held back before each part, in the order they run; None: not at all."""

    forward: Vector | None = None
    backward: Vector | None = None


def timeline(clock: Clock, both_idle: Any, spans: list[tuple[Any, Any]]) -> DirectionTimes:
    """Of parts between stamps, in the order they ran; `both_idle`: a stamp set while both were idle."""
    columns = []
    until = spans[0][0] if spans else None
    for start, end in spans:
        host, device = clock.host_seconds(start, end), clock.seconds(start, end)
        lag = clock.seconds(both_idle, start) - clock.host_seconds(both_idle, start)
        columns.append((host, clock.host_seconds(until, start), device, lag))
        until = end
    return DirectionTimes(*np.array(columns, dtype=np.float64).reshape(len(spans), 4).T)


class LayerStamps:
    """The watcher that times: a stamp at both ends of every layer's forward, and at every gradient.

    Before a layer the device may be held back (`clocks.py`), between the stamps of two layers.
    """

    def __init__(self, clock: Clock, layers: int, holds: Holds | None = None) -> None:
        self._clock = clock
        self._layers = layers
        self._holds = holds or Holds()
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._arrivals: dict[int, tuple[Any, Any]] = {}
        """The end of the part behind, and the beginning of the layer's own; the same stamp mostly."""

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        if index == 0:
            self._both_idle = self._clock.stamp()
        self._hold_back(self._holds.forward, index)
        self._starts.append(self._clock.stamp())

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._ends.append(self._clock.stamp())

    def backward_starts(self) -> None:
        self._hold_back(self._holds.backward, 0)
        begun = self._clock.stamp()
        self._arrivals[len(self._starts) - 1] = begun, begun

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        end = begun = self._clock.stamp()
        if self._hold_back(self._holds.backward, len(self._starts) - 1 - index):
            begun = self._clock.stamp()
        self._arrivals[index] = end, begun

    def backward_ends(self) -> None:
        self._end = self._clock.stamp()

    def times(self) -> LayerTimes:
        """Waits for the stamps and subtracts them."""
        self._clock.settle()
        seconds, host = self._clock.seconds, self._clock.host_seconds
        if not self._clock.has_host:
            return self._layers_and_loss(*self._between(seconds))
        return self._layers_and_loss(*self._between(seconds), *self._between(host))

    def timelines(self) -> tuple[DirectionTimes, DirectionTimes]:
        """Of forward and of backward, after `times` and before another stamp is set."""
        forward = list(zip(self._starts, self._ends, strict=True))
        return (
            timeline(self._clock, self._both_idle, forward),
            timeline(self._clock, self._both_idle, self._spans()),
        )

    def _hold_back(self, holds: Vector | None, position: int) -> bool:
        """Whether it did, and so for some seconds."""
        if holds is None or not holds[position]:
            return False
        self._clock.hold_back(float(holds[position]))
        return True

    def _layers_and_loss(self, *columns: Vector) -> LayerTimes:
        end = self._layers
        loss = PassTimes(*(float(column[end]) for column in columns)) if len(self._starts) > end else None
        forward, backward, *host = (column[:end] for column in columns)
        forward_host, backward_host = host or (None, None)
        return LayerTimes(forward, backward, forward_host, backward_host, loss)

    def _between(self, seconds: Callable[[Any, Any], float]) -> tuple[Vector, Vector]:
        forward = [seconds(start, end) for start, end in zip(self._starts, self._ends, strict=True)]
        backward = [seconds(start, end) for start, end in reversed(self._spans())]
        return np.maximum(forward, 0.0), np.maximum(backward, 0.0)

    def _spans(self) -> list[tuple[Any, Any]]:
        """The stamps around the backward of each part, in the order they run.

        Without an arrival (frozen layers, layers that hand on what they were given, a view that was
        overwritten) a layer takes no time: it is the next layer's.
        """
        spans = []
        until = self._end
        for index in range(len(self._starts)):
            end, begun = self._arrivals.get(index, (until, until))
            spans.append((begun, until))
            until = end
        return spans[::-1]


def stamped_layers(
    run: Callable[[LayerStamps], None], clock: Clock, layers: int, leads: LeadTuner
) -> LayerTimes:
    """The seconds of a pass that `run` makes with the stamps it is given.

    Layers whose launches came late, as after an interruption of the host, have theirs of another pass.
    """
    times, timelines = _stamped(run, clock, layers, leads)
    late = [way.late for way in leads.directions]
    for _ in range(AGAIN - 1):
        able = [mask & way.adjustable for mask, way in zip(late, leads.directions, strict=False)]
        if not leads.is_settled or not any(mask.any() for mask in able):
            break
        other, timelines = _stamped(run, clock, layers, leads)
        better = [mask & one.is_ahead for mask, one in zip(late, timelines, strict=True)]
        times = times.with_parts(other, better[0], better[1][::-1])
        late = [mask & ~mended for mask, mended in zip(late, better, strict=True)]
    if times.forward_host is None or times.backward_host is None:
        return times
    for way, mask in zip(leads.directions, late, strict=True):
        way.keep(mask)
    forward = leads.forward.launched(times.forward_host)
    before = int(times.loss is not None)
    backward = leads.backward.launched(np.concatenate([np.zeros(before), times.backward_host[::-1]]))
    return replace(times, forward_host=forward, backward_host=backward[before:][::-1])


def _stamped(
    run: Callable[[LayerStamps], None], clock: Clock, layers: int, leads: LeadTuner
) -> tuple[LayerTimes, tuple[DirectionTimes, ...]]:
    """The timelines of forward and backward; none where the clock has no host."""
    stamps = LayerStamps(clock, layers, Holds(leads.forward.holds, leads.backward.holds))
    run(stamps)
    times = stamps.times()
    if not clock.has_host:
        return times, ()
    timelines = stamps.timelines()
    leads.observe(*timelines)
    return times, timelines
