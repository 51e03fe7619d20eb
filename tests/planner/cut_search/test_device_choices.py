"""Devices of several kinds for schedules whose cuts are searched, against every choice of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.topology import Group, Topology
from pplan.planner.candidate import Proposal
from pplan.planner.cut_search.device_choices import MOST_LISTED, MOST_TAKEN, DeviceChooser
from pplan.planner.cut_search.schedule_search import search_schedules
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
ORDERS = ((0.2, 1.0, 1.0), (1.0, 1.0, 0.2), (1.0, 0.2, 1.0))


def with_speeds(topology: Topology, speeds: tuple[float, ...]) -> Topology:
    """The topology, each device with a speed."""
    kind = topology.kinds[0]
    groups = tuple(Group(replace(kind, name=f"x{speed}", speed=speed), 1) for speed in speeds)
    return replace(topology, groups=groups)


def every_plan(problem: Problem) -> Iterator[Proposal]:
    """Every cut, on every choice of devices in every order."""
    (name,) = problem.schedules
    every, inner = range(problem.gpus), range(1, len(problem.chain))
    for config in problem.configs:
        schedule = SCHEDULES[config.schedule]
        several = (2, 3, 4) if name in ("interleaved", "looped-bfs") else (schedule.default_virtual_stages,)
        for parts, stages in product(several, every):
            with suppress(UsageError):
                program = schedule.program(stages + 1, config.micro_batches, parts)
                for ends in combinations(inner, (stages + 1) * parts - 1):
                    for ranks in permutations(every, stages + 1):
                        devices = tuple((ranks[slot.device],) for slot in program.pipes[0])
                        own = replace(config, virtual_stages=parts)
                        yield Proposal(own, (*ends, len(problem.chain)), devices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "looped-bfs", "zb-v", "dualpipe-v", "chimera", "zb-h1"])
def test_no_choice_of_devices_is_faster(
    make_chain: MakeChain, make_topology: MakeTopology, name: str
) -> None:
    """The order in which devices are listed makes no difference, and the bound holds for every plan."""
    steps = []
    for speeds in ORDERS:
        options = PlanOptions(mini_batch=4 if name == "dualpipe-v" else 2, schedule=name)
        topology = with_speeds(make_topology(3, latency=0.05), speeds)
        problem = Problem(make_chain(3, 5, cuts=1.1, traffic=0.1), topology, options)
        plans = (fastest(problem.space, [own]) for own in every_plan(problem) if problem.allows(own))
        least = min((plan.step_seconds for plan in plans if plan is not None), default=inf)
        result = search_schedules(problem, [name])
        answer = find_best_plan(problem).best
        assert answer is not None
        steps.append(answer.step_seconds)
        assert result.bound_seconds <= least * (1 + 1e-9)
        assert answer.step_seconds <= least * (1 + 1e-9)
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-9)


def test_the_choices_do_not_depend_on_the_ranks(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """The most capable choices come first, and are all where they are few."""

    def speeds_of(speeds: tuple[float, ...], counts: tuple[int, ...]) -> tuple[list[list[float]], bool]:
        topology = with_speeds(make_topology(len(speeds)), speeds)
        chooser = DeviceChooser(Problem(make_chain(0, 8), topology, PlanOptions(mini_batch=8)))
        own = chooser.choices(counts)
        return [
            [topology.device(r).speed for ranks in shape for r in ranks] for shape in own.shapes
        ], own.complete

    for speeds in ORDERS:
        assert speeds_of(speeds, (1, 1)) == ([[1.0, 1.0], [1.0, 0.2], [0.2, 1.0]], True)
    many = tuple(1.0 + 0.1 * rank for rank in range(6))
    choices, complete = speeds_of(many, (1,) * 6)
    assert (choices, complete) == speeds_of(many[::-1], (1,) * 6)
    assert not complete
    assert len(choices) == MOST_TAKEN < MOST_LISTED
