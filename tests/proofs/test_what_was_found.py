"""Problems by which the attack found false proofs, once each was understood."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attack import terms
from attack.attack import REFERENCE, attacked, quickly_solved
from attack.problems import case_of
from attack.results import Result

from pplan.planner.build_plan import build_problem


@pytest.mark.parametrize(("seed", "kind"), [(63, "kinds"), (54, "ports"), (56, "ports")])
def test_memory_bound_where_a_cut_is_asked_for(seed: int, kind: str) -> None:
    """No stage of all layers may be: the prices of the devices were no numbers, and all plans left out."""
    case, result = case_of(seed, kind), Result(seed, kind)
    assert case.options.cut_after
    terms.memory_bound(
        build_problem(case.chain, case.topology, case.options, REFERENCE, case.profiles), result
    )
    assert result.checks["memory bound"] == 1
    assert not result.violations


@pytest.mark.parametrize(("seed", "kind"), [(11, "kinds"), (31, "kinds"), (35, "tied")])
def test_bounds_on_unfinished_plans(seed: int, kind: str) -> None:
    """Of one micro-batch, whose backward adds nothing up; of stages that fit unless they recompute."""
    case, result = case_of(seed, kind), Result(seed, kind)
    problem = build_problem(case.chain, case.topology, case.options, REFERENCE, case.profiles)
    terms.memory_bound(problem, result)
    terms.unfinished(problem, result)
    assert result.checks["unfinished plans"]
    assert not result.violations


def test_no_device_stays_free_where_all_are_asked_for() -> None:
    """Plans near a pipeline that attains the bound left two of four devices free."""
    result = attacked(case_of(87, "memory"), quickly_solved)
    assert result.checks["nothing fits"]
    assert not result.violations


@pytest.mark.slow
def test_many_devices_for_layers_that_no_cut_may_part() -> None:
    """There is nothing to spread over the layers: `solve` ended with a defect."""
    result = attacked(case_of(10017, "many"), quickly_solved)
    assert result.checks["bound"] == 1
    assert not result.violations


@pytest.mark.slow
def test_a_plan_of_another_schedule_fits_where_none_of_the_first_does() -> None:
    """Of interleaved, which the runtime runs, too: it was refused while plans of it were not searched."""
    case = case_of(41037, "runtimes")
    options = replace(
        case.options,
        max_stages=2,
        cut_after=("layer0", "layer1"),
        pins=(),
        keep_together=(),
        runtime="megatron-bridge",
    )
    case = replace(case, options=options)
    problem = build_problem(case.chain, case.topology, case.options, REFERENCE, case.profiles)
    assert quickly_solved(case, problem).schedule in problem.heuristic_schedules
    assert not attacked(case, quickly_solved).violations


@pytest.mark.slow
def test_asynchronous_plans_are_proven_for_the_orders_that_are_searched() -> None:
    """The bound on the others holds for any order of the devices, and it was said of all."""
    case = case_of(101366, "throughput")
    problem = build_problem(case.chain, case.topology, case.options, REFERENCE, case.profiles)
    covers = quickly_solved(case, problem).prediction.bound_covers
    assert (
        "any devices for each stage; and pipedream, pipedream-2bw and xpipe of two stages or more" in covers
    )
    assert "consecutive devices" in covers
    assert not attacked(case, quickly_solved).violations


def test_a_frontier_goes_down_by_a_byte_of_what_a_plan_holds() -> None:
    """The next limit was rounded down, and a plan between the two left out of a frontier said to be whole."""
    result = attacked(case_of(104933, "frontier"))
    assert result.checks["frontier complete"] == 1
    assert not result.violations
