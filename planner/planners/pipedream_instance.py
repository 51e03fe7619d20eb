"""What PipeDream's dynamic programme plans with: levels of bandwidth, the costs of stages, two recurrences.

Narayanan et al., "PipeDream", SOSP 2019, section 3.1; the recurrence is at the head of pipedream_programme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, inf, isqrt, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Moment, Recompute
from ...cost_models.schedules import find_schedule
from ...cost_models.topology import Topology
from ..pipeline_config import PipelineConfig
from ..search.space import Space, divide_batch
from ..stage_table import StageTable, ledger_options
from .replica_groups import thin_cuts

ENTRIES = 30_000_000
"""Stages times numbers of replicas in the tables of memory: 240 MB."""
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Tier(NamedTuple):
    """A level of bandwidth: so many components, joined by links of so many bytes per second."""

    machines: int
    bandwidth: float


@dataclass(frozen=True)
class Recurrence:
    """What a stage and a cut cost.

    `stage(seconds, weight_bytes, machines, bandwidth)`: of a stage on so many components, by the seconds of
    one of them; at least their part of these. `cut(bytes, machines, bandwidth)`: of what crosses the cut
    before a stage on so many.
    """

    stage: Callable[[Floats, Floats, int, float], Floats]
    cut: Callable[[Floats, int, float], Floats]


def _paper_stage(seconds: Floats, weights: Floats, machines: int, bandwidth: float) -> Floats:
    shared: Floats = np.maximum(seconds, 2 * (machines - 1) * weights / bandwidth) / machines
    return shared


def _paper_cut(crossing: Floats, machines: int, bandwidth: float) -> Floats:  # noqa: ARG001 - as of others
    return 2 * crossing / bandwidth


PAPER = Recurrence(_paper_stage, _paper_cut)


def _published_stage(seconds: Floats, weights: Floats, machines: int, bandwidth: float) -> Floats:
    return (seconds + 4 * (machines - 1) * weights / (bandwidth * machines)) / machines


def _published_cut(crossing: Floats, machines: int, bandwidth: float) -> Floats:
    return 2 * crossing / (bandwidth * machines)


PUBLISHED = Recurrence(_published_stage, _published_cut)


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

    @property
    def running(self) -> Floats:
        """(n + 1,): seconds of the layers before each place."""
        last = self.last
        blocks = self.seconds[np.arange(last), np.arange(1, last + 1)]
        return np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(blocks), blocks, 0.0))])

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


class Bottleneck(NamedTuple):
    """The shortest bottleneck, and the stages of the outermost level."""

    seconds: float
    parts: tuple[NestedStage, ...]


def list_tiers(topology: Topology) -> tuple[Tier, ...]:
    """The levels from the innermost.

    A level whose last group has fewer members is planned in the largest groups that all are made of: 12
    devices in nodes of 8 as three groups of 4, joined as nodes are; 9 as single devices. The links are then
    as slow as between nodes, or slower than they are.
    """
    tiers, inner, whole = list[Tier](), 1, 1
    for level in topology.levels:
        whole = topology.gpus if level.size is None else min(whole * level.size, topology.gpus)
        group = gcd(whole, topology.gpus)
        if group > inner:
            tiers.append(Tier(group // inner, level.link.bandwidth_bytes_per_second))
            inner = group
        if whole == topology.gpus:
            break
    if not tiers:
        tiers = [Tier(1, topology.levels[0].link.bandwidth_bytes_per_second)]
    return tuple(tiers)


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

    def bytes(self, replicas: int, behind: int, recompute: Recompute, moment: Moment = "any") -> Floats:
        """What every stage needs on one of its replicas, with so many stages behind it."""
        options: LedgerOptions = {
            **self.ledger,
            "weight_versions": self.versions(behind),
            "moment": moment,
        }
        per_replica_batch = divide_batch(self.size, replicas)
        return self.space.table(per_replica_batch).memory(
            self.in_flight(behind), recompute, self.space.optimizer, replicas, **options
        )

    def _fits(self, replicas: int, behind: int) -> Bools:
        fitting: Bools = self.in_flight(behind) <= self._room(replicas)
        return fitting

    def _room(self, replicas: int) -> Floats:
        """How many micro-batches each stage may hold on so many devices, as a fraction; negative: none. The
        ledger is a line of them, also where each has a version of the weights."""
        if replicas not in self._rooms:
            room = np.full(self.table.valid.shape, -1.0)
            if self.full_space.fits_someone(self.size, replicas):
                for mode in self.modes:
                    at = [self._most_in_flight(replicas, mode, moment) for moment in ("passes", "step")]
                    room = np.maximum(room, np.minimum(*at))
            self._rooms[replicas] = room
        return self._rooms[replicas]

    def _most_in_flight(self, replicas: int, mode: Recompute, moment: Moment) -> Floats:
        one, other = (self.bytes(replicas, behind, mode, moment) for behind in (0, 1))
        if self.in_flight(1) == self.in_flight(0):
            return np.where(one <= self.limit, np.inf, -1.0)
        each = other - one
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(each > 0, (self.limit - one) / each, np.where(one <= self.limit, np.inf, -np.inf))
        # A stage that fits to the byte may not be lost to rounding.
        most: Floats = (self.in_flight(0) + more) * (1 + 1e-12)
        return most
