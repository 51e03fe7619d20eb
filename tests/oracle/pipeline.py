"""A pipeline computed a second time: seconds of its stages, ledgers, and its simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf

from .events import (
    NONE,
    Transport,
    WiredAction,
    launch_times,
    list_crossed_cuts,
    simulate,
    wire_order,
)
from .layers import HOST, Layers, PartBytes, Vector, count_again, offloaded, part_bytes
from .ledger import Exchange, Ledger, Training, compute_ledger
from .machine import (
    AllReduce,
    Device,
    Machine,
    Port,
    Transfer,
    all_reduce_seconds,
    exposed_seconds,
    find_transfer,
    run_all_reduces,
    sum_loads,
)
from .orders import ImpossiblePlanError, Order

COPYING = ("forward_seconds", "backward_seconds", "first_backward_seconds")
"""Figures that include a copy to the host, or back, where a part offloads."""
COPIES = {"chimera": 2, "avgpipe": 3}
"""Copies of the weights that a schedule keeps; one by default."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Everything that a step depends on. `ends`, `devices`, `modes`: by part of the layers, the layers before
    its end, the ranks of its replicas, and what it recomputes. `profiles`: of kinds that have their own."""

    schedule: str
    order: Order
    size: int
    ends: Sequence[int]
    devices: Sequence[tuple[int, ...]]
    modes: Sequence[str]
    one_process: bool
    receives_ahead: bool
    layers: Layers
    profiles: Mapping[str, Layers]
    machine: Machine
    training: Training
    host_bandwidth: float | None

    @cached_property
    def ranks(self) -> list[tuple[int, ...]]:
        """By device of the pipeline, its replicas. Raises ImpossiblePlanError where its parts have others."""
        ranks: dict[int, tuple[int, ...]] = {}
        for part, (device, _) in enumerate(self.order.routes[0]):
            if ranks.setdefault(device, self.devices[part]) != self.devices[part]:
                raise ImpossiblePlanError(f"part {part} is on other devices than {self.schedule} has it on")
        return [ranks[device] for device in range(self.order.devices)]

    def recompute(self, device: int) -> str:
        """What a device of the pipeline recomputes."""
        return next(self.modes[part] for part, slot in enumerate(self.order.routes[0]) if slot[0] == device)

    def share(self, device: int) -> int:
        """Samples of a micro-batch that each replica computes, at most."""
        return -(-self.size // len(self.ranks[device]))

    def bounds(self, part: int) -> tuple[int, int]:
        """The first layer of a part, and the one after its last."""
        return (0, *self.ends)[part], self.ends[part]

    def kinds(self, device: int) -> list[Device]:
        """The kinds of devices among the replicas."""
        return list(dict.fromkeys(self.machine.kind(rank) for rank in self.ranks[device]))

    def seconds(self, part: int, device: int, name: str, layers: int | None = None) -> float:
        """Seconds of a part, or of its first layers, on its slowest kind of replica; those of the host, which
        is one for all kinds, are the plan's profile's."""
        first, end = self.bounds(part)
        end = end if layers is None else min(first + layers, end)
        if name in HOST:
            return float(self.layers.at(self.share(device))[name][first:end].sum())
        copies = self.copy_seconds(part, device) if layers is None and name in COPYING else 0.0
        each = [self.layer_seconds(kind, device, name, first, end) for kind in self.kinds(device)]
        return copies + max(self.exchange(part).seconds(name, own) for own in each)

    def layer_seconds(self, kind: Device, device: int, name: str, first: int, end: int) -> Vector:
        """Seconds by layer on a kind of devices."""
        layers = self.layers if kind.profile is None else self.profiles[kind.profile]
        return layers.at(self.share(device))[name][first:end] / kind.speed

    def copy_seconds(self, part: int, device: int) -> float:
        """To the host, in a forward, and back, in a backward, where the part offloads."""
        if self.modes[part] != "offload":
            return 0.0
        if not self.host_bandwidth:
            raise ImpossiblePlanError(f"part {part} of the layers offloads, and no host_bandwidth is stated")
        return self.host_bytes(part, device) / self.host_bandwidth

    def host_bytes(self, part: int, device: int) -> float:
        """What a micro-batch of a part that offloads has on the host of each replica."""
        return float(offloaded(self.layers, *self.bounds(part), self.share(device)).sum())

    @cached_property
    def shared(self) -> list[tuple[list[int], list[int], float]]:
        """Weights that several parts use: devices of the pipeline that hold it, all their ranks, and
        the bytes of its gradient; where there is something to add up."""
        weights = []
        for weight in self.layers.shared:
            parts = [part for part in range(self.order.parts) if weight.is_used(*self.bounds(part))]
            ranks = sorted({rank for part in parts for rank in self.part_ranks(part)})
            if weight.trains and len(parts) > 1 and len(ranks) > 1:
                places = sorted({route[part][0] for route in self.order.routes for part in parts})
                weights.append((places, ranks, weight.bytes * self.training.scale))
        return weights

    def exchange(self, part: int) -> Exchange:
        """What ZeRO exchanges over the devices that have a part."""
        rows = slice(*self.bounds(part))
        trainable = self.layers.trainable[rows].copy()
        trainable[0] += self.part_bytes(part, self.order.routes[0][part][0]).copied
        ranks = self.part_ranks(part)
        return Exchange(self.machine, ranks, self.training, self.layers.parameters[rows], trainable)

    def saved_first(self, part: int, device: int, name: str) -> float:
        """What the first backward of a part on a device does not take, of such seconds: it adds to no
        gradients. Where replicas exchange by layer it takes what any does."""
        if self.exchange(part).by_layer:
            return 0.0
        return self.seconds(part, device, name) - self.seconds(part, device, f"first_{name}")

    def part_seconds(self, part: int) -> tuple[float, float]:
        """Forward of a part as the plan states it, and backward with what it recomputes."""
        device, (first, end) = self.order.routes[0][part][0], self.bounds(part)
        again = count_again(self.modes[part], end - first)
        forward, backward = (self.seconds(part, device, name) for name in COPYING[:2])
        return forward, backward + (self.seconds(part, device, COPYING[0], again) if again else 0.0)

    def part_bytes(self, part: int, device: int) -> PartBytes:
        """The bytes from which the ledger of a part is computed."""
        return part_bytes(self.layers, *self.bounds(part), self.share(device), self.modes[part])

    def limit(self, device: int, requested: float | None) -> float:
        """Bytes that each replica may hold."""
        sizes = [requested, *(kind.memory_bytes for kind in self.kinds(device))]
        return min((float(size) for size in sizes if size is not None), default=inf)

    def ledger(self, device: int, weight_versions: Sequence[float] = (1,)) -> Ledger:
        """Ledger of a device, of the kind with the largest context. `weight_versions`: by part, or one."""
        parts = self.order.device_parts(device)
        return compute_ledger(
            self.order,
            device,
            [self.part_bytes(part, device) for part in parts],
            self.training,
            recompute=self.recompute(device),
            replicas=len(self.part_ranks(parts[0])),
            weight_versions=weight_versions,
            copies=COPIES.get(self.schedule, 1),
            context_bytes=max(kind.known[0] for kind in self.kinds(device)),
            receives_ahead=self.receives_ahead,
        )

    def part_ranks(self, part: int) -> list[int]:
        """All devices that sum the gradients of a part."""
        return sorted({rank for route in self.order.routes for rank in self.ranks[route[part][0]]})

    @cached_property
    def transfers(self) -> dict[tuple[int, int, int], tuple[float, Transfer]]:
        """Bytes and route of a transfer between two devices of the pipeline, by (part before the cut, sender,
        receiver), in both directions. All replicas send at once; the bytes of a whole micro-batch are those
        of the larger share times the fewer replicas."""
        transfers = {}
        for _, part, here, there in list_crossed_cuts(self.order):
            shares, row = (self.share(here), self.share(there)), self.ends[part] - 1
            each = max(float(self.layers.at(share)["output_bytes"][row]) for share in shares)
            whole = each * min(len(self.ranks[here]), len(self.ranks[there]))
            for a, b in ((here, there), (there, here)):
                transfers[part, a, b] = whole, find_transfer(self.machine, self.ranks[a], self.ranks[b])
        return transfers

    def gradient_bytes(self, part: int) -> list[float]:
        """By layer of a part."""
        layers = self.layers.trainable[slice(*self.bounds(part))]
        return [float(size) * self.training.scale for size in layers]

    def reduce_seconds(self, part: int, device: int) -> float:
        """What of the sum of a part's gradients follows its last backward on a device."""
        ranks, gradients = self.part_ranks(part), self.gradient_bytes(part)
        if len(ranks) < 2:
            return 0.0
        if self.training.zero:
            return self.exchange(part).at_end()
        if ranks != sorted(self.ranks[device]):
            return all_reduce_seconds(self.machine, ranks, sum(gradients))
        each = [
            self.layer_seconds(kind, device, "backward_seconds", *self.bounds(part)).tolist()
            for kind in self.kinds(device)
        ]
        return exposed_seconds(self.machine, ranks, max(each, key=sum), gradients)

    def bytes_at_end(self, part: int) -> float:
        """What its replicas exchange behind the last backward, as bytes of an all-reduce."""
        return self.exchange(part).bytes_at_end() if self.training.zero else sum(self.gradient_bytes(part))

    @cached_property
    def port_seconds(self) -> float:
        """What the bytes of a step need of the port that they load most, in any order."""
        loads: dict[Port, float] = {}
        count = [0.0] * len(self.order.routes)
        for route, share in zip(self.order.route_of, self.order.shares, strict=True):
            count[route] += share
        for route, part, here, there in list_crossed_cuts(self.order):
            for ends in ((here, there), (there, here)):
                size, transfer = self.transfers[part, *ends]
                _add(loads, {port: count[route] * size * load for port, load in transfer.loads.items()})
        for part in range(self.order.parts):
            meanwhile = len(self.order.route_of) * self.exchange(part).bytes_by_layer()
            _add(loads, sum_loads(self.machine, self.part_ranks(part), meanwhile + self.bytes_at_end(part)))
        for _, ranks, size in self.shared:
            _add(loads, sum_loads(self.machine, ranks, size))
        return max(loads.values(), default=0.0)

    @cached_property
    def step(self) -> tuple[float, float]:
        """Seconds of the simulated step, and the idle share of the devices."""
        wired = wire_order(self.order)
        start, end = _run(self, wired)
        step = max(*_reduce_gradients(self, wired, end), self.port_seconds)
        busy = sum(end) - sum(start)
        return step, 1 - busy / (self.order.devices * step) if step else 0.0


def _add(loads: dict[Port, float], more: dict[Port, float]) -> None:
    for port, load in more.items():
        loads[port] = loads.get(port, 0.0) + load


def _run(pipeline: Pipeline, wired: list[WiredAction]) -> tuple[list[float], list[float]]:
    """By action its start and end."""
    order, split = pipeline.order, pipeline.order.split
    splits, last = any(split), len(order.route_of) - 1
    seconds, again, rest = list[float](), list[float](), list[float]()
    started: set[tuple[int, int]] = set()
    figure, recompute = cache(pipeline.seconds), cache(pipeline.recompute)
    for own in wired:
        (kind, batch, chunk), part, device = own.action, own.part, own.device
        mode, first, end = recompute(device), *pipeline.bounds(part)
        number = 0 if mode == "except_last" and batch == last else count_again(mode, end - first)
        repeats = kind == "B" and number
        names = ["forward_seconds"]
        if kind == "W":
            names = ["backward_weight_seconds"]
        elif kind == "B" and splits:
            whole = (batch, chunk) not in split[device]
            names = ["backward_input_seconds", *(["backward_weight_seconds"] if whole else [])]
        elif kind == "B":
            names = ["backward_seconds"]
        took = sum(figure(part, device, name) for name in names)
        took += figure(part, device, "forward_seconds", number) if repeats else 0.0
        finishes = kind == "W" or (kind == "B" and (batch, chunk) not in split[device])
        if finishes and (device, chunk) not in started:
            started.add((device, chunk))
            took -= pipeline.saved_first(part, device, f"backward_{'weight_' if splits else ''}seconds")
        seconds.append(took * order.shares[batch])
        rest.append(figure(part, device, HOST[int(kind == "B")]) if kind != "W" else 0.0)
        again.append(figure(part, device, HOST[0], number) if repeats else 0.0)
    launches = launch_times(wired, again, rest, one_process=pipeline.one_process)
    transfers = [
        None if own.target == NONE else _transport(pipeline, own, wired[own.target]) for own in wired
    ]
    return simulate(wired, seconds, transfers, launches)


def _transport(pipeline: Pipeline, sender: WiredAction, receiver: WiredAction) -> Transport:
    cut = min(sender.part, receiver.part), sender.device, receiver.device
    size, transfer = pipeline.transfers[cut]
    pace, share = max(transfer.loads.values()), pipeline.order.shares[sender.action[1]]
    return transfer.leaves_by, size * pace * share, transfer.latency


def _reduce_gradients(pipeline: Pipeline, wired: list[WiredAction], end: list[float]) -> list[float]:
    """When each device is done: after its last action come its all-reduces, then those of shared weights."""
    order, machine = pipeline.order, pipeline.machine
    free, ready = [0.0] * order.devices, dict[tuple[int, int], float]()
    for own, now in zip(wired, end, strict=True):
        free[own.device] = max(free[own.device], now)
        if own.action[0] != "F":
            ready[own.part, own.device] = max(ready.get((own.part, own.device), 0.0), now)
    loads = [
        sum_loads(machine, pipeline.part_ranks(part), pipeline.bytes_at_end(part))
        for part in range(order.parts)
    ]
    uses = Counter(port for own in loads for port, load in own.items() if load)
    shared = {
        part: {port: load for port, load in own.items() if uses[port] > 1} for part, own in enumerate(loads)
    }
    requests = list[AllReduce]()
    for part in range(order.parts):
        members = sorted({route[part][0] for route in order.routes})
        seconds = max(pipeline.reduce_seconds(part, device) for device in members)
        if seconds > 0 or shared[part]:
            begin = max(ready[part, device] for device in members)
            requests.append((begin, part, members, seconds))
    ends = run_all_reduces(free, requests, shared)
    for places, ranks, size in pipeline.shared:
        begin = max(ends[device] for device in places)
        for device in places:
            ends[device] = begin + all_reduce_seconds(machine, ranks, size)
    return ends
