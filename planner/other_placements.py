"""Other devices for the stages of good plans: what the search, which knows a few orders, does not look at.

Of few devices every assignment to the stages of a plan is proposed, up to symmetry: devices of one kind that
no level and no port tells apart are alike, and so are groups of devices that hold the same. Of many devices
the runs of equal neighbours are taken in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, islice, permutations
from math import inf

from ..cost_models.schedules import find_schedule
from ..cost_models.topology import Topology
from .candidate import Proposal, ScoredPlan
from .pipeline_config import SEARCHED
from .problem import Problem
from .search.branch_and_bound import search
from .search.device_classes import Shape, Symmetry, group_path, is_uniform
from .search.placements import REORDERED, make_placement
from .search.space import Space, narrow_space
from .search.stage_recompute import cheapest_mode

FEW = 8
"""Up to so many devices all assignments are tried."""
SHAPES = 2
"""Plans whose stages are given other devices."""
MOST_ASSIGNMENTS = 40_320
"""Of the devices to the stages of a plan: eight of which no two are alike to eight stages."""
MOST_ORDERS = 24
"""Of the devices, in which stages take them one run after another."""
MOST_ENTRIES = 4_000
"""Devices times blocks between cuts times orders that are searched along."""
WORK = 5e8
"""Of the search along further orders, see `SearchBudget`; less of a time limit below a second."""


def reassign(problem: Problem, plans: Iterable[ScoredPlan], limit: float = inf) -> Iterator[Proposal]:
    """The fastest of these plans on other devices; none where a runtime numbers the devices. Of few devices
    all that fit and whose busiest stage alone leaves a step below `limit` seconds possible."""
    if problem.runtime is not None or is_uniform(problem.topology) or problem.any_devices:
        return
    linear = [plan for plan in plans if plan.config.virtual_stages == 1]
    shapes = dict[tuple[object, ...], Proposal]()
    for plan in sorted(linear, key=lambda plan: plan.step_seconds):
        own = plan.proposal
        shapes.setdefault((own.config, own.ends, own.replicas), own)
    for proposal in islice(shapes.values(), SHAPES):
        for devices in _assignments(problem.space, proposal, limit):
            changed = replace(proposal, devices=devices)
            if problem.allows(changed):
                yield changed


def search_other_orders(problem: Problem, best: ScoredPlan) -> ScoredPlan | None:
    """A faster plan of the best one's schedule, where a short search along other orders of few devices finds
    one."""
    topology = problem.topology
    if problem.runtime is not None or problem.gpus > FEW or is_uniform(topology) or problem.any_devices:
        return None
    orders = {placement.ranks for placement in problem.placements}
    most = min(MOST_ORDERS, MOST_ENTRIES // (problem.gpus * problem.space.chain.max_stages))
    placements = [
        make_placement(REORDERED, topology, order)
        for order in _orders(topology)[: most + len(orders)]
        if order not in orders
    ]
    families = [
        replace(family, placement=placement)
        for family in problem.families
        if family.placement == problem.placements[0] and family.config.schedule == best.config.schedule
        for placement in placements[:most]
    ]
    if not families:
        return None
    work = min(WORK, problem.options.time_limit * WORK)
    return search(problem.space, families, problem.stage_counts, work=work, limit=best.step_seconds).best


def _assignments(space: Space, proposal: Proposal, limit: float) -> Iterator[Shape]:
    """Devices for the stages of a plan."""
    topology = space.topology
    if topology.gpus <= FEW:
        leaves = _Feasibility(narrow_space(space, proposal.ends), proposal, limit)
        yield from _all_assignments(topology, proposal.replicas, leaves if leaves.knows_memory else None)
    else:
        for order in _orders(topology):
            ranks = iter(order)
            yield tuple(tuple(islice(ranks, count)) for count in proposal.replicas)


@dataclass(frozen=True)
class _Feasibility:
    """Whether the stages of a plan can be on some devices, in a step of less than `limit` seconds."""

    space: Space
    proposal: Proposal
    limit: float

    @property
    def knows_memory(self) -> bool:
        """Whether the schedule is one of which `__call__` knows the memory."""
        return self.proposal.config.schedule in SEARCHED

    def __call__(self, shape: Shape) -> bool:
        """Of the devices of the first stages, the last of which fits and, between the first forward that it
        waits for and the backward that waits for it, computes all micro-batches."""
        stage, config = len(shape) - 1, self.proposal.config
        schedule, stages = find_schedule(config.schedule), len(self.proposal.ends)
        in_flight = schedule.in_flight(stage, stages, config.micro_batches)
        group = self.space.replica_group(config.micro_batch_size, shape[-1])
        if cheapest_mode(group, config, stage, stage + 1, in_flight) is None:
            return False
        before = sum(self._once(number, own) for number, own in enumerate(shape[:-1]))
        return before + config.micro_batches * self._once(stage, shape[-1]) < self.limit

    def _once(self, stage: int, devices: Sequence[int]) -> float:
        """Seconds of one micro-batch, forward and backward."""
        group = self.space.replica_group(self.proposal.config.micro_batch_size, devices)
        return float(group.forward[stage, stage + 1] + group.backward[stage, stage + 1])


def _all_assignments(
    topology: Topology,
    replicas: Sequence[int],
    possible: Callable[[Shape], bool] | None = None,
    most: int = MOST_ASSIGNMENTS,
) -> list[Shape]:
    """Of those that symmetry makes alike one, stage by stage, of `possible` first stages only."""
    symmetry, shapes = Symmetry(topology), [Shape()]
    for count in replicas:
        longer = dict[object, Shape]()
        for shape in shapes:
            ranks = {rank for own in shape for rank in own}
            free = [rank for rank in range(topology.gpus) if rank not in ranks]
            for own in combinations(free, count):
                candidate = (*shape, own)
                if possible is None or possible(candidate):
                    longer.setdefault(symmetry.key(candidate), candidate)
            if len(longer) > most:
                break
        shapes = list(longer.values())[:most]
    return shapes


def _orders(topology: Topology) -> list[tuple[int, ...]]:
    """Of all devices: of few all that differ, of many with the runs of equal neighbours in other orders."""
    if topology.gpus <= FEW:
        shapes = _all_assignments(topology, [1] * topology.gpus, most=10 * MOST_ORDERS)
        return [tuple(rank for own in shape for rank in own) for shape in shapes][:MOST_ORDERS]
    runs = [tuple(own) for _, own in groupby(range(topology.gpus), key=lambda r: group_path(topology, r))]
    if len(runs) == 1:
        runs = [tuple(own) for _, own in groupby(range(topology.gpus), key=topology.device)]
    by_speed = sorted(runs, key=lambda run: topology.device(run[0]).seconds_scale)
    some = [runs[::-1], by_speed, by_speed[::-1], *map(list, islice(permutations(runs), MOST_ORDERS))]
    return list(dict.fromkeys(tuple(rank for run in order for rank in run) for order in some))
