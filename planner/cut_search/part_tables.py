"""Seconds of every part of the layers in its slot of a program.

A part lies between two cut points, as a stage of `StageTable` does. Its seconds are those on its devices. For
a bound on plans on any devices they are the least over all kinds of devices and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.program import Program, StageSlot
from ...cost_models.schedules import find_schedule
from ...cost_models.step_costs import Costs, Hosts
from ...cost_models.topology import Device
from ..candidate import PipelineConfig, Proposal
from ..replica_exchange import ReplicaExchange, stage_figure
from ..search.least_collectives import fastest_transfer
from ..search.least_exchange import LeastExchanges
from ..search.space import Space, divide_batch
from ..stage_table import Floats

Ranks = tuple[int, ...]
Mask = npt.NDArray[np.bool_]
Cuts = npt.NDArray[np.int64]
"""(candidates, parts + 1) cut points before, between and after the parts."""
SECONDS = ("forward", "backward", "weight", "accumulation", "forward_launch", "backward_launch", "exposed")
"""Figures of a part, named as those of `Costs`. `exposed` is the gradient exchange after its last
backward."""


@dataclass(frozen=True, eq=False)
class PipelineShape:
    """A plan without its cuts and recomputation.

    Attributes:
        config: Configuration.
        program: Actions of all devices.
        ranks: Replicas of each device of the program.
        stands_for_all: Whether its bound holds for equally many replicas of every stage on any devices.
    """

    config: PipelineConfig
    program: Program
    ranks: tuple[Ranks, ...]
    stands_for_all: bool = False

    @property
    def is_endless(self) -> bool:
        """True if the pipeline is asynchronous."""
        return not find_schedule(self.config.schedule).synchronous

    def proposal(self, cut_points: Sequence[int], cuts: Sequence[int]) -> Proposal:
        """Return the plan with these (parts + 1,) cuts."""
        devices = tuple(self.ranks[slot.device] for slot in self.program.pipes[0])
        return Proposal(self.config, tuple(cut_points[cut] for cut in cuts[1:]), devices)


@dataclass(frozen=True, eq=False)
class PartTables:
    """Seconds of a micro-batch by figure and slot.

    Parts recompute if all stages do. Scoring a plan decides which other parts must recompute to fit.

    Attributes:
        program: Actions of all devices.
        seconds: By figure (`SECONDS`) and slot of the program, (n + 1, n + 1) seconds.
        hosts: Number of launching processes, see `Costs`.
        occupancy: (parts - 1, n + 1) link seconds of the transfer after each part.
        latency: (parts - 1,) latency of this transfer in seconds.
        usable: (parts, n + 1, n + 1) mask of where a part may lie.
    """

    program: Program
    seconds: Mapping[str, Mapping[StageSlot, Floats]]
    hosts: Hosts
    occupancy: Floats
    latency: Floats
    usable: Mask

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.program.slots

    def costs(self, cuts: Cuts) -> Costs:
        """Return the simulator's costs of many cuts as candidates, without the gradient exchange."""
        shape = (self.program.devices, self.program.chunks, 1, len(cuts))
        columns: dict[str, Any] = {name: np.zeros(shape) for name in SECONDS if name != "exposed"}
        for name, values in columns.items():
            for slot, table in self.seconds[name].items():
                part = self.program.parts_by_slot[slot]
                values[slot.device, slot.chunk, 0] = table[cuts[:, part], cuts[:, part + 1]]
        weight = columns.pop("weight")
        inner = np.arange(self.parts - 1)[:, None]
        pipes = (len(self.program.pipes), self.parts - 1, len(cuts))
        occupancy = np.broadcast_to(self.occupancy[inner, cuts[:, 1:-1].T], pipes)
        latency = np.broadcast_to(self.latency[:, None], pipes)
        return Costs(
            **columns,
            weight=weight if self.program.splits_backward else None,
            hosts=self.hosts,
            forward_occupancy=occupancy,
            forward_latency=latency,
            backward_occupancy=occupancy,
            backward_latency=latency,
        )


def make_part_tables(
    space: Space, shape: PipelineShape, exchanges: LeastExchanges, *, anywhere: bool = False
) -> PartTables:
    """Return the tables of a shape.

    Args:
        space: Costs and limits.
        shape: The shape.
        exchanges: Least seconds of gradient exchanges.
        anywhere: Whether to take the least on any devices, instead of the shape's.
    """
    program, recompute = shape.program, shape.config.recompute
    seconds: dict[str, dict[StageSlot, Floats]] = {name: {} for name in SECONDS}
    usable = np.repeat(space.usable[None], program.slots, axis=0)
    cut_from, cut_to = np.nonzero(space.usable)
    figures_by_kind: dict[object, dict[str, Floats]] = {}
    for slot, part in program.parts_by_slot.items():
        ranks = shape.ranks[slot.device]
        size = divide_batch(shape.config.micro_batch_size, len(ranks))
        kinds = space.topology.kinds if anywhere else tuple(space.topology.count_kinds(ranks))
        key = size, kinds, ranks if space.zero >= 2 else len(ranks)
        if key not in figures_by_kind:
            figures_by_kind[key] = _figures(space, ranks, kinds, size, program.splits_backward, anywhere)
        holders = {rank for pipe in program.pipes for rank in shape.ranks[pipe[part].device]}
        table, recomputes = space.table(size), recompute not in ("never", "by_stage")
        usable[part, cut_from, cut_to] &= space.may_be(part, cut_from, cut_to)
        figures = figures_by_kind[key] | {
            "forward_launch": table.forward_launch,
            "backward": figures_by_kind[key]["backward"] + recomputes * figures_by_kind[key]["forward"],
            "backward_launch": table.backward_launch + recomputes * table.forward_launch,
            "exposed": exchanges.exposed_seconds(len(holders), size, hides=len(holders) == len(ranks)),
        }
        if shape.is_endless:  # the whole exchange: nothing hides it
            reduced = space.gradients(np.asarray(table.stage_bytes.trainable, dtype=np.float64))
            figures["exposed"] = np.asarray(all_reduce_seconds(space.topology, ranks, reduced))
        for name in SECONDS:
            seconds[name][slot] = figures[name]
    return PartTables(program, seconds, space.hosts, *_transfers(space, shape, anywhere), usable)


def _figures(
    space: Space, ranks: Ranks, kinds: Sequence[Device], size: int, splits: bool, anywhere: bool
) -> dict[str, Floats]:
    """Return the seconds of the passes of a device's parts, without recomputation."""
    exchange = ReplicaExchange(space.topology, ranks, space.number_bytes, 0 if anywhere else space.zero)
    join = np.minimum if anywhere else np.maximum

    def figure(name: str) -> Floats:
        by_kind = [
            stage_figure(space.kind_table(kind, size), name, kind.seconds_scale, exchange) for kind in kinds
        ]
        joined: Floats = join.reduce(by_kind)
        return joined

    last = figure("weight" if splits else "backward")
    return {
        "forward": figure("forward"),
        "backward": figure("input") if splits else last,
        "weight": last if splits else np.zeros_like(last),
        "accumulation": np.maximum(last - figure("first_weight" if splits else "first_backward"), 0.0),
    }


def _transfers(space: Space, shape: PipelineShape, anywhere: bool) -> tuple[Floats, Floats]:
    """Return occupancy and latency of the transfers after each part, in seconds."""
    pipe, size = shape.program.pipes[0], shape.config.micro_batch_size
    tables = [space.table(divide_batch(size, len(ranks))) for ranks in shape.ranks]
    occupancy = np.zeros((len(pipe) - 1, len(space.usable)))
    latency = np.zeros(len(pipe) - 1)
    bandwidth, least_latency = fastest_transfer(space.topology)
    for cut, (here, there) in enumerate(pairwise(pipe)):
        if here.device == there.device:
            continue
        crossing = [tables[slot.device].crossing for slot in (here, there)]
        if anywhere:
            latency[cut], occupancy[cut] = least_latency, np.minimum(*crossing) / bandwidth
        else:
            latency[cut], pace = space.pace(shape.ranks[here.device], shape.ranks[there.device])
            occupancy[cut] = np.maximum(*crossing) * pace
    return occupancy, latency
