"""The least memory of any plan, against all plans and against solving."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from math import ceil
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.runtime import OFFLOAD
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.candidate import Proposal, linear_pipeline, replicated_pipeline
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, fastest, is_measured
from pplan.planner.search.budget import SearchBudget
from pplan.planner.smallest_plan import (
    EXACT_SCHEDULES,
    fewest_devices,
    find_smallest_plan,
    fitting_plans,
    fullest_bytes,
    nothing_fits,
)
from pplan.planner.synthesis.synthesize import recompute_choices, synthesize

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def all_shapes(problem: Problem) -> Iterator[Proposal]:
    """Every cut and number of replicas that the options allow."""
    points, devices = list_cut_points(problem.space.chain), problem.usable_gpus
    for config in problem.configs:
        for stages in range(1, min(devices, len(points) - 1) + 1):
            for inner in combinations(points[1:-1], stages - 1):
                for counts in product(range(1, devices + 1), repeat=stages):
                    if sum(counts) <= devices:
                        proposal = replicated_pipeline(config, (*inner, points[-1]), counts)
                        if problem.allows(proposal) and is_measured(problem.space, proposal):
                            yield proposal


def largest_stage(problem: Problem, proposal: Proposal) -> float:
    """Bytes of the fullest device, each stage with the recomputation with which it needs least."""
    return max(needs_by_stage(problem, proposal))


def needs_by_stage(problem: Problem, proposal: Proposal) -> list[int]:
    mode = proposal.config.recompute
    modes = (
        ("never", "always", OFFLOAD)[: 2 + (mode == OFFLOAD)] if mode in ("by_stage", OFFLOAD) else (mode,)
    )
    assembly = assemble(problem.space, proposal, ["never"] * len(proposal.ends))
    return [
        min(ceil(sum(assembly.ledger(device, mode).values())) for mode in modes)
        for device in range(len(proposal.ends))
    ]


CASES: list[tuple[int, int, int, dict[str, Any]]] = [
    (1, 3, 3, {"mini_batch": 4}),
    (2, 4, 3, {"mini_batch": 6, "optimizer": "adam"}),
    (3, 4, 4, {"mini_batch": 7}),
    (4, 5, 1, {"mini_batch": 4}),
    (5, 3, 4, {"mini_batch": 8, "zero": 1, "optimizer": "adam"}),
    (6, 3, 3, {"mini_batch": 8, "micro_batches": 2, "recompute": "never"}),
    (7, 4, 2, {"mini_batch": 4, "runtime": "torch", "schedule": "1f1b"}),
    (8, 4, 3, {"mini_batch": 4, "runtime": "torchgpipe"}),
    (9, 1, 2, {"mini_batch": 3}),
    (10, 4, 3, {"mini_batch": 4, "use_all": True, "optimizer": "adam"}),
    (11, 4, 4, {"mini_batch": 8, "use_all": True, "zero": 2}),
    (12, 5, 3, {"mini_batch": 4, "pins": (("layer2", 1),)}),
    (13, 4, 3, {"mini_batch": 4, "pins": (("layer1", 0),), "use_all": True}),
    (14, 4, 3, {"mini_batch": 4, "cut_after": ("layer0",), "max_stages": 2}),
    (15, 4, 3, {"mini_batch": 4, "recompute": "offload", "host_bandwidth": 10.0}),
    (16, 4, 3, {"mini_batch": 4, "recompute": "offload", "host_bandwidth": 10.0, "host_memory_bytes": 300}),
    (17, 4, 3, {"mini_batch": 8, "schedule": "gpipe", "micro_batches": 4, "recompute": "always"}),
    (18, 4, 3, {"mini_batch": 6, "schedule": "naive"}),
    (19, 5, 2, {"mini_batch": 6, "runtime": "deepspeed"}),
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
    """And a byte less rules every plan out."""
    problem = Problem(make_chain(seed, layers, cuts=1.1), make_topology(gpus), PlanOptions(**options))
    needs = min(largest_stage(problem, own) for own in all_shapes(problem))
    plan = find_smallest_plan(problem)
    assert plan is not None
    assert plan.is_counted
    assert problem.allows(plan.proposal)
    assert plan.memory_bytes == needs == largest_stage(problem, plan.proposal)
    for less in (0, 1):
        limited = replace(problem, options=replace(problem.options, memory_limit=needs - less))
        assert nothing_fits(limited) == bool(less)


def device_sets(free: tuple[int, ...], classes: tuple[int, int], counts: tuple[int, ...]) -> Iterator[Any]:
    """Devices for stages of so many replicas, the first of each of two classes."""
    if not counts:
        yield ()
        return
    for large in range(max(0, counts[0] - free[0]), min(counts[0], free[1]) + 1):
        small = counts[0] - large
        first = (classes[0] - free[0], classes[0] + classes[1] - free[1])
        ranks = (*range(first[0], first[0] + small), *range(first[1], first[1] + large))
        for rest in device_sets((free[0] - small, free[1] - large), classes, counts[1:]):
            yield (ranks, *rest)


@pytest.mark.parametrize("seed", range(4))
def test_two_sizes_of_devices(seed: int, make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Nothing fits exactly where no plan of all devices, cuts and replicas does; what is listed fits."""
    rng, ruled_out, between = np.random.default_rng(seed), 0, 0
    classes = (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    chain, machine = make_chain(seed, 4, cuts=1.1), make_topology(sum(classes))
    wishes: dict[str, Any] = {} if seed % 2 else {"recompute": "never", "optimizer": "adam"}
    options = PlanOptions(mini_batch=4, time_limit=1, **wishes)
    free = Problem(chain, machine, options)
    least = find_smallest_plan(free)
    assert least is not None
    plans = [
        (devices, largest)
        for shape in all_shapes(free)
        for devices in device_sets(classes, classes, shape.replicas)
        for largest in [needs_by_stage(free, shape)]
    ]
    for small, large in product((0.5, 0.97, 1.0), (0.99, 1.1, 1.5, 3.0)):
        sizes = [int(share * least.memory_bytes) for share in (small, large)]
        groups = tuple(
            Group(Device(name, size), number)
            for name, size, number in zip(("small", "large"), sizes, classes, strict=True)
        )
        problem = replace(free, topology=replace(machine, groups=groups))
        limit = [sizes[0]] * classes[0] + [sizes[1]] * classes[1]
        exists = any(
            all(
                need <= min(limit[rank] for rank in ranks) for ranks, need in zip(devices, needs, strict=True)
            )
            for devices, needs in plans
        )
        assert nothing_fits(problem) == (not exists)
        proposals = list(fitting_plans(problem))
        assert bool(proposals) == exists
        assert all(fastest(problem.space, [proposal]) is not None for proposal in proposals)
        ruled_out += not exists
        between += exists and fewest_devices(problem) > problem.usable_gpus
    assert min(ruled_out, between) > 0


WISHES: list[dict[str, Any]] = [
    {},
    {"recompute": "never", "optimizer": "adam"},
    {"schedule": "gpipe", "micro_batches": 4},
    {"recompute": "first_layers"},
    {"runtime": "deepspeed", "zero": 1},
    {"schedule": "naive"},
]


@pytest.mark.parametrize(("seed", "wishes"), list(enumerate(WISHES)))
def test_the_least_memory_is_the_least_that_solving_needs(
    seed: int, wishes: dict[str, Any], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """A search finds a plan in that memory, and none in a byte less."""
    options = PlanOptions(mini_batch=8, time_limit=1, **wishes)
    problem = Problem(make_chain(seed, 6), make_topology(2 + seed % 3), options)
    plan = find_smallest_plan(problem)
    assert plan is not None
    for less in (0, 1):
        limited = replace(problem, options=replace(options, memory_limit=plan.memory_bytes - less))
        assert nothing_fits(limited) == bool(less)
        assert (find_best_plan(limited).best is None) == bool(less)


SCHEDULES = ("naive", "dapple", "chimera", "zb-h1", "zb-h2", "autopipe", "zb-v", "dualpipe-v", "interleaved")


@pytest.mark.parametrize("schedule", [*SCHEDULES, "looped-bfs", "any", "synthesized"])
@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_memory_that_a_plan_fits_into_is_not_ruled_out(
    schedule: str, recompute: Any, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Random plans of each schedule, counted by action."""
    rng, tried = np.random.default_rng(1), 0
    for seed in range(12):
        options = PlanOptions(
            mini_batch=8, schedule=schedule, recompute=recompute, optimizer=("sgd", "adam")[seed % 2]
        )
        problem = Problem(make_chain(seed, 8, cuts=1.1), make_topology(4), options)
        config = problem.configs[rng.integers(len(problem.configs))]
        parts = 2 if config.schedule in ("zb-v", "dualpipe-v", "interleaved", "looped-bfs") else 1
        stages = int(rng.integers(2, 5))
        ends = (*sorted(1 + rng.choice(7, parts * stages - 1, replace=False)), 8)
        shape = linear_pipeline(replace(config, virtual_stages=parts), ends)
        if parts > 1:
            turn = config.schedule in ("zb-v", "dualpipe-v")
            second = range(stages)[::-1] if turn else range(stages)
            shape = replace(shape, devices=tuple((device,) for device in (*range(stages), *second)))
        needs = fullest_bytes(problem.space, shape)
        if needs < 1e9:
            tried += 1
            assert not nothing_fits(replace(problem, options=replace(options, memory_limit=needs)))
            assert nothing_fits(replace(problem, options=replace(options, memory_limit=40)))
    assert tried > 2


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
    for less, is_enough in ((0, True), (1, False)):
        memory_limit = least.memory_bytes - less
        own = replace(
            problem, options=replace(options, memory_limit=memory_limit), budget=SearchBudget(seconds=0.0)
        )
        every = (candidate for shape in shapes for candidate in recompute_choices(own, shape))
        assert any(candidate.problem.has_order() for candidate in every) == is_enough
        assert bool(synthesize(own, None)) >= is_enough


def fits(problem: Problem) -> bool:
    return fewest_devices(problem) <= problem.usable_gpus


def test_devices_of_unlike_memory(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """The largest device rules plans out; the smallest must hold a plan that is said to fit."""
    sizes = (Group(Device("small", 50), 1), Group(Device("large", 60), 1))
    topology = replace(make_topology(2), groups=sizes)
    problem = Problem(make_chain(1, 1), topology, PlanOptions(mini_batch=4))
    error = no_plan_fits(problem)
    assert error.what.startswith("no plan fits into 50 B to 60 B a device: stage 0 of 1 (")
    assert error.what.endswith(" are missing on the smallest")
    least = find_smallest_plan(problem)
    assert least is not None
    for small, large in product((-1, 0), repeat=2):
        sizes = (
            Group(Device("small", least.memory_bytes + small), 1),
            Group(Device("large", least.memory_bytes + large), 1),
        )
        own = replace(problem, topology=replace(topology, groups=sizes))
        assert fits(own) == (small == large == 0)
        assert nothing_fits(own) == (max(small, large) < 0)
    open_end = replace(topology, groups=(Group(Device("a", None), 1), sizes[0]))
    assert not nothing_fits(replace(problem, topology=open_end))


def test_a_known_plan_is_one(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Of schedules that are not counted, what is said to fit was counted by action."""
    known = 0
    for seed, schedule in product(range(4), ("1f1b", "zb-h1", "dapple", "autopipe")):
        assert (schedule in EXACT_SCHEDULES) == (schedule == "1f1b")
        options = PlanOptions(mini_batch=8, schedule=schedule)
        free = Problem(make_chain(seed, 6), make_topology(3), options)
        least = find_smallest_plan(free)
        assert least is not None
        for times in (1.0, 1.2, 1.5):
            problem = replace(free, options=replace(options, memory_limit=times * least.memory_bytes))
            plan = fastest(problem.space, [least.proposal])
            assert plan is None or fits(problem)
            known += fits(problem) and plan is not None
    assert known > 12


def test_long_chains_and_many_devices_are_answered_soon(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """64 layers on 64 devices take less than two seconds of processor time."""
    for schedule, gpus in (("auto", 64), ("any", 64)):
        problem = Problem(
            make_chain(1, 64, cuts=1.1),
            make_topology(gpus, memory=200),
            PlanOptions(mini_batch=1024, optimizer="adam", schedule=schedule),
        )
        start = time.process_time()
        assert nothing_fits(problem)
        error = no_plan_fits(problem)
        assert time.process_time() - start < 2
        assert error.details["missing_bytes"] > 0
        assert error.details["would_fit"]
