"""Clocks: stamps set between layers, and the seconds that lie between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from ..torch_internals import sleep_on_gpu

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
        """Keeps the device busy for so long before what is launched next (see launch_lead.py).

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
