"""Runs of the devices in an order: where stages may begin, and the ways from one stage to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..stage_table import Floats
from .placements import Placement
from .space import Space

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DeviceRanges:
    """The runs of `counts` devices (ascending) in an order. Stages begin at multiples of `unit` positions;
    `on_all`: no device may stay free."""

    space: Space
    placement: Placement
    counts: tuple[int, ...]
    on_all: bool = False
    unit: int = 1
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

    def routes(self, replicas: int) -> tuple[Floats, Floats]:
        """To a stage of so many replicas, (counts, ends, begins) each, positions in units: latency, and
        seconds of each byte that a replica of the smaller stage sends, from a stage of that count of replicas
        that ends at a position, where one may follow so; else inf."""
        if replicas not in self._to:
            self._to[replicas] = self._routes_to(replicas)
        return self._to[replicas]

    def _routes_to(self, replicas: int) -> tuple[Floats, Floats]:
        size = self.devices // self.unit + 1
        latency, slowness = (np.full((len(self.counts), size, size), np.inf) for _ in range(2))
        ranks, known = self.placement.ranks, dict[tuple[int, ...], tuple[float, float]]()
        for end, begins in enumerate(self.starts):
            self.space.budget.check()
            for begin in begins:
                if end % self.unit or begin % self.unit or begin + replicas > self.devices:
                    continue
                receivers = ranks[begin : begin + replicas]
                for index, count in enumerate(self.counts):
                    if count <= end:
                        at = index, end // self.unit, begin // self.unit
                        key = ((end - count) % self._period, count, begin - end)
                        if key not in known:
                            known[key] = self.space.pace(ranks[end - count : end], receivers)
                        latency[at], slowness[at] = known[key]
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
            made = []
            for which in range(2):
                least = np.min([self.routes(count)[which][index] for count in self.counts], axis=0).min(
                    axis=1
                )
                made.append(np.repeat(np.where(np.isinf(least), 0.0, least), self.unit)[: self.devices + 1])
            self._best[replicas] = made[0], made[1]
        return self._best[replicas]

    def reached(self, values: Floats) -> Floats:
        """(positions + 1, cut points): the least value of where a stage may begin after one that ends
        there."""
        ends, begins = self._skips
        if not len(ends):
            return values
        made = values.copy()
        np.minimum.at(made, ends, values[begins])
        return made

    @cached_property
    def _skips(self) -> tuple[Indices, Indices]:
        """Positions where a stage may end and, beside each, where the next may begin with devices between."""
        pairs = [(end, begin) for end, own in enumerate(self.starts) for begin in own if begin > end]
        ends, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return ends, begins
