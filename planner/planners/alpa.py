"""Alpa's inter-operator pass: stages on submeshes, by the time of the slowest stage.

Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022, section 5. A plan of S stages of t_1 ... t_S seconds and M micro-batches costs t_1 + ... + t_S + (M - 1)
max t. For a t_max a dynamic programme finds the least sum of stages no slower than it, where Alpa tries every
t_max in turn. Here intervals of them are halved: with t_max from a to b a plan costs at least the least sum
under b and (M - 1) a, and an interval is left out where that is no better than the best plan known.

Alpa shares a layer among the devices of a submesh in any way that its inner pass finds; here they are
replicas. As there, transfers between stages are not counted, the gradients' all-reduce counts 1 / M in each
micro-batch, all devices are used, and a stage needs room for the micro-batches in flight on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ..candidate import Proposal
from ..search.space import Space
from ..stage_table import Floats, Indices
from .base import Planner
from .replica_groups import (
    CutPlan,
    MicroBatchChoice,
    cost_replicas,
    group_devices,
    propose_promising,
    size_choices,
)
from .stage_programme import StagePlan, StageRule, Values, least_plans

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS = 64
"""Blocks of layers between which a search may cut."""
QUICK_BLOCKS = 24
"""Blocks in the quick search of all micro-batch sizes."""
TOLERANCE = 0.01
"""A plan that is cheaper by more than this share is not missed."""


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
    tolerance: float = TOLERANCE,
) -> CutPlan | None:
    """The cheapest plan for one micro-batch size on the first `gpus` devices, of so many stages at most; None
    where none fits. More devices than `MOST_GROUPS` stay together in groups, which need replicas."""
    node = min(gpus, space.topology.gpus_per_node)
    each = group_devices(gpus, node)
    sizes = [size for size in submeshes(gpus // each * each, node) if size % each == 0]
    most = min(gpus // each, most_stages or gpus)
    plans = [
        plan
        for own in size_choices(space, sizes)
        if (plan := _Enumeration(space, choice, gpus // each, each, own, most).best(tolerance)) is not None
    ]
    return min(plans, key=lambda plan: plan.seconds, default=None)


class _Enumeration:
    """The plans of at most so many stages on `groups` groups of `each` devices, on submeshes of `sizes`."""

    def __init__(
        self, space: Space, choice: MicroBatchChoice, groups: int, each: int, sizes: Sequence[int], most: int
    ) -> None:
        self.space, self.choice, self.groups, self.each, self.most_stages = space, choice, groups, each, most
        self.works = {
            size // each: cost_replicas(space, choice, range(size))
            for size in sizes
            if size <= choice.size and space.fits_someone(choice.size, size)
        }
        self.seconds = cache(self._seconds)

    def _seconds(self, size: int, in_flight: int) -> Floats:
        """Seconds a micro-batch of every stage on so many groups, inf for what does not fit."""
        work = self.works[size]
        return work.work(in_flight) + work.all_reduce / self.choice.micro_batches

    def best(self, tolerance: float) -> CutPlan | None:
        """The cheapest plan."""
        in_flight = {self.choice.in_flight(to_last) for to_last in range(1, self.most_stages + 1)}
        tables = [self.seconds(size, count) for size in self.works for count in in_flight]
        limits = np.unique(tables)
        limits = limits[np.isfinite(limits) & (limits >= 0)].tolist()
        plan, least = self._least_sum(inf)
        # Intervals of limits, each with the least sum under the last, which was tried.
        rounds, intervals = self.choice.micro_batches - 1, [(0, len(limits) - 1, least)]
        while plan is not None and intervals:
            first, last, least = intervals.pop()
            fastest = rounds * limits[first] + max(least, limits[first])
            if first < last and fastest < plan.seconds * (1 - tolerance):
                middle = (first + last) // 2
                other, most = self._least_sum(limits[middle])
                intervals += [(first, middle, most), (middle + 1, last, least)]
                plan = other if other is not None and other.seconds < plan.seconds else plan
        return plan

    def _least_sum(self, limit: float) -> tuple[CutPlan | None, float]:
        """The plan of the least sum whose stages are no slower than the limit, and the sum."""

        def stage(size: int, to_last: int, _: Indices, later: Values) -> Floats:
            seconds = self.seconds(size, self.choice.in_flight(to_last))
            return np.where(seconds <= limit, seconds, inf) + later[:, :, None]

        self.space.budget.check()
        cut_points, sizes = len(self.space.usable), tuple(self.works)
        plans = least_plans(StageRule(stage), sizes, self.groups, cut_points, self.most_stages)
        best = min(plans, default=None)
        return (None, inf) if best is None else (self._cut_plan(best), best.value)

    def _cut_plan(self, plan: StagePlan) -> CutPlan:
        """The plan on its devices, with its cost."""
        times, recomputes = list[float](), False
        for stage, (at, size) in enumerate(zip(pairwise((0, *plan.ends)), plan.sizes, strict=True)):
            in_flight = self.choice.in_flight(len(plan.ends) - stage)
            times.append(float(self.seconds(size, in_flight)[at]))
            recomputes |= bool(self.works[size].never[at] < in_flight)
        cost = sum(times) + (self.choice.micro_batches - 1) * max(times)
        devices = place_submeshes([size * self.each for size in plan.sizes])
        return CutPlan(plan.ends, devices, cost, recomputes)
