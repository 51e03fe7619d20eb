"""Delays a GPU before a pass for so long that its host has launched every kernel before its turn.

Between two events a device's idle time counts as the layer's, and at small micro-batches it idles for most of
the time: it waits for the next launch. So the device is first given something to wait on, as long as it takes
until everything can be launched in time; then what lies between two events is the device's own work, and the
host's seconds, taken where each event is recorded, are the launches alone. Autograd launches the backward
from a thread of its own in the same way, so backward is preceded by a wait of its own.

The right length costs nothing: host and device end together, when the host alone would have ended.
A stream takes about a thousand launches ahead; behind that the host waits, and that would be told as its own
time. So does a model that waits for the device inside (`.item()`, a mask's indices). Either shows in a pass
with a lead: the host is kept longer than without one. Such a direction is held back for less, and a model of
many launches in one direction may still show some idle time at sizes that the host limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

LONGEST = 1.0
"""Seconds of a lead. The host is hardly ever behind by so much in a model that is worth measuring."""
_MARGIN = 1.2
"""The host is not equally fast every time."""
_UNSTEADY = 0.2
"""So much slower, as a share, a part's launches may be without having waited for the device."""
_BLOCKED = 0.1
"""Share of a direction's host seconds from which on waiting for the device counts."""
_BELOW_FULL = 0.9
"""Share of a queue that is filled: about 900 launches of a thousand."""
_WAITED = 0.02
"""Share of a direction's least device seconds from which on a pass is taken to hold some waiting."""
_AGREEING = 2
"""Passes that must show the same, as any one may be disturbed."""
_TRIALS = 2
"""Leads that are tried."""


@dataclass(frozen=True)
class LaunchLead:
    """Seconds that the device is held back before a pass' forward, its backward, its weight gradients."""

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0


def lead(host: Iterable[float], device: Iterable[float] | None = None) -> float:
    """Seconds of lead with which no part starts before it was launched; parts in the order they run.

    `host`: seconds to launch each part. `device`: seconds that each takes; None: nothing is known of them.
    """
    launched = np.cumsum(np.asarray(list(host), dtype=np.float64))
    done = np.zeros_like(launched)
    if device is not None:
        done[1:] = np.cumsum(np.asarray(list(device), dtype=np.float64))[:-1]
    return _MARGIN * max(float(np.max(launched - done, initial=0.0)), 0.0)


class Direction:
    """The lead of one direction, from what passes before showed.

    The first pass is one without a lead, and only the host's seconds of it are used: its device's hold the
    waiting that a lead is to end. The next ones decide whether the host can run so far ahead; where several
    in a row say no, the lead ends where the host was stopped, and where it is stopped again, there is none.
    When that `is_settled`, passes only adjust the lead: the device's seconds are the least seen so far, so
    that a pass in which it waited after all makes no lead too short; and where it waited in two in a row, as
    behind a host that is not equally fast every time, the lead grows by as much.
    """

    def __init__(self) -> None:
        self.lead = 0.0
        self.is_settled = False
        self._most = LONGEST
        self._host: Vector | None = None
        self._device: Vector | None = None
        self._with_lead: list[Vector] = []
        self._trials = 0
        self._waited = 0.0
        self._slack = 0.0

    def observe(self, host: Vector, device: Vector) -> None:
        """Seconds of the parts of one pass with this lead, in the order they run."""
        if self._host is None:
            self._host = host
            self.lead = min(lead(host), self._most)
            self.is_settled = self.lead == 0
            return
        self._device = device if self._device is None else np.minimum(self._device, device)
        if not self.is_settled:
            self._with_lead.append(host)
            if len(self._with_lead) < _AGREEING:
                return
            self._judge(self._host)
        else:
            self._lengthen(device, self._device, float(self._host.sum()))
        self.lead = min(lead(self._host, self._device) + self._slack, self._most)

    def _lengthen(self, device: Vector, least: Vector, longest: float) -> None:
        waited = float((device - least).sum())
        again = min(waited, self._waited)
        if again > _WAITED * float(least.sum()):
            self._slack = min(self._slack + again, longest)
        self._waited = waited

    @property
    def is_short(self) -> bool:
        """Whether the device still waits for the host, as the lead may not be longer."""
        if self._host is None:
            return False
        needed = lead(self._host, self._device) / _MARGIN
        return needed - self.lead > _BLOCKED * float(self._host.sum())

    def _judge(self, host: Vector) -> None:
        """What the passes with this lead say of it; `host`: the seconds of launches that did not wait."""
        slow = np.min(self._with_lead, axis=0)
        grown = float(np.where(slow > (1 + _UNSTEADY) * host, slow - host, 0.0).sum())
        self._with_lead = []
        self._trials += 1
        self._host = np.minimum(host, slow)
        if grown <= _BLOCKED * float(host.sum()):
            self.is_settled = True
            return
        # Stopped until the device began, so this long after the first launch.
        stopped = max(self.lead - grown, 0.0)
        self.is_settled = self._trials == _TRIALS or stopped == 0
        self._most = 0.0 if self.is_settled else _BELOW_FULL * stopped


class LeadTuner:
    """The leads for the passes at one micro-batch size."""

    def __init__(self) -> None:
        self._forward, self._backward, self._weights = Direction(), Direction(), Direction()

    @property
    def leads(self) -> LaunchLead:
        """For the next pass."""
        return LaunchLead(self._forward.lead, self._backward.lead, self._weights.lead)

    @property
    def is_settled(self) -> bool:
        """Whether passes of forward and backward say no more than how long they take."""
        return self._forward.is_settled and self._backward.is_settled

    @property
    def has_settled_weights(self) -> bool:
        """The same for the pass that computes the weights' gradients."""
        return self._weights.is_settled

    @property
    def short(self) -> tuple[str, ...]:
        """The directions in which the device still waits for the host."""
        ways = {
            "forward": self._forward,
            "backward": self._backward,
            "the weights' gradients": self._weights,
        }
        return tuple(name for name, way in ways.items() if way.is_short)

    def observe(self, host: tuple[Vector, Vector], device: tuple[Vector, Vector]) -> None:
        """Seconds of forward's parts, and backward's, each in the order they run: the first without leads."""
        self._forward.observe(host[0], device[0])
        self._backward.observe(host[1], device[1])

    def observe_weights(self, host: Vector, device: Vector) -> None:
        """The same for the pass that computes the weights' gradients."""
        self._weights.observe(host, device)
