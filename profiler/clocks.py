"""Clocks, and how long a GPU is held back before a layer so that its host is ahead."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .torch_private import sleep_on_gpu

# Clocks: stamps set between layers, and the seconds that lie between two of them.

_EVENTS = 21
_CYCLES = 10_000_000
"""Some milliseconds, to find out how many."""


class Clock(Protocol):
    """Sets stamps at the cost of well under a microsecond (CPU) or an event record (CUDA)."""

    has_host: bool
    """Whether the host's seconds are other than the device's, and stored too."""

    def stamp(self) -> Any:
        """Marks this moment."""

    def calibrate(self) -> None:
        """Has `hold_back` know how fast the device runs now. Never called inside what is timed."""

    def hold_back(self, seconds: float) -> None:
        """Keeps the device busy for so long before what is launched next (see `Direction`).

        Called right after `settle` the first time, and nothing where host and device are one.
        """

    def settle(self) -> None:
        """Waits until every stamp set can be read. Never called inside what is timed."""

    def seconds(self, start: Any, end: Any) -> float:
        """Device seconds between two stamps, after `settle`."""

    def host_seconds(self, start: Any, end: Any) -> float:
        """Host seconds between two stamps."""

    def now(self) -> float:
        """Host seconds, for the budget."""


class CpuClock:
    """The CPU computes when it is asked to: one time, `time.perf_counter`."""

    has_host = False

    def stamp(self) -> float:
        return perf_counter()

    def calibrate(self) -> None:
        pass

    def hold_back(self, seconds: float) -> None:
        pass

    def settle(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def host_seconds(self, start: float, end: float) -> float:
        return end - start

    def now(self) -> float:
        return perf_counter()


@dataclass(frozen=True)
class CudaStamp:
    """The moment the host came by, and the event that the device comes by later."""

    host: float
    event: torch.cuda.Event


class CudaClock:
    """Events on the current stream, and the host's time where each was recorded.

    Events are created once and used again after `settle`, as creating one costs more than recording it; the
    stamps of earlier passes must have been read by then.
    """

    has_host = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._settled = False
        self._cycles_per_second = 0.0
        self._event_seconds = 0.0
        """Between two events with nothing between them."""

    def stamp(self) -> CudaStamp:
        if self._settled:
            self._used, self._settled = 0, False
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        self._used += 1
        event.record()
        return CudaStamp(perf_counter(), event)

    def calibrate(self) -> None:
        self._cycles_per_second = self._calibrated()
        self._event_seconds = self._empty_seconds()

    def hold_back(self, seconds: float) -> None:
        if seconds > 0:
            if not self._cycles_per_second:
                self.calibrate()
            sleep_on_gpu(int(seconds * self._cycles_per_second))

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        self._settled = True

    def seconds(self, start: CudaStamp, end: CudaStamp) -> float:
        """Without what the events take themselves: for a tiny layer that is much."""
        elapsed = float(start.event.elapsed_time(end.event)) / 1e3
        return max(elapsed - self._event_seconds, 0.0)

    def host_seconds(self, start: CudaStamp, end: CudaStamp) -> float:
        return end.host - start.host

    def now(self) -> float:
        return perf_counter()

    def _empty_seconds(self) -> float:
        """The median between events in a row, launched while the device is busy."""
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(_EVENTS)]  # type: ignore[no-untyped-call]
        sleep_on_gpu(_CYCLES)
        for event in events:
            event.record()
        torch.cuda.synchronize(self._device)
        return median(float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(events))

    def _calibrated(self) -> float:
        """Cycles a second of the clock that a waiting kernel counts."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        sleep_on_gpu(_CYCLES)
        start.record()
        sleep_on_gpu(_CYCLES)
        end.record()
        torch.cuda.synchronize(self._device)
        return _CYCLES * 1e3 / max(float(start.elapsed_time(end)), 1e-3)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


# Holds a GPU back before the layers of a pass, so that its host has launched each layer before its turn.
#
# Between two events a device's idle time counts as the layer's, and at small micro-batches it idles for most
# of
# the time: it waits for the next launch. So the device is given something to wait on before a layer, as long
# as
# it takes until all of the layer's kernels are launched: then what lies between two events is the device's
# own
# work, and the host's seconds, taken where each event is recorded, are the launches alone.
#
# It is held back before each layer, and no longer than that layer needs: a stream takes about a thousand
# launches ahead, behind which the host waits. The untouched model has no layers to be held back between:
# there
# is one lead before its forward, one before its backward, and of many launches the last come too late.
#
# Whether a layer waited is seen: counted from a moment at which both were idle, the device must come by the
# layer's first event later than the host by as much as the host took to launch the layer.
#
# A model that waits for the device inside (`.item()`, a mask's indices) has its host wait for what the device
# is held back for. Then the host is kept for longer than without, and that layer is not held back.

Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

LONGEST = 1.0
"""Seconds that a device is held back at a time. No layer that is worth measuring takes longer to launch."""
_MARGIN, _MOST_MARGIN, _GROWTH = 1.2, 3.0, 1.25
"""The host is not equally fast every time."""
_EARLY = 30e-6
"""Seconds by which a layer's launches are ahead at the least."""
_UNSTEADY = 0.2
"""So much slower, as a share, a part's launches may be without having waited for the device."""
_BLOCKED = 0.1
"""Share of a direction's host seconds from which on waiting for the device counts."""
_MOST_OF = 0.5
"""Of how much later a device begins, so much more time the host takes that waits for it."""
_WHOLE_MARGIN, _SLOWER = 1.3, 2.0
"""Of the untouched model: a margin for all its launches, and how much slower the host may be where few do."""
_STOPPED = 4
"""So many leads in a row, each longer, that were too short: the host was stopped."""
_BELOW_FULL = 0.9
"""Share of a queue that is filled: about 900 launches of a thousand."""
_TRIALS = 6
"""Passes that look for how long to hold back before what they found has to do."""


@dataclass(frozen=True)
class DirectionTimes:
    """One direction of a pass: seconds, an entry for each part (layer, loss) in the order they run.

    `host`: to launch it. `gap`: of the host between the part before and this one. `device`: between its two
    events. `lag`: by how much later than the host the device came by the first of these.
    """

    host: Vector
    gap: Vector
    device: Vector
    lag: Vector

    @property
    def is_ahead(self) -> Mask:
        """Where all of a part was launched before the device began it, so that it waited for no launch."""
        return self.lag > self.host


@dataclass(frozen=True)
class Leads:
    """Seconds that a device is held back before the forward and the backward of an untouched model."""

    forward: float = 0.0
    backward: float = 0.0


class Direction:
    """How long to hold a device back before each part of one direction, from what passes before showed.

    The first pass is one without; parts for which the device did not wait in it show their own seconds
    already. From then on the device begins each part once the host has launched it, as the least of their
    seconds say. Where it waited all the same the host is taken to be slower, and the device is held back for
    longer. A host that takes as much longer then is one that waits for the device: that part's hold ends
    where the host was stopped, and if it is stopped again, there is none.
    """

    def __init__(self) -> None:
        self.holds: Vector | None = None
        """Seconds before each part; None before the first pass."""
        self.is_settled = False
        self.late = np.zeros(0, dtype=np.bool_)
        """The parts of the last pass in which the device waited for the host."""
        self._host = self._gap = self._device = self._limits = np.zeros(0)
        self._stops = np.zeros(0, dtype=np.int64)
        """How often the host of each part was stopped."""
        self._before: DirectionTimes | None = None
        self._late = np.zeros(0)
        self._passes = 0
        self._margin = _MARGIN
        self._trials = 0

    def observe(self, times: DirectionTimes) -> None:
        """What a pass showed that was held back by `holds`."""
        if self.holds is None:
            self._host, self._gap = times.host, times.gap
            self._device, self._late = np.zeros_like(times.host), np.zeros_like(times.host)
            self._limits, self._stops = (
                np.full(len(times.host), LONGEST),
                np.zeros(len(times.host), dtype=np.int64),
            )
            self.is_settled = not times.host.any()
        else:
            self._judge(times, self.holds)
        self.late = ~times.is_ahead
        self._keep_least(times)
        self.holds = self._needed()

    def keep(self, late: Mask) -> None:
        """Where the device waited for the host in the seconds that are kept of a pass."""
        if self.is_settled:
            self._late = self._late + late
            self._passes += 1

    @property
    def is_short(self) -> bool:
        """Whether the device waited for the host in parts of most of the passes that were kept."""
        if not self._passes:
            return False
        late = self._late > _MOST_OF * self._passes
        return float(self._host[late].sum()) > _BLOCKED * float(self._host.sum())

    def lead(self, slower: float = 1.0) -> float:
        """Seconds to hold back once, before all parts; `slower`: of the host, than at the least."""
        launched = np.cumsum(slower * (self._gap + self._host))
        done = np.cumsum(self._device) - self._device
        return float(np.max(launched - done, initial=0.0))

    @property
    def adjustable(self) -> Mask:
        """The parts before which the device may be held back for longer."""
        able: Mask = (self._stops == 0) & (self._limits > (0.0 if self.holds is None else self.holds))
        return able

    def launched(self, host: Vector) -> Vector:
        """The host's seconds of the first so many parts, without what it waited for the device."""
        count = len(host)
        return np.where(self._stops[:count] > 0, np.minimum(host, self._host[:count]), host)

    @property
    def launching(self) -> float:
        """Seconds of the host, at the least."""
        return float((self._gap + self._host).sum())

    def _judge(self, times: DirectionTimes, holds: Vector) -> None:
        stopped, waits = self._stopped(times), bool((~times.is_ahead & self.adjustable).any())
        waiting = times.host - self._host
        less = np.where(self._stops > 0, 0.0, _BELOW_FULL * np.maximum(holds - waiting, 0.0))
        self._limits = np.where(stopped, less, self._limits)
        self._stops += stopped
        self._before = None if stopped.any() else times
        self._trials += 1
        if waits:
            self._margin = min(_GROWTH * self._margin, _MOST_MARGIN)
        self.is_settled = self.is_settled or not (waits or stopped.any()) or self._trials >= _TRIALS

    def _stopped(self, times: DirectionTimes) -> Mask:
        """Where the host waited for the device: the longer, the later the device began."""
        before = self._before
        if before is None:
            return np.zeros(len(times.host), dtype=np.bool_)
        waiting, waited_before = times.host - self._host, before.host - self._host
        is_longer = (waiting > _UNSTEADY * self._host) & (waited_before > _UNSTEADY * self._host)
        later = times.lag - before.lag
        grows = (later > _UNSTEADY * before.lag) & (waiting - waited_before > _MOST_OF * later)
        return is_longer & grows

    def _keep_least(self, times: DirectionTimes) -> None:
        self._host, self._gap = np.minimum(self._host, times.host), np.minimum(self._gap, times.gap)
        least = np.where(self._device > 0, np.minimum(self._device, times.device), times.device)
        self._device = np.where(times.is_ahead, least, self._device)

    def _needed(self) -> Vector:
        """With these the device begins each part once it was launched; what is not known takes no time."""
        holds = np.zeros_like(self._host)
        launched, done = _EARLY, 0.0
        for index in range(len(holds)):
            begun = launched + self._margin * self._gap[index]
            launched = begun + self._margin * self._host[index]
            holds[index] = min(max(launched - done, 0.0), self._limits[index])
            done = max(done + holds[index], begun) + self._device[index]
            if self._stops[index]:
                launched = max(launched, done)
        return holds


class WholeLead:
    """How long to hold a device back before one direction of the untouched model.

    For as long as its host launches; or, where the device has enough to do, as a host that is twice as slow
    would need. Where that was too short the host was slower, and the next lead is longer; where that is so
    several times in a row, the host was stopped by a full queue, and the lead ends where it was.
    """

    def __init__(self, layers: Direction) -> None:
        self._layers = layers
        self._limit = LONGEST
        self._host = 0.0
        self._too_short = 0
        self._late = self._passes = 0
        self.lead = 0.0
        self.has_waited = False
        """Whether the device waited for the host in the last pass."""

    def update(self) -> None:
        """Takes over what the layers have shown since."""
        needed = min(_WHOLE_MARGIN * max(self._host, self._layers.launching), self._layers.lead(_SLOWER))
        self.lead = min(needed + _EARLY, self._limit) if needed else 0.0

    def observe(self, host: float) -> None:
        """Seconds of the host in a pass that was held back for `lead`."""
        usual = self._layers.launching
        if not usual:
            return
        is_limited = self.lead >= self._limit
        self.has_waited = self._layers.lead(1.0 if is_limited else max(host / usual, 1.0)) > self.lead
        self._too_short = self._too_short + 1 if self.has_waited and not is_limited else 0
        if self._too_short == _STOPPED:
            self._limit = _BELOW_FULL * max(self.lead - (host - usual), 0.0)
        elif self._too_short:
            self._host = max(self._host, host)
        self.update()

    def keep(self) -> None:
        """The seconds of the last pass are kept."""
        if self._layers.is_settled:
            self._late += self.has_waited
            self._passes += 1

    @property
    def is_short(self) -> bool:
        """Whether the device waited for the host in most of the passes that were kept."""
        return self._late > _MOST_OF * self._passes


class LeadTuner:
    """How long the device is held back in the passes at one micro-batch size."""

    def __init__(self) -> None:
        self.forward, self.backward = Direction(), Direction()
        self.inputs, self.weights = Direction(), Direction()
        """Of backward in two parts: the gradients of the inputs, and of the weights."""
        self._parts = self.inputs, self.weights
        self._whole = WholeLead(self.forward), WholeLead(self.backward)

    @property
    def directions(self) -> tuple[Direction, Direction]:
        """Of a pass of the layers: forward and backward."""
        return self.forward, self.backward

    @property
    def leads(self) -> Leads:
        """For the next pass of the untouched model."""
        return Leads(*(way.lead for way in self._whole))

    @property
    def is_settled(self) -> bool:
        """Whether passes of forward and backward say no more than how long they take."""
        return self.forward.is_settled and self.backward.is_settled

    @property
    def has_settled_parts(self) -> bool:
        """The same for the pass with a backward in two parts."""
        return self.inputs.is_settled and self.weights.is_settled

    @property
    def parts_can_wait_less(self) -> bool:
        """Whether the device waited in the last pass with a backward in two parts, and need not have."""
        return self.has_settled_parts and any((way.late & way.adjustable).any() for way in self._parts)

    @property
    def short(self) -> tuple[str, ...]:
        """The directions in which the device still waits for the host."""
        ways = {
            "forward": self.forward,
            "backward": self.backward,
            "the inputs' gradients": self.inputs,
            "the weights' gradients": self.weights,
        }
        return tuple(name for name, way in ways.items() if way.is_short)

    @property
    def has_whole_waited(self) -> bool:
        """Whether the device waited for the host in the untouched model's last pass."""
        return any(way.has_waited for way in self._whole)

    @property
    def is_whole_short(self) -> bool:
        """The same, in most of its passes that were kept."""
        return any(way.is_short for way in self._whole)

    def keep_whole(self) -> None:
        """The seconds of the untouched model's last pass are kept."""
        for way in self._whole:
            way.keep()

    def observe(self, forward: DirectionTimes, backward: DirectionTimes) -> None:
        """What a pass of the layers showed: the first was not held back."""
        self.forward.observe(forward)
        self.backward.observe(backward)
        for way in self._whole:
            way.update()

    def observe_parts(self, inputs: DirectionTimes, weights: DirectionTimes) -> None:
        """What a pass with a backward in two parts showed."""
        for way, times in zip(self._parts, (inputs, weights), strict=True):
            way.observe(times)

    def keep_parts(self) -> None:
        """The seconds of the last pass with a backward in two parts are kept."""
        for way in self._parts:
            way.keep(way.late)

    def observe_whole(self, forward: float, backward: float) -> None:
        """The host's seconds of a pass of the untouched model."""
        for way, host in zip(self._whole, (forward, backward), strict=True):
            way.observe(host)
