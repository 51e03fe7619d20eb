"""The moves of DAPPLE's search: the devices of a next stage, by the devices in use on each machine.

Fan et al., "DAPPLE", PPoPP 2021, section 4.2: three ways to give the next stage its devices, on real machine
boundaries. Devices of a machine are used in the order of their ranks, so that their number says which are
free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.port_sharing import Routes
from ..search.space import Space
from ..stage_table import Floats
from .replica_groups import (
    MOST_GROUPS,
    MicroBatchChoice,
    ReplicaWork,
    cost_replicas,
    group_devices,
)

Counts = tuple[int, ...]
"""By machine, a number of its devices."""
Policy = Callable[[Counts, Counts, int], Counts]


def fresh_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Devices of unused machines first: keeps the replicas of a stage on the fast links of one machine."""
    fresh = [machine for machine, count_used in enumerate(used) if count_used == 0]
    return _in_order(machines, used, count, [*fresh, *_partly_used(used)])


def append_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Free devices of used machines first: leaves no machine half empty."""
    fresh = [machine for machine, count_used in enumerate(used) if count_used == 0]
    return _in_order(machines, used, count, [*_partly_used(used), *fresh])


def scatter_first(machines: Counts, used: Counts, count: int) -> Counts:
    """One device in turn of each used machine, where there are several with enough left, else of each machine
    that has any left: transfers from stage to stage then stay inside the machines."""
    free = [room - count_used for room, count_used in zip(machines, used, strict=True)]
    begun = [machine for machine in _partly_used(used) if free[machine]]
    enough = len(begun) > 1 and sum(free[machine] for machine in begun) >= count
    pool = begun if enough else range(len(machines))
    counts = [0] * len(machines)
    while count:
        for machine in pool:
            if count and counts[machine] < free[machine]:
                counts[machine] += 1
                count -= 1
    return tuple(counts)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def list_ranks(starts: Sequence[int], used: Counts, counts: Counts) -> tuple[int, ...]:
    """The ranks of `counts` devices after the `used` ones of machines whose first ranks are `starts`."""
    return tuple(
        start + count_used + index
        for start, count_used, number in zip(starts, used, counts, strict=True)
        for index in range(number)
    )


def _partly_used(used: Counts) -> list[int]:
    return [machine for machine, count_used in enumerate(used) if count_used]


def _in_order(machines: Counts, used: Counts, count: int, order: Sequence[int]) -> Counts:
    counts = [0] * len(machines)
    for machine in order:
        counts[machine] = min(count, machines[machine] - used[machine])
        count -= counts[machine]
    return tuple(counts)


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Machines:
    """The nodes of a topology, in groups of `each` neighbouring devices that stay together."""

    rooms: Counts
    starts: tuple[int, ...]
    each: int

    def ranks(self, used: Counts, counts: Counts) -> tuple[int, ...]:
        """The ranks of so many groups after the used ones."""
        groups = list_ranks(self.starts, used, counts)
        return tuple(group * self.each + index for group in groups for index in range(self.each))


def split_machines(gpus: int, gpus_per_node: int, most_groups: int = MOST_GROUPS) -> Machines:
    """The nodes of so many devices; those that are left over by the groups stay unused."""
    each = group_devices(gpus, gpus_per_node, most_groups)
    room = max(gpus_per_node // each, 1)
    starts = range(0, gpus // each, room)
    return Machines(tuple(min(room, gpus // each - start) for start in starts), tuple(starts), each)


@dataclass(frozen=True)
class _Move:
    """The devices of a stage: the state after it, its ranks, and the index of its costs."""

    state: int
    ranks: tuple[int, ...]
    costs_index: int


@dataclass(frozen=True, eq=False)
class Moves:
    """All choices of devices for a next stage, numbered as they are met, with their costs.

    A *state* is a number for what is taken of each machine; state 0 is nothing. A *move* is a number for the
    devices of a stage after a state. `counts`: the numbers of groups that a stage may have (None: any).
    """

    space: Space
    choice: MicroBatchChoice
    machines: Machines
    routes: Routes
    counts: tuple[int, ...] | None = None
    _states: dict[Counts, int] = field(default_factory=dict)
    _used: list[Counts] = field(default_factory=list)
    _from: dict[int, list[int]] = field(default_factory=dict)
    _rest: dict[int, int] = field(default_factory=dict)
    _all_moves: list[_Move] = field(default_factory=list)
    _indices: dict[int, int] = field(default_factory=dict)
    _joints: dict[tuple[int, int], int] = field(default_factory=dict)
    _routes: list[tuple[float, float]] = field(default_factory=list)
    """By joint, seconds: its latency, and of each byte of the largest part of a replica."""
    _arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    costs: list[ReplicaWork] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._state((0,) * len(self.machines.rooms))

    def ranks(self, move: int) -> tuple[int, ...]:
        """The devices of a move."""
        return self._all_moves[move].ranks

    def after(self, states: Ints) -> tuple[Ints, Ints]:
        """Every move from each of the states: positions in `states`, and moves."""
        own = {state: self._moves(state) for state in np.unique(states).tolist()}
        lists = [own[state] for state in states.tolist()]
        positions = np.repeat(np.arange(len(lists)), [len(moves) for moves in lists])
        return positions, np.array([move for moves in lists for move in moves], dtype=np.int64)

    def rest(self, states: Ints) -> Ints:
        """By state, the move onto as many of the free devices as possible; -1 where there is none."""
        largest = {state: self._largest(state) for state in np.unique(states).tolist()}
        return np.array([largest[state] for state in states.tolist()], dtype=np.int64)

    def states(self, moves: Ints) -> Ints:
        """The states after moves."""
        return self._column("state")[moves]

    def costs_indices(self, moves: Ints) -> Ints:
        """Where their costs are in `costs`."""
        return self._column("costs_index")[moves]

    def free_devices(self, states: Ints) -> Ints:
        """Devices that are not taken, by state."""
        free = [self.space.topology.gpus - self.machines.each * sum(used) for used in self._used]
        return np.array(free, dtype=np.int64)[states]

    def joints(self, senders: Ints, receivers: Ints) -> Ints:
        """Numbers for the ways from moves to the moves that follow. Arrays of one length."""
        codes, inverse = np.unique(senders << 32 | receivers, return_inverse=True)
        numbers = [self._joint(code >> 32, code & (1 << 32) - 1) for code in codes.tolist()]
        return np.array(numbers, dtype=np.int64)[inverse]

    def transfer(self, joints: Ints, senders: Ints, receivers: Ints, cut_points: Ints) -> Floats:
        """Seconds of a micro-batch from a stage to the next, cut at a place. Arrays of one length."""
        crossing = self.table("crossing")
        bytes = np.maximum(
            crossing[self.costs_indices(senders), cut_points],
            crossing[self.costs_indices(receivers), cut_points],
        )
        if "routes" not in self._arrays or len(self._arrays["routes"]) < len(self._routes):
            self._arrays["routes"] = np.array(self._routes).reshape(-1, 2)
        latency, pace = self._arrays["routes"][joints].T
        seconds: Floats = latency + bytes * pace
        return seconds

    def table(self, name: str) -> Floats:
        """(groups, cut points, cut points): a table of every replica group so far; `crossing` (groups, cut
        points)."""
        if len(self._arrays.get(name, ())) < len(self.costs):
            self._arrays[name] = np.array([getattr(costs, name) for costs in self.costs])
        return self._arrays[name]

    def work(self, in_flight: int) -> Floats:
        """(groups, cut points, cut points): forward and backward of stages with so many micro-batches in
        flight."""
        if len(self._arrays.get(f"work {in_flight}", ())) < len(self.costs):
            self._arrays[f"work {in_flight}"] = np.array([costs.work(in_flight) for costs in self.costs])
        return self._arrays[f"work {in_flight}"]

    @cached_property
    def least_work(self) -> Floats:
        """(cut points,): device seconds of a micro-batch from each place to the end, however it is shared."""
        shared = range(1, min(self.choice.size, self.space.topology.gpus) + 1)
        least = np.full(self.cut_points - 1, np.inf)
        scale = min(device.seconds_scale for device in self.space.topology.kinds)
        for replicas in shared:
            if self.space.fits_someone(self.choice.size, replicas):
                table = self.space.table(-(-self.choice.size // replicas))
                blocks = np.diagonal(table.forward + table.backward, 1)
                least = np.minimum(least, replicas * blocks * scale)
        if any(device.profile is not None for device in self.space.topology.kinds):
            least = np.zeros(self.cut_points - 1)
        return np.append(np.cumsum(least[::-1])[::-1], 0.0)

    @cached_property
    def cut_points(self) -> int:
        """Where stages may start or end."""
        return self.space.table(self.space.chain.sizes[0]).blocks + 1

    def _moves(self, state: int) -> list[int]:
        """The moves from a state, those of most devices first."""
        if state not in self._from:
            used = self._used[state]
            self._from[state] = [self._move(used, counts) for counts in self._choices(used)]
        return self._from[state]

    def _choices(self, used: Counts) -> list[Counts]:
        counts = self._counts(sum(self.machines.rooms) - sum(used))
        policies = POLICIES if len(self.machines.rooms) > 1 else POLICIES[:1]
        choices = (policy(self.machines.rooms, used, count) for count in counts for policy in policies)
        return list(dict.fromkeys(choices))

    def _counts(self, free: int) -> list[int]:
        """How many groups the next stage may have, the most first: no more devices than samples."""
        most = min(free, self.choice.size // self.machines.each)
        own = range(1, most + 1) if self.counts is None else [c for c in self.counts if c <= most]
        return sorted((count for count in own if self._is_measured(count)), reverse=True)

    def _is_measured(self, count: int) -> bool:
        return self.space.fits_someone(self.choice.size, count * self.machines.each)

    def _move(self, used: Counts, counts: Counts) -> int:
        self.space.budget.check()
        ranks = self.machines.ranks(used, counts)
        after = tuple(a + b for a, b in zip(used, counts, strict=True))
        self._all_moves.append(_Move(self._state(after), ranks, self._replica_group(ranks)))
        return len(self._all_moves) - 1

    def _largest(self, state: int) -> int:
        if state not in self._rest:
            choices = self._choices(self._used[state])
            self._rest[state] = self._move(self._used[state], choices[0]) if choices else -1
        return self._rest[state]

    def _state(self, used: Counts) -> int:
        if used not in self._states:
            self._states[used] = len(self._used)
            self._used.append(used)
        return self._states[used]

    def _replica_group(self, ranks: tuple[int, ...]) -> int:
        group = self.space.replica_group(self.choice.size, ranks)
        if id(group) not in self._indices:
            self._indices[id(group)] = len(self.costs)
            gradients = self.space.gradients(np.asarray(group.table.stage_bytes.trainable))
            reduced = all_reduce_seconds(self.space.topology, ranks, gradients)
            self.costs.append(cost_replicas(self.space, group, self.choice.modes, reduced))
        return self._indices[id(group)]

    def _column(self, name: str) -> Ints:
        """A figure of every move made so far."""
        column = self._arrays.get(name, np.zeros(0, dtype=np.int64))
        if len(column) < len(self._all_moves):
            new = [getattr(move, name) for move in self._all_moves[len(column) :]]
            self._arrays[name] = np.append(column, np.array(new, dtype=np.int64))
        return self._arrays[name]

    def _joint(self, sender: int, receiver: int) -> int:
        if (sender, receiver) not in self._joints:
            self._joints[sender, receiver] = len(self._routes)
            senders, receivers = self._all_moves[sender].ranks, self._all_moves[receiver].ranks
            latency, pace = self.routes.route(senders, receivers)
            self._routes.append((latency, pace * min(len(senders), len(receivers))))
        return self._joints[sender, receiver]


@dataclass(frozen=True)
class DappleStage:
    """A stage of many plans side by side: arrays that broadcast together. Forward and backward of one
    micro-batch; the all-reduce of a step."""

    forward: Floats
    backward: Floats
    all_reduce: Floats


class CostedPlans:
    """What the stages of plans cost that have so many `stages` when they are complete. `ends`, `moves`: by
    stage and plan, where it ends and on which devices it is; `joints`: from each stage to the next."""

    def __init__(self, costs: Moves, ends: Ints, moves: Ints, joints: Ints, stages: int) -> None:
        self._costs, self._ends, self._moves, self._joints = costs, ends, moves, joints
        plans = ends.shape[1]
        self.fits = np.ones(plans, dtype=bool)
        self.start_fits = self.fits
        self.recomputes = np.zeros(plans, dtype=bool)
        tables = [costs.table(name) for name in ("forward", "backward", "all_reduce", "never", "always")]
        begin = np.zeros(plans, dtype=np.int64)
        self._stages: list[DappleStage] = []
        for stage, end in enumerate(ends):
            at = (costs.costs_indices(moves[stage]), begin, end)
            forward, backward, reduced, never, always = (table[at] for table in tables)
            in_flight = costs.choice.in_flight(stages - stage)
            recompute = in_flight > never
            self.start_fits = self.fits
            self.fits = self.fits & (~recompute | (in_flight <= always))
            self.recomputes = self.recomputes | recompute
            self._stages.append(DappleStage(forward, backward + recompute * forward, reduced))
            begin = end

    @property
    def parts(self) -> tuple[list[DappleStage], list[Floats]]:
        """The stages, and the transfers between them."""
        each = zip(self._joints, self._moves, self._moves[1:], self._ends, strict=False)
        return self._stages, [self._costs.transfer(*joint) for joint in each]
