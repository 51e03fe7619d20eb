"""The partition of PyTorch's pull request 179212, against the simulator and against all partitions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.program_order import Order, resolve_order
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import Costs
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Topology
from pplan.planner.balance import balance
from pplan.planner.candidate import PipelineConfig
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.critical_stages import (
    _find_partition,
    _run,
    critical_part,
    partition,
)
from pplan.planner.problem import Problem

SHAPES = [("1f1b", 3, 6, 1), ("interleaved", 2, 4, 2), ("interleaved", 3, 6, 2), ("zb-h1", 3, 6, 1)]


def make_order(schedule: str, stages: int, micro_batches: int, parts: int) -> Order:
    return resolve_order(find_schedule(schedule).program(stages, micro_batches, parts))


def of_simulator(order: Order, forward: list[float], backward: list[float], sent: list[float]) -> float:
    """The step by pplan's simulator, with transfers that are latency only."""
    program = order.program
    table = np.zeros((2, program.devices, program.chunks, 1))
    for part, place in enumerate(program.pipes[0]):
        table[:, place.device, place.chunk, 0] = forward[part], backward[part]
    splits = bool((order.kind == 2).any())
    latency = np.array([sent])
    share = 0.5 if splits else 1.0
    costs = Costs(
        forward=table[0],
        backward=share * table[1],
        weight=share * table[1] if splits else None,
        forward_latency=latency,
        backward_latency=latency,
    )
    return float(step_seconds(program, costs)[0])


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "parts"), SHAPES)
def test_simulation(schedule: str, stages: int, micro_batches: int, parts: int) -> None:
    order = make_order(schedule, stages, micro_batches, parts)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        forward, backward = (rng.random(stages * parts).tolist() for _ in range(2))
        sent = (0.2 * rng.random(stages * parts - 1)).tolist()
        times = _run(order, forward, backward, sent)
        assert max(times.end) == pytest.approx(of_simulator(order, forward, backward, sent))
        assert 0 <= critical_part(order, times) < stages * parts


def test_the_slow_part_is_critical() -> None:
    order = make_order("1f1b", 4, 8, 1)
    for slow in range(4):
        forward = [3.0 if part == slow else 1.0 for part in range(4)]
        times = _run(order, forward, forward, [0.0] * 3)
        assert (round(max(times.end), 9), critical_part(order, times)) == (6 * 8 + 2 * slow, slow)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "parts"), SHAPES)
def test_near_the_best_partition(schedule: str, stages: int, micro_batches: int, parts: int) -> None:
    """Never worse than the balanced partition it starts from, at times better; near the best of all."""
    order, count = make_order(schedule, stages, micro_batches, parts), stages * parts
    ratios, improved = [], 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        forward = rng.random(8) + 0.2
        backward, sent = forward * (1 + rng.random(8)), 0.1 * rng.random(9)

        def step(ends: tuple[int, ...]) -> float:
            bounds = list(pairwise((0, *ends)))
            first, second = ([float(own[a:b].sum()) for a, b in bounds] for own in (forward, backward))  # noqa: B023
            return max(_run(order, first, second, [float(sent[end]) for end in ends[:-1]]).end)  # noqa: B023

        ends, seconds = partition(order, forward, backward, sent)
        first = step(tuple(np.cumsum(balance(forward + backward, count)).tolist()))
        assert seconds == step(ends) <= first
        improved += seconds < first
        ratios.append(seconds / min(step((*cuts, 8)) for cuts in combinations(range(1, 8), count - 1)))
    assert min(ratios) >= 1
    assert max(ratios) < 1.25
    assert improved


def test_schedules_and_estimates(
    make_chain: Callable[..., Chain], make_problem: Callable[..., Problem]
) -> None:
    """Every schedule it knows of those that are allowed, and an estimate for each."""
    problem = make_problem(make_chain(1, 8, cuts=1.1), 4, mini_batch=8, schedule="any")
    proposals = list(PLANNERS["torch-partition"].propose(problem))
    assert {own.config.schedule for own in proposals} == {"1f1b", "interleaved", "zb-h1"}
    assert {len(own.ends) for own in proposals if own.config.schedule == "interleaved"} == {4, 8}
    assert all(own.estimate_seconds for own in proposals)
    only = make_problem(make_chain(1, 8, cuts=1.1), 4, mini_batch=8)
    assert {own.config.schedule for own in PLANNERS["torch-partition"].propose(only)} == {"1f1b"}
    alone = make_problem(make_chain(1, 8), 1, mini_batch=8)
    assert not list(PLANNERS["torch-partition"].propose(alone))
    assert PLANNERS["torch-partition"].refusal(alone) == "one device has no pipeline"


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 3), ("gpipe", 2), ("zb-h1", 2)])
def test_of_many_micro_batches_the_others_take_what_the_slowest_stage_does(
    schedule: str, stages: int, make_chain: Callable[..., Chain], make_topology: Callable[..., Topology]
) -> None:
    """The estimate of each micro-batch beyond two a stage, which are looked at one by one."""
    problem = Problem(make_chain(4, 7), make_topology(stages), PlanOptions(mini_batch=64))
    few, more, most = (
        _find_partition(problem, PipelineConfig(schedule, "never", stages * times, 1), stages, 1)
        for times in (2, 3, 4)
    )
    assert few is not None
    assert more is not None
    assert most is not None
    assert few.ends == more.ends == most.ends
    costs = problem.chain.at(1)
    work = costs.forward_seconds + costs.backward_seconds
    slowest = max(float(work[a:b].sum()) for a, b in few.bounds)
    estimates = [own.estimate_seconds or 0.0 for own in (few, more, most)]
    assert np.diff(estimates) == pytest.approx([stages * slowest] * 2)
