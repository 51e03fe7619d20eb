"""Why there is no plan of a schedule that is not searched: memory is blamed where more of it helps, and only
there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from pplan.cost_models.errors import InfeasibleError
from pplan.cost_models.layer import Chain
from pplan.cost_models.quantities import parse_bytes
from pplan.cost_models.schedule_text import register_schedule
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def refused(problem: Problem) -> InfeasibleError:
    assert find_best_plan(problem, planners=()).best is None
    return no_plan_fits(problem)


@pytest.mark.parametrize("memory", [100, 500, inf])
@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "zb-v", "dualpipe-v"])
def test_too_few_layers_for_the_parts_of_a_schedule(
    make_chain: MakeChain, make_topology: MakeTopology, schedule: str, memory: float
) -> None:
    topology = make_topology(2) if memory == inf else make_topology(2, memory=memory)
    error = refused(
        Problem(make_chain(3, 3, cuts=1.1), topology, PlanOptions(mini_batch=8, schedule=schedule))
    )
    needs = "two devices need 4 blocks between cuts; the model has 3"
    assert error.what == f"{schedule} has 2 parts of the layers per device, so {needs}"
    also = " Memory is too small for that, too." if memory == 100 else ""
    assert error.hint == f"Use schedule='auto', or profile with granularity='fine' for more layers.{also}"


def test_a_schedule_that_runs_with_no_numbers_says_why(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """With the line of its text, or with what a published one needs."""
    text = "name: infeasible-own\ndevice i: F*m B*m\ndevice 1: B F*m B*m\n"
    register_schedule(text)
    try:
        options = PlanOptions(mini_batch=8, schedule="infeasible-own", micro_batches=4)
        error = refused(Problem(make_chain(3, 6, cuts=1.1), make_topology(2), options))
    finally:
        SCHEDULES.pop("infeasible-own")
    assert error.what == (
        "infeasible-own: with 2 stages, schedule infeasible-own: line 3: the actions wait for each other: "
        "stage 1 waits at B0 for F0 of stage 1"
    )
    options = PlanOptions(mini_batch=5, schedule="chimera", micro_batches=5)
    error = refused(Problem(make_chain(3, 6, cuts=1.1), make_topology(2), options))
    needs = "chimera: with 2 stages, micro-batches 5: chimera needs a multiple of the stages, 2"
    assert error.what == needs
    assert error.hint == "Use micro_batches=4 mini_batch=4, or schedule='auto'."


@pytest.mark.slow
def test_devices_of_two_sizes(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    machine = make_topology(2)
    groups = tuple(Group(Device(name, size), 1) for name, size in (("small", 100), ("large", 200)))
    topology = replace(machine, groups=groups)
    options = PlanOptions(mini_batch=8, schedule="zb-h1")
    error = refused(Problem(make_chain(3, 8, cuts=1.1), topology, options))
    assert error.what.startswith("no plan under zb-h1 fits into 100 B to 200 B a device: stage ")


@pytest.mark.parametrize("time_limit", [0.01, 2])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "zb-h1", "any"])
def test_the_memory_that_is_said_to_be_enough_is(
    make_chain: MakeChain, make_topology: MakeTopology, schedule: str, time_limit: float
) -> None:
    options = PlanOptions(mini_batch=16, schedule=schedule, time_limit=time_limit)
    chain = make_chain(5, 12, cuts=1.1)
    error = refused(Problem(chain, make_topology(4, memory=10), options))
    (enough,) = (change for change in error.details["would_fit"] if change.startswith("memory="))
    size = parse_bytes(enough.split("'")[1])
    for room in (size, 2 * size):
        problem = Problem(chain, make_topology(4, memory=room), options)
        assert find_best_plan(problem, planners=()).best is not None
