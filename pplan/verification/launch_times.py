"""When every action of a step is launched, computed again.

A process a device launches its device's list, one after another. One process for all devices has a thread a
device for the backwards, as PyTorch's autograd engine has, and launches everything that is Python one after
another: forwards, and what backwards run again of them. A backward's launch waits for the one before on its
device, for that of the backward its gradients come from, and for the forwards before it on the clock; a
forward waits for all backwards before it. No launch waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .wiring import NONE, WiredOrder


@dataclass(frozen=True)
class LaunchWork:
    """By action, in the order of the clock, host seconds: of what launches the forward again, which comes
    first, and of the rest."""

    again: list[float]
    rest: list[float]


def launch_times(
    wiring: WiredOrder, work: LaunchWork, *, one_process: bool
) -> tuple[list[float], list[float]]:
    """By action, when its launch starts and ends."""
    spans = list(_one_process(wiring, work) if one_process else _process_each(wiring, work))
    return [start for start, _ in spans], [end for _, end in spans]


def _process_each(wiring: WiredOrder, work: LaunchWork) -> Iterator[tuple[float, float]]:
    clocks: dict[int, float] = {}
    for device, again, rest in zip(wiring.device, work.again, work.rest, strict=True):
        start = clocks.get(device, 0.0)
        clocks[device] = start + (again + rest)
        yield start, clocks[device]


@dataclass
class _Ends:
    """When launches have ended: all so far of each kind, the last on each device, what was run again."""

    forwards: float = 0.0
    backwards: float = 0.0
    repeated: float = 0.0
    threads: dict[int, float] = field(default_factory=dict)
    actions: list[float] = field(default_factory=list)


def _one_process(wiring: WiredOrder, work: LaunchWork) -> Iterator[tuple[float, float]]:
    ends = _Ends()
    columns = (wiring.device, wiring.action, wiring.source, work.again, work.rest)
    for device, (kind, *_), source, again, rest in zip(*columns, strict=True):
        waits = [ends.forwards, ends.backwards if kind == "F" else ends.threads.get(device, 0.0)]
        if kind != "F" and source != NONE:
            waits.append(ends.actions[source])
        if again > 0:
            waits.append(ends.repeated)
        start = max(waits)
        end = start + (again + rest)
        ends.actions.append(end)
        if kind == "F":
            ends.forwards = end
        else:
            ends.threads[device] = end
            ends.backwards = max(ends.backwards, end)
            ends.repeated = max(ends.repeated, start + again)
        yield start, end
