"""A pipeline computed again: seconds of its stages, ledgers, and its simulated step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from .device_ledger import Ledger, PartBytes, compute_ledger, offloaded, on_host, part_bytes
from .layer_costs import HOST, Layers
from .orders import ScheduleOrder
from .report import ImpossiblePlan, NotChecked
from .stated_machine import Port, StatedDevice, StatedMachine
from .stated_plan import OFFLOAD, first_layers
from .stated_training import Exchange, StatedTraining
from .traffic import (
    TransferRoute,
    all_reduce_time,
    exposed_seconds,
    find_transfer_route,
    sum_loads,
)
from .wiring import cuts_crossed

COPYING = ("forward_seconds", "backward_seconds", "first_backward_seconds")
"""Of a part that offloads they have a copy to the host, or back."""
COPIES = {"chimera": 2, "avgpipe": 3}
"""Of the weights that a schedule keeps; of others one."""


@dataclass(frozen=True, eq=False)
class Figures:
    """Everything that a step depends on. `ends`, `devices`, `modes`: by part of the layers, the layers before
    its end, the ranks of its replicas, and what it recomputes. `profiles`: of kinds that have their own."""

    schedule: str
    order: ScheduleOrder
    size: int
    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    modes: tuple[str, ...]
    one_process: bool
    layers: Layers
    profiles: Mapping[str, Layers]
    machine: StatedMachine
    training: StatedTraining
    shared_ports: bool = True
    receives_ahead: bool = False
    host_bandwidth: float | None = None

    @cached_property
    def ranks(self) -> list[tuple[int, ...]]:
        """By device of the pipeline, its replicas. Raises NotLegal where its parts have others."""
        ranks_by_device: dict[int, tuple[int, ...]] = {}
        for part, (device, _) in enumerate(self.order.routes[0]):
            if ranks_by_device.setdefault(device, self.devices[part]) != self.devices[part]:
                raise ImpossiblePlan(
                    f"part {part} of the layers is on {list(self.devices[part])}, {self.schedule} has it "
                    f"with those on {list(ranks_by_device[device])}"
                )
        return [ranks_by_device[device] for device in range(self.order.devices)]

    @cached_property
    def recompute(self) -> list[str]:
        """By device of the pipeline."""
        own = {device: self.modes[part] for part, (device, _) in enumerate(self.order.routes[0])}
        return [own[device] for device in range(self.order.devices)]

    def per_replica_batch(self, device: int) -> int:
        """Samples of a micro-batch that each replica computes, at the most."""
        return -(-self.size // len(self.ranks[device]))

    def bounds(self, part: int) -> tuple[int, int]:
        """The first layer of a part, and the one after its last."""
        return (0, *self.ends)[part], self.ends[part]

    def _kinds(self, device: int) -> list[StatedDevice]:
        return list(dict.fromkeys(self.machine.kind(rank) for rank in self.ranks[device]))

    def _measured(self, kind: StatedDevice) -> Layers:
        if kind.profile is None:
            return self.layers
        if kind.profile not in self.profiles:
            raise NotChecked(f"{kind.profile}, the profile of {kind.name}, is not beside the plan")
        return self.profiles[kind.profile]

    def seconds(self, part: int, device: int, name: str, layers: int | None = None) -> float:
        """Seconds of a part, or of its first layers, on its slowest kind of replica; those of the host, which
        is one for all kinds, are the plan's profile's."""
        first, end = self.bounds(part)
        end = end if layers is None else min(first + layers, end)
        if name in HOST:
            return float(self.layers.at(self.per_replica_batch(device))[name][first:end].sum())
        exchange = self.exchange(part)
        copies = self.copy_seconds(part, device) if layers is None and name in COPYING else 0.0
        return copies + max(
            exchange.seconds(
                name, self._measured(kind).at(self.per_replica_batch(device))[name][first:end] / kind.speed
            )
            for kind in self._kinds(device)
        )

    def copy_seconds(self, part: int, device: int) -> float:
        """To the host, in a forward, and back, in a backward, where the part offloads."""
        if self.modes[part] != OFFLOAD:
            return 0.0
        if not self.host_bandwidth:
            raise ImpossiblePlan(f"part {part} of the layers offloads, and no host_bandwidth is stated")
        return self.host_bytes(part, device) / self.host_bandwidth

    def host_bytes(self, part: int, device: int) -> float:
        """What a micro-batch of a part that offloads has on the host of each replica."""
        return sum(offloaded(self.layers, *self.bounds(part), self.per_replica_batch(device)))

    def _copied(self, part: int) -> float:
        """Trainable bytes of weights whose first user is in an earlier part."""
        return self.part_bytes(part, self.order.routes[0][part][0]).copied

    @cached_property
    def shared(self) -> list[tuple[list[int], list[int], float]]:
        """Of each weight that several parts use: devices of the pipeline that hold it, all their ranks, and
        the bytes of its gradient; where there is something to add up."""
        weights = []
        for weight in self.layers.shared:
            parts = [part for part in range(self.order.parts) if weight.is_used(*self.bounds(part))]
            ranks = sorted({rank for part in parts for rank in self.part_ranks(part)})
            if weight.trains and len(parts) > 1 and len(ranks) > 1:
                places = sorted({route[part][0] for route in self.order.routes for part in parts})
                weights.append((places, ranks, weight.bytes * self.training.gradient / self.training.weight))
        return weights

    def exchange(self, part: int) -> Exchange:
        """What ZeRO exchanges over the devices that have a part."""
        own = slice(*self.bounds(part))
        parameters, trainable = self.layers.parameters[own], self.layers.trainable[own].copy()
        trainable[0] += self._copied(part)
        return Exchange(self.machine, self.part_ranks(part), self.training, parameters, trainable)

    def saved_first(self, part: int, device: int, name: str) -> float:
        """What the first backward of a part on a device does not take, of such seconds: it adds to no
        gradients. Where replicas exchange by layer it takes what any does."""
        if self.exchange(part).by_layer:
            return 0.0
        return self.seconds(part, device, name) - self.seconds(part, device, f"first_{name}")

    def part_seconds(self, part: int) -> tuple[float, float]:
        """Forward of a part as the plan states it, and backward with what it recomputes."""
        device = self.order.routes[0][part][0]
        forward = self.seconds(part, device, "forward_seconds")
        again = self.seconds(part, device, "forward_seconds", first_layers(self.modes[part]))
        backward = self.seconds(part, device, "backward_seconds")
        return forward, backward + (again if self.modes[part] not in ("never", OFFLOAD) else 0.0)

    def part_bytes(self, part: int, device: int) -> PartBytes:
        """The bytes from which the ledger of a part is computed."""
        own, size = self.bounds(part), self.per_replica_batch(device)
        usual = part_bytes(self.layers, *own, size, first_layers(self.modes[part]))
        return on_host(self.layers, usual, *own, size) if self.modes[part] == OFFLOAD else usual

    def limit(self, device: int, requested: float | None) -> float:
        """Bytes that each replica may hold."""
        own = [requested, *(kind.memory_bytes for kind in self._kinds(device))]
        return min((float(size) for size in own if size is not None), default=inf)

    def ledger(self, device: int, weight_versions: Sequence[float] = (1,)) -> Ledger:
        """Of a device; of several kinds that with the largest context. `weight_versions`: by part, or one."""
        parts = self.order.device_parts(device)
        return compute_ledger(
            self.order,
            device,
            [self.part_bytes(part, device) for part in parts],
            self.training,
            recompute=self.recompute[device],
            replicas=len(self.part_ranks(parts[0])),
            weight_versions=weight_versions,
            copies=COPIES.get(self.schedule, 1),
            context_bytes=max(kind.context_bytes for kind in self._kinds(device)),
            ahead=self.receives_ahead,
        )

    def part_ranks(self, part: int) -> list[int]:
        """All devices that sum the gradients of a part."""
        return sorted({rank for route in self.order.routes for rank in self.ranks[route[part][0]]})

    @cached_property
    def transfers(self) -> dict[tuple[int, int, int], tuple[float, TransferRoute]]:
        """Bytes and way of a transfer between two devices of the pipeline, by (part before the cut, sender,
        receiver), in both directions. All replicas send at once; the bytes of a whole micro-batch are those
        of the larger share times the fewer replicas."""
        transfers = {}
        for _, part, here, there in cuts_crossed(self.order):
            end, shares = self.ends[part], (self.per_replica_batch(here), self.per_replica_batch(there))
            each = max(
                float(self.layers.at(per_replica_batch)["output_bytes"][end - 1])
                for per_replica_batch in shares
            )
            whole = each * min(len(self.ranks[here]), len(self.ranks[there]))
            for a, b in ((here, there), (there, here)):
                transfers[part, a, b] = whole, find_transfer_route(self.machine, self.ranks[a], self.ranks[b])
        return transfers

    def gradient_bytes(self, part: int) -> list[float]:
        """By layer of a part."""
        first, end = self.bounds(part)
        scale = self.training.gradient / self.training.weight
        layers = self.layers.trainable[first:end].tolist()
        if self.training.zero:
            layers[0] += self._copied(part)
        return [float(own) * scale for own in layers]

    def reduce_seconds(self, part: int, device: int) -> float:
        """What of the sum of a part's gradients follows its last backward on a device."""
        ranks, gradients = self.part_ranks(part), self.gradient_bytes(part)
        if len(ranks) < 2:
            return 0.0
        if self.training.zero:
            return self.exchange(part).at_end()
        if ranks != sorted(self.ranks[device]):
            return all_reduce_time(self.machine, ranks, sum(gradients))
        first, end = self.bounds(part)
        each = [
            self._measured(kind).at(self.per_replica_batch(device))["backward_seconds"][first:end]
            / kind.speed
            for kind in self._kinds(device)
        ]
        slowest = max(each, key=lambda seconds: float(seconds.sum()))
        return exposed_seconds(self.machine, ranks, slowest.tolist(), gradients)

    def bytes_at_end(self, part: int) -> float:
        """What its replicas exchange behind the last backward, as bytes of an all-reduce."""
        return self.exchange(part).bytes_at_end() if self.training.zero else sum(self.gradient_bytes(part))

    @cached_property
    def port_seconds(self) -> tuple[float, Port | None]:
        """What the bytes of a step need of the port that they load most, in any order; and that port."""
        loads: dict[Port, float] = {}
        count = [0.0] * len(self.order.routes)
        for entry, route in enumerate(self.order.route_of):
            count[route] += self.order.shares[entry]
        for route, part, here, there in cuts_crossed(self.order):
            for ends in ((here, there), (there, here)):
                size, own = self.transfers[part, *ends]
                for port, load in own.loads.items():
                    loads[port] = loads.get(port, 0.0) + count[route] * size * load
        for part in range(self.order.parts):
            ranks = self.part_ranks(part)
            meanwhile = len(self.order.route_of) * self.exchange(part).bytes_by_layer()
            for port, load in sum_loads(self.machine, ranks, meanwhile + self.bytes_at_end(part)).items():
                loads[port] = loads.get(port, 0.0) + load
        for _, ranks, size in self.shared:
            for port, load in sum_loads(self.machine, ranks, size).items():
                loads[port] = loads.get(port, 0.0) + load
        return max(((seconds, port) for port, seconds in loads.items()), default=(0.0, None))
