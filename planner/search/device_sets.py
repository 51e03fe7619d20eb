"""Any devices for each stage, up to the names of devices and groups that are alike.

In which order a stage's replicas stand matters to transfers, as each has an equal run of the samples. While
plans are made, a transfer is the fastest of all orders of both sides; whole plans are simulated with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from ...cost_models.topology import Topology
from ..stage_table import Floats, Indices
from .device_classes import DeviceClasses, Shape, Vector, group_sizes, is_uniform
from .placements import ANY, DeviceRanges, DeviceRun, Placement, StagesBefore
from .space import Space

MOST_STEPS = 250_000
"""From devices that are taken to those with a further stage: so many are searched."""
MOST_ORDERS = 2_520
"""Of the replicas of the stages of a plan, on devices that the links tell apart."""
MOST_NODES_ALIKE = 8
"""Devices of one kind in several nodes, of which any are searched."""


@lru_cache(maxsize=8)
def list_classes(topology: Topology, counts: tuple[int, ...]) -> DeviceClasses:
    return DeviceClasses(topology, counts)


def may_search_any(topology: Topology, counts: tuple[int, ...], blocks: int) -> bool:
    """Whether there are few enough choices of devices, and stages on them, that all are searched."""
    if is_uniform(topology) or topology.gpus > 64:
        return False
    if len(topology.kinds) == 1 and topology.gpus > MOST_NODES_ALIKE:
        return False
    own = list_classes(topology, counts)
    return own.most_steps * min(blocks, 32) <= MOST_STEPS and own.most_orders <= MOST_ORDERS


@dataclass(frozen=True, eq=False)
class DeviceSets:
    """Any devices for each stage, in place of the runs of an order (`DeviceRanges`): what takes the place of
    positions are the numbers of states, what takes that of begins are numbers of sets."""

    space: Space
    placement: Placement
    counts: tuple[int, ...]
    on_all: bool = False

    @property
    def classes(self) -> DeviceClasses:
        """Of the devices."""
        return list_classes(self.space.topology, self.counts)

    @property
    def any_order(self) -> bool:
        """Whether the replicas of a stage may stand in orders that differ."""
        return self.classes.most_orders > 1

    @cached_property
    def devices_before(self) -> Indices:
        """By state, how many devices are taken."""
        return np.array([sum(own) for own in self.classes.steps[0]], dtype=np.int64)

    def starts_from(self, positions: Indices) -> tuple[Indices, Indices]:
        """Plans whose stages end at these, and where a further one may begin: there."""
        return np.arange(len(positions)), positions

    def runs(self, count: int) -> Iterator[DeviceRun]:
        """The sets of so many devices."""
        _, begins, afters, sets = self.classes.steps
        for index, own in enumerate(self.classes.vectors):
            if sum(own) == count:
                at = sets == index
                if at.any():
                    yield DeviceRun(self.classes.take(own), begins[at], afters[at], sets[at])

    def least_reachable(self, values: Floats) -> Floats:
        """As of `DeviceRanges`: no devices need to be left free."""
        return values

    @cached_property
    def _paces(self) -> tuple[Floats, Floats]:
        """(sets, sets) each: latency, and seconds of a byte; inf where both need one device."""
        classes, vectors = self.classes, self.classes.vectors
        latency, slowness = (np.full((len(vectors),) * 2, np.inf) for _ in range(2))
        by_key = dict[object, tuple[float, float]]()
        by_link = np.array([np.bincount(classes.links, weights=own) for own in vectors], dtype=np.int64)
        for one, senders in enumerate(vectors):
            self.space.budget.check()
            ranks = classes.take(senders)
            for other, receivers in enumerate(vectors):
                both = zip(senders, receivers, classes.sizes, strict=True)
                if any(a + b > size for a, b, size in both):
                    continue
                pairs = list(zip(by_link[one].tolist(), by_link[other].tolist(), strict=True))
                # Groups of one level are joined alike, whichever they are.
                key = tuple(sorted(pairs) if len(group_sizes(self.space.topology)) < 2 else pairs)
                if key not in by_key:
                    by_key[key] = self._least_pace(ranks, classes.take(receivers, senders))
                latency[one, other], slowness[one, other] = by_key[key]
        return latency, slowness

    def _least_pace(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
        """With their devices in any order."""
        paces = [
            self.space.pace(own, others)
            for own in self.classes.orders(senders)
            for others in self.classes.orders(receivers)
        ]
        return min(latency for latency, _ in paces), min(slowness for _, slowness in paces)

    def pace(self, before: StagesBefore, replicas: int, keys: Indices) -> tuple[Floats, Floats]:  # noqa: ARG002
        """As of `DeviceRanges`."""
        latency, slowness = self._paces
        return latency[before.keys, keys], slowness[before.keys, keys]

    @cached_property
    def _least_paces(self) -> tuple[Floats, Floats]:
        """(sets,) each: to whatever may follow; 0 where nothing can."""
        least = (values.min(axis=1) for values in self._paces)
        latency, slowness = (np.where(np.isinf(own), 0.0, own) for own in least)
        return latency, slowness

    def least_pace(self, replicas: int, keys: Indices, ends: Indices) -> tuple[Floats, Floats]:  # noqa: ARG002
        """As of `DeviceRanges`."""
        latency, slowness = self._least_paces
        return latency[keys], slowness[keys]

    def devices_at(self, keys: Sequence[int], replicas: Sequence[int]) -> Shape:  # noqa: ARG002
        """Of the stages of a pipeline, from the first one on."""
        classes, before, shape = self.classes, (0,) * len(self.classes.sizes), list[tuple[int, ...]]()
        for key in keys:
            own = classes.vectors[key]
            shape.append(classes.take(own, before))
            before = tuple(a + b for a, b in zip(before, own, strict=True))
        return tuple(shape)

    def orders(self, shape: Shape) -> Iterator[Shape]:
        """The same devices of each stage in every order that the links tell apart; as ranked first."""
        yield from product(*(self.classes.orders(own) for own in shape))


def make_ranges(
    space: Space, placement: Placement, counts: tuple[int, ...], on_all: bool = False
) -> DeviceRanges | DeviceSets:
    """The devices that stages of these numbers of replicas may have."""
    return (DeviceSets if placement.name == ANY else DeviceRanges)(space, placement, counts, on_all)


def list_shapes(topology: Topology, stages: int, counts: Sequence[int]) -> Iterator[Shape]:
    """Any devices for so many stages of these numbers of replicas, as ranked inside a stage."""
    classes = list_classes(topology, tuple(counts))
    states, begins, _, sets = classes.steps
    by_begin = [sets[begins == state] for state in range(len(states))]
    number = {own: index for index, own in enumerate(states)}

    def further(before: Vector, left: int) -> Iterator[Shape]:
        if not left:
            yield ()
            return
        for index in by_begin[number[before]].tolist():
            own = classes.vectors[index]
            after = tuple(a + b for a, b in zip(before, own, strict=True))
            if sum(after) + left - 1 <= topology.gpus:
                yield from ((classes.take(own, before), *others) for others in further(after, left - 1))

    yield from further((0,) * len(classes.sizes), stages)
