"""Inputs of the planners with replicated stages: micro-batches to try, and costs of stages on replicas."""

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
"""Those whose stages hold a number of micro-batches that these planners know, the preferred first."""
MOST_GROUPS = 16
"""Of devices. Where there are more devices, neighbours stay together."""
PROMISING = 3
"""Micro-batch sizes that are searched fully, after a quick search of all."""


@dataclass(frozen=True)
class MicroBatchChoice:
    """Micro-batches of a size under a schedule, and the modes of recomputation that may be used."""

    schedule: str
    micro_batches: int
    size: int
    modes: tuple[Mode, ...]

    def in_flight(self, to_last: int) -> int:
        """Micro-batches in flight on a stage, where so many stages go from it to the last, both counted."""
        return self.micro_batches if self.schedule == "gpipe" else min(self.micro_batches, to_last)

    def config(self, recomputes: bool) -> PipelineConfig:
        """For a plan in which some stage recomputes, or none."""
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
        """Make a proposal of stages that end at these cut points, on devices or on the next so many
        devices."""
        cut_points, ranks = space.table(space.chain.sizes[0]).cut_points, list[tuple[int, ...]]()
        for own in devices:
            first = sum(map(len, ranks))
            ranks.append(tuple(range(first, first + own)) if isinstance(own, int) else own)
        places = tuple(cut_points[end] for end in ends)
        return Proposal(self.config(recomputes), places, tuple(ranks), seconds)


def micro_batch_choices(configs: Sequence[PipelineConfig]) -> list[MicroBatchChoice]:
    """One for every micro-batch size of the configurations, with the first of `SCHEDULES` that they have."""
    names = {config.schedule for config in configs}
    schedule = next((name for name in SCHEDULES if name in names), None)
    own = [config for config in configs if config.schedule == schedule]
    sizes = dict.fromkeys((s.micro_batches, s.micro_batch_size) for s in own)
    return [
        MicroBatchChoice(
            schedule=own[0].schedule,
            micro_batches=count,
            size=size,
            modes=tuple(dict.fromkeys(s.recompute for s in own if s.micro_batches == count)),
        )
        for count, size in sizes
    ]


@dataclass(frozen=True)
class CutPlan:
    """Plan of a search: by stage the cut point it ends at and its devices; the seconds of a step as the
    planner estimates them, and whether some stage recomputes."""

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds: float
    recomputes: bool

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage, its number of devices."""
        return tuple(map(len, self.devices))


def propose_promising(
    problem: Problem,
    blocks: int,
    quick_blocks: int,
    find: Callable[[Space, MicroBatchChoice, bool], CutPlan | None],
) -> Iterator[Proposal]:
    """Propose the plans of the most promising micro-batch sizes.

    Args:
        problem: What is asked.
        blocks: Blocks of layers between which a search may cut.
        quick_blocks: The same for a quick search of all micro-batch sizes.
        find: Returns the plan for one of them, and takes whether it is to be quick.
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
    """Yield every choice with the numbers of stages and of replicas of each that together are all devices and
    share its micro-batches equally."""
    for choice in micro_batch_choices(problem.configs):
        for stages, replicas in full_shapes(problem):
            if can_share(problem, choice.size, replicas):
                yield choice, stages, replicas


def even_stages(tables: Sequence[Floats]) -> Ends | None:
    """Ends of stages, by stage with a table of what it costs, whose largest cost is least; None where none
    may be."""
    try:
        return tuple(balance_table(tables.__getitem__, len(tables)))
    except InfeasibleError:
        return None


def stage_entries(tables: Sequence[Floats], ends: Ends) -> list[float]:
    """By stage, the entry of its table."""
    return [float(table[at]) for table, at in zip(tables, pairwise((0, *ends)), strict=True)]


def misfit_reason(misfit: str, problem: Problem) -> str:
    """Why a planner of such micro-batches proposes nothing: the layers, or its schedules, or the `misfit`."""
    if problem.space.is_long:
        return "too many layers"
    return misfit if micro_batch_choices(problem.configs) else f"it knows only {', '.join(SCHEDULES)}"


@dataclass(frozen=True, eq=False)
class ReplicaWork:
    """Stages on some devices, in tables as of `StageTable`.

    Attributes:
        group: Their costs.
        forward: Forward seconds.
        backward: Backward seconds.
        crossing: (cut points,): bytes that cross each cut.
        all_reduce: Seconds of an all-reduce of all gradients at once.
        never: How many micro-batches a stage may hold without recomputation, -inf where that may not be.
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
        """Forward and backward seconds with so many micro-batches held, inf for stages that do not fit."""
        recompute = np.where(
            in_flight <= self.never, 0.0, np.where(in_flight <= self.always, self.forward, np.inf)
        )
        seconds: Floats = self.forward + self.backward + recompute
        return seconds


def cost_replicas(space: Space, choice: MicroBatchChoice, ranks: Sequence[int]) -> ReplicaWork:
    """Cost all stages on these devices, under the modes of recomputation of a choice."""
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
    """Of these sizes those that stages may have together: a sequence for each kind of plan that the runtime
    runs."""
    rule = "any" if space.runtime is None else space.runtime.replicas
    if rule == "equal":
        return [[size] for size in sizes]
    return [sizes if rule == "any" else [1]]


def group_devices(gpus: int, gpus_per_node: int, most: int = MOST_GROUPS) -> int:
    """How many neighbouring devices stay together: the fewest that make at most so many groups, each in one
    node or of whole nodes."""
    each = 1
    while gpus // each > most or (gpus_per_node % each and each % gpus_per_node):
        each += 1
    return each


def group_choices(space: Space, gpus: int) -> tuple[int, list[Sequence[int]]]:
    """Group devices for stages on consecutive groups.

    Returns:
        Devices of a group, and the numbers of groups that a stage may have: a sequence for each kind of plan
        that the runtime runs.
    """
    has_replicas = space.runtime is None or space.runtime.replicas != "none"
    each = group_devices(gpus, min(gpus, space.topology.gpus_per_node)) if has_replicas else 1
    return each, size_choices(space, range(1, gpus // each + 1))


class Tier(NamedTuple):
    """A level of bandwidth: so many components, joined by links of so many bytes per second."""

    machines: int
    bandwidth: float


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


def thin_cuts(space: Space, blocks: int) -> Space:
    """The space with at most so many blocks between its cuts, of about the same seconds."""
    table = space.table(space.chain.sizes[-1])
    if table.blocks <= blocks:
        return space
    layers = table.costs.forward_seconds + table.costs.backward_seconds
    before = np.append(0.0, np.cumsum(layers))[list(table.cut_points)]
    targets = np.linspace(0, before[-1], blocks + 1)[1:-1]
    points = np.unique(np.searchsorted(before, targets).clip(1, table.blocks - 1))
    cut_after = np.zeros(len(space.chain), dtype=np.bool_)
    cut_after[np.array(table.cut_points)[points] - 1] = True
    cut_after[list(space.limits.must_cut)] = True
    return with_cuts(space, cut_after)
