"""Inputs of planners with replicated stages: micro-batches to try, and costs of stages on replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.errors import InfeasibleError
from ...cost_models.memory import Recompute
from ...cost_models.topology import Topology
from ..balance import balance_table
from ..candidate import Mode, PipelineConfig, Proposal
from ..search.replica_group import ReplicaGroupCosts
from ..search.space import Space, with_cuts
from ..stage_table import Floats
from .base import Ends, can_share, full_shapes

if TYPE_CHECKING:
    from ..problem import Problem

SCHEDULES = ("1f1b", "dapple", "gpipe")
"""Schedules whose micro-batches in flight these planners count, preferred first."""
MOST_GROUPS = 16
"""Most groups of devices. With more devices, neighbours are grouped."""
PROMISING = 3
"""Micro-batch sizes that are searched fully, after a quick search of all."""


@dataclass(frozen=True)
class MicroBatchChoice:
    """Micro-batches of a size under a schedule, and the allowed recomputation modes."""

    schedule: str
    micro_batches: int
    size: int
    modes: tuple[Mode, ...]

    def in_flight(self, to_last: int) -> int:
        """Return the micro-batches in flight on a stage, by the number of stages from it to the last."""
        return self.micro_batches if self.schedule == "gpipe" else min(self.micro_batches, to_last)

    def config(self, recomputes: bool) -> PipelineConfig:
        """Return the configuration of a plan in which some stage recomputes, or none."""
        modes: tuple[Mode, ...] = ("by_stage", *(("always", "except_last") if recomputes else ("never",)))
        mode = next(mode for mode in (*modes, *self.modes) if mode in self.modes)
        return PipelineConfig(self.schedule, mode, self.micro_batches, self.size)

    def propose(
        self,
        space: Space,
        ends: Iterable[int],
        devices: Iterable[tuple[int, ...] | int],
        seconds: float,
        *,
        recomputes: bool = False,
    ) -> Proposal:
        """Return a proposal of stages.

        Args:
            space: Costs and cut points.
            ends: Cut points where the stages end.
            devices: Devices of each stage, or their number to take the next ones.
            seconds: The planner's estimate of the step.
            recomputes: Whether some stage recomputes.
        """
        cut_points, ranks = space.table(space.chain.sizes[0]).cut_points, list[tuple[int, ...]]()
        for stage_devices in devices:
            first = sum(map(len, ranks))
            ranks.append(
                tuple(range(first, first + stage_devices))
                if isinstance(stage_devices, int)
                else stage_devices
            )
        places = tuple(cut_points[end] for end in ends)
        return Proposal(self.config(recomputes), places, tuple(ranks), seconds)


def micro_batch_choices(configs: Sequence[PipelineConfig]) -> list[MicroBatchChoice]:
    """Return a choice for every micro-batch size, with the first of `SCHEDULES` that is allowed."""
    names = {config.schedule for config in configs}
    schedule = next((name for name in SCHEDULES if name in names), None)
    of_schedule = [config for config in configs if config.schedule == schedule]
    sizes = dict.fromkeys((s.micro_batches, s.micro_batch_size) for s in of_schedule)
    return [
        MicroBatchChoice(
            schedule=of_schedule[0].schedule,
            micro_batches=count,
            size=size,
            modes=tuple(dict.fromkeys(s.recompute for s in of_schedule if s.micro_batches == count)),
        )
        for count, size in sizes
    ]


@dataclass(frozen=True)
class CutPlan:
    """Plan of a planner's search.

    Attributes:
        ends: Cut points where the stages end.
        devices: Devices of the stages.
        seconds: The planner's estimate of the step.
        recomputes: Whether some stage recomputes.
    """

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds: float
    recomputes: bool

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of devices by stage."""
        return tuple(map(len, self.devices))


def propose_promising(
    problem: Problem,
    blocks: int,
    quick_blocks: int,
    find: Callable[[Space, MicroBatchChoice, bool], CutPlan | None],
) -> Iterator[Proposal]:
    """Yield the plans of the most promising micro-batch sizes.

    Args:
        problem: What is asked.
        blocks: Most blocks of layers between which a search may cut.
        quick_blocks: The same for a quick search of all micro-batch sizes.
        find: Function that returns the plan for one size, given whether it must be quick.
    """
    space = thin_cuts(problem.space, blocks)
    coarse = thin_cuts(space, quick_blocks)
    quick_plans = [
        (quick_plan.seconds, choice)
        for choice in micro_batch_choices(problem.configs)
        if (quick_plan := find(coarse, choice, True)) is not None
    ]
    for _, choice in sorted(quick_plans, key=lambda pair: pair[0])[:PROMISING]:
        plan = find(space, choice, False)
        if plan is not None:
            yield choice.propose(space, plan.ends, plan.devices, plan.seconds, recomputes=plan.recomputes)


def equal_shapes(problem: Problem) -> Iterator[tuple[MicroBatchChoice, int, int]]:
    """Yield every choice with stages and replicas that use all devices and share it equally."""
    for choice in micro_batch_choices(problem.configs):
        for stages, replicas in full_shapes(problem):
            if can_share(problem, choice.size, replicas):
                yield choice, stages, replicas


def even_stages(tables: Sequence[Floats]) -> Ends | None:
    """Return the ends of stages whose largest cost is least; None if impossible.

    Args:
        tables: By stage, its cost between any two cut points.
    """
    try:
        return tuple(balance_table(tables.__getitem__, len(tables)))
    except InfeasibleError:
        return None


def stage_entries(tables: Sequence[Floats], ends: Ends) -> list[float]:
    """Return the entry of each stage in its table."""
    return [float(table[at]) for table, at in zip(tables, pairwise((0, *ends)), strict=True)]


def misfit_reason(misfit: str, problem: Problem) -> str:
    """Return why a planner proposes nothing: too many layers, its schedules, or `misfit`."""
    if problem.space.is_long:
        return "too many layers"
    return misfit if micro_batch_choices(problem.configs) else f"it only plans {', '.join(SCHEDULES)}"


@dataclass(frozen=True, eq=False)
class ReplicaWork:
    """Stages on some devices, in tables as those of `StageTable`.

    Attributes:
        group: Their costs.
        forward: Forward seconds.
        backward: Backward seconds.
        crossing: (cut points,) bytes that cross each cut point.
        all_reduce: Seconds of an all-reduce of all gradients at once.
        never: Micro-batches that a stage may hold without recomputation, -inf if not allowed.
        always: The same with recomputation.
    """

    group: ReplicaGroupCosts
    forward: Floats
    backward: Floats
    crossing: Floats
    all_reduce: Floats
    never: Floats
    always: Floats

    def work(self, in_flight: int) -> Floats:
        """Return forward and backward seconds with `in_flight` micro-batches; inf if they do not fit."""
        recompute = np.where(
            in_flight <= self.never, 0.0, np.where(in_flight <= self.always, self.forward, np.inf)
        )
        seconds: Floats = self.forward + self.backward + recompute
        return seconds


def cost_replicas(space: Space, choice: MicroBatchChoice, ranks: Sequence[int]) -> ReplicaWork:
    """Return the costs of all stages on these devices, under the recomputation modes of a choice."""
    space.budget.check()
    group = space.replica_group(choice.size, ranks)
    gradients = space.gradients(np.asarray(group.table.stage_bytes.trainable))
    reduced = np.broadcast_to(all_reduce_seconds(space.topology, ranks, gradients), group.forward.shape)
    never, always = (
        np.where(space.usable, group.most_in_flight(mode) if modes & set(choice.modes) else -np.inf, -np.inf)
        for mode, modes in _MODES
    )
    return ReplicaWork(group, group.forward, group.backward, group.table.crossing, reduced, never, always)


_MODES: tuple[tuple[Recompute, set[Mode]], ...] = (
    ("never", {"never", "by_stage"}),
    ("always", {"always", "except_last", "by_stage"}),
)


def size_choices(space: Space, sizes: Sequence[int]) -> list[Sequence[int]]:
    """Return the sizes that stages may have together, one sequence per kind of plan of the runtime."""
    rule = "any" if space.runtime is None else space.runtime.replicas
    if rule == "equal":
        return [[size] for size in sizes]
    return [sizes if rule == "any" else [1]]


def group_devices(gpus: int, gpus_per_node: int, most: int = MOST_GROUPS) -> int:
    """Return the fewest devices per group for at most `most` groups, each in a node or of whole nodes."""
    size = 1
    while gpus // size > most or (gpus_per_node % size and size % gpus_per_node):
        size += 1
    return size


def group_choices(space: Space, gpus: int) -> tuple[int, list[Sequence[int]]]:
    """Group devices for stages on consecutive groups.

    Returns:
        Devices of a group, and the numbers of groups that a stage may have: a sequence for each kind of plan
        that the runtime runs.
    """
    has_replicas = space.runtime is None or space.runtime.replicas != "none"
    size = group_devices(gpus, min(gpus, space.topology.gpus_per_node)) if has_replicas else 1
    return size, size_choices(space, range(1, gpus // size + 1))


class Tier(NamedTuple):
    """A level of bandwidth: number of components, and bytes per second of the links that join them."""

    machines: int
    bandwidth: float


def list_tiers(topology: Topology) -> tuple[Tier, ...]:
    """Return the levels from the innermost.

    A level whose last group has fewer members is planned in the largest groups into which all divide: 12
    devices in nodes of 8 as three groups of 4, joined as nodes are; 9 as single devices. The links are then
    as slow as between nodes, or slower than in reality.
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


def thin_cuts(space: Space, blocks: int) -> Space:
    """Return the space with at most `blocks` blocks between its cuts, of about equal seconds."""
    table = space.table(space.chain.sizes[-1])
    if table.blocks <= blocks:
        return space
    layers = table.costs.forward_seconds + table.costs.backward_seconds
    running = np.append(0.0, np.cumsum(layers))[list(table.cut_points)]
    targets = np.linspace(0, running[-1], blocks + 1)[1:-1]
    points = np.unique(np.searchsorted(running, targets).clip(1, table.blocks - 1))
    cut_after = np.zeros(len(space.chain), dtype=np.bool_)
    cut_after[np.array(table.cut_points)[points] - 1] = True
    cut_after[list(space.limits.must_cut)] = True
    return with_cuts(space, cut_after)
