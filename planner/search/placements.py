"""Orders of the devices in which the stages of a pipeline take them, one run after another.

In any order a stage may begin after the last device of the stage before, or leave devices free and begin with
the next node (or the next kind of device). Taking the ranks in order keeps neighbouring stages near each
other; taking them across the nodes (one of each node in turn) gives a stage's replicas one device of every
node, so that transfers between stages stay inside the nodes and gradients are added up between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, permutations

from ...cost_models.topology import Topology

FEW = 16
"""Up to so many devices they are taken across the first two nodes, the first three and so on, too, so that
the plans of a smaller machine are among those of a larger one."""
MOST_DEVICES = 64
"""Of so many, stages may begin at any."""
MOST_RUNS = 4
"""Runs of equal devices of which every order is tried: 24."""

IN_ORDER, ACROSS, REORDERED = "in order", "across nodes", "kinds reordered"
WORDS = {
    IN_ORDER: "in rank order",
    ACROSS: "in turn from each node",
    REORDERED: "with the kinds in another order",
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
        made = []
        for position in range(len(self.ranks) + 1):
            own = [position]
            if position < len(self.ranks) and (self.skips_whole or not self._begins(position)):
                later = self.next_group[position]
                while later < len(self.ranks):
                    own.append(later)
                    later = self.next_group[later] if self.skips_whole else len(self.ranks)
            made.append(tuple(own))
        return tuple(made)

    def _begins(self, position: int) -> bool:
        return position == 0 or self.next_group[position - 1] == position


def placements(topology: Topology) -> list[Placement]:
    """The orders that are searched: as ranked; across the full nodes, where there are several; and where
    there are several kinds of devices, their runs in every order (in either direction where there are more
    than `MOST_RUNS`)."""
    if len(topology.kinds) > 1:
        return [
            make_placement(IN_ORDER if index == 0 else REORDERED, topology, ranks)
            for index, ranks in enumerate(_run_orders(topology))
        ]
    made = [make_placement(IN_ORDER, topology, tuple(range(topology.gpus)))]
    nodes = topology.gpus // topology.gpus_per_node
    few = range(2, nodes) if topology.gpus <= FEW else ()
    if topology.gpus_per_node > 1:
        made += [_across(topology, count) for count in (*few, nodes) if count > 1]
    return made


def _across(topology: Topology, nodes: int) -> Placement:
    """One device of each of the first nodes in turn, then all that is left."""
    each, gpus = topology.gpus_per_node, topology.gpus
    taken = (node * each + slot for slot in range(each) for node in range(nodes))
    return Placement(ACROSS, (*taken, *range(nodes * each, gpus)), (gpus,) * gpus)


def _run_orders(topology: Topology) -> Iterator[tuple[int, ...]]:
    """The ranks, with the runs of equal devices in every order, as ranked first."""
    runs = [tuple(ranks) for _, ranks in groupby(range(topology.gpus), key=topology.device)]
    orders = permutations(runs) if len(runs) <= MOST_RUNS else iter((runs, runs[::-1]))
    for order in orders:
        yield tuple(rank for run in order for rank in run)


def make_placement(name: str, topology: Topology, ranks: tuple[int, ...]) -> Placement:
    """`ranks` with a new group at every node and every kind."""
    groups = [(rank // topology.gpus_per_node, topology.device(rank)) for rank in ranks]
    next_group, later = [0] * len(ranks), len(ranks)
    for position in reversed(range(len(ranks))):
        next_group[position] = later
        if position and groups[position - 1] != groups[position]:
            later = position
    return Placement(name, ranks, tuple(next_group), skips_whole=len(topology.kinds) > 1)
