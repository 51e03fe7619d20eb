"""A pipeline on its devices as input of the simulator: costs and memory under any program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from ..cost_models.collectives import (
    AllReduceBytes,
    Hop,
    PortSharing,
    TiedSum,
    TopologyPorts,
    all_reduce_seconds,
    exposed_all_reduce_seconds,
    reduction_seconds,
    tied_sums,
)
from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain
from ..cost_models.memory import (
    LedgerOptions,
    StageBytes,
    Training,
    count_first_layers,
    device_ledger,
    ledger,
    offload_saved,
    receive_ahead,
    repeat_word,
    whole_word,
)
from ..cost_models.optimizers import Precision
from ..cost_models.precision import training_precision
from ..cost_models.program import Program, Schedule, StageSlot
from ..cost_models.runtime import OFFLOAD
from ..cost_models.step_costs import Costs, Hosts, recompute_shares
from ..cost_models.topology import Device, Topology
from .candidate import SEARCHED
from .replica_exchange import (
    ReplicaExchange,
    bytes_at_end,
    bytes_by_layer,
    gradient_bytes,
    stage_figure,
    tied_exchanges,
)
from .search.space import divide_batch
from .stage_table import Floats, StageTable, fullest_kind, ledger_options

_COPYING = ("forward", "backward", "first_backward")
"""Figures that include copies to the host if a stage offloads."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """Parts of a chain on the devices of a program, with the memory of devices and the seconds of actions.

    Attributes:
        schedule: Schedule of the program.
        program: Actions of all devices.
        chain: Costs of the layers.
        topology: Devices and links.
        size: Samples of a micro-batch.
        bounds: By part of the layers, the two cut points that it lies between, in the order of a micro-batch.
        ranks: By device of the program, the ranks of its replicas, which share every micro-batch.
        recompute: By device of the program, the recomputation mode.
        optimizer: Name of the optimizer.
        dtype: Data type of the training.
        zero: ZeRO stage.
        hosts: Number of launching processes, see `Costs`.
        transfers: How transfers overlap, see `Costs`.
        profiles: The same layers as measured on the kinds of devices with their own profile, by its name.
    """

    schedule: Schedule
    program: Program
    chain: Chain
    topology: Topology
    size: int
    bounds: Sequence[tuple[int, int]]
    ranks: Sequence[Sequence[int]]
    recompute: Sequence[str]
    optimizer: str
    dtype: str
    precision: Precision | None = None
    """Bytes of one weight, gradient and master weight. None for those that are usual for the dtype."""
    zero: int = 0
    hosts: Hosts = "each"
    transfers: str = "overlapped"
    receives_ahead: bool = False
    """True if the runtime has buffers for all micro-batches, see `Runtime`."""
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    host_bandwidth: float | None = None
    """Bytes per second of a device's copies to its host, and as many back, if stages offload."""

    def part_ranks(self, part: int) -> list[int]:
        """Return all devices that hold a part of the layers, which therefore sum its gradients."""
        places = {pipe[part] for pipe in self.program.pipes}
        return sorted({rank for place in places for rank in self.ranks[place.device]})

    def per_replica_batch(self, device: int) -> int:
        """Return the most samples of a micro-batch that a replica of this device computes."""
        return divide_batch(self.size, len(self.ranks[device]))

    def table(self, device: int) -> StageTable:
        """Return the costs of all stages at the samples per replica of this device."""
        return _table(self.chain, self.per_replica_batch(device))

    @cached_property
    def timing_tables(self) -> list[list[tuple[StageTable, float]]]:
        """Costs as profiled and the factor on their seconds, by device, for each kind among its replicas.

        The slowest kind of a device counts.
        """
        return [
            [
                (_table(self._profile_chain(kind), self.per_replica_batch(device)), kind.seconds_scale)
                for kind in self.topology.count_kinds(ranks)
            ]
            for device, ranks in enumerate(self.ranks)
        ]

    def _profile_chain(self, kind: Device) -> Chain:
        if kind.profile is None:
            return self.chain
        if kind.profile not in self.profiles:
            raise UsageError(
                f"the topology names the profile {kind.profile} for {kind.name}, which was not given",
                "Give that profile, or state the device's speed relative to the profiled one.",
            )
        return self.profiles[kind.profile]

    @cached_property
    def number_bytes(self) -> Precision:
        """Bytes of a weight, a gradient and a master weight."""
        return self.precision or training_precision(self.dtype).bytes

    def ledger(self, device: int, recompute: str | None = None) -> dict[str, float]:
        """Return the bytes by term of a device with all its chunks, at its peak.

        1F1B and GPipe use the closed form, other schedules count action by action.

        Args:
            device: Device of the program.
            recompute: Recomputation to assume. Defaults to that of the device.
        """
        options, word = self.ledger_options(device), whole_word(recompute or self.recompute[device])
        chunks = self.chunk_bytes(device, recompute)
        replicas = len(self.part_ranks(self.program.parts_by_slot[StageSlot(device)]))
        stages, count = self.program.devices, self.program.micro_batches
        if self.schedule.name in SEARCHED:
            in_flight = self.schedule.in_flight(device, stages, count)
            closed = ledger(
                chunks[0],
                in_flight=in_flight,
                recompute=word,
                optimizer=self.optimizer,
                replicas=replicas,
                **options,
            )
            return {name: float(amount) for name, amount in closed.items()}
        return device_ledger(
            self.program,
            device,
            chunks,
            Training(self.optimizer, options["precision"], replicas, self.zero),
            recompute=word,
            weight_versions=self.schedule.chunk_versions
            or self.schedule.weight_versions(device, stages, count),
            copies=self.schedule.copies,
            context_bytes=options["context_bytes"],
            ahead=self._is_ahead,
        )

    @property
    def _is_ahead(self) -> bool:
        """True if buffers of all micro-batches are added to the stage's bytes.

        A backward in two parts, which only PyTorch runs, always counts its buffers elsewhere.
        """
        return self.receives_ahead and not self.program.splits_backward

    def ledger_options(self, device: int) -> LedgerOptions:
        """Return the options of the memory ledger for the kind of replica with the largest context."""
        kind = fullest_kind(map(self.topology.device, self.ranks[device]))
        return ledger_options(kind, self.dtype, self.number_bytes, self.zero)

    def smallest_device(self, device: int) -> Device:
        """Return the replica with the least memory, whose limit holds for all replicas of the device."""
        kinds = map(self.topology.device, self.ranks[device])
        return min(kinds, key=lambda kind: inf if kind.memory_bytes is None else kind.memory_bytes)

    def chunk_bytes(self, device: int, recompute: str | None = None) -> list[StageBytes]:
        """Return the bytes of each chunk of a device.

        Args:
            device: Device of the program.
            recompute: Recomputation to assume. Defaults to that of the device.
        """
        parts = [self.program.parts_by_slot[StageSlot(device, chunk)] for chunk in range(self.program.chunks)]
        table, word = self.table(device), recompute or self.recompute[device]
        chunks = [table.bytes_between(*self.bounds[part], zero=self.zero, recompute=word) for part in parts]
        if self._is_ahead:
            chunks = [receive_ahead(chunk, self.program.micro_batches) for chunk in chunks]
        return [offload_saved(chunk) for chunk in chunks] if word == OFFLOAD else chunks

    def offloaded_bytes(self, part: int) -> float:
        """Return the bytes that a micro-batch of a part keeps on the host of each replica.

        0 without offloading.
        """
        device, (start, end) = self.program.pipes[0][part].device, self.bounds[part]
        if self.recompute[device] != OFFLOAD:
            return 0.0
        return float(self.table(device).bytes_between(start, end).offloaded)

    def copy_seconds(self, part: int) -> float:
        """Return the seconds to copy them to the host in every forward, and the same back in every backward.

        Raises:
            UsageError: The stage offloads and the bandwidth is not set.
        """
        copied = self.offloaded_bytes(part)
        if not copied:
            return 0.0
        if self.host_bandwidth is None:
            raise UsageError(
                "a stage offloads, and the bandwidth between its device and the host is not set",
                "Solve again with `host_bandwidth`.",
            )
        return copied / self.host_bandwidth

    def by_place(self, name: str) -> Floats:
        """Return a (devices, chunks, 1) figure of the stage at every place.

        Args:
            name: Name of the figure, see `stage_figure`.
        """
        values = np.zeros((self.program.devices, self.program.chunks, 1))
        for (device, chunk), part in self.program.parts_by_slot.items():
            bounds = self.bounds[part]
            exchange = self.exchange(part)
            copies = self.copy_seconds(part) if name in _COPYING else 0.0
            values[device, chunk] = copies + max(
                stage_figure(table, name, scale, exchange)[bounds]
                for table, scale in self.timing_tables[device]
            )
        return values

    def exchanged_seconds(self, part: int, table: StageTable, scale: float, name: str) -> float:
        """Return the seconds that ZeRO's exchange, or copies to the host, add to a figure of a part."""
        exchange = self.exchange(part)
        if not exchange.is_by_layer:
            return self.copy_seconds(part) if name in _COPYING else 0.0
        alone = replace(exchange, zero=0)
        bounds = self.bounds[part]
        return float(
            (stage_figure(table, name, scale, exchange) - stage_figure(table, name, scale, alone))[bounds]
        )

    def exchange(self, part: int) -> ReplicaExchange:
        """Return the ZeRO exchange between all devices that hold a part of the layers."""
        return ReplicaExchange(self.topology, self.part_ranks(part), self.number_bytes, self.zero)

    def costs(self) -> Costs:
        """Return the seconds of the program's actions and transfers."""
        forward, backward = self.by_place("forward"), self.by_place("backward")
        weight = self.by_place("weight") if self.program.splits_backward else None
        shares, repeats = (self._recompute_shares(name) for name in ("forward", "forward_launch"))
        occupancy, latency = self._transfers()
        sharing, all_reduce = self.sharing(occupancy), self._all_reduce()
        launch = self.launch_seconds("forward_launch")
        repeat = None if repeats is None else repeats * launch
        relaunch = self.launch_seconds("backward_launch") + (0.0 if repeat is None else repeat)
        return Costs(
            forward=forward,
            backward=backward if weight is None else self.by_place("input"),
            weight=weight,
            accumulation=self._accumulation("backward" if weight is None else "weight"),
            recompute=shares,
            forward_launch=launch,
            backward_launch=relaunch,
            recompute_launch=repeat if self.hosts == "one" else None,
            forward_occupancy=occupancy,
            forward_latency=latency,
            backward_occupancy=occupancy,
            backward_latency=latency,
            all_reduce=all_reduce,
            links=sharing.links,
            reduce_loads=sharing.reduce_loads,
            port_seconds=sharing.port_seconds,
            tied=self.tied_sums,
            transfers=self.transfers,
            hosts=self.hosts,
        )

    def _accumulation(self, part: str) -> Floats:
        """Return (devices, chunks, 1) seconds that the first backward of a step saves.

        It adds to no gradients. `part` is `backward`, or `weight` if weight gradients are separate actions.
        """
        return self.by_place(part) - self.by_place(f"first_{part}")

    def launch_seconds(self, name: str) -> Floats:
        """Return (devices, chunks, 1) host seconds from the plan's profile, for every kind of device."""
        values = np.zeros((self.program.devices, self.program.chunks, 1))
        for (device, chunk), part in self.program.parts_by_slot.items():
            values[device, chunk] = getattr(self.table(device), name)[self.bounds[part]]
        return values

    def _recompute_shares(self, name: str) -> Floats | None:
        """Return the share of the forward that is recomputed, in seconds or launches.

        It has one value per place if all micro-batches are alike. None if nothing is recomputed.
        """
        if {repeat_word(word) for word in self.recompute} == {"never"}:
            return None
        shares = recompute_shares([repeat_word(word) for word in self.recompute], self.program)
        return (shares if "except_last" in self.recompute else shares[:, :, :1]) * self.first_shares(name)

    def first_shares(self, name: str) -> Floats:
        """Return (devices, 1, 1) shares of a stage's `forward` or `forward_launch` that are recomputed.

        They are those of its recomputed first layers, and 1 for other modes and for a stage that takes no
        time.
        """
        shares = np.ones((self.program.devices, 1, 1))
        for device, first in enumerate(map(count_first_layers, self.recompute)):
            if first is not None:
                bounds = self.bounds[self.program.parts_by_slot[StageSlot(device)]]
                tables = self.timing_tables[device] if name == "forward" else [(self.table(device), 1.0)]
                whole = max(getattr(table, name)[bounds] * scale for table, scale in tables)
                repeated = max(table.first_sum(name, *bounds, first) * scale for table, scale in tables)
                if whole:
                    shares[device] = min(repeated / whole, 1.0)
        return shares

    def _transfers(self) -> tuple[Floats, Floats]:
        """Return occupancy and latency of every cut of every pipe, in seconds.

        All replicas send at the same time. A replica of the smaller side sends its largest share of the
        micro-batch.
        """
        pipes, routes = self.program.pipes, _ports(self.topology).routes
        occupancy, latency = (np.zeros((len(pipes), self.program.slots - 1)) for _ in range(2))
        for row, pipe in enumerate(pipes):
            for cut, (here, there) in enumerate(pairwise(pipe)):
                if here.device == there.device:
                    continue
                senders, receivers = tuple(self.ranks[here.device]), tuple(self.ranks[there.device])
                latency[row, cut], pace = routes.route(senders, receivers)
                place = self.bounds[cut][1]
                sent = max(
                    float(self.table(device).crossing[place]) for device in (here.device, there.device)
                )
                occupancy[row, cut] = sent * min(len(senders), len(receivers)) * pace
        return occupancy, latency

    def sharing(self, occupancy: Floats) -> PortSharing:
        """Return the ports that transfers and all-reduces share.

        Args:
            occupancy: (pipes, cuts) link seconds of the transfers.
        """
        program = self.program
        counts = np.zeros(len(program.pipes))
        for micro_batch, pipe in enumerate(program.pipe_of):
            counts[pipe] += program.share(micro_batch)
        hops = [
            Hop(*route, float(occupancy[row, cut] * counts[row]))
            for row, pipe in enumerate(program.pipes)
            for cut, (here, there) in enumerate(pairwise(pipe))
            for route in ((here.device, there.device), (there.device, here.device))
            if here.device != there.device
        ]
        ranks = [tuple(device_ranks) for device_ranks in self.ranks]
        return _ports(self.topology).sharing(
            ranks, hops, [*self._reductions(), *tied_exchanges(self.tied_sums)]
        )

    @cached_property
    def tied_sums(self) -> tuple[TiedSum, ...]:
        """Sums of the gradients of weights that several parts use."""
        table, parts = self.table(0), range(len(self.bounds))
        stages = [sorted({pipe[part].device for pipe in self.program.pipes}) for part in parts]
        return tuple(
            tied_sums(
                self.chain.tied,
                [table.cut_points[end] for _, end in self.bounds],
                [self.part_ranks(part) for part in parts],
                stages,
                self.number_bytes,
                reduction_seconds(self.topology),
            )
        )

    def _reductions(self) -> Iterator[AllReduceBytes]:
        """Yield the bytes that are reduced, by part of the layers."""
        update_every = self.program.update_every
        times = 1 if update_every is None else self.program.micro_batches // update_every
        for part, place in enumerate(self.program.pipes[0]):
            ranks = self.part_ranks(part)
            if len(ranks) > 1:
                table, at = self.table(place.device), self.bounds[part]
                tables = (table.reduced_bytes(self.zero), table.stage_bytes.parameters)
                numbers = [np.asarray(table_bytes)[[at[0]], [at[1]]] for table_bytes in tables]
                at_end = bytes_at_end(numbers[0], self.number_bytes, self.zero)
                by_layer = bytes_by_layer(numbers[0], numbers[1], self.number_bytes, self.zero)
                before = float(by_layer[0]) * self.program.micro_batches
                yield AllReduceBytes(part, tuple(ranks), float(at_end[0]), times, before)

    def _all_reduce(self) -> Floats | None:
        """Return (devices, chunks) seconds of the all-reduce after a slot's last backward.

        None if none exists.
        """
        seconds = np.zeros((self.program.devices, self.program.chunks))
        for place, part in self.program.parts_by_slot.items():
            ranks = self.part_ranks(part)
            if len(ranks) > 1:
                seconds[place] = self._all_reduce_seconds(place, part, ranks)
        return seconds if seconds.any() else None

    def reduces_meanwhile(self, place: StageSlot, ranks: Sequence[int]) -> bool:
        """Return whether the gradients of a slot are reduced over `ranks` while its backward runs."""
        alone = list(ranks) == sorted(self.ranks[place.device])
        return alone and not self.zero and self.program.update_every is None

    def _all_reduce_seconds(self, place: StageSlot, part: int, ranks: list[int]) -> float:
        """Return the exposed all-reduce seconds of one slot.

        Replicas of one stage reduce while they compute, as DistributedDataParallel does.
        """
        table = self.table(place.device)
        i, j = self.bounds[part]
        layers = slice(table.cut_points[i], table.cut_points[j])
        gradients = gradient_bytes(table.costs.trainable_bytes[layers], self.number_bytes)
        if self.zero:
            return float(self.exchange(part).at_end(np.asarray(table.reduced_bytes(self.zero)[i, j])))
        if not self.reduces_meanwhile(place, ranks):
            return float(all_reduce_seconds(self.topology, ranks, float(gradients.sum())))
        by_kind = [
            timing.costs.backward_seconds[layers] * scale
            for timing, scale in self.timing_tables[place.device]
        ]
        backward = max(by_kind, key=lambda seconds: float(seconds.sum()))
        return float(exposed_all_reduce_seconds(backward, gradients, self.topology, ranks))


@lru_cache(maxsize=16)
def _table(chain: Chain, size: int) -> StageTable:
    return StageTable.of(chain, size, past_largest=True)


@lru_cache(maxsize=16)
def _ports(topology: Topology) -> TopologyPorts:
    return TopologyPorts(topology)
