"""When the hosts launch a program's actions: ahead of the devices, for which they never wait.

Where each device has its own host, a process a device, its launches follow one another in the order of its
list. Where one process drives all devices, it launches from several threads:

  forwards one after another, in the order of the clock. torchgpipe and FairScale have a worker thread a
    device for them, but what launches is Python, and threads take turns with Python's lock. PyTorch lets go
    of the lock inside each operation, so that some of it may overlap: one after another is the most it takes;
  backwards from a thread a device: PyTorch's autograd engine has one for each CUDA device (engine.cpp, "Note
    [Allocating GPUs to autograd threads]"), and its operations are launched without Python. A backward's
    launch begins when that of the place its gradients come from has ended, on the host, whatever the devices
    have done by then;
  what a backward runs again of its forward first, one after another, too. It is Python, launched until
    PyTorch 2.5 by the thread that called backward, as its node receives no gradient (a queue was chosen by
    the device of the gradients), and since by that of its device (pull request 135633).

The process goes from forwards to backwards and back as the clock does: backward() is called after the
forwards before it, and returns when all backwards up to the next forward are launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .costs import Array, Costs
from .dependencies import NONE, Indices, Order


class Launches(NamedTuple):
    """Seconds of each action's launch: when it starts and ends; `repeat`: what of it, at its beginning,
    launches a forward again, where one process drives all devices."""

    start: Array
    end: Array
    repeat: Array | None


def time_launches(order: Order, costs: Costs, seconds: Array, repeat: Array | None) -> Launches:
    """Of launches that take so many seconds, (actions,) or (actions, candidates), what is launched again
    included."""
    if costs.hosts == "one":
        return _of_process(order, seconds, repeat)
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    for device in range(order.program.devices):
        own = np.flatnonzero(order.device == device)
        end[own] = np.cumsum(seconds[own], axis=0)
        start[own] = np.concatenate([np.zeros_like(end[own[:1]]), end[own[:-1]]])
    return Launches(start, end, None)


def _of_process(order: Order, seconds: Array, repeat: Array | None) -> Launches:
    """`called`: when the last forward was launched; `done`: the last of the backwards; `python`: what a
    backward runs again."""
    many = seconds.ndim > 1
    later: Any = np.maximum if many else max
    rows = list(seconds) if many else seconds.tolist()
    repeats = _rows_repeated(repeat, many, len(order))
    called = done = python = 0 * rows[0]
    threads = [called] * order.program.devices
    starts, ends = [], list[Any]()
    columns = (order.kind.tolist(), order.lists["device"], order.lists["source"], rows, repeats)
    for kind, device, source, own, again in zip(*columns, strict=True):
        if kind == 0:
            begins = later(called, done)
            finishes = called = python = begins + own
        else:
            begins = later(threads[device], called)
            if source != NONE:
                begins = later(begins, ends[source])
            if again is not None:
                begins = _after_python(begins, python, again)
                python = later(python, begins + again)
            finishes = threads[device] = begins + own
            done = later(done, finishes)
        starts.append(begins)
        ends.append(finishes)
    return Launches(np.array(starts), np.array(ends), repeat)


def _rows_repeated(repeat: Array | None, many: bool, count: int) -> list[Any]:
    """By action what is launched again; None where nothing is."""
    if repeat is None:
        return [None] * count
    if not many:
        return [seconds or None for seconds in repeat.tolist()]
    return [seconds if seconds.any() else None for seconds in repeat]


def _after_python(begins: Any, python: Any, again: Any) -> Any:
    """When a launch begins that takes Python first; of candidates, those that launch something again."""
    if isinstance(begins, np.ndarray):
        return np.where(again > 0, np.maximum(begins, python), begins)
    return max(begins, python)


def preceding_launches(order: Order, costs: Costs, launches: Launches) -> Indices:
    """By action, another one, when whose launch, or what that launches again, ends, its own launch starts;
    -1: at the beginning of the step."""
    before = np.full(len(order), NONE)
    for i, others in enumerate(_waits(order, costs, launches)):
        for j, until in others:
            if launches.start[i] > 0 and until == launches.start[i]:
                before[i] = j
                break
    return before


def _waits(order: Order, costs: Costs, launches: Launches) -> Iterator[list[tuple[int, float]]]:
    """For each action in the order of the clock, the launches that its own waits for, and until when."""
    last: dict[int, tuple[int, float]] = {}
    called = python = done = (NONE, 0.0)
    for i, device in enumerate(order.lists["device"]):
        start, end = float(launches.start[i]), float(launches.end[i])
        own, source = last.get(device, (NONE, 0.0)), order.lists["source"][i]
        last[device] = (i, end)
        if costs.hosts == "each":
            yield [own]
        elif order.kind[i] == 0:
            yield [called, done]
            called = python = (i, end)
        else:
            again = 0.0 if launches.repeat is None else float(launches.repeat[i])
            sender = [] if source == NONE else [(source, float(launches.end[source]))]
            yield [own, *sender, called, *([python] if again else [])]
            python = max(python, (i, start + again), key=lambda one: one[1]) if again else python
            done = max(done, (i, end), key=lambda one: one[1])
