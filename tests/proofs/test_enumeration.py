"""What the enumeration leaves out may be left out: slower plans, and devices that are only renumbered."""

from __future__ import annotations

from itertools import permutations

import pytest
from attack.enumeration import Enumeration
from attack.orders import Shape, in_any, in_orders, renumberings
from attack.problems import case_of

from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.search.placements import list_placements

NAMED = ("naive", "gpipe", "1f1b", "dapple", "zb-h1", "zb-h2", "interleaved", "zb-v", "chimera", "avgpipe")
LINKS = Link(10.0, 0.1), Link(2.0, 0.2)


def machine(*kinds: str, each: int = 2, port: int = 1) -> Topology:
    """Devices of these kinds on nodes of so many."""
    groups = tuple(Group(Device(kind, None, speed=1.0 + len(kind)), 1) for kind in kinds)
    return Topology(groups, (Level("node", each, LINKS[0]), Level("network", None, LINKS[1], port)))


MACHINES = [
    machine("a", "a", "a", "a"),
    machine("a", "a", "a", each=2),
    machine("a", "bb", "a", "bb"),
    machine("a", "a", "bb", "bb", port=2),
    machine("a", "a", "a", each=8),
]


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize(
    ("seed", "kind"),
    [(0, "levels"), *(pytest.param(*own, marks=pytest.mark.slow) for own in ((3, "ports"), (4, "kinds")))],
)
def test_no_step_is_below_the_least_seconds(seed: int, kind: str, schedule: str) -> None:
    case = case_of(seed, kind)
    problem = Problem(case.chain, case.topology, case.options, profiles=case.profiles)
    every = Enumeration(problem, [schedule], scope="any")
    looked_at = 0
    sizes = every.rules.sizes[:3]
    programs = (own for size in sizes for own in every._programs(schedule, problem.mini_batch // size, size))
    for config, program in programs:
        for index, (proposal, modes, least) in enumerate(every._plans(config, program)):
            if index % 7 == 0 and looked_at < 150:
                made = assemble(problem.space, proposal, modes)
                step = float(step_seconds(made.program, made.costs())[0])
                assert least <= step * (1 + 1e-12)
                looked_at += 1
    assert looked_at or schedule in ("chimera", "zb-v", "interleaved", "zb-h2", "avgpipe")


@pytest.mark.parametrize("topology", MACHINES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_any_devices_but_for_renumbering(topology: Topology, stages: int) -> None:
    chosen = in_any(topology, stages, range(1, topology.gpus + 1))
    same = renumberings(topology)
    known = {
        tuple(tuple(other[rank] for rank in ranks) for ranks in shape) for shape in chosen for other in same
    }
    assert known == set(_every(topology.gpus, stages))
    assert len(chosen) == len(set(chosen))


def _every(gpus: int, stages: int) -> list[Shape]:
    """Different devices, in every order, cut into so many runs."""
    made = []
    for used in range(stages, gpus + 1):
        for order in permutations(range(gpus), used):
            made += [
                tuple(order[a:b] for a, b in zip((0, *cuts), (*cuts, used), strict=True))
                for cuts in _cuts(used, stages - 1)
            ]
    return made


def _cuts(length: int, count: int, first: int = 1) -> list[tuple[int, ...]]:
    if not count:
        return [()]
    return [(cut, *others) for cut in range(first, length) for others in _cuts(length, count - 1, cut + 1)]


@pytest.mark.parametrize("topology", MACHINES)
def test_orders_are_those_that_are_searched(topology: Topology) -> None:
    own = {
        tuple(rank for ranks in shape for rank in ranks)
        for shape in in_orders(topology, topology.gpus, range(1, 2), numbered=False)
    }
    assert own == {placement.ranks for placement in list_placements(topology)}
