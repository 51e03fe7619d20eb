"""The step of a pipeline, simulated again from its figures."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, cached_property

from .launch_times import LaunchWork, launch_times
from .layer_costs import FORWARD
from .pipeline import Figures
from .stated_machine import Port
from .stated_plan import OFFLOAD, first_layers
from .traffic import AllReduce, all_reduce_time, run_all_reduces, shared_loads
from .wiring import NONE, RunTimes, StepWork, WiredOrder, check_order, simulate_events


@dataclass(frozen=True)
class Step:
    """Simulated: seconds of the step, and the idle share of the devices."""

    seconds: float
    bubble: float


@dataclass(frozen=True, eq=False)
class SimulatedFigures(Figures):
    """Figures with the step that they come to."""

    @cached_property
    def step(self) -> Step:
        """Simulated once."""
        return _simulate(self)


def _simulate(figures: Figures) -> Step:
    """The step of a pipeline of these figures."""
    wiring = check_order(figures.order)
    work = _work(figures, wiring)
    ran = simulate_events(work)
    end = max(_reduce_gradients(figures, wiring, ran))
    if figures.shared_ports:
        end = max(end, figures.port_seconds[0])
    busy = sum(ran.end) - sum(ran.start)
    return Step(end, 1 - busy / (figures.order.devices * end) if end else 0.0)


def _work(figures: Figures, wiring: WiredOrder) -> StepWork:
    order, last, splits = figures.order, len(figures.order.route_of) - 1, figures.order.splits
    split = {
        (device, *own[1:]) for device, actions in enumerate(order.lists) for own in actions if own[0] == "W"
    }
    seconds, launches = [], LaunchWork([], [])
    begun: set[tuple[int, int]] = set()
    figure = cache(figures.seconds)
    for device, (kind, batch, chunk), part in zip(wiring.device, wiring.action, wiring.part, strict=True):
        forward = figure(part, device, "forward_seconds")
        share, mode = order.shares[batch], figures.recompute[device]
        repeats = mode not in ("never", OFFLOAD) and not (mode == "except_last" and batch == last)
        again = [figure(part, device, name, first_layers(mode)) if repeats else 0.0 for name in FORWARD]
        if kind == "F":
            own = forward
        elif kind == "W":
            own = figure(part, device, "backward_weight_seconds")
        elif not splits:
            own = figure(part, device, "backward_seconds") + again[0]
        else:
            whole = (device, batch, chunk) not in split
            weight = figure(part, device, "backward_weight_seconds") if whole else 0.0
            own = figure(part, device, "backward_input_seconds") + weight + again[0]
        finishes = kind == "W" or (kind == "B" and (device, batch, chunk) not in split)
        if finishes and (device, chunk) not in begun:
            begun.add((device, chunk))
            own -= figures.saved_first(part, device, f"backward_{'weight_' if splits else ''}seconds")
        seconds.append(own * share)
        host = "" if kind == "W" else f"{'forward' if kind == 'F' else 'backward'}_host_seconds"
        launches.rest.append(figure(part, device, host) if host else 0.0)
        launches.again.append(again[1] if kind == "B" else 0.0)
    launch_start, launch_end = launch_times(wiring, launches, one_process=figures.one_process)
    ports, occupancy, latency = _transfers(figures, wiring)
    return StepWork(
        wiring, seconds, ports, occupancy, latency, launch_start=launch_start, launch_end=launch_end
    )


def _transfers(
    figures: Figures, wiring: WiredOrder
) -> tuple[list[Hashable | None], list[float], list[float]]:
    ports: list[Hashable | None] = []
    occupancy, latency = [], []
    for index, target in enumerate(wiring.target):
        if target == NONE:
            ports.append(None)
            occupancy.append(0.0)
            latency.append(0.0)
            continue
        here, there = wiring.device[index], wiring.device[target]
        size, own = figures.transfers[min(wiring.part[index], wiring.part[target]), here, there]
        ports.append(own.leaves_by if figures.shared_ports else (here, there))
        occupancy.append(size * own.pace * figures.order.shares[wiring.action[index][1]])
        latency.append(own.latency)
    return ports, occupancy, latency


def _reduce_gradients(figures: Figures, wiring: WiredOrder, ran: RunTimes) -> list[float]:
    """When each device is done: after its last action come its all-reduces, then those of shared weights."""
    ready: dict[tuple[int, int], float] = {}
    for index, last in enumerate(wiring.last):
        if last:
            place = wiring.part[index], wiring.device[index]
            ready[place] = max(ready.get(place, 0.0), ran.end[index])
    shared: dict[int, dict[Port, float]] = {}
    if figures.shared_ports:
        parts = range(figures.order.parts)
        sizes = [figures.bytes_at_end(part) for part in parts]
        shared = shared_loads(figures.machine, [figures.part_ranks(part) for part in parts], sizes)
    requests = list[AllReduce]()
    for part in range(figures.order.parts):
        members = sorted({route[part][0] for route in figures.order.routes})
        seconds = max(figures.reduce_seconds(part, device) for device in members)
        if seconds > 0 or shared.get(part):
            requests.append(AllReduce(max(ready[part, device] for device in members), part, members, seconds))
    ends = run_all_reduces(ran.free, requests, shared)
    for places, ranks, size in figures.shared:
        begin = max(ends[device] for device in places)
        for device in places:
            ends[device] = begin + all_reduce_time(figures.machine, ranks, size)
    return ends
