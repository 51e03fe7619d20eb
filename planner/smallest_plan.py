"""Plans that fit into memory, and the one whose fullest device needs the least memory.

With n cut points, let `k(s)` be the micro-batches in flight on a stage with s - 1 stages after it, and
`r(s, i, j, M)` the fewest replicas with which layers i to j fit into M bytes with `k(s)` in flight. Then

    devices(s, i) = min over j of r(s, i, j, M) + devices(s - 1, j),    devices(0, n) = 0

is the fewest devices for the layers from cut point i on in s stages, and a plan fits into M bytes exactly if
`devices(s, 0)` is at most the number of devices for some s (`Pipelines.find`). The least such M is found by
bisection. GPipe, 1F1B and naive are counted exactly. For other schedules `k` is a lower bound.

If some devices have room for M and others for M' > M bytes, a stage takes r(M) devices of any kind, or r(M')
of the larger ones; `devices` is then a table of the former by the number of the latter. With `use_all` it is
a table by the number of all devices, and 0 if these can be used exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.memory import FRAGMENTATION_RESERVE, LedgerOptions, Moment, Recompute, first_layers_word
from ..cost_models.runtime import OFFLOAD
from ..cost_models.schedules import find_schedule
from .candidate import FIRST_LAYERS, SEARCHED, UNPROPOSED, PipelineConfig, Proposal
from .part_memory import parts_are_ruled_out
from .problem import FEW, Problem
from .scoring import assemble
from .search.replica_group import ReplicaMemory
from .search.space import Space, divide_batch, narrow_space
from .search.stage_recompute import stage_modes
from .stage_table import Floats, Indices, fullest_kind, ledger_options

EXACT_SCHEDULES = ("naive", *SEARCHED)
"""Schedules whose memory the number of micro-batches in flight states exactly."""
STATES = ("weights", "gradients", "master_weights", "optimizer")
"""Ledger terms of the states of weights."""
MOST_USED = 64
"""Most devices for which `use_all` is respected. Plans on more devices are searched without it."""
MOST_CUTS = 128
"""Cut points of a long chain between which the least memory is sought."""


class StageNeed(NamedTuple):
    """Memory of a stage on `replicas` devices, all of the larger kind if `on_larger`."""

    start: int
    end: int
    replicas: int
    on_larger: bool
    recompute: Recompute
    ledger: dict[str, int]

    @property
    def memory_bytes(self) -> int:
        """Bytes on each replica."""
        return sum(self.ledger.values())


class SmallestPlan(NamedTuple):
    """The plan that needs the least memory, on the first devices.

    If `is_counted`, its bytes are exact. Otherwise they are a lower bound for the schedule.
    """

    stages: list[StageNeed]
    proposal: Proposal
    is_counted: bool

    @property
    def number(self) -> int:
        """Number of the stage that needs the most memory, the first of several."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].memory_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest device."""
        return self.stages[self.number].memory_bytes


class Room(NamedTuple):
    """Bytes that some devices hold, as if every device had the largest context of all kinds."""

    bytes: float
    devices: int


def nothing_fits(problem: Problem, more_schedules: Sequence[str] = ()) -> bool:
    """Return whether the memory of the devices excludes every plan that the options allow.

    Args:
        problem: The allowed plans.
        more_schedules: Asynchronous schedules that are allowed in addition. With one stage per device they
            need no less than 1F1B, which must be allowed.
    """
    key = tuple(more_schedules)
    if key not in problem.proofs:
        problem.proofs[key] = _rules_out_all(problem, key)
    return problem.proofs[key]


def _rules_out_all(problem: Problem, more_schedules: Sequence[str]) -> bool:
    """Return whether memory excludes all plans, checking those of fewest parts first."""
    room, space = list_rooms(problem)[-1].bytes, problem.space
    if room == inf or problem.allowed_schedules != problem.schedules:
        return False
    if leaves_plans_out(problem):
        return room < least_on_stages(problem, problem.usable_gpus)
    if more_schedules and "1f1b" not in problem.schedules:
        return False
    has_parts = any(find_schedule(name).default_virtual_stages > 1 for name in more_schedules)
    if has_parts and least_on_stages(problem, space.chain.max_stages // 2) <= room:
        return False
    if next(fitting_plans(problem), None) is not None:
        return False
    counts = range(2, problem.usable_gpus + 1)
    stage_counts = [number for number in counts if least_on_stages(problem, number) <= room]
    return parts_are_ruled_out(
        problem, stage_counts, room * (1 + 1e-9)
    )  # rounding must not exclude a plan that fits to the byte


def leaves_plans_out(problem: Problem) -> bool:
    """Return whether some cuts or numbers of replicas are not tried."""
    return problem.space.is_long or bool(problem.space.zero and problem.usable_gpus > FEW)


def fitting_plans(problem: Problem) -> Iterator[Proposal]:
    """Yield a plan on few devices for each number of micro-batches and replicas with which one fits.

    It may not fit under schedules that are not counted exactly, or with three or more sizes of memory.
    """
    rooms = list_rooms(problem)[-2:]  # smaller devices count as the smaller of these two
    plans = (pipelines.find(rooms) for pipelines in list_pipelines(problem))
    yield from (plan.proposal for plan in plans if plan is not None)


def fewest_devices(problem: Problem) -> float:
    """Return the fewest devices of a plan known to fit into the smallest device; inf if none is known.

    Only plans with the smallest micro-batches, or the fewest samples per replica, are tried. They rarely need
    more memory than others.
    """
    room, fewest, all_pipelines = list_rooms(problem)[0].bytes, inf, list_pipelines(problem)
    if problem.options.use_all and problem.usable_gpus > MOST_USED:
        return inf
    least = min(
        (pipelines.share(count) for pipelines in all_pipelines for count in pipelines.counts), default=0
    )
    for pipelines in all_pipelines:
        is_smallest = pipelines.config.micro_batch_size == all_pipelines[0].config.micro_batch_size
        counts = [count for count in pipelines.counts if is_smallest or pipelines.share(count) == least]
        plan = replace(pipelines, counts=counts).find([Room(room, problem.usable_gpus)]) if counts else None
        used = inf if plan is None else sum(plan.proposal.replicas)
        if plan is not None and used < fewest:
            fits = plan.is_counted or fullest_bytes(pipelines.space, plan.proposal) <= room
            fewest = used if fits else fewest
    return fewest


def find_smallest_plan(problem: Problem, in_flight: float | None = None) -> SmallestPlan | None:
    """Find the plan whose fullest device needs the least memory.

    Args:
        problem: The allowed plans. Schedules with several parts of the layers per device are left out, and so
            are most cuts of a long chain.
        in_flight: Micro-batches that every stage holds, as in a synthesized order. None for those of the
            schedule.

    Returns:
        The plan; None if the options allow none regardless of memory.
    """
    best: SmallestPlan | None = None
    for pipelines in list_pipelines(problem, in_flight):
        low, high = 0, inf if best is None else best.memory_bytes
        room = high - 1
        while low < room:
            plan = pipelines.find([Room(room, problem.usable_gpus)])
            if plan is not None:
                best, high = plan, min(plan.memory_bytes, high - 1)
            elif room == high - 1:
                break
            else:
                low = int(room)
            room = (low + int(high)) // 2
    return best


def fullest_bytes(space: Space, proposal: Proposal) -> float:
    """Return the bytes of the fullest device, counted action by action; inf if the schedule does not run.

    Each device uses the recomputation with which it needs the least.
    """
    try:
        assembly = assemble(space, proposal, ["never"] * len(proposal.ends))
    except UsageError:
        return inf
    modes = stage_modes(proposal.config)
    devices = range(assembly.program.devices)
    return max(min(ceil(sum(assembly.ledger(device, mode).values())) for mode in modes) for device in devices)


def list_rooms(problem: Problem) -> list[Room]:
    """Return the distinct amounts of memory of the devices, ascending; inf if the memory is unknown."""
    rooms, counts = np.unique(_room_by_rank(problem), return_counts=True)
    return [Room(float(room), int(count)) for room, count in zip(rooms, counts, strict=True)]


def _room_by_rank(problem: Problem) -> Floats:
    """Return (devices,) memory limits, as if every device had the largest context of all kinds."""
    space, rooms = problem.space, list[float]()
    largest = _ledger_options(space)["context_bytes"]
    for group in problem.topology.groups:
        context = ledger_options(group.device, space.dtype, space.number_bytes)["context_bytes"]
        rooms += [space.kinds_limit([group.device]) - context + largest] * group.number
    return np.array(rooms)


def _ledger_options(space: Space) -> LedgerOptions:
    kind = fullest_kind(space.topology.kinds)
    return ledger_options(kind, space.dtype, space.number_bytes, space.zero)


def least_on_stages(problem: Problem, stages: int) -> float:
    """Return the least bytes of the fullest device if `stages` stages hold the states of all layers.

    Under ZeRO, the replicas of a stage share its states.
    """
    space, table = problem.space, problem.space.table(problem.space.chain.sizes[0])
    devices = problem.usable_gpus if space.zero else min(problem.usable_gpus, stages)
    options: LedgerOptions = {**_ledger_options(space), "zero": 0}
    ledger = table.stage_ledger(0, table.blocks, 0, "never", space.optimizer, **options)
    states = sum(ledger.get(name, 0) for name in STATES)
    return options["context_bytes"] + (1 + FRAGMENTATION_RESERVE) * states / max(devices, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageMemory(ReplicaMemory):
    """Bytes of all stages, cached for every limit."""

    cache: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def bytes(self, in_flight: float, recompute: Recompute, moment: Moment = "any") -> Floats:
        """Return the bytes that each stage needs on one replica; (repeats,) for `FIRST_LAYERS`."""
        key = recompute, 1 if moment == "step" else in_flight, moment  # then nothing is in flight
        if key not in self.cache:
            if recompute == FIRST_LAYERS:
                start, end, recompute_end, _ = _repeats(self.table.blocks + 1)
                self.cache[key] = self.pair_bytes(in_flight, "always", start, end, recompute_end, moment)
            else:
                self.cache[key] = super().bytes(in_flight, recompute, moment)
        return self.cache[key]

    def most_in_flight(self, recompute: Recompute) -> Floats:
        """Return the micro-batches that each stage has room for.

        With recomputed first blocks for `FIRST_LAYERS`.
        """
        most = super().most_in_flight(recompute)
        if recompute != FIRST_LAYERS or self.limit == inf:
            return most
        start, end, _, first = _repeats(self.table.blocks + 1)
        largest = np.full(self.table.valid.shape, -inf)
        if len(first):
            largest[start[first], end[first]] = np.maximum.reduceat(most, first)
        return largest


@lru_cache(maxsize=8)
def _repeats(cut_points: int) -> tuple[Indices, Indices, Indices, Indices]:
    """Return start, end and every recompute end inside of every stage, and the first row of each stage."""
    start, end = np.triu_indices(cut_points, 2)
    inside = end - start - 1
    first = np.cumsum(inside) - inside
    start, end = np.repeat(start, inside), np.repeat(end, inside)
    return start, end, start + 1 + np.arange(len(start)) - np.repeat(first, inside), first


@lru_cache(maxsize=8)
def _memories(space: Space) -> dict[tuple[int, int, float], StageMemory]:  # noqa: ARG001 - one for each space
    """Return the cache of stage bytes of a space, by `Pipelines._key`."""
    return {}


@lru_cache(maxsize=8)
def _thin_cuts(space: Space) -> Space:
    """Return the space with at most about `MOST_CUTS` cuts."""
    if not space.is_long:
        return space
    cuts = np.flatnonzero(space.chain.cut_after) + 1
    kept_cuts = cuts[np.unique(np.linspace(0, len(cuts) - 1, MOST_CUTS).round().astype(int))]
    ends = {*kept_cuts.tolist(), *(layer + 1 for layer in space.limits.must_cut), len(space.chain)}
    return narrow_space(space, sorted(ends))


def list_pipelines(problem: Problem, in_flight: float | None = None) -> list[Pipelines]:
    """Return the pipelines of one stage per device, those that tend to need the least memory first.

    Of configurations that differ only in the schedule, the one with the fewest micro-batches in flight needs
    the least.

    Args:
        problem: The allowed plans.
        in_flight: See `find_smallest_plan`.
    """
    most_stages = min(problem.usable_gpus, problem.space.chain.max_stages)
    least = dict[tuple[object, ...], tuple[tuple[float, bool], PipelineConfig]]()
    for config in problem.configs:
        is_left_out = in_flight is not None and config.schedule != "1f1b"
        if is_left_out or find_schedule(config.schedule).default_virtual_stages > 1:
            continue
        total = sum(_in_flight(config, to_last) for to_last in range(1, most_stages + 1))
        rank = total, config.schedule not in EXACT_SCHEDULES
        key = config.recompute, config.micro_batch_size
        least[key] = min(least.get(key, (rank, config)), (rank, config), key=lambda ranked: ranked[0])
    configs = sorted((config for _, config in least.values()), key=lambda config: config.micro_batch_size)
    return [
        Pipelines(problem, _thin_cuts(problem.space), config, counts, in_flight)
        for config in configs
        for counts in problem.replica_choices(config.micro_batch_size)
    ]


def _in_flight(config: PipelineConfig, to_last: int) -> float:
    """Return a lower estimate of the most micro-batches in flight, `to_last` stages before the end."""
    schedule = find_schedule(config.schedule)
    is_lower = schedule.closed_in_flight is None or schedule.copies > 1
    if is_lower or (schedule.splits_backward and config.recompute != "never"):
        return 1
    return schedule.in_flight(0, to_last, config.micro_batches)


Option = tuple[int, Floats]
"""Counted devices of a stage, and a (cut points, cut points) table of the others, inf for no stage."""
Shape = list[tuple[int, int, int, bool]]
"""Cut points and replicas of the stages, and whether the replicas are counted."""


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines of one configuration whose stages have these numbers of replicas, ascending."""

    problem: Problem
    space: Space
    config: PipelineConfig
    counts: Sequence[int]
    in_flight: float | None

    def share(self, count: int) -> int:
        """Return the samples of a micro-batch on a replica."""
        return divide_batch(self.config.micro_batch_size, count)

    def find(self, rooms: Sequence[Room]) -> SmallestPlan | None:
        """Find the plan on the fewest devices, each stage within the room of its devices.

        Args:
            rooms: One, or the smaller and the larger of two. They cover all devices of the problem.

        Returns:
            The plan on the first devices with the least room; None if none fits.
        """
        if len(rooms) > 1 and ((plan := self.find(rooms[:1])) or self.find(rooms[1:]) is None):
            return plan
        usable = self.problem.usable_gpus
        uses_all = self.problem.options.use_all and usable <= MOST_USED and len(rooms) == 1
        counts = self.counts
        if not uses_all:  # of numbers with equal needs, the fewest
            counts = sorted({self._key(count): count for count in reversed(counts)}.values())
        most = [np.stack([self._most_in_flight(count, room.bytes) for count in counts]) for room in rooms]
        width = usable if uses_all else rooms[1].devices if len(rooms) > 1 else 0
        totals: Sequence[int | None] = self._stage_counts if self.space.limits.pins else (None,)
        shapes = [self._find(most, counts, total, width, uses_all) for total in totals]
        shape = min(filter(None, shapes), key=lambda shape: sum(stage[2] for stage in shape), default=[])
        return self._plan(shape, uses_all) if shape else None

    def _find(
        self, most: Sequence[Floats], counts: Sequence[int], total: int | None, width: int, uses_all: bool
    ) -> Shape:
        """Find cut points and replicas of the stages with the fewest devices, in `total` stages if given."""
        usable, points = self.problem.usable_gpus, most[0].shape[1]
        rows, options = [np.full((points, width + 1), inf)], list[list[Option]]()
        rows[0][-1, 0] = 0.0
        best: tuple[float, int, int] = (inf, 0, 0)
        for to_last in self._stage_counts[:total]:
            options.append(self._options(most, counts, to_last, total, uses_all))
            row = np.full_like(rows[0], inf)
            for count, cost in options[-1]:
                later = rows[-1][:, : max(width + 1 - count, 0)]
                if uses_all:  # all are 0 or inf
                    reachable = np.isfinite(cost).astype(np.float32) @ np.isfinite(later).astype(np.float32)
                    later = np.where(reachable > 0, 0.0, inf)
                else:
                    later = (cost[:, :, None] + later).min(axis=1)
                row[:, count:] = np.minimum(row[:, count:], later)
            rows.append(row)
            used = row[0] + np.where(np.arange(width + 1) < width * uses_all, inf, np.arange(width + 1))
            if total in (None, to_last):
                best = min(best, (float(used.min()), to_last, int(used.argmin())))
            if (row.min(axis=1) > usable).all() or (uses_all and best[0] < inf):
                break
        devices, to_last, place = best
        return self._trace(rows[:to_last], options, place) if devices <= usable else []

    def _options(
        self, most: Sequence[Floats], counts: Sequence[int], to_last: int, total: int | None, uses_all: bool
    ) -> list[Option]:
        """Return the devices that a stage this far from the end may take."""
        allowed = self.space.usable
        if total is not None:
            start, end = np.indices(allowed.shape).reshape(2, -1)
            allowed = allowed & self.space.may_be(total - to_last, start, end).reshape(allowed.shape)
        fits = [(self._in_flight(to_last) <= mask) & allowed for mask in most]
        if uses_all:
            return [
                (count, np.where(fitting, 0.0, inf)) for count, fitting in zip(counts, fits[0], strict=True)
            ]
        number = np.array(counts, dtype=float)
        fewest = [np.where(mask.any(axis=0), number[mask.argmax(axis=0)], inf) for mask in fits]
        larger_counts = [] if len(fewest) == 1 else np.unique(fewest[1][fewest[1] < fewest[0]]).tolist()
        return [
            (0, fewest[0]),
            *((int(count), np.where(fewest[1] == count, 0.0, inf)) for count in larger_counts),
        ]

    def _trace(self, rows: list[Floats], options: list[list[Option]], place: int) -> Shape:
        """Return the stages that attain the least of the last row."""
        shape, start = Shape(), 0
        for row, choices in reversed(list(zip(rows, options, strict=False))):
            sums = [(cost[start] + row[:, place - count], count) for count, cost in choices if count <= place]
            total, count = min(sums, key=lambda choice: float(choice[0].min()))
            end = int(total.argmin())
            shape.append((start, end, count or int(choices[0][1][start, end]), count > 0))
            start, place = end, place - count
        return shape

    @property
    def _stage_counts(self) -> range:
        limits = (
            self.problem.usable_gpus,
            self.space.chain.max_stages,
            self.problem.options.max_stages or inf,
        )
        return range(1, int(min(limits)) + 1)

    def _most_in_flight(self, count: int, room: float) -> Floats:
        """Return the (cut points, cut points) micro-batches of each stage that fit into `room` bytes."""
        memory = replace(self._memory(count), limit=room)
        most: Floats = np.maximum.reduce([memory.most_in_flight(mode) for mode in self._modes])
        return most

    @property
    def _modes(self) -> list[Recompute]:
        """Recomputation modes; `FIRST_LAYERS` stands for any number of first blocks."""
        mode = self.config.recompute
        return [*stage_modes(self.config), *([mode] if mode in UNPROPOSED else [])]

    def _key(self, count: int) -> tuple[int, int, float]:
        """Return what the memory of a stage depends on."""
        ahead = 0 if self.space.mini_batch is None else self.space.mini_batch / self.config.micro_batch_size
        return self.share(count), count if self.space.zero else min(count, 2), ahead

    def _memory(self, count: int) -> StageMemory:
        """Return the bytes of all stages on `count` replicas."""
        memories, key, space = _memories(self.space), self._key(count), self.space
        if key not in memories:
            memories[key] = StageMemory(
                table=space.table(key[0]),
                replicas=count,
                limit=inf,
                optimizer=space.optimizer,
                ledger={**_ledger_options(space), "ahead": key[2]},
                host=space.host,
            )
        return memories[key]

    def _in_flight(self, to_last: int) -> float:
        return _in_flight(self.config, to_last) if self.in_flight is None else self.in_flight

    def _need(self, start: int, end: int, count: int, on_larger: bool, to_last: int) -> StageNeed:
        """Return the memory of a stage with the recomputation that needs the least."""
        memory, in_flight, words = self._memory(count), self._in_flight(to_last), list[str]()
        table, points = memory.table, memory.table.cut_points
        for mode in self._modes:
            first = [
                first_layers_word(points[recompute_end] - points[start])
                for recompute_end in range(start + 1, end)
            ]
            if mode != OFFLOAD or memory.fits_host(in_flight)[start, end]:
                words += first if mode == FIRST_LAYERS else [mode]
        needs = (
            StageNeed(
                *(start, end, count, on_larger, word),
                table.stage_ledger(start, end, in_flight, word, memory.optimizer, count, **memory.ledger),
            )
            for word in words
        )
        return min(needs, key=lambda need: need.memory_bytes)

    def _plan(self, shape: Shape, uses_all: bool) -> SmallestPlan:
        """Return the plan of these stages on the first devices with the least room."""
        stages = [
            self._need(start, end, count, is_counted and not uses_all, len(shape) - stage)
            for stage, (start, end, count, is_counted) in enumerate(shape)
        ]
        cut_points, devices = self.space.table(self.space.chain.sizes[0]).cut_points, list[tuple[int, ...]]()
        free = np.argsort(_room_by_rank(self.problem)[: self.problem.usable_gpus], kind="stable").tolist()
        for stage in stages:
            places = slice(len(free) - stage.replicas, None) if stage.on_larger else slice(stage.replicas)
            devices.append(tuple(sorted(free[places])))
            del free[places]
        ends = tuple(cut_points[stage.end] for stage in stages)
        is_counted = self.in_flight is not None or self.config.schedule in EXACT_SCHEDULES
        return SmallestPlan(stages, Proposal(self.config, ends, tuple(devices)), is_counted)
