"""The stages that a pipeline of a configuration may have: pairs of cut points, on runs of the devices in an
order, or on any sets of them.

Runs that cost the same are a group; its pairs stand in lists sorted by the place they start at, without those
that would alone be too slow or fit nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import Recompute
from ...cost_models.runtime import OFFLOAD
from ...cost_models.schedules import find_schedule
from ..candidate import FIRST_LAYERS, PipelineConfig
from ..stage_table import Floats, Indices
from .device_sets import DeviceSets
from .placements import DeviceRanges, DeviceRun
from .replica_group import ReplicaGroupCosts
from .space import Space
from .stage_recompute import OFFLOADS, stage_modes


class Entries(NamedTuple):
    """Stages of a group that begin at `position` and end before `after`, by entry: devices `key`, pair
    `pair`, cut points `start` and `end`; sorted by run and start, of which `first` are the first entries."""

    position: Indices
    after: Indices
    key: Indices
    pair: Indices
    start: Indices
    end: Indices
    first: Indices

    def least_into(self, table: Floats, values: Floats) -> None:
        """Lowers the table at each position and start to the least value of its entries."""
        at = self.position[self.first] * table.shape[1] + self.start[self.first]
        np.minimum.at(table.reshape(-1), at, np.minimum.reduceat(values, self.first))


@dataclass(frozen=True, eq=False)
class GroupChoices:
    """The stages of one replica group: `start`, `end` (pairs,) are cut points. Its runs (runs,) begin at
    `positions`, ascending, and end before `afters`, on the devices `keys`. Seconds (pairs,) are those of that
    group."""

    costs: ReplicaGroupCosts
    positions: Indices
    afters: Indices
    keys: Indices
    start: Indices
    end: Indices
    config: PipelineConfig
    offloads: npt.NDArray[np.bool_] | None = None
    """(pairs,): of which of two entries for the same cut points what is saved goes to the host; None: of
    none."""
    _most: dict[Recompute, Floats] = field(default_factory=dict)
    _eff: dict[float, tuple[Floats, Indices]] = field(default_factory=dict)
    _first_rooms: dict[int, Floats] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Devices of a run."""
        return self.costs.replicas

    def runs_from(self, positions: Indices) -> tuple[Indices, Indices]:
        """Its runs that begin at these positions: the number of a position, and of a run."""
        low, high = (np.searchsorted(self.positions, positions, side) for side in ("left", "right"))
        counts = high - low
        which = np.repeat(np.arange(len(positions)), counts)
        return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + low[which]

    @cached_property
    def forward(self) -> Floats:
        return self.costs.forward[self.start, self.end] + self._copies

    @cached_property
    def plain(self) -> Floats:
        """Backward, without what is run again."""
        own = self.costs.backward_seconds(self.config.micro_batches)[0][self.start, self.end]
        return own + self._copies

    @cached_property
    def _copies(self) -> Floats | float:
        """Of what goes to the host in forward, and comes back in backward."""
        return 0.0 if self.offloads is None else self.offloads * self.costs.copy_seconds[self.start, self.end]

    @cached_property
    def accumulation(self) -> Floats:
        """What the first backward of several does not take."""
        return self.costs.backward_seconds(self.config.micro_batches)[1][self.start, self.end]

    @cached_property
    def forward_launch(self) -> Floats:
        """Host seconds."""
        return self.costs.table.forward_launch[self.start, self.end]

    @cached_property
    def exposed_allreduce(self) -> Floats:
        return self.costs.exposed_allreduce[self.start, self.end]

    @cached_property
    def least_after(self) -> Floats:
        """After the last backward, at the least: the all-reduce, and sums of tied weights."""
        tied = self.costs.least_tied
        own = 0.0 if isinstance(tied, float) else tied[self.start, self.end]
        return self.exposed_allreduce + own

    @cached_property
    def sent(self) -> Floats:
        """Bytes that a replica sends at the end of the stage."""
        return self.costs.table.crossing[self.end]

    @cached_property
    def inner(self) -> npt.NDArray[np.bool_]:
        """Whether a stage follows."""
        inner: npt.NDArray[np.bool_] = self.end < self.costs.table.blocks
        return inner

    @cached_property
    def segments(self) -> Indices:
        """(cut points + 1,): where the pairs of each start begin."""
        return np.searchsorted(self.start, np.arange(self.costs.table.blocks + 2))

    def before(self, reachable: npt.NDArray[np.bool_]) -> Entries | None:
        """Its stages that end where others may follow: `reachable` (positions + 1, cut points)."""
        which, pair = np.nonzero(reachable[self.afters].take(self.end, axis=1))
        if not len(pair):
            return None
        start = self.start[pair]
        first = np.flatnonzero(np.append(True, (which[1:] != which[:-1]) | (start[1:] != start[:-1])))
        runs = self.positions[which], self.afters[which], self.keys[which]
        return Entries(*runs, pair, start, self.end[pair], first)

    def _room(self, mode: Recompute) -> Floats:
        if mode not in self._most:
            self._most[mode] = self.costs.room(mode, self.start, self.end)
        return self._most[mode]

    def backward(self, in_flight: float) -> tuple[Floats, Indices]:
        """Backward seconds where so many micro-batches are held, inf where they do not fit; and the cut point
        up to which forward is run again: the start, where nothing is, or `OFFLOADS`.

        A stage that fits as it is does nothing, which takes least of all. Whether recomputing or offloading
        is the better, if both fit, depends on the other stages: both are there, each an entry."""
        if in_flight not in self._eff:
            again, seconds = self.start.copy(), np.full(len(self.start), np.inf)
            for mode in reversed(stage_modes(self.config)):
                fits = in_flight <= self._room(mode)
                own = self.plain if mode == "never" else self.plain + self.forward
                seconds = np.where(fits, own, seconds)
                again = np.where(fits, self.start if mode == "never" else self.end, again)
            if self.offloads is not None:
                fits = self.offloads & (in_flight > self._room("never")) & (in_flight <= self._room(OFFLOAD))
                seconds = np.where(self.offloads, np.where(fits, self.plain, np.inf), seconds)
                again = np.where(self.offloads, OFFLOADS, again)
            if self.config.recompute == FIRST_LAYERS:
                unsure = np.flatnonzero((again > self.start) | np.isinf(seconds))
                self._run_fewest_again(in_flight, unsure, seconds, again)
            self._eff[in_flight] = seconds, again
        return self._eff[in_flight]

    def _run_fewest_again(self, in_flight: float, pairs: Indices, seconds: Floats, again: Indices) -> None:
        """Of these pairs, the fewest first layers with which so many micro-batches fit."""
        blocks = 1
        while len(pairs := pairs[self.start[pairs] + blocks < self.end[pairs]]):
            fits = in_flight <= self._first_room(blocks)[pairs]
            enough = pairs[fits]
            again[enough] = self.start[enough] + blocks
            seconds[enough] = self.plain[enough] + self.costs.forward[self.start[enough], again[enough]]
            pairs, blocks = pairs[~fits], blocks + 1

    def _first_room(self, blocks: int) -> Floats:
        """How many micro-batches fit where so many first blocks run again, of stages with more."""
        if blocks not in self._first_rooms:
            room = np.full(len(self.start), -np.inf)
            own = np.flatnonzero(self.start + blocks < self.end)
            start, end = self.start[own], self.end[own]
            room[own] = self.costs.room("always", start, end, start + blocks)
            self._first_rooms[blocks] = room
        return self._first_rooms[blocks]


@dataclass(frozen=True, eq=False)
class StageChoices:
    """All groups of a configuration on the runs of an order of the devices."""

    space: Space
    config: PipelineConfig
    ranges: DeviceRanges | DeviceSets
    groups: tuple[GroupChoices, ...]

    @cached_property
    def may_be_done(self) -> npt.NDArray[np.bool_]:
        """(positions,): whether the last stage may end there."""
        may_be: npt.NDArray[np.bool_] = self.ranges.devices_before >= (
            self.devices if self.ranges.on_all else 0
        )
        return may_be

    @cached_property
    def after_last(self) -> Floats:
        """(positions + 1, cut points): 0 where a plan may be done, else inf."""
        values = np.full(self.shape, np.inf)
        values[self.may_be_done, -1] = 0.0
        return values

    @property
    def last_place(self) -> int:
        """Where the last stage ends."""
        return self.groups[0].costs.table.blocks if self.groups else 0

    @property
    def devices(self) -> int:
        """In the order."""
        return len(self.ranges.placement.ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """Positions, and cut points."""
        return len(self.ranges.devices_before), self.last_place + 1

    @property
    def entries(self) -> int:
        """Stages on runs of devices."""
        return sum(len(group.start) * len(group.positions) for group in self.groups)

    @cached_property
    def most_stages(self) -> int:
        """Of a pipeline: each takes a device and a block."""
        least = min((group.replicas for group in self.groups), default=1)
        return min(self.devices // least, self.last_place)

    def in_flight(self, remaining: int) -> float:
        """Micro-batches in flight on the stage that is the `remaining`-th from the end."""
        schedule, count = find_schedule(self.config.schedule), self.config.micro_batches
        return schedule.in_flight(0, remaining, count)

    @cached_property
    def forward_launches(self) -> float:
        """Host seconds of all forwards of a step if one process launches them, else 0."""
        if not self.space.one_process or not self.groups:
            return 0.0
        return self.config.micro_batches * float(self.groups[0].costs.table.forward_launch[0, -1])


def list_stage_choices(
    space: Space, config: PipelineConfig, ranges: DeviceRanges | DeviceSets, limit: float
) -> StageChoices:
    """The options whose stage alone takes no longer than `limit` over all micro-batches."""
    return StageChoices(space, config, ranges, tuple(_groups(space, config, ranges, limit)))


def _groups(
    space: Space, config: PipelineConfig, ranges: DeviceRanges | DeviceSets, limit: float
) -> Iterator[GroupChoices]:
    for count in ranges.counts:
        if count > min(len(ranges.placement.ranks), config.micro_batch_size):
            continue
        if not space.fits_someone(config.micro_batch_size, count):
            continue
        alike: dict[int, tuple[ReplicaGroupCosts, list[DeviceRun]]] = {}
        for run in ranges.runs(count):
            space.budget.check()
            costs = space.replica_group(config.micro_batch_size, run.ranks)
            alike.setdefault(id(costs), (costs, []))[1].append(run)
        for costs, runs in alike.values():
            after = costs.exposed_allreduce + costs.least_tied
            work = config.micro_batches * (costs.forward + costs.backward) - costs.accumulation + after
            start, end = np.nonzero(space.usable & (work <= limit))
            if len(start):
                begins, afters, keys = (np.concatenate([own[i] for own in runs]) for i in (1, 2, 3))
                order = np.argsort(begins, kind="stable")
                offloads = None
                if config.recompute == OFFLOAD:
                    offloads = np.tile([False, True], len(start))
                    start, end = np.repeat(start, 2), np.repeat(end, 2)
                runs_in_order = begins[order], afters[order], keys[order]
                yield GroupChoices(costs, *runs_in_order, start, end, config, offloads)
