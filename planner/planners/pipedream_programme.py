"""PipeDream's recurrence, and the tables that are filled of it.

Narayanan et al., "PipeDream", SOSP 2019, section 3.1. Level k joins m_k components by links of bandwidth B_k;
a component of the innermost level is a device, one of level k is all of level k-1. With C the seconds and W
the weight bytes of the layers i..j, and a_s the bytes that cross the cut at s:

    A^0(i..j)    = C(i..j)
    T^k(i..j, m) = max(A^{k-1}(i..j), 2(m-1) W(i..j) / B_k) / m       a stage on m components
    A^k(i..j, m) = min(T^k(i..j, m), min over s, m' of max(T^k(i..s, m'), 2 a_s / B_k, A^k(s..j, m-m')))

A^{k-1} without a number is that of a whole component. Where fewer machines are faster the others stay idle,
unless all are to be used. `pipedream_planner` runs it.

The tables are filled from the last layer back. So a stage is placed when the number of stages behind it is
known, which its memory depends on: tables are kept apart by that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..stage_table import Floats
from .replica_groups import Tier

Bools = npt.NDArray[np.bool_]
CALL = 5_000
"""What a call of numpy counts for in `work`, a comparison for one: a nanosecond or two."""
ROWS = 16
"""Of a table that are compared in one call."""


class Recurrence:
    """What a stage on so many components costs, by the seconds of one of them: at least their part of these.
    And what crosses the cut before it. As the paper has them."""

    def stage(self, seconds: Floats, weight_bytes: Floats, machines: int, bandwidth: float) -> Floats:
        shared: Floats = np.maximum(seconds, 2 * (machines - 1) * weight_bytes / bandwidth) / machines
        return shared

    def cut(self, crossing: Floats, machines: int, bandwidth: float) -> Floats:  # noqa: ARG002 - of others
        return 2 * crossing / bandwidth


class _Published(Recurrence):
    """As the authors' code has them."""

    def stage(self, seconds: Floats, weight_bytes: Floats, machines: int, bandwidth: float) -> Floats:
        return (seconds + 4 * (machines - 1) * weight_bytes / (bandwidth * machines)) / machines

    def cut(self, crossing: Floats, machines: int, bandwidth: float) -> Floats:
        return 2 * crossing / (bandwidth * machines)


PAPER, PUBLISHED = Recurrence(), _Published()


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
        self._masks: dict[tuple[int, int], int] = {}
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
        kind, fits = self._mask(replicas, behind), self.at.fits
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
        if (replicas, behind) not in self._masks:
            own = self.at.fits(replicas, behind)[np.isfinite(self.at.seconds)]
            kind = 0 if own.all() else -1 if not own.any() else 1
            if kind == 1:
                kind = self._kinds.setdefault(np.packbits(own).tobytes(), len(self._kinds) + 1)
            self._masks[replicas, behind] = kind
        return self._masks[replicas, behind]

    def _signature(self, level: int, copies: int, behind: int) -> tuple[int, ...]:
        """What the values of a component depend on, of the copies that stand side by side."""
        replicas = {copies}
        for tier in self.at.tiers[: level + 1]:
            replicas = {own * machines for own in replicas for machines in range(1, tier.machines + 1)}
        return tuple(self._mask(own, b) for own in sorted(replicas) for b in range(behind, self.depth + 1))


class Tables:
    """The tables of a level, of which `copies` stand side by side with so many stages behind, filled as they
    are needed; `column`: for stages up to that place alone; `scale`: as if of so many copies."""

    def __init__(
        self, programme: Programme, level: int, copies: int, behind: int, column: int | None, scale: int = 1
    ) -> None:
        self.programme, self.at, self.tier = programme, programme.at, programme.at.tiers[level]
        self.level, self.copies, self.behind, self.column, self.scale = level, copies, behind, column, scale
        self._stages: dict[tuple[int, int], States] = {}
        self._leads: dict[tuple[int, int], States] = {}
        self._led: list[States] = [{}]

    def stages(self, machines: int, behind: int) -> States:
        """T: a stage on so many components with so many stages behind it."""
        key = (machines, behind)
        if key not in self._stages:
            inside = self.programme.whole(self.level - 1, self.copies * machines, behind)
            stage, bandwidth = self.at.recurrence.stage, self.tier.bandwidth
            tables = {then: stage(own, self.at.weights, machines, bandwidth) for then, own in inside.items()}
            self._stages[key] = self.programme.of_use(tables, self.scale)
        return self._stages[key]

    def leads(self, machines: int, behind: int) -> States:
        """The same with the cut before it, which the stage receives."""
        key = (machines, behind)
        if key not in self._leads:
            cut = self.at.recurrence.cut(self.at.crossing, machines, self.tier.bandwidth)[:, None]
            tables = {then: np.maximum(stage, cut) for then, stage in self.stages(machines, behind).items()}
            self._leads[key] = self.programme.of_use(tables, self.scale)
        return self._leads[key]

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
