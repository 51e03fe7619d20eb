"""Other devices for the stages of good plans: what the search, which knows a few orders, does not look at.

Of few devices every assignment to the stages of a plan is proposed, up to symmetry: devices of one kind that
no level tells apart are alike, and so are groups of devices that hold the same. Of many devices the runs of
equal neighbours are taken in other orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby, islice, permutations

from ..cost_models.topology import Topology
from .candidate import Proposal, ScoredPlan
from .problem import Problem
from .search.branch_and_bound import search
from .search.placements import REORDERED, placement_of
from .symmetry import Shape, Symmetry, path_of

FEW = 8
"""Devices of which all assignments are looked at."""
SHAPES = 2
"""Plans whose stages are given other devices."""
MOST_ASSIGNMENTS = 400
"""Of the devices to the stages of a plan."""
MOST_ORDERS = 24
"""Of the devices, in which stages take them one run after another."""
MOST_ENTRIES = 4_000
"""Devices times blocks between cuts times orders that are searched along."""
WORK = 5e8
"""Of the search along further orders, see `search.work.Work`; less of a time limit below a second."""


def reassigned(problem: Problem, plans: Iterable[ScoredPlan]) -> Iterator[Proposal]:
    """The fastest of these plans on other devices; none where a runtime numbers the devices."""
    if problem.runtime is not None or _is_uniform(problem.topology):
        return
    linear = [plan for plan in plans if plan.config.virtual_stages == 1]
    shapes = dict[tuple[object, ...], Proposal]()
    for plan in sorted(linear, key=lambda plan: plan.step_seconds):
        own = plan.proposal
        shapes.setdefault((own.config, own.ends, own.replicas), own)
    for proposal in islice(shapes.values(), SHAPES):
        for devices in _assignments(problem.topology, proposal.replicas):
            changed = replace(proposal, devices=devices)
            if problem.allows(changed):
                yield changed


def along_other_orders(problem: Problem, best: ScoredPlan) -> ScoredPlan | None:
    """A faster plan of the best one's schedule, where a short search along other orders of few devices finds
    one."""
    topology = problem.topology
    if problem.runtime is not None or problem.gpus > FEW or _is_uniform(topology):
        return None
    known = {placement.ranks for placement in problem.placements}
    most = min(MOST_ORDERS, MOST_ENTRIES // (problem.gpus * problem.space.chain.max_stages))
    placements = [
        placement_of(REORDERED, topology, order)
        for order in _orders(topology)[: most + len(known)]
        if order not in known
    ]
    families = [
        replace(family, placement=placement)
        for family in problem.families
        if family.placement == problem.placements[0] and family.config.schedule == best.config.schedule
        for placement in placements[:most]
    ]
    if not families:
        return None
    work = min(WORK, problem.wishes.time_limit * WORK)
    return search(problem.space, families, problem.stage_counts, work=work, limit=best.step_seconds).best


def _is_uniform(topology: Topology) -> bool:
    """Whether it makes no difference which devices the stages take."""
    return len({path_of(topology, rank) for rank in range(topology.gpus)}) == len(topology.kinds) == 1


def _assignments(topology: Topology, replicas: Sequence[int]) -> Iterator[Shape]:
    """Devices for stages of so many replicas."""
    if topology.gpus <= FEW:
        yield from _all_assignments(topology, replicas)
    else:
        for order in _orders(topology):
            ranks = iter(order)
            yield tuple(tuple(islice(ranks, count)) for count in replicas)


def _all_assignments(topology: Topology, replicas: Sequence[int]) -> list[Shape]:
    """Of each kind that symmetry makes alike one, stage by stage; of too many the first."""
    symmetry, found = Symmetry(topology), [Shape()]
    for count in replicas:
        longer = dict[object, Shape]()
        for shape in found:
            taken = {rank for own in shape for rank in own}
            free = [rank for rank in range(topology.gpus) if rank not in taken]
            for own in combinations(free, count):
                longer.setdefault(symmetry.key((*shape, own)), (*shape, own))
            if len(longer) > MOST_ASSIGNMENTS:
                break
        found = list(longer.values())[:MOST_ASSIGNMENTS]
    return found


def _orders(topology: Topology) -> list[tuple[int, ...]]:
    """Of all devices: of few all that differ, of many with the runs of equal neighbours in other orders."""
    if topology.gpus <= FEW:
        shapes = _all_assignments(topology, [1] * topology.gpus)
        return [tuple(rank for own in shape for rank in own) for shape in shapes][:MOST_ORDERS]
    runs = [tuple(own) for _, own in groupby(range(topology.gpus), key=lambda r: path_of(topology, r))]
    if len(runs) == 1:
        runs = [tuple(own) for _, own in groupby(range(topology.gpus), key=topology.device)]
    by_speed = sorted(runs, key=lambda run: topology.device(run[0]).seconds_scale)
    some = [runs[::-1], by_speed, by_speed[::-1], *map(list, islice(permutations(runs), MOST_ORDERS))]
    return list(dict.fromkeys(tuple(rank for run in order for rank in run) for order in some))
