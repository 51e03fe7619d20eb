"""The plan whose fullest device needs the least memory: a question without seconds, asked before any search.

With n cut points, let `k(s)` be the micro-batches in flight on a stage with s - 1 stages after it, and
`r(s, i, j, M)` the fewest replicas with which layers i to j fit into M bytes with `k(s)` in flight. Then

    devices(s, i) = min over j of r(s, i, j, M) + devices(s - 1, j),    devices(0, n) = 0

is the fewest devices for the layers from cut point i on in s stages, and a plan fits into M bytes exactly if
`devices(s, 0)` is at most the number of devices for some s (`_Pipelines.find`). The least such M is found by
bisection. GPipe, 1F1B and naive are counted exactly. For other schedules `k` is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError
from ..cost_models.first_layers import first_layers_word
from ..cost_models.memory import FRAGMENTATION_RESERVE, LedgerOptions, Moment, Recompute
from ..cost_models.optimizers import find_optimizer
from ..cost_models.quantities import format_bytes
from ..cost_models.runtime import OFFLOAD
from ..cost_models.schedules import find_schedule
from .candidate import Proposal, replicated_pipeline
from .pipeline_config import FIRST_LAYERS, SEARCHED, PipelineConfig
from .problem import FEW, Problem
from .scoring import assemble, possible
from .search.budget import SearchBudget
from .search.replica_group import most_within
from .search.space import Space, divide_batch, narrow_space
from .search.stage_recompute import stage_modes
from .stage_table import Floats, StageTable, fullest_kind, ledger_options

EXACT_SCHEDULES = ("naive", *SEARCHED)
"""Schedules whose memory the number of micro-batches in flight states exactly."""
STATES = ("weights", "gradients", "master_weights", "optimizer")
UNUSABLE = 1e30
"""Bytes of a stage that may not be."""
SECONDS = 0.3
"""Processor time for the memory of balanced plans of other schedules."""
MOST_USED = 64
"""Devices up to which `use_all` is respected; plans on more are looked for without it."""
MOST_CUTS = 128
"""Cut points of a long chain between which the least memory is sought."""


@dataclass(frozen=True)
class StageNeed:
    """Memory of a stage between two cut points on `replicas` devices."""

    start: int
    end: int
    replicas: int
    recompute: Recompute
    ledger: dict[str, int]

    @property
    def memory_bytes(self) -> int:
        """Bytes on each replica."""
        return sum(self.ledger.values())


@dataclass(frozen=True)
class SmallestPlan:
    """The plan that needs the least memory.

    Attributes:
        config: Its schedule and micro-batches.
        stages: Its stages, first to last.
        proposal: The plan on the first devices.
        is_counted: Whether the bytes are exact; else they are a lower bound for the schedule.
    """

    config: PipelineConfig
    stages: list[StageNeed]
    proposal: Proposal
    is_counted: bool

    @property
    def number(self) -> int:
        """Number of the stage that needs the most memory, the first among equals."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].memory_bytes)

    @property
    def tightest(self) -> StageNeed:
        """The stage that needs the most memory."""
        return self.stages[self.number]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest device."""
        return self.tightest.memory_bytes


def nothing_fits(problem: Problem) -> bool:
    """Return whether the memory of the devices rules out every plan that the options allow."""
    room, leaves_counts_out = list_rooms(problem)[-1], problem.usable_gpus > FEW and problem.space.zero
    if room == inf or problem.space.is_long or leaves_counts_out:
        return False
    if problem.allowed_schedules != problem.schedules:
        return False
    return room < least_in_parts(problem) and not any(own.find(room) for own in _list_pipelines(problem))


def fits(problem: Problem) -> bool:
    """Return whether a plan is known that fits into the smallest device of the problem."""
    return fewest_devices(problem) <= problem.usable_gpus


def fewest_devices(problem: Problem) -> float:
    """Return the fewest devices of a plan known to fit into the smallest device; inf if none is known.

    Only plans with the smallest micro-batches, or the fewest samples on a replica, are tried. They rarely
    need more memory than others.
    """
    room, fewest, pipelines = list_rooms(problem)[0], inf, _list_pipelines(problem)
    if problem.options.use_all and problem.usable_gpus > MOST_USED:
        return inf
    share = min((own.share(count) for own in pipelines for count in own.counts), default=0)
    for own in pipelines:
        is_smallest = own.config.micro_batch_size == pipelines[0].config.micro_batch_size
        counts = [count for count in own.counts if is_smallest or own.share(count) == share]
        stages = replace(own, counts=counts).find(room) if counts else None
        used = inf if stages is None else sum(stage.replicas for stage in stages)
        if stages is not None and used < fewest:
            proposal = own.plan(stages).proposal
            is_known = own.is_counted or fullest_bytes(problem.space, proposal) <= room
            fewest = used if is_known else fewest
    return fewest


def find_smallest_plan(problem: Problem, in_flight: float | None = None) -> SmallestPlan | None:
    """Find the plan whose fullest device needs the least memory.

    Args:
        problem: The plans that are allowed. Schedules with several parts of the layers on a device are left
            out, and so are most cuts of a long chain.
        in_flight: Micro-batches that every stage holds, as a synthesized order may; None: as the schedule
            asks.

    Returns:
        The plan, or None where the options allow none whatever the memory.
    """
    best: SmallestPlan | None = None
    for own in _list_pipelines(problem, in_flight):
        low, high = 0, inf if best is None else best.memory_bytes
        stages = own.find(high - 1)
        while stages is not None:
            best = own.plan(stages)
            high = min(best.memory_bytes, high - 1)
            stages = None
            while stages is None and high - low > 1:
                middle = (low + int(high)) // 2
                stages = own.find(middle)
                low = middle if stages is None else low
    return best


def fullest_bytes(space: Space, proposal: Proposal) -> float:
    """Return the bytes of the fullest device, counted by action; inf if the schedule does not run.

    Each device recomputes as it needs the least.
    """
    try:
        ways = [
            assemble(space, proposal, [mode] * len(proposal.ends)) for mode in stage_modes(proposal.config)
        ]
    except UsageError:
        return inf
    devices = range(ways[0].program.devices)
    return max(min(ceil(sum(own.ledger(device).values())) for own in ways) for device in devices)


def enough_bytes(problem: Problem, smallest: SmallestPlan | None) -> float:
    """Return bytes a device with which a plan fits; inf if none is known.

    Args:
        problem: The plans that are allowed.
        smallest: The answer of `find_smallest_plan`. Of schedules that it does not count, the plan and
            balanced plans are counted by action.
    """
    if smallest is not None and smallest.is_counted:
        return smallest.memory_bytes
    from .other_schedules import propose_other_schedules, propose_parts  # where the plan is not counted

    least = inf if smallest is None else fullest_bytes(problem.space, smallest.proposal)
    problem, names = replace(problem, budget=SearchBudget(seconds=SECONDS)), problem.heuristic_schedules
    for proposal in (*propose_parts(problem, names), *propose_other_schedules(problem, names, None)):
        if problem.budget.over and least < inf:
            break
        if possible(problem.space, proposal):
            least = min(least, fullest_bytes(problem.space, proposal))
    return least


def list_limits(problem: Problem) -> list[float]:
    """Return the bytes that devices may hold, each once, ascending; inf where the memory is unknown."""
    return sorted({limit for limit, _ in _list_devices(problem)})


def list_rooms(problem: Problem) -> list[float]:
    """Return `list_limits` as if every device had the context of the kind with the largest one."""
    context = _ledger_options(problem.space)["context_bytes"]
    return sorted({limit + context - own for limit, own in _list_devices(problem)})


def room(problem: Problem) -> str:
    """Return the memory of the devices in words."""
    least, *more = map(format_bytes, (limit for limit in list_limits(problem) if limit < inf))
    return f"{least} to {more[-1]} a device" if more else f"{least} a device"


def _list_devices(problem: Problem) -> Iterator[tuple[float, float]]:
    """List the limit and the context of each group of devices."""
    first = 0
    for group in problem.topology.groups:
        options = ledger_options(group.device, problem.space.dtype, problem.space.number_bytes)
        yield problem.space.limit([first]), options["context_bytes"]
        first += group.number


def _ledger_options(space: Space) -> LedgerOptions:
    kind = fullest_kind(space.topology.kinds)
    return ledger_options(kind, space.dtype, space.number_bytes, space.zero)


def least_in_parts(problem: Problem) -> float:
    """Least bytes of the fullest device in plans with several parts of the layers on a device; else inf.

    The states of all layers are spread over at most as many devices as parts of the layers can fill.
    """
    space, blocks = problem.space, problem.space.chain.max_stages
    names = {name for name in problem.schedules if find_schedule(name).default_virtual_stages > 1}
    if not names or blocks == 1:
        return inf
    parts = min(find_schedule(name).default_virtual_stages for name in names)
    devices = problem.usable_gpus if space.zero else min(problem.usable_gpus, blocks // parts)
    options: LedgerOptions = {**_ledger_options(space), "zero": 0}
    ledger = space.table(space.chain.sizes[0]).stage_ledger(0, blocks, 0, "never", space.optimizer, **options)
    states = sum(ledger.get(name, 0) for name in STATES)
    return options["context_bytes"] + (1 + FRAGMENTATION_RESERVE) * states / max(devices, 1)


def _list_pipelines(problem: Problem, in_flight: float | None = None) -> list[_Pipelines]:
    """List the pipelines of one stage a device, those first that tend to need the least memory.

    Among configurations that differ in the schedule alone, the one with the fewest micro-batches in flight
    needs the least.
    """
    space, tables = problem.space, dict[tuple[object, ...], Floats]()
    if space.is_long:
        cuts = np.flatnonzero(space.chain.cut_after) + 1
        kept_cuts = cuts[np.unique(np.linspace(0, len(cuts) - 1, MOST_CUTS).round().astype(int))]
        ends = {*kept_cuts.tolist(), *(layer + 1 for layer in space.limits.must_cut), len(space.chain)}
        space = narrow_space(space, sorted(ends))
    most_stages = min(problem.usable_gpus, space.chain.max_stages)
    least = dict[tuple[object, ...], tuple[tuple[float, bool], PipelineConfig]]()
    for config in problem.configs:
        if find_schedule(config.schedule).default_virtual_stages > 1:
            continue
        if in_flight is not None and config.schedule != "1f1b":
            continue
        total = sum(_in_flight(config, to_last) for to_last in range(1, most_stages + 1))
        rank = total, config.schedule not in EXACT_SCHEDULES
        key = config.recompute, config.micro_batch_size
        if key not in least or rank < least[key][0]:
            least[key] = rank, config
    configs = sorted((config for _, config in least.values()), key=lambda own: own.micro_batch_size)
    return [
        _Pipelines(problem, space, config, counts, in_flight, tables)
        for config in configs
        for counts in problem.replica_choices(config.micro_batch_size)
    ]


def _in_flight(config: PipelineConfig, to_last: int) -> float:
    """Fewest micro-batches that are in flight on a stage at some time, by the stages from it to the last."""
    schedule = find_schedule(config.schedule)
    is_lower = schedule.closed_in_flight is None or schedule.copies > 1
    if is_lower or (schedule.splits_backward and config.recompute != "never"):
        return 1
    return schedule.in_flight(0, to_last, config.micro_batches)


@dataclass(frozen=True, eq=False)
class _Pipelines:
    """The pipelines of a configuration whose stages have these numbers of replicas, ascending."""

    problem: Problem
    space: Space
    config: PipelineConfig
    counts: Sequence[int]
    in_flight: float | None
    tables: dict[tuple[object, ...], Floats] = field(repr=False)

    def share(self, count: int) -> int:
        """Samples of a micro-batch on a replica."""
        return divide_batch(self.config.micro_batch_size, count)

    @property
    def is_counted(self) -> bool:
        """Whether the bytes of a stage are exact."""
        return self.in_flight is not None or self.config.schedule in EXACT_SCHEDULES

    def find(self, room: float) -> list[StageNeed] | None:
        """Find the stages on the fewest devices that fit into `room` bytes each; None where none do."""
        problem, rooms = self.problem, dict[tuple[object, ...], Floats]()
        for count in self.counts:
            if (key := self._key(count)) not in rooms:
                rooms[key] = self._most_in_flight(count, room)
        first = {self._key(count): count for count in reversed(self.counts)}  # more need as much
        counts = self.counts if problem.options.use_all else sorted(first.values())
        most = np.stack([rooms[self._key(count)] for count in counts])
        if self._least_devices(most, counts) > problem.usable_gpus:
            return None
        uses_all = problem.options.use_all and problem.usable_gpus <= MOST_USED
        find = self._find_all if uses_all else self._find_fewest
        totals: Sequence[int | None] = self._stage_counts if self.space.limits.pins else (None,)
        shapes = [shape for total in totals if (shape := find(most, counts, total))]
        shape = min(shapes, key=lambda shape: sum(count for *_, count in shape), default=[])
        if not shape or sum(count for *_, count in shape) > problem.usable_gpus:
            return None
        return [self._need(*own, len(shape) - stage) for stage, own in enumerate(shape)]

    def _least_devices(self, most: Floats, counts: Sequence[int]) -> float:
        """Fewest devices if every stage held as few micro-batches as the last one."""
        fitting = self._fitting(most, 1, None)
        need = np.where(fitting.any(axis=0), np.array(counts, dtype=float)[fitting.argmax(axis=0)], inf)
        devices = np.append(np.full(len(need) - 1, inf), 0.0)
        for start in reversed(range(len(need) - 1)):
            devices[start] = (need[start] + devices).min()
        return float(devices[0])

    @property
    def _stage_counts(self) -> range:
        problem = self.problem
        limits = (problem.usable_gpus, self.space.chain.max_stages, problem.options.max_stages or inf)
        return range(1, int(min(limits)) + 1)

    def _find_fewest(
        self, most: Floats, counts: Sequence[int], total: int | None
    ) -> list[tuple[int, int, int]]:
        """Find cut points and replicas of the stages with the fewest devices; `total`: in so many stages."""
        fewest = [np.append(np.full(most.shape[1] - 1, inf), 0.0)]
        ends, needs = list[npt.NDArray[np.int64]](), list[Floats]()
        for to_last in self._stage_counts[:total]:
            fitting = self._fitting(most, to_last, total)
            need = np.where(fitting.any(axis=0), np.array(counts, dtype=float)[fitting.argmax(axis=0)], inf)
            devices = need + fewest[-1]
            ends.append(devices.argmin(axis=1))
            needs.append(need)
            fewest.append(devices.min(axis=1))
            if fewest[-1].min() == inf:
                break
        used = [float(row[0]) for row in fewest]
        to_last = total or int(np.argmin(used))
        if to_last >= len(used) or used[to_last] == inf:
            return []
        shape, start = [], 0
        for row in reversed(range(to_last)):
            end = int(ends[row][start])
            shape.append((start, end, int(needs[row][start, end])))
            start = end
        return shape

    def _find_all(self, most: Floats, counts: Sequence[int], total: int | None) -> list[tuple[int, int, int]]:
        """Find cut points and replicas of stages that use every device."""
        devices = self.problem.usable_gpus
        rows = [np.zeros((most.shape[1], devices + 1), dtype=bool)]
        rows[0][-1, 0] = True
        fitting = list[npt.NDArray[np.bool_]]()
        for to_last in self._stage_counts[:total]:
            fitting.append(self._fitting(most, to_last, total))
            totals = np.zeros_like(rows[0])
            for allowed, count in zip(fitting[-1], counts, strict=True):
                if count <= devices:
                    later = rows[-1][:, : devices + 1 - count].astype(np.float32)
                    totals[:, count:] |= allowed.astype(np.float32) @ later > 0
            rows.append(totals)
            if totals[0, devices] and to_last == (total or to_last):
                break
        else:
            return []
        shape, start = list[tuple[int, int, int]](), 0
        for row in reversed(range(to_last)):
            end, count = next(
                (int(end), count)
                for allowed, count in zip(fitting[row], counts, strict=True)
                for end in np.flatnonzero(allowed[start])
                if count <= devices and rows[row][end, devices - count]
            )
            shape.append((start, end, count))
            start, devices = end, devices - count
        return shape

    def _fitting(self, most: Floats, to_last: int, total: int | None) -> npt.NDArray[np.bool_]:
        """(counts, cut points, cut points): whether a stage fits that is so far from the end."""
        fitting: npt.NDArray[np.bool_] = (self._in_flight(to_last) <= most) & self.space.usable
        if total is not None:
            start, end = np.indices(most.shape[1:]).reshape(2, -1)
            fitting = fitting & self.space.may_be(total - to_last, start, end).reshape(most.shape[1:])
        return fitting

    def _in_flight(self, to_last: int) -> float:
        return _in_flight(self.config, to_last) if self.in_flight is None else self.in_flight

    def _most_in_flight(self, count: int, room: float) -> Floats:
        """(cut points, cut points): how many micro-batches of each stage fit into `room` bytes."""
        temporaries = find_optimizer(self.space.optimizer).has_temporaries(self.space.number_bytes)
        most = [
            np.minimum(
                most_within(room, partial(self._bytes, count, mode), temporaries=temporaries),
                self._host_room(count, mode),
            )
            for mode in self._modes
        ]
        largest: Floats = np.maximum.reduce(most)
        return largest

    @cached_property
    def _modes(self) -> list[Recompute | int]:
        """Ways to recompute; a number is that of the first blocks that run forward again."""
        modes: list[Recompute | int] = list(stage_modes(self.config))
        if self.config.recompute == OFFLOAD:
            modes.append(OFFLOAD)
        if self.config.recompute == FIRST_LAYERS:
            modes += range(1, self.space.chain.max_stages)
        return modes

    def _host_room(self, count: int, mode: Recompute | int) -> Floats | float:
        """(cut points, cut points): how many micro-batches fit into the host's memory."""
        host = self.space.host
        if mode != OFFLOAD or host is None:
            return inf
        with np.errstate(divide="ignore", invalid="ignore"):
            most: Floats = host.limit / np.asarray(self._table(count).stage_bytes.offloaded)
        return most

    def _key(self, count: int) -> tuple[object, ...]:
        """What the memory of a stage depends on."""
        return self.share(count), count if self.space.zero else min(count, 2), self._options.get("ahead")

    def _bytes(self, count: int, mode: Recompute | int, in_flight: float, moment: Moment) -> Floats:
        """(cut points, cut points): bytes of each stage; without a stage that recomputes so, UNUSABLE."""
        if moment == "step":  # then nothing is in flight
            in_flight = 1
        key = *self._key(count), mode, in_flight, moment
        if key not in self.tables:
            options: LedgerOptions = {**self._options, "moment": moment}
            table, optimizer = self._table(count), self.space.optimizer
            if isinstance(mode, int):
                needs = np.full(table.valid.shape, UNUSABLE)
                start, end = np.nonzero(np.triu(table.valid, mode + 1))
                needs[start, end] = table.stage_memory(
                    start, end, in_flight, "always", optimizer, count, start + mode, **options
                )
            else:
                needs = table.memory(in_flight, mode, optimizer, count, **options)
            self.tables[key] = needs
        return self.tables[key]

    @cached_property
    def _options(self) -> LedgerOptions:
        batch, size = self.space.mini_batch, self.config.micro_batch_size
        return {**_ledger_options(self.space), "ahead": 0 if batch is None else batch / size}

    def _table(self, count: int) -> StageTable:
        return self.space.table(self.share(count))

    def _need(self, start: int, end: int, count: int, to_last: int) -> StageNeed:
        """The memory of a stage with the recomputation that needs the least."""
        table, in_flight, needs = self._table(count), self._in_flight(to_last), list[StageNeed]()
        for mode in self._modes:
            if isinstance(mode, int):
                if start + mode >= end:
                    continue
                mode = first_layers_word(table.cut_points[start + mode] - table.cut_points[start])
            host_room = np.broadcast_to(self._host_room(count, mode), table.valid.shape)
            if in_flight <= host_room[start, end]:
                optimizer, options = self.space.optimizer, self._options
                ledger = table.stage_ledger(start, end, in_flight, mode, optimizer, count, **options)
                needs.append(StageNeed(start, end, count, mode, ledger))
        return min(needs, key=lambda need: need.memory_bytes)

    def plan(self, stages: list[StageNeed]) -> SmallestPlan:
        """The plan of these stages on the first devices."""
        cut_points = self.space.table(self.space.chain.sizes[0]).cut_points
        ends = [int(cut_points[stage.end]) for stage in stages]
        proposal = replicated_pipeline(self.config, ends, [stage.replicas for stage in stages])
        return SmallestPlan(self.config, stages, proposal, self.is_counted)
