"""One pass through the layers, or through the whole model: forward and backward, stamped; and many passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..cost_models.errors import ModelError
from .clocks import Clock
from .layers import Layer, layer_failure
from .out_of_memory import is_out_of_memory
from .user_code import at_user_line, first_line

Vector = npt.NDArray[np.float64]


class Watcher(Protocol):
    """What a pass tells: where it is, forwards and, as gradients arrive, backwards."""

    def before(self, index: int, given: Any) -> None:
        """Layer `index` runs next, on `given`."""

    def after(self, index: int, output: Any) -> None:
        """Layer `index` has run."""

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None:
        """The gradient of layer `index`'s output is complete; the layer's own backward comes next."""

    def backward_ends(self) -> None: ...


class OutputGradients:
    """The gradients that backward starts from: unit normal, drawn once for each shape, seeded."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def of(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors in `output` that need a gradient, and theirs. Raises ModelError where there is none."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors:
            raise ModelError(
                "the model's output needs no gradient: nothing would be trained",
                "Leave requires_grad on for some parameter, and compute the output outside torch.no_grad().",
            )
        return tensors, [self._for(index, tensor) for index, tensor in enumerate(tensors)]

    def _for(self, index: int, tensor: Tensor) -> Tensor:
        key = (index, tuple(tensor.shape), tensor.dtype, tensor.device)
        if key not in self._made:
            generator = torch.Generator().manual_seed(self._seed + index)
            self._made[key] = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        return self._made[key]


def run_layers(layers: Sequence[Layer], given: Tensor, gradients: OutputGradients, watcher: Watcher) -> None:
    """Forward through the layers one after another, then backward, as one autograd graph.

    A hook on each tensor that passes from layer to layer tells when its gradient is complete: after every
    backward operation of the layers behind it, the accumulation of their gradients included, and before the
    first of the layer that made it. The hook is put on before a later layer may overwrite the tensor, and
    then belongs to the value before. Hooks are set between `after` and `before`, outside the layers' time.
    """
    value: Any = given
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        run = layer.module
        watcher.before(index, value)
        try:
            value = run(value)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise layer_failure(layer.name, layer.kind, value, error) from error
        watcher.after(index, value)
        if index < last and value.requires_grad:
            value.register_hook(partial(watcher.gradient, index))
    tensors, starts = gradients.of(value)
    del value, given
    watcher.backward_starts()
    _backward(tensors, starts)
    watcher.backward_ends()


def run_whole(model: nn.Module, given: Tensor, gradients: OutputGradients, clock: Clock) -> WholeTimes:
    """Forward and backward of the untouched model, between stamps at its ends only."""
    start = clock.stamp()
    try:
        output = model(given)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise layer_failure("(all)", type(model).__name__, given, error) from error
    middle = clock.stamp()
    tensors, starts = gradients.of(output)
    del output
    again = clock.stamp()
    _backward(tensors, starts)
    end = clock.stamp()
    clock.settle()
    return WholeTimes(clock.seconds(start, middle), clock.seconds(again, end))


def _backward(tensors: list[Tensor], starts: list[Tensor]) -> None:
    try:
        torch.autograd.backward(tensors, starts)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"the model's backward failed: {first_line(error)}{at_user_line(error)}",
            "Check that output.backward() runs on the model itself.",
        ) from error


@dataclass(frozen=True)
class WholeTimes:
    """Seconds of one pass through the untouched model."""

    forward: float
    backward: float


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one pass, an entry for each layer; the host's where the clock has its own."""

    forward: Vector
    backward: Vector
    forward_host: Vector | None = None
    backward_host: Vector | None = None


class Stamps:
    """The watcher that times: a stamp at both ends of every layer's forward, and at every gradient."""

    def __init__(self, clock: Clock, layers: int) -> None:
        self._clock = clock
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._arrivals: list[Any] = [None] * layers

    def before(self, index: int, given: Any) -> None:  # noqa: ARG002
        self._starts.append(self._clock.stamp())

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._ends.append(self._clock.stamp())

    def backward_starts(self) -> None:
        self._arrivals[-1] = self._clock.stamp()

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._arrivals[index] = self._clock.stamp()

    def backward_ends(self) -> None:
        self._end = self._clock.stamp()

    def times(self) -> LayerTimes:
        """Waits for the stamps and subtracts them."""
        self._clock.settle()
        seconds, host = self._clock.seconds, self._clock.host_seconds
        if not self._clock.has_host:
            return LayerTimes(*self._between(seconds))
        return LayerTimes(*self._between(seconds), *self._between(host))

    def _between(self, seconds: Callable[[Any, Any], float]) -> tuple[Vector, Vector]:
        forward = [seconds(start, end) for start, end in zip(self._starts, self._ends, strict=True)]
        backward = []
        until = self._end
        for arrival in self._arrivals:
            # No arrival: frozen layers, or a view that was overwritten. Its time is the next layer's.
            since = until if arrival is None else arrival
            # Where a layer returns its input itself, both hooks fire together, the earlier layer's first.
            backward.append(max(seconds(since, until), 0.0))
            until = since
        return np.maximum(forward, 0.0), np.array(backward)


@dataclass
class Rounds:
    """All timed passes at one micro-batch size."""

    layers: list[LayerTimes] = field(default_factory=list)
    whole: list[WholeTimes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.layers)

    def medians(self, direction: Literal["forward", "backward"]) -> Vector:
        """Seconds of the layers, shape (layers,)."""
        return _median([getattr(times, direction) for times in self.layers])

    def host_medians(self, direction: Literal["forward", "backward"]) -> list[float] | list[None]:
        """The host's seconds for each layer; None where they are the device's."""
        rows = [getattr(times, f"{direction}_host") for times in self.layers]
        return [None] * len(self.layers[0].forward) if rows[0] is None else _median(rows).tolist()

    def spreads(self) -> Vector:
        """Interquartile range of forward + backward over its median, shape (layers,)."""
        return spread(np.array([times.forward + times.backward for times in self.layers]))

    def whole_medians(self) -> tuple[float, float]:
        """Of forward and of backward."""
        return (
            float(np.median([times.forward for times in self.whole])),
            float(np.median([times.backward for times in self.whole])),
        )

    def whole_spread(self) -> float:
        return float(spread(np.array([[times.forward + times.backward] for times in self.whole]))[0])

    def uncertainty(self) -> float:
        """Relative standard error of the median of a pass' seconds, of the layers' or the whole's passes.

        The larger of both. 1.2533 / sqrt(n) standard deviations (the asymptotic one of a normal's median),
        and the standard deviation from the interquartile range, which is 1.349 of it.
        """
        sums = np.array([[times.forward.sum() + times.backward.sum()] for times in self.layers])
        widest = max(float(spread(sums)[0]), self.whole_spread())
        return float(1.2533 * widest / 1.349 / np.sqrt(len(self)))


def _median(rows: list[Vector]) -> Vector:
    return np.asarray(np.median(np.array(rows), axis=0), dtype=np.float64)


def spread(samples: Vector) -> Vector:
    """Interquartile range over the median along axis 0; 0 where the median is 0."""
    low, middle, high = np.percentile(samples, (25, 50, 75), axis=0)
    wide = np.zeros_like(middle)
    np.divide(high - low, middle, out=wide, where=middle > 0)
    return np.asarray(wide, dtype=np.float64)
