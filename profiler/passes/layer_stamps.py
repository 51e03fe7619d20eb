"""The watcher that times a pass, and the seconds of each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from .clocks import Clock
from .launch_lead import DirectionTimes, LeadTuner, Mask, Vector

_KINDS = ("forward", "backward", "forward_host", "backward_host")
AGAIN = 4
"""Passes that are made, at the most, until the device has waited for its host in none of the layers."""


@dataclass(frozen=True)
class LossTimes:
    """Seconds of the loss in one pass; the host's where the clock has its own."""

    forward: float
    backward: float
    forward_host: float | None = None
    backward_host: float | None = None


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one pass, an entry for each layer; the host's where the clock has its own."""

    forward: Vector
    backward: Vector
    forward_host: Vector | None = None
    backward_host: Vector | None = None
    loss: LossTimes | None = None

    def with_parts(self, other: LayerTimes, forward: Mask, backward: Mask) -> LayerTimes:
        """With the seconds of another pass where the masks say so, an entry for each layer and the loss."""

        def either(mask: Mask, kind: str) -> Any:
            own, others = getattr(self, kind), getattr(other, kind)
            return None if own is None else np.where(mask[: len(own)], others, own)

        masks = (forward, backward, forward, backward)
        loss = self.loss
        if loss is not None and other.loss is not None:
            sources = (other.loss if mask[-1] else loss for mask in masks)
            loss = LossTimes(*(getattr(one, kind) for one, kind in zip(sources, _KINDS, strict=True)))
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

    Before a layer the device may be held back (`launch_lead.py`), between the stamps of two layers.
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
        loss = LossTimes(*(float(column[end]) for column in columns)) if len(self._starts) > end else None
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
