"""Memory that rules out plans with several parts a device, against all plans counted by action."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf
from typing import Any

import pytest

from pplan.cost_models.layer import Chain, TiedWeight, list_cut_points
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner import joint_search
from pplan.planner.candidate import SEVERAL_PARTS, VIRTUAL_STAGES, Proposal
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import FEW, Problem
from pplan.planner.scoring import is_measured
from pplan.planner.smallest_plan import fullest_bytes, least_on_stages, nothing_fits

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def all_plans(problem: Problem) -> Iterator[Proposal]:
    """Every plan with several parts a device that the options allow, on the first devices."""
    points, devices = list_cut_points(problem.space.chain), problem.usable_gpus
    for config in problem.configs:
        for parts in VIRTUAL_STAGES if config.schedule in SEVERAL_PARTS else (2,):
            for stages in range(2, min(devices, (len(points) - 1) // parts) + 1):
                turns = config.schedule in ("zb-v", "dualpipe-v")
                order = [*range(stages), *reversed(range(stages))] if turns else [*range(stages)] * parts
                for counts in product(range(1, devices + 1), repeat=stages):
                    if sum(counts) > devices:
                        continue
                    ranks = [tuple(range(sum(counts[:d]), sum(counts[: d + 1]))) for d in range(stages)]
                    for inner in combinations(points[1:-1], parts * stages - 1):
                        own = replace(config, virtual_stages=parts)
                        plan = Proposal(own, (*inner, points[-1]), tuple(ranks[d] for d in order))
                        if problem.allows(plan) and is_measured(problem.space, plan):
                            yield plan


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (6, 3, {"mini_batch": 12, "schedule": "interleaved"}),
    (6, 3, {"mini_batch": 12, "schedule": "interleaved", "optimizer": "adam", "recompute": "always"}),
    (6, 2, {"mini_batch": 8, "schedule": "interleaved", "pins": (("layer2", 1),)}),
    (6, 2, {"mini_batch": 8, "schedule": "looped-bfs", "recompute": "never"}),
    (6, 3, {"mini_batch": 9, "schedule": "zb-v"}),
    (6, 2, {"mini_batch": 12, "schedule": "zb-v", "optimizer": "adam"}),
    (6, 3, {"mini_batch": 9, "schedule": "dualpipe-v"}),
    (5, 4, {"mini_batch": 8, "schedule": "interleaved", "zero": 1, "optimizer": "adam"}),
    (5, 4, {"mini_batch": 8, "schedule": "interleaved", "zero": 3, "optimizer": "adam"}),
    (6, 2, {"mini_batch": 8, "schedule": "interleaved", "runtime": "torch", "recompute": "never"}),
]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("layers", "gpus", "options"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (number not in (2, 3, 5, 9)))
        for number, case in enumerate(CASES)
    ],
)
def test_no_plan_that_fits_is_ruled_out(
    layers: int,
    gpus: int,
    options: dict[str, Any],
    tied: bool,
    make_chain: MakeChain,
    make_topology: MakeTopology,
) -> None:
    """A fifth less than the best plan needs is ruled out; what it needs is not."""
    for seed in (1, 2):
        chain = make_chain(seed, layers, cuts=1.1)
        if tied:
            chain = replace(chain, tied=(TiedWeight("w", 24.0, 24.0, (0, layers - 1)),))
        problem = Problem(chain, make_topology(gpus), PlanOptions(**options))
        least = min((fullest_bytes(problem.space, plan) for plan in all_plans(problem)), default=inf)
        if least == inf:  # ZeRO keeps the ends of the chain together
            assert tied
            assert problem.untied_reason
            continue
        for share in (0.8, 1.0, 1.2):
            limited = replace(problem, options=replace(problem.options, memory_limit=share * least))
            assert nothing_fits(limited) == (share < 1), (seed, share)


def test_the_larger_of_two_kinds_counts(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    options = PlanOptions(mini_batch=8, schedule="interleaved")
    machine, chain = make_topology(2), make_chain(1, 6, cuts=1.1)
    problem = Problem(chain, machine, options)
    least = min(fullest_bytes(problem.space, plan) for plan in all_plans(problem))
    for small, large in product((0.7, 1.0), repeat=2):
        groups = (Group(Device("a", int(small * least)), 1), Group(Device("b", int(large * least)), 1))
        own = replace(problem, topology=replace(machine, groups=groups))
        assert nothing_fits(own) == (small == large == 0.7)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_sixty_four_layers_on_as_many_devices_are_ruled_out_without_a_search(
    schedule: str, make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more memory than the states of all layers take."""

    def no_search(*_: object, **__: object) -> None:
        raise AssertionError("a search ran")

    for name in ("joint_search", "run_search"):
        monkeypatch.setattr(joint_search, name, no_search)
    options = PlanOptions(mini_batch=1024, optimizer="adam", schedule=schedule)
    problem = Problem(make_chain(1, 64, cuts=1.1), make_topology(64, memory=450), options)
    assert least_on_stages(problem, 32) < 450
    assert find_best_plan(problem).best is None
    assert no_plan_fits(problem).what.startswith(
        f"no plan under {schedule} fits into 450 B a device: the smallest known plan needs "
    )


def test_states_alone_rule_out_a_long_chain(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    problem = Problem(make_chain(1, 240, cuts=1.1), make_topology(4), PlanOptions(mini_batch=8))
    assert problem.space.is_long
    least = least_on_stages(problem, 4)
    for share in (0.99, 1.01):
        limited = replace(problem, options=replace(problem.options, memory_limit=share * least))
        assert nothing_fits(limited) == (share < 1)


def test_a_plan_is_not_called_the_smallest_where_not_all_replicas_were_tried(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """With ZeRO on more than `FEW` devices."""
    options = PlanOptions(mini_batch=2 * FEW + 4, optimizer="adam", zero=1)
    problem = Problem(make_chain(1, 4, cuts=1.1), make_topology(FEW + 2), options)
    room = least_on_stages(problem, FEW + 2) * 0.99
    error = no_plan_fits(replace(problem, options=replace(options, memory_limit=room)))
    assert error.what.startswith("no plan fits into ")
    assert ") needs " in error.what
    assert "needs at least" not in error.what
