"""Classes of interchangeable devices, and the distinct sets of devices that stages can take.

Devices of one kind that no level and no port distinguishes form a class. Stages take the first free devices
of a class, so a set of devices is a vector of counts by class. The state after some stages is the vector of
all devices taken. Of several next sets that are equal up to renumbering of groups, one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import comb, factorial, prod

import numpy as np

from ...cost_models.topology import Topology
from ..stage_table import Indices

Shape = tuple[tuple[int, ...], ...]
"""By stage, the ranks of its replicas."""
Vector = tuple[int, ...]
"""Number of devices by class."""


def group_path(topology: Topology, rank: int) -> tuple[object, ...]:
    """Return the groups that hold a device, outermost first, followed by its kind."""
    return (*(rank // size for size in group_sizes(topology)), topology.device(rank))


@lru_cache(maxsize=16)
def group_sizes(topology: Topology) -> tuple[int, ...]:
    """Return the sizes of the groups of devices of a level or behind a port, largest first."""
    sizes, inner = set[int](), 1
    for level in topology.levels:
        sizes.add(level.devices_per_port)
        inner = topology.gpus if level.size is None else inner * level.size
        sizes.add(inner)
    return tuple(sorted((size for size in sizes if 1 < size < topology.gpus), reverse=True))


@lru_cache(maxsize=16)
def _class_ranks(topology: Topology) -> list[tuple[int, ...]]:
    """Return the ranks of the devices by class."""
    by_path = dict[tuple[object, ...], list[int]]()
    for rank in range(topology.gpus):
        by_path.setdefault(group_path(topology, rank), []).append(rank)
    return [tuple(ranks) for ranks in by_path.values()]


def is_uniform(topology: Topology) -> bool:
    """Return whether all devices and links are alike, so that any devices serve a stage equally well."""
    return len(topology.kinds) == 1 and not group_sizes(topology)


@dataclass(frozen=True, eq=False)
class Symmetry:
    """Equality of assignments of devices up to renumbering of equal devices and groups."""

    topology: Topology
    _holds: dict[tuple[object, ...], object] = field(default_factory=dict)

    def key(self, shape: Shape) -> tuple[object, ...]:
        """Return a key that is equal for equivalent assignments."""
        numbers, counts, stages = dict[tuple[object, ...], int](), dict[tuple[object, ...], int](), []
        for ranks in shape:
            stage = []
            for rank in ranks:
                *groups, kind = group_path(self.topology, rank)
                label: tuple[object, ...] = ()
                for depth in range(len(groups)):
                    group = tuple(groups[: depth + 1])
                    alike = (label, self.contents(group))
                    if group not in numbers:
                        numbers[group] = counts[alike] = counts.get(alike, 0) + 1
                    label = (*label, self.contents(group), numbers[group])
                stage.append((label, kind))
            stages.append(tuple(stage))
        return tuple(stages)

    def contents(self, group: tuple[object, ...]) -> object:
        """Return what a group holds: its parts and their kinds in the order of the ranks."""
        if group not in self._holds:
            depth, first, parts = len(group), dict[object, int](), list[object]()
            for rank in range(self.topology.gpus):
                path = group_path(self.topology, rank)
                if path[:depth] == group:
                    inner = tuple(first.setdefault(path[: depth + 1 + i], len(first)) for i in range(3))
                    parts.append((inner, path[-1]))
            self._holds[group] = tuple(parts)
        return self._holds[group]


@dataclass(frozen=True, eq=False)
class DeviceClasses:
    """Classes of a topology's devices, sets of devices, and transitions between states of taken devices.

    Attributes:
        topology: Devices and links.
        counts: Numbers of devices that a set may have.
    """

    topology: Topology
    counts: tuple[int, ...]

    @cached_property
    def ranks(self) -> list[tuple[int, ...]]:
        """Ranks of the devices by class."""
        return _class_ranks(self.topology)

    @property
    def sizes(self) -> Vector:
        """Number of devices by class."""
        return tuple(map(len, self.ranks))

    @cached_property
    def links(self) -> list[int]:
        """Numbers by class that are equal for classes with the same links, whatever their kinds."""
        numbers = dict[tuple[object, ...], int]()
        paths = [group_path(self.topology, ranks[0])[:-1] for ranks in self.ranks]
        return [numbers.setdefault(path, len(numbers)) for path in paths]

    @cached_property
    def most_steps(self) -> int:
        """Upper limit on the number of transitions."""
        return prod(comb(size + 2, 2) for size in self.sizes)

    @cached_property
    def most_orders(self) -> int:
        """Most distinct orders of the replicas of all stages of a plan."""
        if len(set(self.links)) == 1:
            return 1
        by_link = np.bincount(self.links, weights=self.sizes)
        return factorial(self.topology.gpus) // prod(factorial(int(count)) for count in by_link)

    @cached_property
    def vectors(self) -> list[Vector]:
        """Sets of devices that a stage may have, those of low ranks first."""
        vectors = product(*(range(size + 1) for size in self.sizes))
        return sorted(
            (vector for vector in vectors if sum(vector) in self.counts), key=lambda vector: self.take(vector)
        )

    @cached_property
    def steps(self) -> tuple[list[Vector], Indices, Indices, Indices]:
        """The states, and the transitions between them, sorted by first state.

        The first state is that of no device taken.

        Returns:
            The states (devices taken by class), then (transitions,) arrays: state before the stage, state
            after it, and set of devices that the stage takes.
        """
        number = {vector: index for index, vector in enumerate(self.vectors)}
        states, steps = {(0,) * len(self.sizes): 0}, list[tuple[int, int, int]]()
        symmetry = Symmetry(self.topology)
        queue = list(states)
        for used in queue:
            keys = set[object]()
            for vector in self.vectors:
                total = tuple(a + b for a, b in zip(used, vector, strict=True))
                if any(a > size for a, size in zip(total, self.sizes, strict=True)):
                    continue
                key = symmetry.key((self.take(used), self.take(vector, used))) if self._alike else vector
                if key in keys:
                    continue
                keys.add(key)
                if total not in states:
                    states[total] = len(states)
                    queue.append(total)
                steps.append((states[used], states[total], number[vector]))
        begins, afters, sets = np.array(sorted(steps), dtype=np.int64).reshape(-1, 3).T
        return queue, begins, afters, sets

    @cached_property
    def _alike(self) -> bool:
        """True if two groups can be renumbered without a difference."""
        symmetry = Symmetry(self.topology)
        paths = {group_path(self.topology, rank)[:-1] for rank in range(self.topology.gpus)}
        groups = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
        distinct = {(group[:-1], symmetry.contents(group)) for group in groups}
        return len(distinct) < len(groups)

    def take(self, counts: Vector, used: Vector | None = None) -> tuple[int, ...]:
        """Return the ranks of a set of devices.

        Args:
            counts: Number of devices by class.
            used: Devices by class that earlier stages take. None for none.

        Returns:
            The ranks, ascending.
        """
        used = (0,) * len(counts) if used is None else used
        return tuple(
            sorted(
                rank
                for ranks, count, first in zip(self.ranks, counts, used, strict=True)
                for rank in ranks[first : first + count]
            )
        )

    def orders(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the orders of a stage's devices that differ in their links. The first one is by rank."""
        link_of_rank = {
            rank: link for ranks_, link in zip(self.ranks, self.links, strict=True) for rank in ranks_
        }
        by_link = dict[int, list[int]]()
        for rank in ranks:
            by_link.setdefault(link_of_rank[rank], []).append(rank)
        return list(_interleave([tuple(group) for group in by_link.values()]))


def _interleave(groups: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield all merges of the groups that keep each group's order, their concatenation first."""
    if not any(groups):
        yield ()
        return
    for index, group in enumerate(groups):
        if group:
            rest = [*groups[:index], group[1:], *groups[index + 1 :]]
            yield from ((group[0], *rest_of_row) for rest_of_row in _interleave(rest))
