"""PipeDream: stages and replicas by the hierarchical dynamic programme, for asynchronous throughput.

Narayanan et al., "PipeDream", SOSP 2019. Its objective is the seconds of a global batch in steady state, with
transfers and all-reduces beside the compute: those of the slowest stage or cut (`pipedream_programme`).
Latencies count nothing in it. What enters the pipeline at a time is a global batch of its own there, a
micro-batch here; replicas of a stage take turns there and share every micro-batch here: the recurrence is
the same for both.

Where a model has branches PipeDream's states are the down-sets of its graph. Here they are the cut points of
the chain: what a cut sends is every tensor made before it that is needed behind it, each once, and always
counts. Of devices of several kinds all count as the slowest, with the least memory.

`pipedream-published` counts as the code that its authors published, which is not as the paper does. Of a
stage on m components compute and all-reduce add up, and the all-reduce of m copies sends 4 (m-1) / m times
the weights; what a cut sends is divided among the components of the stage behind it. Cuts are charged, which
that code does on request; memory and unused machines are as in `pipedream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import inf, isqrt, prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Moment, Recompute
from ...cost_models.schedules import find_schedule
from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from ..search.replica_group import most_within
from ..search.space import Space, divide_batch
from ..stage_table import Floats, StageTable, ledger_options
from .base import Planner
from .pipedream_programme import (
    PAPER,
    PUBLISHED,
    Bools,
    Instance,
    NestedStage,
    Programme,
    Recurrence,
    Solution,
)
from .replica_groups import Tier, list_tiers, thin_cuts

if TYPE_CHECKING:
    from ..problem import Problem


SCHEDULES = ("pipedream", "pipedream-2bw", "1f1b", "dapple", "gpipe")
"""Those whose stages hold what the number of stages behind them says; of several the first is taken."""
WORK = 4e9
"""What the programmes of one plan may compare, a nanosecond or two each."""
LONG = 200
"""Blocks between the cuts that are left of a long chain."""
ENTRIES = 30_000_000
"""Stages times numbers of replicas in the tables of memory: 240 MB."""
COARSE = 24
"""Places, or up to twice as many, that a long chain is planned over first."""
QUICK = 1e9
"""Comparisons up to which a chain is planned over all cut points at once, where memory is no matter."""

GUESSES = (1.2, 2.0, 4.0, inf)
"""Limits of the bottleneck under which a plan that fits is looked for, in what it were without memory."""


def place_parts(parts: Sequence[NestedStage], tiers: Sequence[Tier]) -> list[tuple[int, ...]]:
    """The ranks of every stage of devices, in order: components are taken in turn.

    A stage of an outer level on several components has its inner stages on each of them: their replicas are
    those of all copies.
    """
    return list(_devices(parts, [tier.machines for tier in tiers], [0]))


def _devices(
    parts: Sequence[NestedStage], machines: Sequence[int], bases: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    size, first = prod(machines[:-1]), 0
    for part in parts:
        copies = [base + size * (first + own) for base in bases for own in range(part.replicas)]
        first += part.replicas
        if part.inner:
            yield from _devices(part.inner, machines[:-1], copies)
        else:
            yield tuple(copies)


@dataclass(frozen=True, eq=False)
class PipeDreamStages:
    """What stages cost and how much memory they need under a configuration."""

    full_space: Space
    config: PipelineConfig
    recurrence: Recurrence
    use_all: bool = False
    most_replicas: int | None = None
    _rooms: dict[int, Floats] = field(default_factory=dict)

    @cached_property
    def space(self) -> Space:
        """With costs past the largest measured size: a replica's share may lie within. Where memory is
        limited, with no more cuts than there is room for tables, one for each number of replicas."""
        space = replace(self.full_space, past_largest=True)
        if space.limit(range(space.topology.gpus)) == inf:
            return space
        counts = {1}
        for tier in list_tiers(space.topology):
            counts = {count * machines for count in counts for machines in range(1, tier.machines + 1)}
        most = self.most_replicas or inf
        return thin_cuts(space, isqrt(ENTRIES // sum(count <= most for count in counts)))

    @property
    def size(self) -> int:
        return self.config.micro_batch_size

    @cached_property
    def table(self) -> StageTable:
        return self.space.table(self.size)

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        return list_tiers(self.space.topology)

    @cached_property
    def ledger(self) -> LedgerOptions:
        """Of the kind of device with the least memory."""
        least = min(self.space.topology.kinds, key=lambda kind: kind.memory_bytes or inf)
        return ledger_options(least, self.space.dtype, self.space.number_bytes, self.space.zero)

    @cached_property
    def limit(self) -> float:
        return self.space.limit(range(self.space.topology.gpus))

    @cached_property
    def modes(self) -> tuple[Recompute, ...]:
        """How a stage may recompute, the cheapest first."""
        return ("never", "always") if self.config.recompute == "by_stage" else (self.config.recompute,)

    def place(self, parts: Sequence[NestedStage]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """By stage, the number of layers before its end, and the ranks of its replicas."""
        ends = tuple(self.table.cut_points[end] for part in parts for _, end, _ in part.flat())
        return ends, tuple(place_parts(parts, self.tiers))

    @cached_property
    def instance(self) -> Instance:
        """What the dynamic programme plans with."""
        unlimited = self.limit == inf and self.full_space.fits_someone(self.size, 1)
        return Instance(
            seconds=np.where(self.space.usable, self._seconds, np.inf),
            weights=np.asarray(self.table.stage_bytes.trainable),
            crossing=self.table.crossing,
            tiers=self.tiers,
            recurrence=self.recurrence,
            fits=None if unlimited else self._fits,
            most_replicas=self.most_replicas,
            use_all=self.use_all,
            check=self.full_space.budget.check,
        )

    @cached_property
    def _seconds(self) -> Floats:
        """Of a global batch on the slowest kind of device; what recomputes, computes twice."""
        topology = self.space.topology
        firsts = {topology.device(rank): rank for rank in range(topology.gpus - 1, -1, -1)}
        groups = [self.space.replica_group(self.size, [rank]) for rank in firsts.values()]
        recompute = 0 if self.config.recompute in ("never", "by_stage") else 1
        slowest: Floats = np.maximum.reduce(
            [(1 + recompute) * group.forward + group.backward for group in groups]
        )
        return slowest

    def in_flight(self, behind: int) -> int:
        """Micro-batches in flight on a stage with so many behind it."""
        own = find_schedule(self.config.schedule)
        return int(own.in_flight(0, behind + 1, self.config.micro_batches))

    def versions(self, behind: int) -> int:
        """Weight versions of a stage with so many behind it."""
        own = find_schedule(self.config.schedule)
        return int(own.weight_versions(0, behind + 1, self.config.micro_batches))

    def _fits(self, replicas: int, behind: int) -> Bools:
        fitting: Bools = self.in_flight(behind) <= self._room(replicas)
        return fitting

    def _room(self, replicas: int) -> Floats:
        """How many micro-batches each stage may hold on so many devices; negative: none. Where each has a
        version of the weights, it counts as what the micro-batch holds."""
        if replicas not in self._rooms:
            room = np.full(self.table.valid.shape, -1.0)
            if self.full_space.fits_someone(self.size, replicas):
                for mode in self.modes:
                    room = np.maximum(room, most_within(self.limit, self._need(replicas, mode)))
            self._rooms[replicas] = room
        return self._rooms[replicas]

    def _need(self, replicas: int, recompute: Recompute) -> Callable[[float, Moment], Floats]:
        """Bytes of every stage on one of its replicas, with so many micro-batches in flight."""
        table, optimizer = self.space.table(divide_batch(self.size, replicas)), self.space.optimizer

        def need(in_flight: float, moment: Moment) -> Floats:
            versions = self.versions(int(in_flight) - 1)
            options: LedgerOptions = {**self.ledger, "weight_versions": versions, "moment": moment}
            return table.memory(in_flight, recompute, optimizer, replicas, **options)

        return need


def _propose(recurrence: Recurrence, problem: Problem) -> Iterator[Proposal]:
    """For every configuration its partition with the shortest bottleneck, where one fits, under the requested
    schedule. A runtime that runs no replicas, or the same number everywhere, is given one device a stage. Of
    a long chain some of the cuts: tables of all its stages would be too large."""
    space, configs = _within_reach(problem.space), _one_schedule(problem.configs)
    if space.is_long:
        space = thin_cuts(space, LONG)
    runtime = space.runtime
    for config in configs:
        size = config.micro_batch_size
        if not space.chain.reaches(size, past_largest=True):
            continue
        shared = space.fits_someone(size, 2) and (runtime is None or runtime.runs_replicas([2, 1]))
        stages = PipeDreamStages(space, config, recurrence, most_replicas=size if shared else 1)
        solution = shortest_bottleneck(stages.instance, WORK / 2 / len(configs))
        if solution is not None:
            seconds = solution.seconds * config.micro_batches
            yield Proposal(config, *stages.place(solution.parts), seconds)


def _within_reach(space: Space) -> Space:
    """With the devices that the runtime can use: one process has those of one node."""
    gpus, of_node = space.topology.gpus, space.topology.gpus_per_node
    if not space.one_process or gpus <= of_node:
        return space
    return replace(space, topology=space.topology.with_gpus(of_node))


def _one_schedule(configs: Sequence[PipelineConfig]) -> list[PipelineConfig]:
    """Of one schedule; where each stage may recompute or not, only so."""
    names = {config.schedule for config in configs}
    schedule = next((name for name in SCHEDULES if name in names), None)
    own = [config for config in configs if config.schedule == schedule]
    by_stage = [config for config in own if config.recompute == "by_stage"]
    return by_stage or own


PLANNERS = (
    Planner("pipedream", partial(_propose, PAPER)),
    Planner("pipedream-published", partial(_propose, PUBLISHED)),
)


def shortest_bottleneck(instance: Instance, work: float = WORK) -> Solution | None:
    """The plan with the shortest bottleneck; None where none fits.

    Exact, unless the cut points are too many for `work`: then over as many of them as it allows (`cut
    points`). Of equal plans one with the fewest components of the outermost level; then with no further cut,
    or with the most components on the first stage, and its earliest end.

    Long chains are planned over few cut points first: the plan is a limit for the next one, over more.
    """
    best: Solution | None = None
    depth, before, total = -1, 0.0, 0.0
    for count in _counts(instance):
        points = _select_points(instance, count)
        limit = best.seconds if best else inf
        solution, depth, spent = _deep_enough(instance.select_points(points), depth, limit)
        if solution is not None:
            best = solution._replace(parts=tuple(_renumber(part, points) for part in solution.parts))
        total += spent
        if total + spent * max(spent / before if before else 1.0, 1.0) > work:
            break
        before = spent
    return best


def _deep_enough(instance: Instance, depth: int, limit: float) -> tuple[Solution | None, int, float]:
    """The plan, with the depth that it took and what was compared.

    Memory depends on the number of stages behind. These are counted only up to a depth (-1: memory is not
    limited); as no count exceeds the true one, no plan that fits is lost. If the best plan fits, it is the
    best of all; else the depth is raised. Without a limit, one is guessed by what memory would allow at best,
    as tables are short under it, and raised until there is a plan.
    """
    spent, limits = 0.0, [limit]
    while True:
        relaxed = instance if depth >= 0 else replace(instance, fits=None)
        programme = Programme(relaxed, max(depth, 0), limits[0])
        solution = programme.solution()
        spent += programme.work
        large = [] if solution is None else _too_large(solution, instance)
        if solution is not None and depth < 0 and large and limit == inf:
            limits = [solution.seconds * share for share in GUESSES]
        if solution is None and len(limits) > 1:
            limits.pop(0)
        elif large:
            depth = 0 if depth < 0 else min(large)
        else:
            return solution, depth, spent


def _too_large(solution: Solution, instance: Instance) -> list[int]:
    """The numbers of stages behind those that do not fit."""
    fits, stages = instance.fits, solution.flat()
    if fits is None:
        return []
    behind = range(len(stages) - 1, -1, -1)
    return [b for b, (i, j, devices) in zip(behind, stages, strict=True) if not fits(devices, b)[i, j]]


def _counts(instance: Instance) -> list[int]:
    """All cut points, and before them halves of halves, where the programme is not quick at once."""
    *inside, outer = [tier.machines**2 / 2 for tier in instance.tiers]
    comparisons = outer * instance.last**2 + sum(inside) * instance.last**3 / 3
    counts = [instance.last]
    if instance.fits is not None or comparisons > QUICK:
        while counts[0] >= 2 * COARSE:
            counts.insert(0, counts[0] // 2)
    return counts


def _renumber(part: NestedStage, points: npt.NDArray[np.int64]) -> NestedStage:
    inner = tuple(_renumber(own, points) for own in part.inner)
    return NestedStage(int(points[part.start]), int(points[part.end]), part.replicas, inner)


def _select_points(instance: Instance, count: int) -> npt.NDArray[np.int64]:
    """About so many cut points, or all: of equal shares of the seconds the cut of each that least crosses."""
    if count >= instance.last:
        return np.arange(instance.last + 1)
    layers = np.arange(instance.last)
    seconds = instance.seconds[layers, layers + 1]
    done = np.cumsum(np.where(np.isfinite(seconds), seconds, 0.0))
    share = np.floor(done[:-1] / max(float(done[-1]), 1e-300) * (count - 1))
    starts = np.flatnonzero(np.diff(share, prepend=-1.0)) + 1
    inner = [a + int(instance.crossing[a:b].argmin()) for a, b in pairwise([*starts, instance.last])]
    return np.array([0, *inner, instance.last])
