"""Alpa's inter-operator pass: stages on submeshes, enumerated by the time of the slowest stage.

Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022, section 5. A plan of S stages of t_1 ... t_S seconds and M micro-batches costs

    t_1 + ... + t_S + (M - 1) max t

For a t_max, a dynamic programme finds the least sum of stages that are no slower. Alpa tries every t_max in
turn. Here intervals of t_max are halved: with a <= t_max <= b, a plan costs at least the least sum under b
plus (M - 1) a, and intervals that cannot beat the best known plan are dropped.

Alpa's inner pass chooses how the devices of a submesh share a layer; here they are replicas. As in Alpa,
transfers between stages are not counted, the gradients' all-reduce counts 1 / M in each micro-batch, all
devices are used, and a stage needs room for its micro-batches in flight.
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
"""Most blocks of layers between which a search may cut."""
QUICK_BLOCKS = 24
"""Most blocks in the quick search of all micro-batch sizes."""
TOLERANCE = 0.01
"""Share by which a plan may be cheaper than the result."""


def _propose(problem: Problem) -> Iterator[Proposal]:
    """Yield the cheapest plan of the most promising micro-batch sizes."""

    def find(space: Space, choice: MicroBatchChoice, _: bool) -> CutPlan | None:
        return find_alpa_plan(space, choice, problem.usable_gpus, problem.stage_counts[-1])

    return propose_promising(problem, BLOCKS, QUICK_BLOCKS, find)


PLANNERS = (Planner("alpa", _propose),)


def submeshes(gpus: int, gpus_per_node: int) -> list[int]:
    """Return the numbers of devices of a stage: powers of two inside a node, whole nodes, all devices.

    If the devices of a node are not a power of two, only powers that divide them are used. Then stages of any
    sizes that add up to all devices fit side by side without crossing nodes.
    """
    node = min(gpus, gpus_per_node)
    powers = [2**power for power in range(node.bit_length()) if gpus == node or node % 2**power == 0]
    return sorted({*powers, *range(node, gpus + 1, node), gpus})


def place_submeshes(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of stages with these numbers of devices.

    The largest stages take theirs first (Alpa, appendix A), so that no stage crosses more nodes than it must.
    """
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
    """Return the cheapest plan for one micro-batch size on the first `gpus` devices.

    More devices than `MOST_GROUPS` stay together in groups, which need replicas.

    Args:
        space: Costs and limits.
        choice: Micro-batches.
        gpus: Number of devices.
        most_stages: Most stages. None for any number.
        tolerance: Share by which another plan may be cheaper.

    Returns:
        The plan; None if none fits.
    """
    node = min(gpus, space.topology.gpus_per_node)
    each = group_devices(gpus, node)
    sizes = [size for size in submeshes(gpus // each * each, node) if size % each == 0]
    most = min(gpus // each, most_stages or gpus)
    plans = [
        plan
        for allowed_sizes in size_choices(space, sizes)
        if (plan := _Enumeration(space, choice, gpus // each, each, allowed_sizes, most).best(tolerance))
        is not None
    ]
    return min(plans, key=lambda plan: plan.seconds, default=None)


class _Enumeration:
    """Plans of at most `most` stages on `groups` groups of `each` devices, on submeshes of `sizes`."""

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
        """Return the seconds per micro-batch of every stage on `size` groups, inf for what does not fit."""
        work = self.works[size]
        return work.work(in_flight) + work.all_reduce / self.choice.micro_batches

    def best(self, tolerance: float) -> CutPlan | None:
        """Return the cheapest plan."""
        in_flight = {self.choice.in_flight(to_last) for to_last in range(1, self.most_stages + 1)}
        tables = [self.seconds(size, count) for size in self.works for count in in_flight]
        limits = np.unique(tables)
        limits = limits[np.isfinite(limits) & (limits >= 0)].tolist()
        plan, least = self._least_sum(inf)
        # Intervals of limits, each with the least sum under its last limit, which was tried.
        rounds, intervals = self.choice.micro_batches - 1, [(0, len(limits) - 1, least)]
        while plan is not None and intervals:
            first, last, least = intervals.pop()
            fastest = rounds * limits[first] + max(least, limits[first])
            if first < last and fastest < plan.seconds * (1 - tolerance):
                middle = (first + last) // 2
                middle_plan, most = self._least_sum(limits[middle])
                intervals += [(first, middle, most), (middle + 1, last, least)]
                plan = middle_plan if middle_plan is not None and middle_plan.seconds < plan.seconds else plan
        return plan

    def _least_sum(self, limit: float) -> tuple[CutPlan | None, float]:
        """Return the plan with the least sum whose stages are no slower than the limit, and the sum."""

        def stage(size: int, to_last: int, _: Indices, later: Values) -> Floats:
            seconds = self.seconds(size, self.choice.in_flight(to_last))
            return np.where(seconds <= limit, seconds, inf) + later[:, :, None]

        self.space.budget.check()
        cut_points, sizes = len(self.space.usable), tuple(self.works)
        plans = least_plans(StageRule(stage), sizes, self.groups, cut_points, self.most_stages)
        best = min(plans, default=None)
        return (None, inf) if best is None else (self._cut_plan(best), best.value)

    def _cut_plan(self, plan: StagePlan) -> CutPlan:
        """Return the plan on its devices, with its cost."""
        times, recomputes = list[float](), False
        for stage, (at, size) in enumerate(zip(pairwise((0, *plan.ends)), plan.sizes, strict=True)):
            in_flight = self.choice.in_flight(len(plan.ends) - stage)
            times.append(float(self.seconds(size, in_flight)[at]))
            recomputes |= bool(self.works[size].never[at] < in_flight)
        cost = sum(times) + (self.choice.micro_batches - 1) * max(times)
        devices = place_submeshes([size * self.each for size in plan.sizes])
        return CutPlan(plan.ends, devices, cost, recomputes)
