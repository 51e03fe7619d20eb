"""Devices that are alike: which choices of devices for the stages of a pipeline make no difference.

Devices of one kind that no level and no port tells apart are alike, and so are groups that hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cost_models.topology import Topology

Shape = tuple[tuple[int, ...], ...]
"""By stage, the ranks of its replicas."""


def group_path(topology: Topology, rank: int) -> tuple[object, ...]:
    """The groups that hold a device, the outermost first, and its kind."""
    return (*(rank // size for size in _sizes(topology)), topology.device(rank))


def _sizes(topology: Topology) -> list[int]:
    """Devices of the groups, and of those that share a port, the largest first."""
    own, inner = set[int](), 1
    for level in topology.levels:
        own.add(level.devices_per_port)
        inner = topology.gpus if level.size is None else inner * level.size
        own.add(inner)
    return sorted((size for size in own if 1 < size < topology.gpus), reverse=True)


@dataclass(frozen=True, eq=False)
class Symmetry:
    """Which assignments of devices are the same but for the names of devices and groups that are alike."""

    topology: Topology
    _holds: dict[tuple[object, ...], object] = field(default_factory=dict)

    def key(self, shape: Shape) -> tuple[object, ...]:
        """The same for assignments that are."""
        numbers, counts, made = dict[tuple[object, ...], int](), dict[tuple[object, ...], int](), []
        for own in shape:
            stage = []
            for rank in own:
                *groups, kind = group_path(self.topology, rank)
                label: tuple[object, ...] = ()
                for depth in range(len(groups)):
                    group = tuple(groups[: depth + 1])
                    alike = (label, self.held(group))
                    if group not in numbers:
                        numbers[group] = counts[alike] = counts.get(alike, 0) + 1
                    label = (*label, self.held(group), numbers[group])
                stage.append((label, kind))
            made.append(tuple(stage))
        return tuple(made)

    def held(self, group: tuple[object, ...]) -> object:
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
