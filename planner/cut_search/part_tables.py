"""What every part of the layers takes on its place in a program: tables of all parts that there can be.

A part lies between two cut points, as a stage of `StageTable` does. Its seconds are those on the devices that
it is given, or, for a bound on plans on any devices, the least that any kind of device and any link allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...cost_models.hardware import Device
from ...cost_models.schedules import Program, StageSlot
from ...cost_models.simulator.costs import Costs, Hosts
from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from ..replica_exchange import ReplicaExchange, stage_figure
from ..search.least_collectives import fastest_transfer
from ..search.least_exchange import LeastExchanges
from ..search.space import Space, divide_batch
from ..stage_table import Floats, StageTable
from .part_memory import PartMemory

Ranks = tuple[int, ...]
Cuts = npt.NDArray[np.int64]
"""(candidates, parts + 1): the cut points before, between and after the parts."""


@dataclass(frozen=True, eq=False)
class PipelineShape:
    """All of a plan but its cuts and what it recomputes; `ranks`: by device of the program, its replicas.

    `stands_for_all`: its bound is to hold for as many replicas of every stage on any devices.
    """

    config: PipelineConfig
    program: Program
    ranks: tuple[Ranks, ...]
    stands_for_all: bool = False

    def proposal(self, cut_points: Sequence[int], cuts: Sequence[int]) -> Proposal:
        """The plan with these cuts, (parts + 1,)."""
        devices = tuple(self.ranks[slot.device] for slot in self.program.pipes[0])
        return Proposal(self.config, tuple(cut_points[cut] for cut in cuts[1:]), devices)


@dataclass(frozen=True, eq=False)
class PartTables:
    """By slot of the program (n + 1, n + 1) seconds of a micro-batch. `credit`: what the first backward of
    all (its weights' part, where there is one) does not take. `forward_launch` and `backward_launch`: of the
    `hosts`, as of `Costs`. `after`: of the exchange of gradients what follows the last backward, at the
    least, on any devices; not in `costs`. `occupancy` (parts - 1, n + 1) and `latency`
    (parts - 1,) of transfers after each part, by where it ends. `usable` (parts, n + 1, n + 1): whether a
    part may lie there; of those that fit on no device with the rest of its parts, some are left in.
    """

    program: Program
    forward: dict[StageSlot, Floats]
    backward: dict[StageSlot, Floats]
    weight: dict[StageSlot, Floats]
    credit: dict[StageSlot, Floats]
    forward_launch: dict[StageSlot, Floats]
    backward_launch: dict[StageSlot, Floats]
    after: dict[StageSlot, Floats]
    hosts: Hosts
    occupancy: Floats
    latency: Floats
    usable: npt.NDArray[np.bool_]

    @property
    def places(self) -> int:
        """Cut points, the ends of the model included."""
        return int(self.usable.shape[1])

    @property
    def parts(self) -> int:
        """That the layers are cut into."""
        return self.program.slots

    @property
    def is_late(self) -> bool:
        """Whether a device may wait for a host."""
        if self.hosts == "one" or self.program.splits_backward:
            return any(own.any() for own in (*self.forward_launch.values(), *self.backward_launch.values()))
        return any(
            bool((self.forward_launch[slot] > self.forward[slot]).any())
            or bool((self.backward_launch[slot] > self.backward[slot] - self.credit[slot]).any())
            for slot in self.forward
        )

    def seconds_after(self, cuts: Cuts) -> Floats:
        """(slots, candidates): of `after`, slots by device and chunk."""
        seconds = np.zeros((self.program.devices * self.program.chunks, len(cuts)))
        for (device, chunk), table in self.after.items():
            part = self.program.parts_by_slot[StageSlot(device, chunk)]
            seconds[device * self.program.chunks + chunk] = table[cuts[:, part], cuts[:, part + 1]]
        return seconds

    def costs(self, cuts: Cuts) -> Costs:
        """For the simulator, of many cuts side by side."""
        shape = (self.program.devices, self.program.chunks, 1, len(cuts))
        names = ("forward", "backward", "weight", "credit", "forward_launch", "backward_launch")
        columns = {name: np.zeros(shape) for name in names}
        for name, values in columns.items():
            tables: dict[StageSlot, Floats] = getattr(self, name)
            for (device, chunk), table in tables.items():
                part = self.program.parts_by_slot[StageSlot(device, chunk)]
                values[device, chunk, 0] = table[cuts[:, part], cuts[:, part + 1]]
        inner = np.arange(self.parts - 1)[:, None]
        pipes = (len(self.program.pipes), self.parts - 1, len(cuts))
        occupancy = np.broadcast_to(self.occupancy[inner, cuts[:, 1:-1].T], pipes)
        latency = np.broadcast_to(self.latency[:, None], pipes)
        return Costs(
            forward=columns["forward"],
            backward=columns["backward"],
            weight=columns["weight"] if self.program.splits_backward else None,
            accumulation=columns["credit"],
            forward_launch=columns["forward_launch"],
            backward_launch=columns["backward_launch"],
            hosts=self.hosts,
            forward_occupancy=occupancy,
            forward_latency=latency,
            backward_occupancy=occupancy,
            backward_latency=latency,
        )


def make_part_tables(
    space: Space, shape: PipelineShape, exchanges: LeastExchanges, *, anywhere: bool = False
) -> PartTables:
    """The tables of a shape on its devices; `anywhere`: the least on any devices, with as many replicas."""
    return _TableMaker(space, shape, exchanges, anywhere).make()


@dataclass(frozen=True, eq=False)
class _TableMaker:
    space: Space
    shape: PipelineShape
    exchanges: LeastExchanges
    anywhere: bool

    def make(self) -> PartTables:
        program = self.shape.program
        slots = list(program.parts_by_slot)
        figures = [self._figures(device) for device in range(program.devices)]
        never, always = (self._memory.fits(mode) for mode in ("never", "always"))
        recompute = self.shape.config.recompute
        backward, backward_launch = {}, {}
        usable = np.repeat(self._possible, program.slots, axis=0)
        for slot in slots:
            forward, whole = figures[slot.device]["forward"], figures[slot.device]["backward"]
            without = never[slot] & (recompute in ("never", "by_stage"))
            with_recompute = always[slot] & (recompute != "never")
            backward[slot] = np.where(without, whole, whole + forward)
            table = self._table(slot.device)
            backward_launch[slot] = table.backward_launch + np.where(without, 0.0, table.forward_launch)
            usable[program.parts_by_slot[slot]] &= without | with_recompute
        cut_from, cut_to = np.nonzero(self._possible[0])
        for part in range(program.slots):
            usable[part, cut_from, cut_to] &= self.space.may_be(part, cut_from, cut_to)
        occupancy, latency = self._transfers()
        return PartTables(
            program,
            forward={slot: figures[slot.device]["forward"] for slot in slots},
            backward=backward,
            weight={slot: figures[slot.device]["weight"] for slot in slots},
            credit={slot: figures[slot.device]["credit"] for slot in slots},
            forward_launch={slot: self._table(slot.device).forward_launch for slot in slots},
            backward_launch=backward_launch,
            after={slot: self._after(slot) for slot in slots},
            hosts=self.space.hosts,
            occupancy=occupancy,
            latency=latency,
            usable=usable,
        )

    @property
    def _memory(self) -> PartMemory:
        devices = range(self.shape.program.devices)
        return PartMemory(
            self.space,
            self.shape.program,
            self.shape.ranks,
            [self._table(device) for device in devices],
            [self._kinds(device) for device in devices],
            self.anywhere,
        )

    def _after(self, slot: StageSlot) -> Floats:
        """What follows the last backward of a slot's parts, at the least, whichever devices they are on."""
        program, own = self.shape.program, self.shape.ranks[slot.device]
        part = program.parts_by_slot[slot]
        ranks = {rank for pipe in program.pipes for rank in self.shape.ranks[pipe[part].device]}
        batch = divide_batch(self.shape.config.micro_batch_size, len(own))
        return self.exchanges.after(len(ranks), batch, hides=len(ranks) == len(own))

    @cached_property
    def _possible(self) -> npt.NDArray[np.bool_]:
        """(1, n + 1, n + 1): which parts may be, whatever the memory and the place."""
        return self.space.usable[None]

    @cached_property
    def _computed(self) -> dict[object, dict[str, Floats]]:
        return {}

    def _kinds(self, device: int) -> tuple[Device, ...]:
        topology = self.space.topology
        own = topology.kinds if self.anywhere else map(topology.device, self.shape.ranks[device])
        return tuple(dict.fromkeys(own))

    def _figures(self, device: int) -> dict[str, Floats]:
        """Seconds of a device's parts, wherever they are cut."""
        ranks, kinds = self.shape.ranks[device], self._kinds(device)
        exchanges = self.space.zero >= 2 and not self.anywhere
        key = len(ranks), kinds, ranks if exchanges else ()
        if key not in self._computed:
            split = self.shape.program.splits_backward
            names = (
                ("forward", "input", "weight", "first_weight")
                if split
                else (
                    "forward",
                    "backward",
                    "first_backward",
                )
            )
            figures = {name: self._figure(name, ranks, kinds) for name in names}
            last = "weight" if split else "backward"
            self._computed[key] = {
                "forward": figures["forward"],
                "backward": figures["input" if split else "backward"],
                "weight": figures["weight"] if split else np.zeros_like(figures["forward"]),
                "credit": np.maximum(figures[last] - figures[f"first_{last}"], 0.0),
            }
        return self._computed[key]

    def _figure(self, name: str, ranks: Ranks, kinds: Sequence[Device]) -> Floats:
        space = self.space
        exchange = ReplicaExchange(
            space.topology, ranks, space.number_bytes, 0 if self.anywhere else space.zero
        )
        size = divide_batch(self.shape.config.micro_batch_size, len(ranks))
        each = [
            stage_figure(space.kind_table(kind, size), name, kind.seconds_scale, exchange) for kind in kinds
        ]
        figure: Floats = (np.minimum if self.anywhere else np.maximum).reduce(each)
        return figure

    def _table(self, device: int) -> StageTable:
        """What a device's parts hold and send."""
        size = divide_batch(self.shape.config.micro_batch_size, len(self.shape.ranks[device]))
        return self.space.table(size)

    def _transfers(self) -> tuple[Floats, Floats]:
        pipe, topology = self.shape.program.pipes[0], self.space.topology
        tables = [self._table(device) for device in range(self.shape.program.devices)]
        occupancy = np.zeros((len(pipe) - 1, len(tables[0].cut_points)))
        latency = np.zeros(len(pipe) - 1)
        bandwidth, least_latency = fastest_transfer(topology)
        for cut, (here, there) in enumerate(pairwise(pipe)):
            if here.device == there.device:
                continue
            crossing = [tables[own.device].crossing for own in (here, there)]
            if self.anywhere:
                latency[cut] = least_latency
                occupancy[cut] = np.minimum(*crossing) / bandwidth
            else:
                senders, receivers = self.shape.ranks[here.device], self.shape.ranks[there.device]
                latency[cut], pace = self.space.pace(senders, receivers)
                occupancy[cut] = np.maximum(*crossing) * pace
        return occupancy, latency
