"""The watcher that times a pass, and the seconds of each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from .clocks import Clock
from .launch_lead import LaunchLead, LeadTuner, Vector


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

    def in_order(self, kind: Literal["", "_host"] = "") -> tuple[Vector, Vector] | None:
        """Forward and backward of the layers and the loss, in the order they run; None: there are no such."""
        forward, backward = getattr(self, f"forward{kind}"), getattr(self, f"backward{kind}")
        if forward is None or backward is None:
            return None
        if self.loss is not None:
            forward = np.append(forward, getattr(self.loss, f"forward{kind}"))
            backward = np.append(backward, getattr(self.loss, f"backward{kind}"))
        return forward, backward[::-1]


def update_leads(ahead: LeadTuner, times: LayerTimes) -> None:
    """Updates the leads of the next pass by the times of this one."""
    host, device = times.in_order("_host"), times.in_order()
    if host is not None and device is not None:
        ahead.observe(host, device)


class LayerStamps:
    """The watcher that times: a stamp at both ends of every layer's forward, and at every gradient."""

    def __init__(self, clock: Clock, layers: int, leads: LaunchLead = LaunchLead()) -> None:  # noqa: B008
        self._clock = clock
        self._layers = layers
        self._leads = leads
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._arrivals: dict[int, Any] = {}

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        if index == 0:
            self._clock.hold_back(self._leads.forward)
        self._starts.append(self._clock.stamp())

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._ends.append(self._clock.stamp())

    def backward_starts(self) -> None:
        self._clock.hold_back(self._leads.backward)
        self._arrivals[len(self._starts) - 1] = self._clock.stamp()

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._arrivals[index] = self._clock.stamp()

    def backward_ends(self) -> None:
        self._end = self._clock.stamp()

    def times(self) -> LayerTimes:
        """Waits for the stamps and subtracts them."""
        self._clock.settle()
        seconds, host = self._clock.seconds, self._clock.host_seconds
        if not self._clock.has_host:
            return self._layers_and_loss(*self._between(seconds))
        return self._layers_and_loss(*self._between(seconds), *self._between(host))

    def _layers_and_loss(self, *columns: Vector) -> LayerTimes:
        end = self._layers
        loss = LossTimes(*(float(column[end]) for column in columns)) if len(self._starts) > end else None
        forward, backward, *host = (column[:end] for column in columns)
        forward_host, backward_host = host or (None, None)
        return LayerTimes(forward, backward, forward_host, backward_host, loss)

    def _between(self, seconds: Callable[[Any, Any], float]) -> tuple[Vector, Vector]:
        forward = [seconds(start, end) for start, end in zip(self._starts, self._ends, strict=True)]
        backward = []
        until = self._end
        for index in range(len(self._starts)):
            # No arrival: frozen layers, layers that hand on what they were given, or a view that was
            # overwritten. Their time is the next layer's.
            since = self._arrivals.get(index, until)
            backward.append(max(seconds(since, until), 0.0))
            until = since
        return np.maximum(forward, 0.0), np.array(backward)
