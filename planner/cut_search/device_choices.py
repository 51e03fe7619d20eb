"""Devices for the stages of a pipeline, where some are faster than others.

A choice gives each stage a set of devices. Devices of a kind that no link tells apart are alike, and of
choices that differ only in names of devices and groups that are alike one is listed. The listing begins with
the choices of the highest capacity and does not depend on the order in which devices are ranked.
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
"""Choices that are listed of one pipeline; of more, the best are taken."""
MOST_TAKEN = 12
"""Choices that are looked at where not all are listed."""


@dataclass(frozen=True)
class DeviceChoices:
    """The choices for stages of some numbers of replicas; `complete`: any other is like one of them."""

    shapes: tuple[Shape, ...]
    complete: bool


@dataclass(frozen=True, eq=False)
class DeviceChooser:
    """The choices of a problem's devices for pipelines."""

    problem: Problem
    _choices: dict[tuple[int, ...], DeviceChoices] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        """The devices and their links."""
        return self.problem.topology

    @property
    def is_single(self) -> bool:
        """Return whether devices are taken in rank order, so that there is one choice."""
        return self.problem.runtime is not None or len(self.topology.kinds) == 1

    def choices(self, counts: Sequence[int]) -> DeviceChoices:
        """List the devices that stages of so many replicas may have, the most capable choices first.

        A runtime numbers the devices, and devices of one kind are taken in rank order: there is one choice.
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
        # The replicas of a stage may stand in any order where links tell them apart.
        complete &= not grouped or max(counts) == 1
        return DeviceChoices(tuple(sorted(shapes, key=self._capacity)), complete)

    @cached_property
    def _symmetry(self) -> Symmetry:
        return Symmetry(self.topology)

    @cached_property
    def _seconds(self) -> Mapping[Device, float]:
        """By kind of device, the seconds of a sample in all layers."""
        space, size = self.problem.space, self.problem.chain.sizes[0]

        def whole(kind: Device) -> float:
            return float(
                space.on(kind, size, lambda costs: costs.forward_seconds + costs.backward_seconds).sum()
            )

        return {kind: whole(kind) for kind in self.topology.kinds}

    @cached_property
    def _classes(self) -> tuple[tuple[int, ...], ...]:
        """Devices that are alike, the fastest first."""
        classes = dict[tuple[object, ...], list[int]]()
        for rank in range(self.topology.gpus):
            classes.setdefault(group_path(self.topology, rank), []).append(rank)
        fastest_first = sorted(
            classes.values(), key=lambda ranks: self._seconds[self.topology.device(ranks[0])]
        )
        return tuple(map(tuple, fastest_first))

    def _shapes(self, counts: tuple[int, ...], free: tuple[tuple[int, ...], ...]) -> Iterator[Shape]:
        """The choices from these free devices by class, those of the first classes first."""
        if not counts:
            yield ()
            return
        for numbers in _divisions(counts[0], tuple(map(len, free))):
            stage = tuple(sorted(rank for ranks, n in zip(free, numbers, strict=True) for rank in ranks[:n]))
            rest = tuple(ranks[n:] for ranks, n in zip(free, numbers, strict=True))
            yield from ((stage, *rest_of_shape) for rest_of_shape in self._shapes(counts[1:], rest))

    def _capacity(self, shape: Shape) -> tuple[float, ...]:
        """Sort key: what the stages compute together, and then each, the most first."""
        rates = [
            len(ranks) / max(self._seconds[self.topology.device(rank)] for rank in ranks) for ranks in shape
        ]
        return (-round(sum(rates), 9), *(-rate for rate in rates))


def _divisions(count: int, most: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Choose a number of devices from classes of these sizes, from the first classes first."""
    if not most:
        if not count:
            yield ()
        return
    for number in range(min(count, most[0]), -1, -1):
        if count - number <= sum(most[1:]):
            yield from ((number, *rest) for rest in _divisions(count - number, most[1:]))
