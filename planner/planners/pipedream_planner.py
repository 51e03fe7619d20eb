"""PipeDream: stages and replicas by the hierarchical dynamic programme, for asynchronous throughput.

Narayanan et al., "PipeDream", SOSP 2019. Its objective is the seconds of a global batch in steady state, with
transfers and all-reduces beside the compute: those of the slowest stage or cut.
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

The recurrence (section 3.1): level k joins m_k components by links of bandwidth B_k;
a component of the innermost level is a device, one of level k is all of level k-1. With C the seconds and W
the weight bytes of the layers i..j, and a_s the bytes that cross the cut at s:

    A^0(i..j)    = C(i..j)
    T^k(i..j, m) = max(A^{k-1}(i..j), 2(m-1) W(i..j) / B_k) / m       a stage on m components
    A^k(i..j, m) = min(T^k(i..j, m), min over s, m' of max(T^k(i..s, m'), 2 a_s / B_k, A^k(s..j, m-m')))

A^{k-1} without a number is that of a whole component. Where fewer machines are faster the others stay idle,
unless all are to be used.

The tables are filled from the last layer back. So a stage is placed when the number of stages behind it is
known, which its memory depends on: tables are kept apart by that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import inf, isqrt, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Moment, Recompute
from ...cost_models.schedules import find_schedule
from ..candidate import PipelineConfig, Proposal
from ..search.replica_group import most_within
from ..search.space import Space, divide_batch
from ..stage_table import Floats, StageTable, ledger_options
from .base import Planner
from .replica_groups import Tier, list_tiers, thin_cuts

if TYPE_CHECKING:
    from ..problem import Problem


SCHEDULES = ("pipedream", "pipedream-2bw", "1f1b", "dapple", "gpipe")
"""Schedules whose memory depends on the number of stages after a stage. Of several the first is used."""
WORK = 4e9
"""Most comparisons of the programmes of one plan, one or two nanoseconds each."""
LONG = 200
"""Most blocks between the remaining cuts of a long chain."""
ENTRIES = 30_000_000
"""Most stages times numbers of replicas in the memory tables: 240 MB."""
Bools = npt.NDArray[np.bool_]


class Recurrence(NamedTuple):
    """Seconds of a stage on several components, and of the cut before it.

    Attributes:
        stage: Function of (seconds, weight bytes, components, bandwidth): seconds of one component to those
            of the stage. They are at least seconds / components.
        cut: Function of (crossing bytes, components, bandwidth).
    """

    stage: Callable[[Floats, Floats, int, float], Floats]
    cut: Callable[[Floats, int, float], Floats]


PAPER = Recurrence(
    lambda seconds, weights, m, bandwidth: np.maximum(seconds, 2 * (m - 1) * weights / bandwidth) / m,
    lambda crossing, _, bandwidth: 2 * crossing / bandwidth,
)
PUBLISHED = Recurrence(
    lambda seconds, weights, m, bandwidth: (seconds + 4 * (m - 1) * weights / (bandwidth * m)) / m,
    lambda crossing, m, bandwidth: 2 * crossing / (bandwidth * m),
)
"""Recurrence of the authors' code."""


@dataclass(frozen=True)
class NestedStage:
    """A stage of one level: cut points `start` to `end` on `replicas` components.

    `inner` are the stages of the level inside each component (empty on the innermost level).
    """

    start: int
    end: int
    replicas: int
    inner: tuple[NestedStage, ...] = ()

    def flat(self, copies: int = 1) -> list[tuple[int, int, int]]:
        """Return (start, end, devices) of its stages of devices, for `copies` copies of it."""
        alone = [] if self.inner else [(self.start, self.end, copies * self.replicas)]
        return sum((part.flat(copies * self.replicas) for part in self.inner), alone)


@dataclass(frozen=True, eq=False)
class Instance:
    """Problem of the dynamic programme over n + 1 cut points, see `StageTable`.

    Attributes:
        seconds: (n + 1, n + 1) seconds of one global batch on one device, inf if the stage is not allowed.
        weights: (n + 1, n + 1) bytes whose gradients replicas exchange.
        crossing: (n + 1,) bytes of a global batch that cross each cut point.
        tiers: Levels from the innermost.
        recurrence: Seconds of stages and cuts.
        fits: Function of (replicas, stages after): mask of the stages that fit. More stages after never make
            a stage fit. None for all.
        most_replicas: Most replicas of a stage of devices. None for any number.
        use_all: Whether every device must be used.
    """

    seconds: Floats
    weights: Floats
    crossing: Floats
    tiers: tuple[Tier, ...]
    recurrence: Recurrence = PAPER
    fits: Callable[[int, int], Bools] | None = None
    most_replicas: int | None = None
    use_all: bool = False
    check: Callable[[], None] = lambda: None
    """Function that is called now and then, and may raise an error that ends the planning."""

    @property
    def last(self) -> int:
        """Cut point after the last layer."""
        return len(self.crossing) - 1


States = dict[int, Floats]
"""Seconds by the number of stages from the next one on, counted up to the depth.

Arrays are (n + 1, n + 1), or (n + 1,) if all end at one cut point; inf if there is no plan.
"""


class Solution(NamedTuple):
    """Shortest bottleneck in seconds, and the stages of the outermost level."""

    seconds: float
    parts: tuple[NestedStage, ...]

    def flat(self) -> list[tuple[int, int, int]]:
        """Return (start, end, devices) of the stages of devices, in order."""
        return [stage for part in self.parts for stage in part.flat()]


class TooMuchWork(Exception):
    """A programme needs more comparisons than it may do."""


class Programme:
    """Dynamic programme that counts the stages after a stage up to `depth`, which stands for more, too.

    Args:
        instance: The problem.
        depth: Largest number of later stages that is told apart.
        work: Most table entries to compare.
    """

    def __init__(self, instance: Instance, depth: int, work: float = inf) -> None:
        self.at, self.depth, self.work = instance, depth, work
        self.most = instance.most_replicas or prod(tier.machines for tier in instance.tiers)
        self._whole = cache(self._of_copies)

    def solution(self) -> Solution | None:
        """Return the shortest bottleneck of the whole chain and its stages; None if no plan fits."""
        tables = Tables(self, len(self.at.tiers) - 1, 1, 0, self.at.last)
        ways = [(float(row[0]), then) for then, row in tables.led(tables.machines).items()]
        seconds, then = min(ways, default=(inf, 0))
        if seconds == inf:
            return None
        return Solution(seconds, tuple(tables.trace_behind(tables.machines, then, 0)))

    def whole(self, level: int, copies: int, behind: int) -> States:
        """Return A of a whole component of the level, with `copies` copies side by side.

        Level -1 is a device with its seconds.
        """
        self.at.check()
        inside = prod(tier.machines for tier in self.at.tiers[: level + 1])
        # Without memory limits, the table is the same for any number of copies.
        same = self.at.fits is None and copies * inside <= self.most
        return self._whole(level, 1 if same else copies, behind)

    def _of_copies(self, level: int, copies: int, behind: int) -> States:
        if level >= 0:
            tables = Tables(self, level, copies, behind)
            return tables.best(tables.stages, tables.machines)
        fits = True if self.at.fits is None else self.at.fits(copies, behind)
        possible = copies <= self.most and np.any(fits)
        return {min(behind + 1, self.depth): np.where(fits, self.at.seconds, inf)} if possible else {}


FirstStages = Callable[[int, int], States]
"""`Tables.stages` or `Tables.leads`."""


class Tables:
    """Tables of a level, filled when they are needed.

    Args:
        programme: The programme.
        level: The level.
        copies: Copies of it side by side.
        behind: Stages after it.
        column: If given, only stages up to that cut point.
    """

    def __init__(
        self, programme: Programme, level: int, copies: int, behind: int, column: int | None = None
    ) -> None:
        self.programme, self.at, self.level, self.copies = programme, programme.at, level, copies
        self.machines, self.bandwidth = self.at.tiers[level]
        self.behind, self.column = behind, column
        self.stages, self.leads = cache(self._stage), cache(self._lead)
        self._led: list[States] = [{}]

    def _stage(self, machines: int, behind: int) -> States:
        """Return T: a stage on `machines` components with `behind` stages after it."""
        inside = self.programme.whole(self.level - 1, self.copies * machines, behind)
        seconds, weights = self.at.recurrence.stage, self.at.weights
        return {
            then: seconds(inside_seconds, weights, machines, self.bandwidth)
            for then, inside_seconds in inside.items()
        }

    def _lead(self, machines: int, behind: int) -> States:
        """Return T with the cut before it, which the stage receives."""
        cut = self.at.recurrence.cut(self.at.crossing, machines, self.bandwidth)[:, None]
        return {then: np.maximum(stage, cut) for then, stage in self.stages(machines, behind).items()}

    def led(self, machines: int) -> States:
        """Return stages on (at most) `machines` components, with the cut before the first of them."""
        while len(self._led) <= machines:
            self._led.append(self.best(self.leads, len(self._led)))
        return self._led[machines]

    def best(self, firsts: FirstStages, machines: int) -> States:
        """Return stages on (at most) `machines` components, the first of them from `firsts`."""
        best: States = {}
        for first in range(1, machines + 1):
            ways = list[tuple[int, Floats]]()
            if first == machines or not self.at.use_all:
                end = slice(None) if self.column is None else self.column
                ways += [(then, stage[:, end]) for then, stage in firsts(first, self.behind).items()]
            for between, rest in self.led(machines - first).items():
                ways += [
                    (then, self._join(first_seconds, rest))
                    for then, first_seconds in firsts(first, between).items()
                ]
            for then, seconds in ways:
                best[then] = np.minimum(seconds, best.get(then, inf))
        useful, least = dict[int, Floats](), np.full(1, inf)
        for then, seconds in sorted(best.items()):
            if (seconds < least).any():
                useful[then], least = seconds, np.minimum(least, seconds)
        return useful

    def _join(self, first: Floats, rest: Floats) -> Floats:
        """Return the slower of a stage and what follows, at the best cut point between them."""
        self.at.check()
        self.programme.work -= first.size * (1 if rest.ndim == 1 else len(first) / 6)
        if self.programme.work < 0:
            raise TooMuchWork
        if rest.ndim == 1:
            row: Floats = np.maximum(first, rest).min(axis=1)
            return row
        joined = np.full_like(rest, inf)
        for cut in np.flatnonzero((first.min(axis=0) < inf) & (rest.min(axis=1) < inf)).tolist():
            through = joined[:cut, cut + 1 :]
            np.minimum(through, np.maximum(first[:cut, cut, None], rest[cut, cut + 1 :]), out=through)
        return joined

    def trace_behind(self, machines: int, then: int, start: int) -> list[NestedStage]:
        """Return the stages that attain a value of `led`, on the fewest components."""
        value = self.led(machines)[then][start]
        counts = [machines] if self.at.use_all else range(1, machines + 1)
        fewest = next(n for n in counts if then in self.led(n) and self.led(n)[then][start] == value)
        return self._trace(self.leads, fewest, then, start, value)

    def _trace(
        self, firsts: FirstStages, machines: int, then: int, start: int, value: float
    ) -> list[NestedStage]:
        """Return the stages that attain the value.

        A single stage is preferred, else the most components on the first stage, and its earliest end.
        """
        assert self.column is not None
        for alone_on in range(machines if self.at.use_all else 1, machines + 1):
            alone = firsts(alone_on, self.behind).get(then)
            if alone is not None and alone[start, self.column] == value:
                return [self._part(alone_on, self.behind, then, start, self.column)]
        for first in range(machines - 1, 0, -1):
            for between, rest in self.led(machines - first).items():
                first_seconds = firsts(first, between).get(then)
                for cut in np.flatnonzero(
                    first_seconds is not None and np.maximum(first_seconds[start], rest) == value
                ).tolist():
                    part = self._part(first, between, then, start, cut)
                    return [part, *self.trace_behind(machines - first, between, cut)]
        raise AssertionError("no plan attains the value")

    def _part(self, machines: int, behind: int, then: int, start: int, end: int) -> NestedStage:
        """Return a stage with the stages inside it."""
        if not self.level:
            return NestedStage(start, end, machines)
        inside = Tables(self.programme, self.level - 1, self.copies * machines, behind, end)
        value = inside.best(inside.stages, inside.machines)[then][start]
        parts = inside._trace(inside.stages, inside.machines, then, start, value)
        return NestedStage(start, end, machines, tuple(parts))


def place_parts(
    parts: Sequence[NestedStage], tiers: Sequence[Tier], bases: Sequence[int] = (0,)
) -> list[tuple[int, ...]]:
    """Return the ranks of every stage of devices, in order. Components are assigned in turn.

    A stage of an outer level on several components has its inner stages on each of them: their replicas are
    those of all copies.

    Args:
        parts: The stages.
        tiers: Levels from the innermost.
        bases: First rank of each copy.
    """
    size, first, placed = prod(tier.machines for tier in tiers[:-1]), 0, list[tuple[int, ...]]()
    for part in parts:
        copies = [base + size * (first + index) for base in bases for index in range(part.replicas)]
        first += part.replicas
        placed += place_parts(part.inner, tiers[:-1], copies) if part.inner else [tuple(copies)]
    return placed


@dataclass(frozen=True, eq=False)
class PipeDreamStages:
    """Costs and memory of stages under a configuration."""

    full_space: Space
    config: PipelineConfig
    recurrence: Recurrence
    use_all: bool = False
    most_replicas: int | None = None

    @cached_property
    def space(self) -> Space:
        """The space with costs past the largest measured size, because a replica's share may be within.

        If memory is limited, cuts are thinned so that the tables, one for each number of replicas, stay
        small.
        """
        space = replace(self.full_space, past_largest=True)
        if space.limit(range(space.topology.gpus)) == inf:
            return space
        counts = {1}
        for tier in list_tiers(space.topology):
            counts = {count * machines for count in counts for machines in range(1, tier.machines + 1)}
        most = self.most_replicas or inf
        return thin_cuts(space, isqrt(ENTRIES // sum(count <= most for count in counts)))

    @cached_property
    def table(self) -> StageTable:
        """Stages of a whole micro-batch."""
        return self.space.table(self.config.micro_batch_size)

    def proposal(self, work: float = WORK) -> Proposal | None:
        """Return the plan with the shortest bottleneck, which is its estimate; None if none fits.

        It is exact, unless the cut points are too many for `work`. Then half of the cut points are used, and
        so on.
        """
        try:
            solution = shortest_bottleneck(self.instance, work)
        except TooMuchWork:
            return replace(self, full_space=thin_cuts(self.space, self.table.blocks // 2)).proposal(work)
        if solution is None:
            return None
        ends = tuple(self.table.cut_points[end] for _, end, _ in solution.flat())
        return Proposal(
            self.config, ends, tuple(place_parts(solution.parts, self.instance.tiers)), solution.seconds
        )

    @cached_property
    def instance(self) -> Instance:
        """Problem of the dynamic programme."""
        space, size = self.space, self.config.micro_batch_size
        recompute = 0 if self.config.recompute in ("never", "by_stage") else 1
        firsts = {space.topology.device(rank): rank for rank in reversed(range(space.topology.gpus))}
        groups = [space.replica_group(size, [rank]) for rank in firsts.values()]
        # A global batch on the slowest kind of device. Recomputation runs the forward twice.
        seconds = np.maximum.reduce([(1 + recompute) * group.forward + group.backward for group in groups])
        unlimited = self._limit == inf and self.full_space.fits_someone(size, 1)
        return Instance(
            seconds=np.where(space.usable, seconds, np.inf),
            weights=np.asarray(self.table.stage_bytes.trainable),
            crossing=self.table.crossing,
            tiers=list_tiers(space.topology),
            recurrence=self.recurrence,
            fits=None if unlimited else self._fits,
            most_replicas=self.most_replicas,
            use_all=self.use_all,
            check=self.full_space.budget.check,
        )

    @cached_property
    def _limit(self) -> float:
        return self.space.limit(range(self.space.topology.gpus))

    def _fits(self, replicas: int, behind: int) -> Bools:
        schedule = find_schedule(self.config.schedule)
        return self._room(replicas) >= int(schedule.in_flight(0, behind + 1, self.config.micro_batches))

    @cached_property
    def _room(self) -> Callable[[int], Floats]:
        """Function from devices to the micro-batches that each stage may hold; negative for none.

        If each micro-batch has a version of the weights, the version counts as bytes of the micro-batch. All
        devices count as the kind with the least memory.
        """

        @cache
        def room(replicas: int) -> Floats:
            most, mode = np.full(self.table.valid.shape, -1.0), self.config.recompute
            modes: tuple[Recompute, ...] = ("never", "always") if mode == "by_stage" else (mode,)
            if self.full_space.fits_someone(self.config.micro_batch_size, replicas):
                needs = [partial(self._need, replicas, recompute) for recompute in modes]
                most = np.maximum.reduce([most, *(most_within(self._limit, need) for need in needs)])
            return most

        return room

    def _need(self, replicas: int, recompute: Recompute, in_flight: float, moment: Moment) -> Floats:
        """Return the bytes of every stage on one of its replicas, with `in_flight` micro-batches."""
        space, schedule = self.space, find_schedule(self.config.schedule)
        least = min(space.topology.kinds, key=lambda kind: kind.memory_bytes or inf)
        versions = schedule.weight_versions(0, int(in_flight), self.config.micro_batches)
        options: LedgerOptions = {
            **ledger_options(least, space.dtype, space.number_bytes, space.zero),
            "weight_versions": int(versions),
            "moment": moment,
        }
        table = space.table(divide_batch(self.config.micro_batch_size, replicas))
        return table.memory(in_flight, recompute, space.optimizer, replicas, **options)


def _propose(recurrence: Recurrence, problem: Problem) -> Iterator[Proposal]:
    """Yield the partition with the shortest bottleneck of every configuration that fits.

    A runtime without replicas, or with equal replicas only, gets one device per stage. In a long chain only
    some cuts are tried, because tables of all its stages would be too large.
    """
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
        plan = stages.proposal(WORK / 2 / len(configs))
        if plan is not None:
            yield replace(plan, estimate_seconds=(plan.estimate_seconds or 0.0) * config.micro_batches)


def _within_reach(space: Space) -> Space:
    """Return the space with the devices that the runtime can use. One process has those of one node."""
    gpus, of_node = space.topology.gpus, space.topology.gpus_per_node
    if not space.one_process or gpus <= of_node:
        return space
    return replace(space, topology=space.topology.with_gpus(of_node))


def _one_schedule(configs: Sequence[PipelineConfig]) -> list[PipelineConfig]:
    """Return the configurations of one schedule; only those by stage, if there are any."""
    names = {config.schedule for config in configs}
    schedule = next((name for name in SCHEDULES if name in names), None)
    of_schedule = [config for config in configs if config.schedule == schedule]
    by_stage = [config for config in of_schedule if config.recompute == "by_stage"]
    return by_stage or of_schedule


PLANNERS = (
    Planner("pipedream", partial(_propose, PAPER)),
    Planner("pipedream-published", partial(_propose, PUBLISHED)),
)


def shortest_bottleneck(instance: Instance, work: float = WORK) -> Solution | None:
    """Return the plan with the shortest bottleneck; None if none fits.

    Of equal plans it has the fewest components of the outermost level; then no further cut, or the most
    components on the first stage, and its earliest end.

    Memory depends on the number of later stages. These are counted only up to a depth (-1: memory is not
    limited). No count exceeds the true one, so no plan that fits is lost. If the best plan fits, it is the
    best of all; else the depth is raised.

    Args:
        instance: The problem.
        work: Most comparisons.

    Raises:
        TooMuchWork: More comparisons would be needed.
    """
    depth, fits = -1, instance.fits
    while True:
        relaxed = instance if depth >= 0 else replace(instance, fits=None)
        programme = Programme(relaxed, max(depth, 0), work)
        solution, work = programme.solution(), programme.work
        stages = [] if solution is None or fits is None else solution.flat()
        behind = range(len(stages) - 1, -1, -1)
        large = [b for b, (i, j, n) in zip(behind, stages, strict=True) if fits and not fits(n, b)[i, j]]
        if not large:
            return solution
        depth = 0 if depth < 0 else min(large)
