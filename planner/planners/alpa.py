"""Alpa's inter-operator pass: stages on submeshes, by the time of the slowest stage.

Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022, section 5. A plan of S stages of t_1 ... t_S seconds and M micro-batches costs t_1 + ... + t_S +
(M - 1) max t. For every t_max in turn a dynamic programme finds the least sum of stages no slower than it;
larger ones are tried until t_max alone costs more than the best plan known.

Alpa shares a layer among the devices of a submesh in any way that its inner pass finds; here they are
replicas. As there, transfers between stages are not counted, the gradients' all-reduce counts 1 / M in each
micro-batch, all devices are used, and a stage needs room for the micro-batches in flight on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..candidate import Proposal
from ..search.space import Space
from ..stage_table import Floats
from .base import Planner
from .replica_groups import (
    CutPlan,
    MicroBatchChoice,
    ReplicaWork,
    cost_replicas,
    count_replicas,
    group_devices,
    propose_promising,
)

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS = 64
"""Blocks of layers between which a search may cut."""
QUICK_BLOCKS = 24
"""Blocks in the quick search of all micro-batch sizes."""
STEPS = 100
"""Number of values of t_max: a plan that is cheaper by more than one part in so many is not missed."""


def _propose(problem: Problem) -> Iterator[Proposal]:
    """The cheapest plan of the most promising micro-batch sizes."""

    def find(space: Space, choice: MicroBatchChoice, _: bool) -> CutPlan | None:
        return find_alpa_plan(space, choice, problem.usable_gpus, problem.stage_counts[-1])

    return propose_promising(problem, BLOCKS, QUICK_BLOCKS, find)


PLANNERS = (Planner("alpa", _propose),)


def submeshes(gpus: int, gpus_per_node: int) -> list[int]:
    """The sizes of a stage's devices: powers of two inside a node, whole nodes, all devices.

    Where a node has no power of two of devices, only those powers that fill it: then stages of any sizes that
    add up to all devices fit side by side, none of a node's across two.
    """
    node = min(gpus, gpus_per_node)
    powers = [2**power for power in range(node.bit_length()) if gpus == node or node % 2**power == 0]
    return sorted({*powers, *range(node, gpus + 1, node), gpus})


def place_submeshes(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of stages of these numbers of devices: the largest stages take theirs first (Alpa, appendix
    A), so that none lies across more nodes than it must."""
    order = sorted(range(len(replicas)), key=lambda stage: -replicas[stage])
    starts, first = [0] * len(replicas), 0
    for stage in order:
        starts[stage] = first
        first += replicas[stage]
    return tuple(tuple(range(at, at + count)) for at, count in zip(starts, replicas, strict=True))


def find_alpa_plan(
    space: Space,
    choice: MicroBatchChoice,
    gpus: int,
    most_stages: int | None = None,
    *,
    steps: int | None = STEPS,
) -> CutPlan | None:
    """The cheapest plan for one micro-batch size on the first `gpus` devices, of so many stages at most; None
    where none fits. More devices than `MOST_GROUPS` stay together in groups, which need replicas.

    steps: as `STEPS`; None to try every t_max there is.
    """
    node = min(gpus, space.topology.gpus_per_node)
    each = group_devices(gpus, node)
    sizes = [size for size in submeshes(gpus // each * each, node) if size % each == 0]
    rule = count_replicas(space)
    choices = {"any": [sizes], "none": [[1]], "equal": [[size] for size in sizes]}[rule]
    most = min(gpus // each, most_stages or gpus)
    plans = [_Enumeration(space, choice, gpus // each, each, own, most).best(steps) for own in choices]
    return min((p for p in plans if p is not None), key=lambda p: p.seconds, default=None)


@dataclass(frozen=True, eq=False)
class _Enumeration:
    """The plans of at most so many stages on `groups` groups of `each` devices, on submeshes of `sizes`."""

    space: Space
    choice: MicroBatchChoice
    groups: int
    each: int
    sizes: Sequence[int]
    most_stages: int

    @cached_property
    def stage_work(self) -> dict[int, ReplicaWork]:
        """What stages cost, by size in groups; none has more devices than there are samples."""
        return {
            size // self.each: cost_replicas(self.space, self.choice, range(size))
            for size in self.sizes
            if size % self.each == 0
            and size <= self.choice.size
            and self.space.fits_someone(self.choice.size, size)
        }

    @cached_property
    def seconds(self) -> list[dict[int, Floats]]:
        """By number of stages to the last one (from 1 on), and by size: seconds of every stage a micro-batch,
        inf for what does not fit. They are the same from where no more micro-batches are in flight."""
        most = min(self.most_stages, self.cut_points - 1)
        in_flight = [self.choice.in_flight(to_last) for to_last in range(1, most + 1)]
        tables = {
            count: {
                size: work.work(count) + work.all_reduce / self.choice.micro_batches
                for size, work in self.stage_work.items()
            }
            for count in set(in_flight)
        }
        return [tables[count] for count in in_flight]

    @property
    def cut_points(self) -> int:
        """Where stages may start or end."""
        return self.space.table(self.space.chain.sizes[0]).blocks + 1

    def best(self, steps: int | None) -> CutPlan | None:
        """The cheapest plan, over t_max ascending."""
        loosest = self._least_sum(np.inf) if self.stage_work else None
        if loosest is None:
            return None
        best, least_sum = loosest
        limits = np.unique([table for tables in self.seconds for table in tables.values()])
        limits = limits[np.isfinite(limits) & (limits >= 0)]
        # The tightest limit under which there is a plan.
        limits = limits[bisect_left(limits, True, key=lambda limit: bool(self._sums(limit)[1])) :]
        count, width = self.choice.micro_batches, 0.0
        if steps is not None:
            tightest, _ = self._least_sum(limits[0]) or loosest
            width = min(best.seconds, tightest.seconds) / count / steps
        for limit in _spaced(limits, width):
            # With this slowest stage a plan costs at least the least sum of any, and at least M such stages.
            if (count - 1) * limit + max(least_sum, limit) >= best.seconds:
                break
            plan, _ = self._least_sum(limit) or loosest
            best = min(best, plan, key=lambda plan: plan.seconds)
        return best

    def _least_sum(self, limit: float) -> tuple[CutPlan, float] | None:
        """The plan of the least sum whose stages are no slower than the limit, and the sum."""
        sums, possible = self._sums(limit)
        if not possible:
            return None
        stages = min(possible, key=lambda count: sums[count][0, self.groups])
        return self._trace_back(sums, stages, limit)

    def _sums(self, limit: float) -> tuple[list[Floats], list[int]]:
        """By stages s, (cut points, groups + 1): the least sum of s stages from a place to the end on so many
        groups; and the numbers of stages that take all layers and all groups."""
        last = np.full((self.cut_points, self.groups + 1), np.inf)
        last[-1, 0] = 0.0
        sums, possible = [last], []
        for tables in self.seconds:
            self.space.budget.check()
            longer = np.full(last.shape, np.inf)
            for size, table in tables.items():
                allowed = np.where(table <= limit, table, np.inf)
                following = sums[-1][:, : self.groups + 1 - size]
                through = (allowed[:, :, None] + following[None, :, :]).min(axis=1)
                longer[:, size:] = np.minimum(longer[:, size:], through)
            if not np.isfinite(longer).any():
                break
            sums.append(longer)
            if np.isfinite(longer[0, self.groups]):
                possible.append(len(sums) - 1)
        return sums, possible

    def _trace_back(self, sums: list[Floats], stages: int, limit: float) -> tuple[CutPlan, float]:
        """The plan behind a least sum."""
        place, groups, ends, replicas, times, recomputes = 0, self.groups, [], [], [], False
        for to_last in range(stages, 0, -1):
            tables, best = self.seconds[to_last - 1], (np.inf, 0, 0)
            for size, table in tables.items():
                if size <= groups:
                    row = np.where(table[place] <= limit, table[place], np.inf)
                    through = row + sums[to_last - 1][:, groups - size]
                    end = int(through.argmin())
                    best = min(best, (float(through[end]), size, end))
            _, size, end = best
            recomputes |= bool(self.stage_work[size].never[place, end] < self.choice.in_flight(to_last))
            times.append(float(tables[size][place, end]))
            ends.append(end)
            replicas.append(size * self.each)
            place, groups = end, groups - size
        cost = sum(times) + (self.choice.micro_batches - 1) * max(times)
        return CutPlan(tuple(ends), place_submeshes(replicas), cost, recomputes), sum(times)


def _spaced(values: Floats, width: float) -> Iterator[float]:
    """The largest of the values in each interval of that width; each value for a width of 0."""
    at = 0
    while at < len(values):
        at = max(int(np.searchsorted(values, values[at] + width, side="right")), at + 1)
        yield float(values[at - 1])
