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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from .pipedream_instance import Bottleneck, Floats, Instance, NestedStage

CALL = 5_000
"""What a call of numpy counts for in `work`, a comparison for one: a nanosecond or two."""
BLOCK = 128
"""Entries of rows that are compared in one call, where they are short."""


@dataclass(frozen=True, eq=False)
class SecondsTable:
    """(n + 1, n + 1), or (n + 1,) where all end at one place; inf where there is no plan."""

    table: Floats

    @cached_property
    def _extent(self) -> tuple[list[int], list[int]]:
        """By row, the first finite column and the one after the last; 0 where there is none."""
        finite = np.isfinite(self.table)
        lows = finite.argmax(axis=1)
        highs = np.where(finite.any(axis=1), finite.shape[1] - finite[:, ::-1].argmax(axis=1), 0)
        return lows.tolist(), highs.tolist()

    @cached_property
    def reach(self) -> list[int]:
        """By place, the column after the last that a row before it has."""
        return [0, *accumulate(self._extent[1], max)]

    @cached_property
    def bands(self) -> list[tuple[int, int, int, int]]:
        """Blocks of rows (start, stop) with the columns (low, high) that hold all they have: few rows where
        they are long."""
        return list(_bands(*self._extent))


def _bands(lows: list[int], highs: list[int]) -> Iterator[tuple[int, int, int, int]]:
    start = 0
    while start < len(lows):
        stop, low, high = start, len(lows), 0
        while stop < len(lows) and (stop == start or (stop - start + 1) * (highs[stop] - low) <= BLOCK):
            if highs[stop]:
                low, high = min(low, lows[stop]), max(high, highs[stop])
            stop += 1
        if high:
            yield start, stop, low, high
        start = stop


States = dict[int, SecondsTable]
"""Seconds by the number of stages behind the one that comes next, counted up to the depth."""


class Programme:
    """The programme that counts the stages behind up to `depth`: that many stands for more, too.

    Stages slower than `limit` are dropped; of those that stand side by side in so many copies, stages that
    many times as slow, as a stage on m components takes at least the m-th part of each. Tables of long
    chains become bands beside the diagonals. `work`: how much was compared.
    """

    def __init__(self, instance: Instance, depth: int, limit: float) -> None:
        self.at, self.depth, self.limit = instance, depth, limit * (1 + 1e-9)
        self.work = 0
        self._states: dict[tuple[int, int, int, tuple[int, ...]], States] = {}
        self._masks: dict[tuple[int, int], int] = {}
        self._kinds: dict[bytes, int] = {}
        self._seconds: dict[int, SecondsTable] = {}

    def solution(self) -> Bottleneck | None:
        """The shortest bottleneck of the whole chain and its stages; None where no plan fits the limits."""
        top, last = len(self.at.tiers) - 1, self.at.last
        machines = self.at.tiers[top].machines
        tables = self.tables(top, 1, 0, last)
        ends = {then: float(seconds.table[0]) for then, seconds in tables.led(machines).items()}
        if not ends:
            return None
        then = min(ends, key=lambda b: (ends[b], b))
        if not np.isfinite(ends[then]):
            return None
        stand = _Stand(0, then, machines, 0, last)
        return Bottleneck(ends[then], tuple(self._behind_a_cut(tables, stand)))

    def tables(self, level: int, copies: int, behind: int, column: int | None, scale: int = 0) -> Tables:
        """Of a level, of which `copies` stand side by side with so many stages behind; `scale`: of more."""
        return Tables(self, level, copies, behind, column, scale or copies)

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
            self._states[key] = self.tables(level, copies, behind, None, scale).whole()
        return self._states[key]

    def _device(self, replicas: int, behind: int) -> States:
        kind = self._mask(replicas, behind)
        if kind < 0:
            return {}
        if kind not in self._seconds:
            fits = self.at.fits
            fitting = True if kind == 0 or fits is None else fits(replicas, behind)
            self._seconds[kind] = SecondsTable(np.where(fitting, self.at.seconds, np.inf))
        return {min(behind + 1, self.depth): self._seconds[kind]}

    def of_use(self, states: dict[int, Floats], scale: int) -> States:
        """Without what is slower than the limit, or no faster than with fewer stages behind."""
        if np.isinf(self.limit) and len(states) < 2:
            return {then: SecondsTable(own) for then, own in states.items()}
        best: float | Floats = self.limit * scale
        useful: States = {}
        for then in sorted(states):
            self.work += 4 * states[then].size
            own = np.where(states[then] <= best, states[then], np.inf)
            if np.isfinite(own).any():
                useful[then] = SecondsTable(own)
                best = np.minimum(best, np.nextafter(own, -np.inf))
        return useful

    # The plan that has the values

    def _behind_a_cut(self, tables: Tables, at: _Stand) -> list[NestedStage]:
        """The stages of the value of `tables.led` there."""
        value = tables.led(at.machines)[at.then].table[at.start]
        machines = at.machines
        while machines > 1 and not self.at.use_all and _has(tables.led(machines - 1), at, value):
            machines -= 1
        at = at._replace(machines=machines)
        whole = tables.leads(machines, at.after).get(at.then)
        if whole is not None and whole.table[at.start, at.end] == value:
            return [self._part(tables, at)]
        return self._divide_stages(tables, at, value, charged=True)

    def _inside(self, level: int, copies: int, at: _Stand) -> list[NestedStage]:
        """The stages of the value of `whole` there."""
        tables, most = self.tables(level, copies, at.after, at.end), self.at.tiers[level].machines
        value = self.whole(level, copies, at.after)[at.then].table[at.start, at.end]
        for machines in range(most if self.at.use_all else 1, most + 1):
            whole = tables.stages(machines, at.after).get(at.then)
            if whole is not None and whole.table[at.start, at.end] == value:
                return [self._part(tables, at._replace(machines=machines))]
        return self._divide_stages(tables, at._replace(machines=most), value, charged=False)

    def _divide_stages(self, tables: Tables, at: _Stand, value: float, *, charged: bool) -> list[NestedStage]:
        """The first stage, the cut before it `charged` or not, and the stages behind it."""
        for first in range(at.machines - 1, 0, -1):
            rest_machines = at.machines - first
            for between, rest in tables.led(rest_machines).items():
                own = (tables.leads if charged else tables.stages)(first, between).get(at.then)
                if own is None:
                    continue
                cuts = np.flatnonzero(np.maximum(own.table[at.start], rest.table) == value)
                if len(cuts):
                    cut = int(cuts[0])
                    part = self._part(tables, _Stand(between, at.then, first, at.start, cut))
                    behind = _Stand(at.after, between, rest_machines, cut, at.end)
                    return [part, *self._behind_a_cut(tables, behind)]
        raise AssertionError("a value that no plan has")

    def _part(self, tables: Tables, at: _Stand) -> NestedStage:
        level, copies = tables.level - 1, tables.copies * at.machines
        inner = self._inside(level, copies, at) if tables.level else []
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


class _Stand(NamedTuple):
    """Stages of the cut points `start` to `end` on so many components, at most; `after` the last of them so
    many stages, and counted behind the next before them, `then`."""

    after: int
    then: int
    machines: int
    start: int
    end: int


def _has(states: States, at: _Stand, value: float) -> bool:
    return at.then in states and bool(states[at.then].table[at.start] == value)


class Tables:
    """The tables of a level with so many stages behind, filled as they are needed."""

    def __init__(
        self, programme: Programme, level: int, copies: int, behind: int, column: int | None, scale: int
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
            tables = {
                then: self.at.recurrence.stage(own.table, self.at.weights, machines, self.tier.bandwidth)
                for then, own in inside.items()
            }
            self._stages[key] = self.programme.of_use(tables, self.scale)
        return self._stages[key]

    def leads(self, machines: int, behind: int) -> States:
        """The same with the cut before it, which the stage receives."""
        key = (machines, behind)
        if key not in self._leads:
            cut = self.at.recurrence.cut(self.at.crossing, machines, self.tier.bandwidth)[:, None]
            own = self.stages(machines, behind)
            tables = {then: np.maximum(stage.table, cut) for then, stage in own.items()}
            self._leads[key] = self.programme.of_use(tables, self.scale)
        return self._leads[key]

    def led(self, machines: int) -> States:
        """Stages on so many components, or at most so many, with the cut before the first of them."""
        while len(self._led) <= machines:
            self._led.append(self._next())
        return self._led[machines]

    def _next(self) -> States:
        machines, best = len(self._led), dict[int, Floats]()
        if not self.at.use_all:
            best = {then: own.table for then, own in self._led[-1].items()}
        for then, lead in self.leads(machines, self.behind).items():
            _lower(best, then, lead.table if self.column is None else lead.table[:, self.column])
        for first in range(1, machines):
            for between, rest in self._led[machines - first].items():
                for then, lead in self.leads(first, between).items():
                    _lower(best, then, self._join_tables(lead, rest))
        return self.programme.of_use(self._in_room(best, machines), self.scale)

    def _in_room(self, best: dict[int, Floats], machines: int) -> dict[int, Floats]:
        """Of the whole chain, without what leaves too few machines for the layers before it."""
        if self.column != self.at.last or self.level < len(self.at.tiers) - 1:
            return best
        devices = (self.tier.machines - machines) * prod(tier.machines for tier in self.at.tiers[:-1])
        enough = self.at.running <= self.programme.limit * devices if devices else self.at.running <= 0
        return {then: np.where(enough, own, np.inf) for then, own in best.items()}

    def whole(self) -> States:
        """A of all components, without the cut before them."""
        best: dict[int, Floats] = {}
        most = self.tier.machines
        for first in range(1, most + 1):
            if first == most or not self.at.use_all:
                for then, stage in self.stages(first, self.behind).items():
                    _lower(best, then, stage.table)
            for between, rest in self.led(most - first).items():
                for then, stage in self.stages(first, between).items():
                    _lower(best, then, self._join_tables(stage, rest))
        return self.programme.of_use(best, self.scale)

    def _join_tables(self, first: SecondsTable, rest: SecondsTable) -> Floats:
        """Of a stage and what stands behind it, the slower; by the best place between."""
        programme, behind = self.programme, rest.table
        self.at.check()
        programme.work += CALL + 6 * first.table.size
        if behind.ndim == 1:
            row: Floats = np.maximum(first.table, behind).min(axis=1)
            return row
        joined: Floats = np.full(behind.shape, np.inf)
        for start, stop, low, high in first.bands:
            end = rest.reach[high]
            if end > low + 1:
                programme.work += CALL + (stop - start) * (high - low) * (end - low)
                both = np.maximum(
                    first.table[start:stop, low:high, None], behind[None, low:high, low + 1 : end]
                )
                both.min(axis=1, out=joined[start:stop, low + 1 : end])
        return joined


def _lower(best: dict[int, Floats], then: int, values: Floats) -> None:
    best[then] = np.minimum(best[then], values) if then in best else values
