"""The devices of a topology by class, and the sets of them that differ.

Devices of a kind that no level and no port tells apart are a class; of a class, stages take the first that
are free. A set of devices is the number that it takes of each class, and so is the state that stages so far
leave: what they take. Of further sets that are the same on a machine with its groups renumbered, one is kept.
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
"""By class, how many of its devices."""


def group_path(topology: Topology, rank: int) -> tuple[object, ...]:
    """The groups that hold a device, the outermost first, and its kind."""
    return (*(rank // size for size in group_sizes(topology)), topology.device(rank))


@lru_cache(maxsize=16)
def group_sizes(topology: Topology) -> tuple[int, ...]:
    """Devices of the groups, and of those that share a port, the largest first."""
    own, inner = set[int](), 1
    for level in topology.levels:
        own.add(level.devices_per_port)
        inner = topology.gpus if level.size is None else inner * level.size
        own.add(inner)
    return tuple(sorted((size for size in own if 1 < size < topology.gpus), reverse=True))


@lru_cache(maxsize=16)
def _class_ranks(topology: Topology) -> list[tuple[int, ...]]:
    """By class, the ranks of its devices."""
    by_path = dict[tuple[object, ...], list[int]]()
    for rank in range(topology.gpus):
        by_path.setdefault(group_path(topology, rank), []).append(rank)
    return [tuple(ranks) for ranks in by_path.values()]


def is_uniform(topology: Topology) -> bool:
    """Whether it makes no difference which devices the stages take."""
    return len(topology.kinds) == 1 and not group_sizes(topology)


@dataclass(frozen=True, eq=False)
class Symmetry:
    """Which assignments of devices are the same but for the names of devices and groups that are alike."""

    topology: Topology
    _holds: dict[tuple[object, ...], object] = field(default_factory=dict)

    def key(self, shape: Shape) -> tuple[object, ...]:
        """The same for assignments that are."""
        numbers, counts, stages = dict[tuple[object, ...], int](), dict[tuple[object, ...], int](), []
        for own in shape:
            stage = []
            for rank in own:
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
        """What a group holds, its parts in the order of the ranks."""
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
    """The classes of a topology's devices, the sets of these numbers of devices, and the steps from state to
    state: `begins`, `afters` and `sets`."""

    topology: Topology
    counts: tuple[int, ...]

    @cached_property
    def ranks(self) -> list[tuple[int, ...]]:
        """By class, those of its devices."""
        return _class_ranks(self.topology)

    @property
    def sizes(self) -> Vector:
        """By class, its devices."""
        return tuple(map(len, self.ranks))

    @cached_property
    def links(self) -> list[int]:
        """By class, a number for how the links reach it: kinds make no difference to them."""
        numbers = dict[tuple[object, ...], int]()
        paths = [group_path(self.topology, own[0])[:-1] for own in self.ranks]
        return [numbers.setdefault(path, len(numbers)) for path in paths]

    @cached_property
    def most_steps(self) -> int:
        """No more steps than these."""
        return prod(comb(size + 2, 2) for size in self.sizes)

    @cached_property
    def most_orders(self) -> int:
        """Of the replicas of all stages of a plan."""
        if len(set(self.links)) == 1:
            return 1
        by_link = np.bincount(self.links, weights=self.sizes)
        return factorial(self.topology.gpus) // prod(factorial(int(count)) for count in by_link)

    @cached_property
    def vectors(self) -> list[Vector]:
        """The sets of devices that a stage may have, those of low ranks first."""
        every = product(*(range(size + 1) for size in self.sizes))
        return sorted((own for own in every if sum(own) in self.counts), key=lambda own: self.take(own))

    @cached_property
    def steps(self) -> tuple[list[Vector], Indices, Indices, Indices]:
        """The states, by state what is taken (the first: nothing; the last: the most), and the steps, by
        `begins`."""
        number = {own: index for index, own in enumerate(self.vectors)}
        states, steps = {(0,) * len(self.sizes): 0}, list[tuple[int, int, int]]()
        symmetry = Symmetry(self.topology)
        every = list(states)
        for before in every:
            keys = set[object]()
            for own in self.vectors:
                after = tuple(a + b for a, b in zip(before, own, strict=True))
                if any(a > size for a, size in zip(after, self.sizes, strict=True)):
                    continue
                key = symmetry.key((self.take(before), self.take(own, before))) if self._alike else own
                if key in keys:
                    continue
                keys.add(key)
                if after not in states:
                    states[after] = len(states)
                    every.append(after)
                steps.append((states[before], states[after], number[own]))
        begins, afters, sets = np.array(sorted(steps), dtype=np.int64).reshape(-1, 3).T
        return every, begins, afters, sets

    @cached_property
    def _alike(self) -> bool:
        """Whether two groups may be renumbered."""
        symmetry, own = Symmetry(self.topology), set[tuple[object, ...]]()
        paths = {group_path(self.topology, rank)[:-1] for rank in range(self.topology.gpus)}
        groups = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
        own = {(group[:-1], symmetry.contents(group)) for group in groups}
        return len(own) < len(groups)

    def take(self, own: Vector, before: Vector | None = None) -> tuple[int, ...]:
        """The ranks of a set, after stages that take so many of each class."""
        before = (0,) * len(own) if before is None else before
        return tuple(
            sorted(
                rank
                for ranks, count, first in zip(self.ranks, own, before, strict=True)
                for rank in ranks[first : first + count]
            )
        )

    def orders(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Of the devices of a stage, the orders that differ by what the links tell apart; as ranked first."""
        own = {rank: link for ranks_, link in zip(self.ranks, self.links, strict=True) for rank in ranks_}
        by_link = dict[int, list[int]]()
        for rank in ranks:
            by_link.setdefault(own[rank], []).append(rank)
        return list(_interleave([tuple(group) for group in by_link.values()]))


def _interleave(groups: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """All in one row, each group in its order; one after another first."""
    if not any(groups):
        yield ()
        return
    for index, own in enumerate(groups):
        if own:
            rest = [*groups[:index], own[1:], *groups[index + 1 :]]
            yield from ((own[0], *others) for others in _interleave(rest))
