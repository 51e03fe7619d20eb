"""Orders in which stages take the devices, and the ranges of devices in an order.

In any order, a stage begins after the last device of the previous stage, or it leaves devices free and begins
at the next node (or kind of device). Ranks in order keep neighbouring stages near each other. Ranks across
the nodes (one of each node in turn) give the replicas of a stage one device on every node, so that transfers
between stages stay inside nodes and gradients are exchanged between them.
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
"""Up to this many devices, orders across the first two nodes, the first three and so on are tried, too.

The plans of a smaller machine are then among those of a larger one.
"""
EVERY_COUNT = 16
"""Up to this many devices every number of replicas is tried; beyond, 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
MOST_DEVICES = 64
"""Most devices for which a stage may begin at any position."""
MOST_RUNS = 4
"""Most runs of equal devices for which every order (24) is tried."""

IN_ORDER, ACROSS, REORDERED, ANY = "in order", "across nodes", "kinds reordered", "any"
WORDS = {
    IN_ORDER: "in rank order",
    ACROSS: "in turn from each node",
    REORDERED: "with the kinds in another order",
    ANY: "in any order",
}
"""Names of the orders in a plan file."""


@dataclass(frozen=True)
class Placement:
    """An order of all devices.

    Attributes:
        name: Name of the order.
        ranks: Ranks in the order.
        next_group: By position, where the next node or kind of device begins; the number of devices if there
            is none.
        skips_whole: Whether whole groups may stay free, too.
    """

    name: str
    ranks: tuple[int, ...]
    next_group: tuple[int, ...]
    skips_whole: bool = False

    @property
    def in_words(self) -> str:
        """Name of the order, to follow `on consecutive devices`."""
        return WORDS[self.name]

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Positions at which the stage after one that ends at a position may begin, by this position."""
        return tuple(tuple(self.starts_after(position)) for position in range(len(self.ranks) + 1))

    def starts_after(self, position: int) -> Iterator[int]:
        """Yield the positions at which the stage after one that ends at `position` may begin."""
        yield position
        if position < len(self.ranks) and (self.skips_whole or not self._begins(position)):
            later = self.next_group[position]
            while later < len(self.ranks):
                yield later
                later = self.next_group[later] if self.skips_whole else len(self.ranks)

    def _begins(self, position: int) -> bool:
        return position == 0 or self.next_group[position - 1] == position


def list_placements(topology: Topology) -> list[Placement]:
    """Return the orders that are searched.

    These are the ranks in order and the ranks across the full nodes. With several kinds of devices they are
    the runs of equal devices in every order (with more than `MOST_RUNS` runs: in order, and by speed in both
    directions).
    """
    if len(topology.kinds) > 1:
        return [
            make_placement(IN_ORDER if index == 0 else REORDERED, topology, ranks)
            for index, ranks in enumerate(_run_orders(topology))
        ]
    orders = [make_placement(IN_ORDER, topology, tuple(range(topology.gpus)))]
    nodes = topology.gpus // topology.gpus_per_node
    partial_counts = range(2, nodes) if topology.gpus <= FEW else ()
    if topology.gpus_per_node > 1:
        orders += [_across(topology, count) for count in (*partial_counts, nodes) if count > 1]
    return orders


def _across(topology: Topology, nodes: int) -> Placement:
    """Return the order with one device of each of the first `nodes` nodes in turn, then all other devices."""
    per_node, gpus = topology.gpus_per_node, topology.gpus
    ranks = (node * per_node + slot for slot in range(per_node) for node in range(nodes))
    return Placement(ACROSS, (*ranks, *range(nodes * per_node, gpus)), (gpus,) * gpus)


def _run_orders(topology: Topology) -> Iterator[tuple[int, ...]]:
    """Yield the ranks with the runs of equal devices in every order, rank order first."""
    runs = [tuple(ranks) for _, ranks in groupby(range(topology.gpus), key=topology.device)]
    by_speed = sorted(runs, key=lambda run: topology.device(run[0]).seconds_scale)
    orders = permutations(runs) if len(runs) <= MOST_RUNS else iter((runs, by_speed, by_speed[::-1]))
    for order in dict.fromkeys(map(tuple, orders)):
        yield tuple(rank for run in order for rank in run)


def make_placement(name: str, topology: Topology, ranks: tuple[int, ...]) -> Placement:
    """Return an order in which every node and every kind begins a new group."""
    numbers = topology.kind_numbers(ranks).tolist()
    groups = [(rank // topology.gpus_per_node, kind) for rank, kind in zip(ranks, numbers, strict=True)]
    next_group, later = [0] * len(ranks), len(ranks)
    for position in reversed(range(len(ranks))):
        next_group[position] = later
        if position and groups[position - 1] != groups[position]:
            later = position
    return Placement(name, ranks, tuple(next_group), skips_whole=len(topology.kinds) > 1)


def list_replica_counts(devices: int) -> tuple[int, ...]:
    """Return the numbers of replicas that are tried on `devices` devices."""
    return tuple(
        count
        for count in range(1, devices + 1)
        if count <= EVERY_COUNT or count == devices or any(count in (2**k, 3 * 2**k) for k in range(17))
    )


def place_anywhere(topology: Topology) -> Placement:
    """Return the placement that allows any devices for each stage, see `device_sets`."""
    gpus = topology.gpus
    return Placement(ANY, tuple(range(gpus)), (gpus,) * gpus)


class DeviceRun(NamedTuple):
    """Devices that a stage may take.

    Attributes:
        ranks: The devices.
        begins: Positions (or states) before the stage, one for each transition.
        afters: Positions after it.
        keys: Keys of the devices in these transitions.
    """

    ranks: tuple[int, ...]
    begins: Indices
    afters: Indices
    keys: Indices


class StagesBefore(NamedTuple):
    """(plans,) last chosen stages of unfinished plans: replicas, end position and key of the devices."""

    replicas: Indices
    ends: Indices
    keys: Indices


@dataclass(frozen=True, eq=False)
class DeviceRanges:
    """Runs of devices in an order.

    Attributes:
        space: Costs and links.
        placement: The order.
        counts: Numbers of replicas, ascending.
        on_all: Whether every device must be used.
    """

    space: Space
    placement: Placement
    counts: tuple[int, ...]
    on_all: bool = False
    _to: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _best: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Positions at which the stage after one that ends at a position may begin, by this position."""
        if self.on_all:
            return tuple((position,) for position in range(self.devices + 1))
        return self.placement.starts

    @property
    def devices(self) -> int:
        """Number of devices in the order."""
        return len(self.placement.ranks)

    @property
    def any_order(self) -> bool:
        """True if the replicas of a stage may stand in different orders."""
        return False

    @cached_property
    def devices_before(self) -> Indices:
        """(positions,) number of devices before each position."""
        return np.arange(self.devices + 1)

    def starts_from(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the possible begins of the next stage of plans that end at these positions.

        Returns:
            Rows of the plans, and positions where a stage may begin.
        """
        pairs = [(row, begin) for row, end in enumerate(positions.tolist()) for begin in self.starts[end]]
        rows, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return rows, begins

    def runs(self, count: int) -> Iterator[DeviceRun]:
        """Yield the runs of `count` devices."""
        ranks = self.placement.ranks
        for begin in range(len(ranks) - count + 1):
            at = np.array([begin])
            yield DeviceRun(ranks[begin : begin + count], at, at + count, at)

    def devices_at(self, keys: Sequence[int], replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of the stages of a pipeline.

        Args:
            keys: First positions of the stages.
            replicas: Numbers of replicas.
        """
        ranks = self.placement.ranks
        pairs = zip(keys, replicas, strict=True)
        return tuple(ranks[begin : begin + count] for begin, count in pairs)

    def pace(self, before: StagesBefore, replicas: int, keys: Indices) -> tuple[Floats, Floats]:
        """Return the cost of transfers from the previous stages.

        Args:
            before: Previous stages.
            replicas: Replicas of the receiving stages.
            keys: Keys of the receiving stages.

        Returns:
            Latency in seconds, and seconds per byte that a replica of the smaller stage sends.
        """
        latency, slowness = self.routes(replicas)
        counts = np.searchsorted(self.counts, before.replicas)
        at = counts, before.ends, keys
        return latency[at], slowness[at]

    def least_pace(self, replicas: int, keys: Indices, ends: Indices) -> tuple[Floats, Floats]:  # noqa: ARG002
        """Return the least cost of a transfer to any next stage; 0 at the end of the order.

        Args:
            replicas: Replicas of the sending stages.
            keys: Keys of the sending stages.
            ends: Positions where they end.

        Returns:
            Latency in seconds, and seconds per byte.
        """
        latency, slowness = self.best_route(replicas)
        return latency[ends], slowness[ends]

    def orders(self, shape: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the one order of the replicas: that of the devices."""
        yield shape

    def routes(self, replicas: int) -> tuple[Floats, Floats]:
        """Return the cost of all transfers to stages of `replicas` replicas.

        Returns:
            Two (counts, ends, begins) tables: latency in seconds, and seconds per byte that a replica of the
            smaller stage sends, from a stage with a number of replicas and an end to a stage with a begin;
            inf if it may not follow.
        """
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
        """Number of positions after which costs repeat: a node, if all nodes are alike and in order."""
        in_order = self.placement.ranks == tuple(range(self.devices))
        return self.space.topology.gpus_per_node if in_order and self.space.routes.alike else self.devices + 1

    def best_route(self, replicas: int) -> tuple[Floats, Floats]:
        """Return the least cost of a transfer from a stage of `replicas` replicas to any next stage.

        Returns:
            Two (positions + 1,) arrays: least latency in seconds and least seconds per byte; 0 at the end.
        """
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
        """Return the least value over the begins of the stage after one that ends at each position.

        Args:
            values: (positions + 1, cut points) values by begin.
        """
        ends, begins = self._skips
        if not len(ends):
            return values
        least = values.copy()
        np.minimum.at(least, ends, values[begins])
        return least

    @cached_property
    def _skips(self) -> tuple[Indices, Indices]:
        """Pairs of positions where a stage may end and the next may begin, with free devices between."""
        pairs = [(end, begin) for end, starts in enumerate(self.starts) for begin in starts if begin > end]
        ends, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return ends, begins
