"""Arbitrary sets of devices for each stage, up to renumbering of equal devices and groups.

The order of a stage's replicas matters to transfers, because each replica has one run of the samples. While
plans are extended, a transfer takes the time of the fastest order of both sides. Whole plans are simulated in
each order.
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
"""Most transitions between states of taken devices, times blocks, that are searched."""
MOST_ORDERS = 2_520
"""Most orders of the replicas of a plan's stages on devices with different links."""
MOST_NODES_ALIKE = 8
"""Most devices of one kind in several nodes for which arbitrary sets are searched."""


@lru_cache(maxsize=8)
def list_classes(topology: Topology, counts: tuple[int, ...]) -> DeviceClasses:
    """Return the device classes of a topology, cached."""
    return DeviceClasses(topology, counts)


def may_search_any(topology: Topology, counts: tuple[int, ...], blocks: int) -> bool:
    """Return whether arbitrary sets of devices are few enough to search them all.

    Args:
        topology: Devices and links.
        counts: Numbers of replicas that a stage may have.
        blocks: Number of blocks between allowed cuts.
    """
    if is_uniform(topology) or topology.gpus > 64:
        return False
    if len(topology.kinds) == 1 and topology.gpus > MOST_NODES_ALIKE:
        return False
    classes = list_classes(topology, counts)
    return classes.most_steps * min(blocks, 32) <= MOST_STEPS and classes.most_orders <= MOST_ORDERS


@dataclass(frozen=True, eq=False)
class DeviceSets:
    """Arbitrary devices for each stage, with the interface of `DeviceRanges`.

    Numbers of states take the place of positions, and numbers of sets take the place of begins.

    Attributes:
        space: Costs and links.
        placement: The placement `any`.
        counts: Numbers of replicas that a stage may have.
        on_all: Whether every device must be used.
    """

    space: Space
    placement: Placement
    counts: tuple[int, ...]
    on_all: bool = False

    @property
    def classes(self) -> DeviceClasses:
        """Classes of the devices."""
        return list_classes(self.space.topology, self.counts)

    @property
    def any_order(self) -> bool:
        """True if the replicas of a stage may stand in different orders."""
        return self.classes.most_orders > 1

    @cached_property
    def devices_before(self) -> Indices:
        """(states,) number of devices taken."""
        return np.array([sum(used) for used in self.classes.steps[0]], dtype=np.int64)

    def starts_from(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the rows of plans that end at these states, and the states where the next stage begins."""
        return np.arange(len(positions)), positions

    def runs(self, count: int) -> Iterator[DeviceRun]:
        """Yield the sets of `count` devices."""
        _, begins, afters, sets = self.classes.steps
        for index, vector in enumerate(self.classes.vectors):
            if sum(vector) == count:
                at = sets == index
                if at.any():
                    yield DeviceRun(self.classes.take(vector), begins[at], afters[at], sets[at])

    def least_reachable(self, values: Floats) -> Floats:
        """Return `values`, because no devices need to be skipped (see `DeviceRanges`)."""
        return values

    @cached_property
    def _paces(self) -> tuple[Floats, Floats]:
        """(sets, sets) latency and seconds per byte between stages; inf if the sets share a device."""
        classes, vectors = self.classes, self.classes.vectors
        latency, slowness = (np.full((len(vectors),) * 2, np.inf) for _ in range(2))
        by_key = dict[object, tuple[float, float]]()
        by_link = np.array([np.bincount(classes.links, weights=vector) for vector in vectors], dtype=np.int64)
        for row, senders in enumerate(vectors):
            self.space.budget.check()
            ranks = classes.take(senders)
            for column, receivers in enumerate(vectors):
                both = zip(senders, receivers, classes.sizes, strict=True)
                if any(a + b > size for a, b, size in both):
                    continue
                pairs = list(zip(by_link[row].tolist(), by_link[column].tolist(), strict=True))
                # All groups of a single level are linked alike, so their numbers do not matter.
                key = tuple(sorted(pairs) if len(group_sizes(self.space.topology)) < 2 else pairs)
                if key not in by_key:
                    by_key[key] = self._least_pace(ranks, classes.take(receivers, senders))
                latency[row, column], slowness[row, column] = by_key[key]
        return latency, slowness

    def _least_pace(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
        """Return the least latency and seconds per byte over all orders of both stages' devices."""
        paces = [
            self.space.pace(sending_order, receiving_order)
            for sending_order in self.classes.orders(senders)
            for receiving_order in self.classes.orders(receivers)
        ]
        return min(latency for latency, _ in paces), min(slowness for _, slowness in paces)

    def pace(self, before: StagesBefore, replicas: int, keys: Indices) -> tuple[Floats, Floats]:  # noqa: ARG002
        """Return latency and seconds per byte from the previous stages to `keys` (see `DeviceRanges`)."""
        latency, slowness = self._paces
        return latency[before.keys, keys], slowness[before.keys, keys]

    @cached_property
    def _least_paces(self) -> tuple[Floats, Floats]:
        """(sets,) least latency and seconds per byte to any next stage; 0 if none is possible."""
        least = (values.min(axis=1) for values in self._paces)
        latency, slowness = (np.where(np.isinf(values), 0.0, values) for values in least)
        return latency, slowness

    def least_pace(self, replicas: int, keys: Indices, ends: Indices) -> tuple[Floats, Floats]:  # noqa: ARG002
        """Return the least latency and seconds per byte to any next stage (see `DeviceRanges`)."""
        latency, slowness = self._least_paces
        return latency[keys], slowness[keys]

    def devices_at(self, keys: Sequence[int], replicas: Sequence[int]) -> Shape:  # noqa: ARG002
        """Return the ranks of the stages of a pipeline.

        Args:
            keys: Numbers of the sets of devices, first stage first.
            replicas: Number of replicas by stage.
        """
        classes, used, shape = self.classes, (0,) * len(self.classes.sizes), list[tuple[int, ...]]()
        for key in keys:
            vector = classes.vectors[key]
            shape.append(classes.take(vector, used))
            used = tuple(a + b for a, b in zip(used, vector, strict=True))
        return tuple(shape)

    def orders(self, shape: Shape) -> Iterator[Shape]:
        """Yield the devices of all stages in every order that differs in its links, rank order first."""
        yield from product(*(self.classes.orders(ranks) for ranks in shape))


def make_ranges(
    space: Space, placement: Placement, counts: tuple[int, ...], on_all: bool = False
) -> DeviceRanges | DeviceSets:
    """Return the devices that stages with these numbers of replicas may take."""
    return (DeviceSets if placement.name == ANY else DeviceRanges)(space, placement, counts, on_all)


def list_shapes(topology: Topology, stages: int, counts: Sequence[int]) -> Iterator[Shape]:
    """Yield all assignments of devices to `stages` stages with these numbers of replicas."""
    classes = list_classes(topology, tuple(counts))
    states, begins, _, sets = classes.steps
    by_begin = [sets[begins == state] for state in range(len(states))]
    number = {vector: index for index, vector in enumerate(states)}

    def further(used: Vector, left: int) -> Iterator[Shape]:
        if not left:
            yield ()
            return
        for index in by_begin[number[used]].tolist():
            vector = classes.vectors[index]
            total = tuple(a + b for a, b in zip(used, vector, strict=True))
            if sum(total) + left - 1 <= topology.gpus:
                yield from (
                    (classes.take(vector, used), *later_stages) for later_stages in further(total, left - 1)
                )

    yield from further((0,) * len(classes.sizes), stages)
