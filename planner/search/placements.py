"""Orders of the devices in which the stages of a pipeline take them, and the ranges of devices in an order.

In any order a stage may begin after the last device of the stage before, or leave devices free and begin with
the next node (or the next kind of device). Taking the ranks in order keeps neighbouring stages near each
other; taking them across the nodes (one of each node in turn) gives a stage's replicas one device of every
node, so that transfers between stages stay inside the nodes and gradients are added up between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, permutations
from typing import NamedTuple

import numpy as np

from ...cost_models.topology import Topology
from ..stage_table import Floats, Indices
from .space import Space

FEW = 16
"""Up to so many devices they are taken across the first two nodes, the first three and so on, too, so that
the plans of a smaller machine are among those of a larger one."""
EVERY_COUNT = 16
"""Up to so many devices every number of replicas is tried; beyond, 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
MOST_DEVICES = 64
"""Of so many, stages may begin at any."""
MOST_RUNS = 4
"""Runs of equal devices of which every order is tried: 24."""

IN_ORDER, ACROSS, REORDERED, ANY = "in order", "across nodes", "kinds reordered", "any"
WORDS = {
    IN_ORDER: "in rank order",
    ACROSS: "in turn from each node",
    REORDERED: "with the kinds in another order",
    ANY: "in any order",
}
"""What the orders are called in a plan file."""


@dataclass(frozen=True)
class Placement:
    """An order of all devices. `next_group`: by position, where the next node or kind of device begins (the
    number of devices: nowhere); `skips_whole`: whether a whole group may stay free, too."""

    name: str
    ranks: tuple[int, ...]
    next_group: tuple[int, ...]
    skips_whole: bool = False

    @property
    def in_words(self) -> str:
        """The order, to follow `on consecutive devices`."""
        return WORDS[self.name]

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By position, the positions at which a stage that follows a stage ending there may begin."""
        return tuple(tuple(self.starts_after(position)) for position in range(len(self.ranks) + 1))

    def starts_after(self, position: int) -> Iterator[int]:
        """The positions at which a stage that follows a stage ending there may begin."""
        yield position
        if position < len(self.ranks) and (self.skips_whole or not self._begins(position)):
            later = self.next_group[position]
            while later < len(self.ranks):
                yield later
                later = self.next_group[later] if self.skips_whole else len(self.ranks)

    def _begins(self, position: int) -> bool:
        return position == 0 or self.next_group[position - 1] == position


def list_placements(topology: Topology) -> list[Placement]:
    """The orders that are searched: as ranked; across the full nodes, where there are several; and where
    there are several kinds of devices, their runs in every order (more than `MOST_RUNS`: as ranked, and by
    speed in either direction)."""
    if len(topology.kinds) > 1:
        return [
            make_placement(IN_ORDER if index == 0 else REORDERED, topology, ranks)
            for index, ranks in enumerate(_run_orders(topology))
        ]
    orders = [make_placement(IN_ORDER, topology, tuple(range(topology.gpus)))]
    nodes = topology.gpus // topology.gpus_per_node
    few = range(2, nodes) if topology.gpus <= FEW else ()
    if topology.gpus_per_node > 1:
        orders += [_across(topology, count) for count in (*few, nodes) if count > 1]
    return orders


def _across(topology: Topology, nodes: int) -> Placement:
    """One device of each of the first nodes in turn, then all that is left."""
    each, gpus = topology.gpus_per_node, topology.gpus
    ranks = (node * each + slot for slot in range(each) for node in range(nodes))
    return Placement(ACROSS, (*ranks, *range(nodes * each, gpus)), (gpus,) * gpus)


def _run_orders(topology: Topology) -> Iterator[tuple[int, ...]]:
    """The ranks, with the runs of equal devices in every order, as ranked first."""
    runs = [tuple(ranks) for _, ranks in groupby(range(topology.gpus), key=topology.device)]
    by_speed = sorted(runs, key=lambda run: topology.device(run[0]).seconds_scale)
    orders = permutations(runs) if len(runs) <= MOST_RUNS else iter((runs, by_speed, by_speed[::-1]))
    for order in dict.fromkeys(map(tuple, orders)):
        yield tuple(rank for run in order for rank in run)


def make_placement(name: str, topology: Topology, ranks: tuple[int, ...]) -> Placement:
    """`ranks` with a new group at every node and every kind."""
    numbers = topology.kind_numbers(ranks).tolist()
    groups = [(rank // topology.gpus_per_node, kind) for rank, kind in zip(ranks, numbers, strict=True)]
    next_group, later = [0] * len(ranks), len(ranks)
    for position in reversed(range(len(ranks))):
        next_group[position] = later
        if position and groups[position - 1] != groups[position]:
            later = position
    return Placement(name, ranks, tuple(next_group), skips_whole=len(topology.kinds) > 1)


def list_replica_counts(devices: int) -> tuple[int, ...]:
    """The numbers of replicas that are tried on so many devices."""
    return tuple(
        count
        for count in range(1, devices + 1)
        if count <= EVERY_COUNT or count == devices or any(count in (2**k, 3 * 2**k) for k in range(17))
    )


def place_anywhere(topology: Topology) -> Placement:
    """Any devices for each stage: no order of them; see `device_sets`."""
    gpus = topology.gpus
    return Placement(ANY, tuple(range(gpus)), (gpus,) * gpus)


class DeviceRun(NamedTuple):
    """Devices that a stage may have: where it begins, and is after them, in as many ways as there are; `key`
    names them there."""

    ranks: tuple[int, ...]
    begins: Indices
    afters: Indices
    keys: Indices


class StagesBefore(NamedTuple):
    """By plan, the last stage so far: how many replicas it has, where it ends, and the key of its devices."""

    replicas: Indices
    ends: Indices
    keys: Indices


@dataclass(frozen=True, eq=False)
class DeviceRanges:
    """The runs of `counts` devices (ascending) in an order. `on_all`: no device may stay free."""

    space: Space
    placement: Placement
    counts: tuple[int, ...]
    on_all: bool = False
    _to: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _best: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By position, where a stage that follows one ending there may begin."""
        if self.on_all:
            return tuple((position,) for position in range(self.devices + 1))
        return self.placement.starts

    @property
    def devices(self) -> int:
        """In the order."""
        return len(self.placement.ranks)

    @property
    def any_order(self) -> bool:
        """Whether the replicas of a stage may stand in orders that differ."""
        return False

    @cached_property
    def devices_before(self) -> Indices:
        """By position, how many there are."""
        return np.arange(self.devices + 1)

    def starts_from(self, positions: Indices) -> tuple[Indices, Indices]:
        """Of plans that end at these positions, the number of a plan and where a further stage may begin."""
        pairs = [(row, begin) for row, end in enumerate(positions.tolist()) for begin in self.starts[end]]
        rows, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return rows, begins

    def runs(self, count: int) -> Iterator[DeviceRun]:
        """Of so many devices."""
        ranks = self.placement.ranks
        for begin in range(len(ranks) - count + 1):
            at = np.array([begin])
            yield DeviceRun(ranks[begin : begin + count], at, at + count, at)

    def devices_at(self, keys: Sequence[int], replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of the stages of a pipeline."""
        ranks = self.placement.ranks
        pairs = zip(keys, replicas, strict=True)
        return tuple(ranks[begin : begin + count] for begin, count in pairs)

    def pace(self, before: StagesBefore, replicas: int, keys: Indices) -> tuple[Floats, Floats]:
        """Latency, and seconds of each byte that a replica of the smaller stage sends, to stages of so many
        replicas from those `before` them."""
        latency, slowness = self.routes(replicas)
        counts = np.searchsorted(self.counts, before.replicas)
        at = counts, before.ends, keys
        return latency[at], slowness[at]

    def least_pace(self, replicas: int, keys: Indices, ends: Indices) -> tuple[Floats, Floats]:  # noqa: ARG002
        """The least of stages of so many replicas on these devices, which end there, to whatever follows; 0
        at the end."""
        latency, slowness = self.best_route(replicas)
        return latency[ends], slowness[ends]

    def orders(self, shape: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The replicas stand as in the order of the devices."""
        yield shape

    def routes(self, replicas: int) -> tuple[Floats, Floats]:
        """To a stage of so many replicas, (counts, ends, begins) each: latency, and
        seconds of each byte that a replica of the smaller stage sends, from a stage of that count of replicas
        that ends at a position, where one may follow so; else inf."""
        if replicas not in self._to:
            self._to[replicas] = self._routes_to(replicas)
        return self._to[replicas]

    def _routes_to(self, replicas: int) -> tuple[Floats, Floats]:
        size = self.devices + 1
        latency, slowness = (np.full((len(self.counts), size, size), np.inf) for _ in range(2))
        ranks, paces = self.placement.ranks, dict[tuple[int, ...], tuple[float, float]]()
        for end, begins in enumerate(self.starts):
            self.space.budget.check()
            for begin in begins:
                if begin + replicas > self.devices:
                    continue
                receivers = ranks[begin : begin + replicas]
                for index, count in enumerate(self.counts):
                    if count <= end:
                        at = index, end, begin
                        key = ((end - count) % self._period, count, begin - end)
                        if key not in paces:
                            paces[key] = self.space.pace(ranks[end - count : end], receivers)
                        latency[at], slowness[at] = paces[key]
        return latency, slowness

    @cached_property
    def _period(self) -> int:
        """Of how many positions the ways repeat: those of a node, where nodes are alike and in order."""
        in_order = self.placement.ranks == tuple(range(self.devices))
        return self.space.topology.gpus_per_node if in_order and self.space.routes.alike else self.devices + 1

    def best_route(self, replicas: int) -> tuple[Floats, Floats]:
        """(positions + 1,) each: from a stage of so many replicas that ends there, the least latency and the
        least seconds a byte to whatever follows; 0 at the end."""
        if replicas not in self._best:
            index = self.counts.index(replicas)
            tables = []
            for which in range(2):
                least = np.min([self.routes(count)[which][index] for count in self.counts], axis=0).min(
                    axis=1
                )
                tables.append(np.where(np.isinf(least), 0.0, least))
            self._best[replicas] = tables[0], tables[1]
        return self._best[replicas]

    def least_reachable(self, values: Floats) -> Floats:
        """(positions + 1, cut points): the least value of where a stage may begin after one that ends
        there."""
        ends, begins = self._skips
        if not len(ends):
            return values
        least = values.copy()
        np.minimum.at(least, ends, values[begins])
        return least

    @cached_property
    def _skips(self) -> tuple[Indices, Indices]:
        """Positions where a stage may end and, beside each, where the next may begin with devices between."""
        pairs = [(end, begin) for end, own in enumerate(self.starts) for begin in own if begin > end]
        ends, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return ends, begins
