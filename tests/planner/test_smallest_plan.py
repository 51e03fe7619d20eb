"""The plan that needs the least memory, against all plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.quantities import format_bytes
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.candidate import Proposal, linear_pipeline, replicated_pipeline
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.pipeline_config import SEARCHED
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, is_measured
from pplan.planner.search.budget import SearchBudget
from pplan.planner.smallest_plan import find_smallest_of_others, find_smallest_plan
from pplan.planner.synthesis.candidates import recompute_choices
from pplan.planner.synthesis.synthesize import synthesize

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def all_shapes(problem: Problem) -> Iterator[Proposal]:
    """Every cut and number of replicas of 1F1B and GPipe."""
    points, devices = list_cut_points(problem.space.chain), problem.usable_gpus
    for config in problem.configs:
        if config.schedule not in SEARCHED:
            continue
        for stages in range(1, min(devices, len(points) - 1) + 1):
            for inner in combinations(points[1:-1], stages - 1):
                for counts in product(range(1, devices + 1), repeat=stages):
                    if sum(counts) <= devices and problem.may_share(config.micro_batch_size, counts):
                        yield replicated_pipeline(config, (*inner, points[-1]), counts)


def largest_stage(problem: Problem, proposal: Proposal) -> float:
    """Bytes of the fullest device, each stage with the recomputation with which it needs least."""
    modes = ("never", "always") if proposal.config.recompute == "by_stage" else (proposal.config.recompute,)
    assembly = assemble(problem.space, proposal, ["never"] * len(proposal.ends))
    return max(
        min(sum(map(round, assembly.ledger(device, mode).values())) for mode in modes)
        for device in range(len(proposal.ends))
    )


CASES: list[tuple[int, int, int, dict[str, Any]]] = [
    (1, 3, 3, {"mini_batch": 4}),
    (2, 4, 3, {"mini_batch": 6, "optimizer": "adam"}),
    (3, 4, 4, {"mini_batch": 7}),
    (4, 5, 1, {"mini_batch": 4}),
    (5, 3, 4, {"mini_batch": 8, "zero": 1, "optimizer": "adam"}),
    (6, 3, 3, {"mini_batch": 8, "micro_batches": 2, "recompute": "never"}),
    (7, 4, 2, {"mini_batch": 4, "runtime": "torch"}),
    (8, 4, 3, {"mini_batch": 4, "runtime": "torchgpipe"}),
    (9, 1, 2, {"mini_batch": 3}),
]


@pytest.mark.parametrize(("seed", "layers", "gpus", "options"), CASES)
def test_no_plan_needs_less(
    seed: int,
    layers: int,
    gpus: int,
    options: dict[str, Any],
    make_chain: MakeChain,
    make_topology: MakeTopology,
) -> None:
    """Two of three devices for the heavier of two stages need less than any equal replicas, and one micro-
    batch at work is held as it is, or made again with its input held besides."""
    problem = Problem(make_chain(seed, layers, cuts=1.1), make_topology(gpus), PlanOptions(**options))
    needs = (largest_stage(problem, own) for own in all_shapes(problem) if is_measured(problem.space, own))
    plan = find_smallest_plan(problem)
    assert plan is not None
    assert plan.is_least
    assert plan.memory_bytes == pytest.approx(min(needs), abs=8)
    assert plan.memory_bytes == sum(plan.ledger.values())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("recompute", ["auto", "never"])
def test_no_order_needs_less(
    seed: int, recompute: Any, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """One byte less, and on no cuts is there an order, with the backward whole or in two parts; and in so
    much memory one is made, also without time."""
    options = PlanOptions(mini_batch=4, micro_batches=4, schedule="synthesized", recompute=recompute)
    problem = Problem(make_chain(seed, 4, cuts=1.0), make_topology(2, latency=0.01), options)
    least = find_smallest_plan(problem, in_flight=1)
    assert least is not None
    shapes = [
        linear_pipeline(config, (end, 4))
        for config, end in product(problem.configs, (1, 2, 3))
        if config.schedule in ("1f1b", "zb-h1") and config.recompute != "except_last"
    ]
    assert len({shape.config.schedule for shape in shapes}) == 2
    for less, fits in ((0, True), (1, False)):
        memory_limit = least.memory_bytes - less
        own = replace(
            problem, options=replace(options, memory_limit=memory_limit), budget=SearchBudget(seconds=0.0)
        )
        every = (candidate for shape in shapes for candidate in recompute_choices(own, shape))
        assert any(candidate.problem.has_order() for candidate in every) == fits
        assert bool(synthesize(own, None)) >= fits


def test_what_other_schedules_need_is_said(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Of a plan in any order what one micro-batch at a time needs; of others what balanced stages do."""
    chain, topology = make_chain(1, 6, cuts=1.0), make_topology(2, memory=150)
    words = {"synthesized": " of one stage a device, in any order,", "any": " of 1f1b or gpipe"}
    for schedule, of_which in words.items():
        options = PlanOptions(mini_batch=4, micro_batches=4, schedule=schedule, time_limit=0.3)
        problem = Problem(chain, topology, options)
        error = no_plan_fits(problem)
        assert error.what.startswith(f"no plan{of_which} fits into 150 B a device: at the least, stage ")
        assert ("one micro-batch at a time" in error.what) == (schedule == "synthesized")
        size, name = find_smallest_of_others(problem) or (0, "")
        assert error.what.endswith(f" are missing; {name} with balanced stages needs {format_bytes(size)}")
        enough = replace(options, schedule=name, memory_limit=size)
        assert find_best_plan(Problem(chain, make_topology(2), enough)).best is not None
    options = PlanOptions(mini_batch=4, micro_batches=4, schedule="1f1b")
    assert no_plan_fits(Problem(chain, topology, options)).what.endswith(" are missing")
    assert find_smallest_of_others(Problem(chain, topology, options)) is None


def test_unequal_replicas_need_less(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """The case is one in which it matters."""
    found = 0
    for seed in range(8):
        options = PlanOptions(mini_batch=4, micro_batches=1)
        problem = Problem(make_chain(seed, 2, cuts=1.1), make_topology(3), options)
        least, equal = find_smallest_plan(problem), find_smallest_plan(problem, equal=True)
        assert least is not None
        assert equal is not None
        assert not equal.is_least
        assert least.memory_bytes <= equal.memory_bytes
        found += least.memory_bytes < equal.memory_bytes
    assert found > 0


def test_one_device_is_not_said_to_recompute(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """With one micro-batch in flight what recomputes has its input besides."""
    problem = Problem(make_chain(1, 3), make_topology(1, memory=50), PlanOptions(mini_batch=4))
    assert ", recompute never) needs" in no_plan_fits(problem).what


def test_devices_of_unlike_memory(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    kinds = (Group(Device("small", 50), 1), Group(Device("large", 60), 1))
    topology = replace(make_topology(2), groups=kinds)
    problem = Problem(make_chain(1, 1), topology, PlanOptions(mini_batch=4))
    error = no_plan_fits(problem)
    assert error.what.startswith("no plan fits into 50 B to 60 B a device: at the least, stage 0 of 1 (")
    assert error.what.endswith(" are missing on the smallest")
