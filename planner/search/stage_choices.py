"""Allowed stages of a configuration: pairs of cut points on runs or sets of the devices.

Runs of devices with equal costs form a group. Its pairs are sorted by start. Pairs that would be too slow
alone, or fit nowhere, are left out.
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
    """Stages of a group, one entry per (run of devices, pair of cut points), sorted by run and start.

    Attributes:
        position: Position where the run begins.
        after: Position after the run.
        key: Key of the devices.
        pair: Index of the pair.
        start: Cut point where the stage begins.
        end: Cut point where it ends.
        first: First entry of each (run, start).
    """

    position: Indices
    after: Indices
    key: Indices
    pair: Indices
    start: Indices
    end: Indices
    first: Indices

    def least_into(self, table: Floats, values: Floats) -> None:
        """Lower the table at each position and start to the least value of its entries."""
        at = self.position[self.first] * table.shape[1] + self.start[self.first]
        np.minimum.at(table.reshape(-1), at, np.minimum.reduceat(values, self.first))


@dataclass(frozen=True, eq=False)
class GroupChoices:
    """Allowed stages of one replica group.

    Attributes:
        costs: Costs of all stages on the group. Seconds below are (pairs,) arrays of it.
        positions: (runs,) positions where its runs begin, ascending.
        afters: (runs,) positions after its runs.
        keys: (runs,) keys of their devices.
        start: (pairs,) cut points where the stages begin.
        end: (pairs,) cut points where they end.
        config: Configuration of the pipeline.
    """

    costs: ReplicaGroupCosts
    positions: Indices
    afters: Indices
    keys: Indices
    start: Indices
    end: Indices
    config: PipelineConfig
    offloads: npt.NDArray[np.bool_] | None = None
    """(pairs,) mask of the stages that offload their activations; each pair then stands twice. None for
    none."""
    _most: dict[Recompute, Floats] = field(default_factory=dict)
    _eff: dict[float, tuple[Floats, Indices]] = field(default_factory=dict)
    _first_rooms: dict[int, Floats] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Devices of a run."""
        return self.costs.replicas

    def runs_from(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the runs that begin at these positions, as (index of the position, index of the run)."""
        low, high = (np.searchsorted(self.positions, positions, side) for side in ("left", "right"))
        counts = high - low
        which = np.repeat(np.arange(len(positions)), counts)
        return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + low[which]

    @cached_property
    def forward(self) -> Floats:
        """(pairs,) forward seconds of a micro-batch, copies to the host included."""
        return self.costs.forward[self.start, self.end] + self._copies

    @cached_property
    def plain(self) -> Floats:
        """(pairs,) backward seconds of a micro-batch without recomputation."""
        seconds = self.costs.backward_seconds(self.config.micro_batches)[0][self.start, self.end]
        return seconds + self._copies

    @cached_property
    def _copies(self) -> Floats | float:
        """(pairs,) seconds to copy activations to the host in a forward, and the same back in a backward."""
        return 0.0 if self.offloads is None else self.offloads * self.costs.copy_seconds[self.start, self.end]

    @cached_property
    def accumulation(self) -> Floats:
        """(pairs,) seconds that the first of several backwards saves."""
        return self.costs.backward_seconds(self.config.micro_batches)[1][self.start, self.end]

    @cached_property
    def forward_launch(self) -> Floats:
        """(pairs,) host seconds to launch a forward."""
        return self.costs.table.forward_launch[self.start, self.end]

    @cached_property
    def exposed_allreduce(self) -> Floats:
        """(pairs,) seconds of the all-reduce after the last backward."""
        return self.costs.exposed_allreduce[self.start, self.end]

    @cached_property
    def least_after(self) -> Floats:
        """(pairs,) least seconds after the last backward: the all-reduce and the sums of tied weights."""
        tied = self.costs.least_tied
        tied_seconds = 0.0 if isinstance(tied, float) else tied[self.start, self.end]
        return self.exposed_allreduce + tied_seconds

    @cached_property
    def sent(self) -> Floats:
        """(pairs,) bytes that a replica sends at the end of the stage."""
        return self.costs.table.crossing[self.end]

    @cached_property
    def inner(self) -> npt.NDArray[np.bool_]:
        """(pairs,) mask of the stages that another stage follows."""
        inner: npt.NDArray[np.bool_] = self.end < self.costs.table.blocks
        return inner

    @cached_property
    def segments(self) -> Indices:
        """(cut points + 1,) index of the first pair of each start."""
        return np.searchsorted(self.start, np.arange(self.costs.table.blocks + 2))

    def before(self, reachable: npt.NDArray[np.bool_]) -> Entries | None:
        """Return the stages that end where other stages may follow.

        Args:
            reachable: (positions + 1, cut points) mask of where another stage may begin.

        Returns:
            The stages; None if none exist.
        """
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
        """Return the backward seconds of each stage with its cheapest recomputation.

        A stage that fits without recomputation does not recompute. If it fits with either recomputation or
        offloading, the better one depends on the other stages, so each is an entry of its own.

        Args:
            in_flight: Micro-batches in flight.

        Returns:
            (pairs,) seconds, inf if the stage does not fit; and (pairs,) cut points up to which forward is
            recomputed: the start if nothing is, or `OFFLOADS`.
        """
        if in_flight not in self._eff:
            recompute_end, seconds = self.start.copy(), np.full(len(self.start), np.inf)
            for mode in reversed(stage_modes(self.config)):
                fits = in_flight <= self._room(mode)
                mode_seconds = self.plain if mode == "never" else self.plain + self.forward
                seconds = np.where(fits, mode_seconds, seconds)
                recompute_end = np.where(fits, self.start if mode == "never" else self.end, recompute_end)
            if self.offloads is not None:
                fits = self.offloads & (in_flight > self._room("never")) & (in_flight <= self._room(OFFLOAD))
                seconds = np.where(self.offloads, np.where(fits, self.plain, np.inf), seconds)
                recompute_end = np.where(self.offloads, OFFLOADS, recompute_end)
            if self.config.recompute == FIRST_LAYERS:
                unsure = np.flatnonzero((recompute_end > self.start) | np.isinf(seconds))
                self._recompute_fewest(in_flight, unsure, seconds, recompute_end)
            self._eff[in_flight] = seconds, recompute_end
        return self._eff[in_flight]

    def _recompute_fewest(
        self, in_flight: float, pairs: Indices, seconds: Floats, recompute_end: Indices
    ) -> None:
        """Set seconds and recomputation of some pairs to the fewest first blocks with which they fit."""
        blocks = 1
        while len(pairs := pairs[self.start[pairs] + blocks < self.end[pairs]]):
            fits = in_flight <= self._first_room(blocks)[pairs]
            enough = pairs[fits]
            recompute_end[enough] = self.start[enough] + blocks
            seconds[enough] = (
                self.plain[enough] + self.costs.forward[self.start[enough], recompute_end[enough]]
            )
            pairs, blocks = pairs[~fits], blocks + 1

    def _first_room(self, blocks: int) -> Floats:
        """Return (pairs,) micro-batches that fit if the first `blocks` blocks are recomputed."""
        if blocks not in self._first_rooms:
            room = np.full(len(self.start), -np.inf)
            longer = np.flatnonzero(self.start + blocks < self.end)
            start, end = self.start[longer], self.end[longer]
            room[longer] = self.costs.room("always", start, end, start + blocks)
            self._first_rooms[blocks] = room
        return self._first_rooms[blocks]


@dataclass(frozen=True, eq=False)
class StageChoices:
    """All allowed stages of a configuration.

    Attributes:
        space: Costs and limits.
        config: Configuration of the pipeline.
        ranges: Runs or sets of devices.
        groups: Stages by replica group.
    """

    space: Space
    config: PipelineConfig
    ranges: DeviceRanges | DeviceSets
    groups: tuple[GroupChoices, ...]

    @cached_property
    def may_be_done(self) -> npt.NDArray[np.bool_]:
        """(positions,) mask of where the last stage may end."""
        may_be: npt.NDArray[np.bool_] = self.ranges.devices_before >= (
            self.devices if self.ranges.on_all else 0
        )
        return may_be

    @cached_property
    def after_last(self) -> Floats:
        """(positions + 1, cut points) table: 0 where a plan may be complete, else inf."""
        values = np.full(self.shape, np.inf)
        values[self.may_be_done, -1] = 0.0
        return values

    @property
    def last_place(self) -> int:
        """Cut point where the last stage ends."""
        return self.groups[0].costs.table.blocks if self.groups else 0

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.ranges.placement.ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of positions and of cut points."""
        return len(self.ranges.devices_before), self.last_place + 1

    @property
    def entries(self) -> int:
        """Number of (stage, run of devices) pairs."""
        return sum(len(group.start) * len(group.positions) for group in self.groups)

    @cached_property
    def most_stages(self) -> int:
        """Most stages of a pipeline: each takes a device and a block."""
        least = min((group.replicas for group in self.groups), default=1)
        return min(self.devices // least, self.last_place)

    def in_flight(self, remaining: int) -> float:
        """Return the micro-batches in flight on the stage that is the `remaining`-th from the end."""
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
    """Return the stages that alone take at most `limit` seconds for all micro-batches."""
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
                begins, afters, keys = (np.concatenate([run[i] for run in runs]) for i in (1, 2, 3))
                order = np.argsort(begins, kind="stable")
                offloads = None
                if config.recompute == OFFLOAD:
                    offloads = np.tile([False, True], len(start))
                    start, end = np.repeat(start, 2), np.repeat(end, 2)
                runs_in_order = begins[order], afters[order], keys[order]
                yield GroupChoices(costs, *runs_in_order, start, end, config, offloads)
