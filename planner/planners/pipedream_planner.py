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
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
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


Bools = npt.NDArray[np.bool_]
CALL = 5_000
"""What a call of numpy counts for in `work`, a comparison for one: a nanosecond or two."""
ROWS = 16
"""Of a table that are compared in one call."""


class Recurrence(NamedTuple):
    """Seconds of a stage on so many components, by the seconds of one of them: at least their part of these;
    and of the cut before it.

    stage(seconds, weight bytes, components, bandwidth), cut(crossing bytes, components, bandwidth).
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
"""As the authors' code has them."""


@dataclass(frozen=True)
class NestedStage:
    """A stage of one level: cut points `start` to `end` on `replicas` components, in each of them the stages
    `inner` of the level inside (none on the innermost)."""

    start: int
    end: int
    replicas: int
    inner: tuple[NestedStage, ...] = ()

    def flat(self, copies: int = 1) -> Iterator[tuple[int, int, int]]:
        """(start, end, devices) of the stages of devices in it, where there are so many copies of it."""
        if not self.inner:
            yield self.start, self.end, copies * self.replicas
        for part in self.inner:
            yield from part.flat(copies * self.replicas)


@dataclass(frozen=True, eq=False)
class Instance:
    """The problem of the dynamic programme, over n + 1 cut points; see `StageTable` for cut points and
    matrices.

    seconds, weights: (n + 1, n + 1), of one global batch on one device (inf where no stage may be), and bytes
    whose gradients replicas exchange. crossing: (n + 1,) bytes of a global batch. tiers: from the innermost
    level. `fits(replicas, behind)`: the stages, (n + 1, n + 1), that so many devices can hold with so many
    stages behind; more behind never makes a stage fit. None: all. `most_replicas` of a stage of devices;
    None: any number.
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
    """Called now and then; what it raises ends the planning."""

    @property
    def last(self) -> int:
        """The place after the last layer."""
        return len(self.crossing) - 1

    def select_points(self, points: npt.NDArray[np.int64]) -> Instance:
        """The same with these cut points alone."""
        own, among = self.fits, np.ix_(points, points)
        return replace(
            self,
            seconds=self.seconds[among],
            weights=self.weights[among],
            crossing=self.crossing[points],
            fits=None if own is None else lambda replicas, behind: own(replicas, behind)[among],
        )


States = dict[int, Floats]
"""Seconds by the number of stages behind the one that comes next, counted up to the depth: (n + 1, n + 1), or
(n + 1,) where all end at one place; inf where there is no plan."""


class Solution(NamedTuple):
    """The shortest bottleneck, the stages of the outermost level, and the number of cut points of the
    tables."""

    seconds: float
    parts: tuple[NestedStage, ...]
    places: int

    def flat(self) -> list[tuple[int, int, int]]:
        """(start, end, devices) of the stages of devices, in order."""
        return [stage for part in self.parts for stage in part.flat()]


class _Stand(NamedTuple):
    """Stages of the cut points `start` to `end` on so many components, at most; `after` the last of them so
    many stages, and counted behind the next before them, `then`."""

    after: int
    then: int
    machines: int
    start: int
    end: int


class Programme:
    """The programme that counts the stages behind up to `depth`: that many stands for more, too.

    Stages slower than `limit` are dropped; of those that stand side by side in so many copies, stages that
    many times as slow, as a stage on m components takes at least the m-th part of each. `work`: how much was
    compared.
    """

    def __init__(self, instance: Instance, depth: int, limit: float) -> None:
        self.at, self.depth, self.limit = instance, depth, limit * (1 + 1e-9)
        self.work = 0
        self._states: dict[tuple[int, int, int, tuple[int, ...]], States] = {}
        self.mask = cache(self._mask)
        self._kinds: dict[bytes, int] = {}
        self._seconds: dict[int, Floats] = {}

    def solution(self) -> Solution | None:
        """The shortest bottleneck of the whole chain and its stages; None where no plan fits the limits."""
        machines, last = self.at.tiers[-1].machines, self.at.last
        tables = Tables(self, len(self.at.tiers) - 1, 1, 0, last)
        ends = {then: float(seconds[0]) for then, seconds in tables.led(machines).items()}
        then = min(ends, key=lambda b: (ends[b], b), default=None)
        if then is None or not np.isfinite(ends[then]):
            return None
        parts = self._behind_a_cut(tables, _Stand(0, then, machines, 0, last))
        return Solution(ends[then], tuple(parts), last + 1)

    def whole(self, level: int, copies: int, behind: int) -> States:
        """A of a whole component of the level, for all stages; of level -1, a device, its seconds."""
        self.at.check()
        if level < 0:
            return self._device(copies, behind)
        signature = self._signature(level, copies, behind)
        # Where memory is no matter, any number of copies is worth the same table.
        scale = copies if any(signature) else prod(tier.machines for tier in self.at.tiers[level + 1 :])
        key = (level, behind, scale, signature)
        if key not in self._states:
            tables = Tables(self, level, copies, behind, None, scale)
            self._states[key] = self.of_use(tables.best(tables.stages, tables.tier.machines), scale)
        return self._states[key]

    def _device(self, replicas: int, behind: int) -> States:
        kind, fits = self.mask(replicas, behind), self.at.fits
        if kind < 0:
            return {}
        if kind not in self._seconds:
            fitting = True if kind == 0 or fits is None else fits(replicas, behind)
            self._seconds[kind] = np.where(fitting, self.at.seconds, np.inf)
        return {min(behind + 1, self.depth): self._seconds[kind]}

    def of_use(self, states: States, scale: int) -> States:
        """Without what is slower than the limit, or no faster than with fewer stages behind."""
        if np.isinf(self.limit) and len(states) < 2:
            return states
        best: float | Floats = np.inf
        useful: States = {}
        for then, seconds in sorted(states.items()):
            self.work += 4 * seconds.size
            useful[then] = np.where((seconds <= self.limit * scale) & (seconds < best), seconds, np.inf)
            best = np.minimum(best, useful[then])
        return {then: seconds for then, seconds in useful.items() if np.isfinite(seconds).any()}

    # The plan that has the values

    def _behind_a_cut(self, tables: Tables, at: _Stand) -> list[NestedStage]:
        """The stages of the value of `tables.led` there, on as few components as have it."""
        value, machines = tables.led(at.machines)[at.then][at.start], at.machines
        while machines > 1 and not self.at.use_all:
            fewer = tables.led(machines - 1).get(at.then)
            if fewer is None or fewer[at.start] != value:
                break
            machines -= 1
        return self._stages(tables, tables.leads, at._replace(machines=machines), value)

    def _stages(self, tables: Tables, firsts: FirstStages, at: _Stand, value: float) -> list[NestedStage]:
        """The stages of the value: one, else with the most components on the first, and its earliest end."""
        for machines in range(at.machines if self.at.use_all else 1, at.machines + 1):
            alone = firsts(machines, at.after).get(at.then)
            if alone is not None and alone[at.start, at.end] == value:
                return [self._part(tables, at._replace(machines=machines))]
        for first in range(at.machines - 1, 0, -1):
            others = at.machines - first
            for between, rest in tables.led(others).items():
                own = firsts(first, between).get(at.then)
                fits = own is not None and np.maximum(own[at.start], rest) == value
                for cut in np.flatnonzero(fits).tolist():
                    part = self._part(tables, _Stand(between, at.then, first, at.start, cut))
                    return [part, *self._behind_a_cut(tables, _Stand(at.after, between, others, cut, at.end))]
        raise AssertionError("a value that no plan has")

    def _part(self, tables: Tables, at: _Stand) -> NestedStage:
        """A stage, with the stages inside it."""
        if not tables.level:
            return NestedStage(at.start, at.end, at.machines)
        level, copies = tables.level - 1, tables.copies * at.machines
        value = self.whole(level, copies, at.after)[at.then][at.start, at.end]
        inside = Tables(self, level, copies, at.after, at.end, copies)
        whole = at._replace(machines=inside.tier.machines)
        inner = self._stages(inside, inside.stages, whole, value)
        return NestedStage(at.start, at.end, at.machines, tuple(inner))

    # Which memory limits are the same

    def _mask(self, replicas: int, behind: int) -> int:
        """A number for the stages that fit: -1 for none, 0 for all, else that of all with the same."""
        if self.at.most_replicas is not None and replicas > self.at.most_replicas:
            return -1
        if self.at.fits is None:
            return 0
        fits = self.at.fits(replicas, behind)[np.isfinite(self.at.seconds)]
        if fits.all() or not fits.any():
            return 0 if fits.all() else -1
        return self._kinds.setdefault(np.packbits(fits).tobytes(), len(self._kinds) + 1)

    def _signature(self, level: int, copies: int, behind: int) -> tuple[int, ...]:
        """What the values of a component depend on, of the copies that stand side by side."""
        replicas = {copies}
        for tier in self.at.tiers[: level + 1]:
            replicas = {own * machines for own in replicas for machines in range(1, tier.machines + 1)}
        return tuple(self.mask(own, b) for own in sorted(replicas) for b in range(behind, self.depth + 1))


class Tables:
    """The tables of a level, of which `copies` stand side by side with so many stages behind, filled as they
    are needed; `column`: for stages up to that place alone; `scale`: as if of so many copies."""

    def __init__(
        self, programme: Programme, level: int, copies: int, behind: int, column: int | None, scale: int = 1
    ) -> None:
        self.programme, self.at, self.tier = programme, programme.at, programme.at.tiers[level]
        self.level, self.copies, self.behind, self.column, self.scale = level, copies, behind, column, scale
        self.stages, self.leads = cache(self._stage), cache(self._lead)
        self._led: list[States] = [{}]

    def _stage(self, machines: int, behind: int) -> States:
        """T: a stage on so many components with so many stages behind it."""
        inside = self.programme.whole(self.level - 1, self.copies * machines, behind)
        stage, bandwidth = self.at.recurrence.stage, self.tier.bandwidth
        tables = {then: stage(own, self.at.weights, machines, bandwidth) for then, own in inside.items()}
        return self.programme.of_use(tables, self.scale)

    def _lead(self, machines: int, behind: int) -> States:
        """The same with the cut before it, which the stage receives."""
        cut = self.at.recurrence.cut(self.at.crossing, machines, self.tier.bandwidth)[:, None]
        tables = {then: np.maximum(stage, cut) for then, stage in self.stages(machines, behind).items()}
        return self.programme.of_use(tables, self.scale)

    def led(self, machines: int) -> States:
        """Stages on so many components, or at most so many, with the cut before the first of them."""
        while len(self._led) <= machines:
            best = self.best(self.leads, len(self._led))
            self._led.append(self.programme.of_use(best, self.scale))
        return self._led[machines]

    def best(self, first_stages: FirstStages, machines: int) -> States:
        """Of stages on so many components, or at most so many, the first of them one of these."""
        best: States = {}
        for first in range(1, machines + 1):
            if first == machines or not self.at.use_all:
                for then, stage in first_stages(first, self.behind).items():
                    own = stage if self.column is None else stage[:, self.column]
                    best[then] = np.minimum(own, best.get(then, np.inf))
            for between, rest in self.led(machines - first).items():
                for then, stage in first_stages(first, between).items():
                    best[then] = np.minimum(self._join(stage, rest), best.get(then, np.inf))
        return best

    def _join(self, first: Floats, rest: Floats) -> Floats:
        """Of a stage and what stands behind it, the slower; by the best place between."""
        self.at.check()
        self.programme.work += CALL + 6 * first.size
        if rest.ndim == 1:
            row: Floats = np.maximum(first, rest).min(axis=1)
            return row
        joined = np.full_like(rest, np.inf)
        for start in range(0, len(first), ROWS):
            stages = first[start : start + ROWS]
            cuts = np.flatnonzero(stages.min(axis=0) < np.inf)
            if len(cuts):
                low, high = cuts[0], cuts[-1] + 1
                behind = rest[low:high, low + 1 :]
                end = np.flatnonzero(behind.min(axis=0) < np.inf)[-1:].sum() + 1
                both = np.maximum(stages[:, low:high, None], behind[:, :end])
                both.min(axis=1, out=joined[start : start + ROWS, low + 1 : low + 1 + end])
                self.programme.work += CALL + both.size
        return joined


FirstStages = Callable[[int, int], States]
"""`Tables.stages` or `Tables.leads`."""


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

    @cached_property
    def table(self) -> StageTable:
        """Stages of a whole micro-batch."""
        return self.space.table(self.config.micro_batch_size)

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """Levels of the machine."""
        return list_tiers(self.space.topology)

    def place(self, parts: Sequence[NestedStage]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """By stage, the number of layers before its end, and the ranks of its replicas."""
        ends = tuple(self.table.cut_points[end] for part in parts for _, end, _ in part.flat())
        return ends, tuple(place_parts(parts, self.tiers))

    @cached_property
    def instance(self) -> Instance:
        """What the dynamic programme plans with."""
        space, size = self.space, self.config.micro_batch_size
        recompute = 0 if self.config.recompute in ("never", "by_stage") else 1
        firsts = {
            kind: rank
            for rank in reversed(range(space.topology.gpus))
            for kind in [space.topology.device(rank)]
        }
        groups = [space.replica_group(size, [rank]) for rank in firsts.values()]
        # A global batch on the slowest kind of device; what recomputes, computes twice.
        seconds = np.maximum.reduce([(1 + recompute) * group.forward + group.backward for group in groups])
        unlimited = self._limit == inf and self.full_space.fits_someone(size, 1)
        return Instance(
            seconds=np.where(space.usable, seconds, np.inf),
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
    def _limit(self) -> float:
        return self.space.limit(range(self.space.topology.gpus))

    def versions(self, behind: int) -> int:
        """Weight versions of a stage with so many behind it."""
        own = find_schedule(self.config.schedule)
        return int(own.weight_versions(0, behind + 1, self.config.micro_batches))

    def _fits(self, replicas: int, behind: int) -> Bools:
        own = find_schedule(self.config.schedule)
        in_flight = int(own.in_flight(0, behind + 1, self.config.micro_batches))
        fitting: Bools = in_flight <= self._room(replicas)
        return fitting

    def _room(self, replicas: int) -> Floats:
        """How many micro-batches each stage may hold on so many devices; negative: none. Where each has a
        version of the weights, it counts as what the micro-batch holds. All devices count as the kind with
        the least memory."""
        if replicas not in self._rooms:
            mode, room = self.config.recompute, np.full(self.table.valid.shape, -1.0)
            modes: tuple[Recompute, ...] = ("never", "always") if mode == "by_stage" else (mode,)
            if self.full_space.fits_someone(self.config.micro_batch_size, replicas):
                needs = [partial(self._need, replicas, own) for own in modes]
                room = np.maximum.reduce([room, *(most_within(self._limit, need) for need in needs)])
            self._rooms[replicas] = room
        return self._rooms[replicas]

    def _need(self, replicas: int, recompute: Recompute, in_flight: float, moment: Moment) -> Floats:
        """Bytes of every stage on one of its replicas, with so many micro-batches in flight."""
        space = self.space
        least = min(space.topology.kinds, key=lambda kind: kind.memory_bytes or inf)
        options: LedgerOptions = {
            **ledger_options(least, space.dtype, space.number_bytes, space.zero),
            "weight_versions": self.versions(int(in_flight) - 1),
            "moment": moment,
        }
        table = space.table(divide_batch(self.config.micro_batch_size, replicas))
        return table.memory(in_flight, recompute, space.optimizer, replicas, **options)


def _propose(recurrence: Recurrence, problem: Problem) -> Iterator[Proposal]:
    """Yield the partition with the shortest bottleneck of every configuration, where one fits, under the
    requested schedule.

    A runtime that runs no replicas, or the same number everywhere, gets one device a stage. In a long chain
    only some cuts are tried: tables of all its stages would be too large.
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
    best of all; else the depth is raised.
    """
    spent = 0.0
    while True:
        relaxed = instance if depth >= 0 else replace(instance, fits=None)
        programme = Programme(relaxed, max(depth, 0), limit)
        solution = programme.solution()
        spent += programme.work
        large = [] if solution is None else _too_large(solution, instance)
        if not large:
            return solution, depth, spent
        depth = 0 if depth < 0 else min(large)


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
