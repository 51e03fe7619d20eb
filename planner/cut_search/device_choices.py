"""Choices of devices for the stages of a pipeline if some devices are faster than others.

A choice gives each stage a set of devices. Devices of one kind that no link distinguishes are alike, and of
choices that are equal up to renumbering of equal devices and groups, one is listed. Choices of the highest
capacity come first, independent of the ranking of the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from ...cost_models.topology import Device, Topology
from ..problem import Problem
from ..search.device_classes import Shape, Symmetry, group_path, group_sizes, is_uniform

MOST_LISTED = 64
"""Most choices that are listed for one pipeline. Of more, the best are taken."""
MOST_TAKEN = 12
"""Number of choices that are tried if not all are listed."""


@dataclass(frozen=True)
class DeviceChoices:
    """Choices for stages with given replicas.

    If `complete`, any other choice is equivalent to one of them.
    """

    shapes: tuple[Shape, ...]
    complete: bool


@dataclass(frozen=True, eq=False)
class DeviceChooser:
    """Choices of a problem's devices for pipelines."""

    problem: Problem
    _choices: dict[tuple[int, ...], DeviceChoices] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        """Devices and links."""
        return self.problem.topology

    @property
    def is_single(self) -> bool:
        """True if devices are taken in rank order, so that there is one choice."""
        return self.problem.runtime is not None or len(self.topology.kinds) == 1

    def choices(self, counts: Sequence[int]) -> DeviceChoices:
        """Return the devices that stages with these replicas may take, most capable choices first.

        A runtime fixes the ranks, and devices of one kind are taken in rank order: then there is one choice.
        """
        key = tuple(counts)
        if key not in self._choices:
            self._choices[key] = self._list(key)
        return self._choices[key]

    def _list(self, counts: tuple[int, ...]) -> DeviceChoices:
        if self.is_single:
            ranks = iter(self.problem.placements[0].ranks)
            shape = tuple(tuple(islice(ranks, count)) for count in counts)
            return DeviceChoices((shape,), is_uniform(self.topology))
        shapes = list(islice(self._shapes(counts, self._classes), MOST_LISTED + 1))
        complete = len(shapes) <= MOST_LISTED
        if not complete:
            shapes = sorted(shapes, key=self._capacity)[:MOST_TAKEN]
        grouped = bool(group_sizes(self.topology))
        if grouped:
            shapes = list({self._symmetry.key(shape): shape for shape in reversed(shapes)}.values())
        # If links differ, the order of the replicas of a stage matters, too.
        complete &= not grouped or max(counts) == 1
        return DeviceChoices(tuple(sorted(shapes, key=self._capacity)), complete)

    @cached_property
    def _symmetry(self) -> Symmetry:
        return Symmetry(self.topology)

    @cached_property
    def _seconds(self) -> Mapping[Device, float]:
        """Seconds of a sample in all layers by kind of device."""
        space, size = self.problem.space, self.problem.chain.sizes[0]

        def whole(kind: Device) -> float:
            return float(
                space.on(kind, size, lambda costs: costs.forward_seconds + costs.backward_seconds).sum()
            )

        return {kind: whole(kind) for kind in self.topology.kinds}

    @cached_property
    def _classes(self) -> tuple[tuple[int, ...], ...]:
        """Classes of equal devices, fastest first."""
        classes = dict[tuple[object, ...], list[int]]()
        for rank in range(self.topology.gpus):
            classes.setdefault(group_path(self.topology, rank), []).append(rank)
        fastest_first = sorted(
            classes.values(), key=lambda ranks: self._seconds[self.topology.device(ranks[0])]
        )
        return tuple(map(tuple, fastest_first))

    def _shapes(self, counts: tuple[int, ...], free: tuple[tuple[int, ...], ...]) -> Iterator[Shape]:
        """Yield the choices from free devices by class, preferring the first classes."""
        if not counts:
            yield ()
            return
        for numbers in _divisions(counts[0], tuple(map(len, free))):
            stage = tuple(sorted(rank for ranks, n in zip(free, numbers, strict=True) for rank in ranks[:n]))
            rest = tuple(ranks[n:] for ranks, n in zip(free, numbers, strict=True))
            yield from ((stage, *rest_of_shape) for rest_of_shape in self._shapes(counts[1:], rest))

    def _capacity(self, shape: Shape) -> tuple[float, ...]:
        """Return a sort key: the capacity of all stages, then that of each, largest first."""
        rates = [
            len(ranks) / max(self._seconds[self.topology.device(rank)] for rank in ranks) for ranks in shape
        ]
        return (-round(sum(rates), 9), *(-rate for rate in rates))


def _divisions(count: int, most: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of devices of each class that add up to `count`, preferring the first classes."""
    if not most:
        if not count:
            yield ()
        return
    for number in range(min(count, most[0]), -1, -1):
        if count - number <= sum(most[1:]):
            yield from ((number, *rest) for rest in _divisions(count - number, most[1:]))
