"""Tables of the parts of a shape against the layers, figure by figure, and against the steps of its plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig
from pplan.planner.cut_search.part_tables import PartTables, PipelineShape, make_part_tables
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.least_collectives import fastest_transfer
from pplan.planner.search.least_exchange import LeastExchanges

MakeChain = Callable[..., Chain]
LAYERS = 7
FAST, SLOW = Device("fast", None, speed=1.0), Device("slow", None, speed=0.4)
RANKS = ((0, 1), (2,), (3,))
"""Of three stages, two fast devices, one of each, one slow."""


def make_problem(make_chain: MakeChain, speed: float = 0.4, **options: Any) -> Problem:
    """Three fast devices, and three slow ones; two are inside a node."""
    chain = make_chain(3, LAYERS, cuts=1.1, traffic=0.05, adding=0.9)
    share = np.random.default_rng(1).uniform(0.3, 0.7, chain.backward_seconds.shape)
    chain = replace(
        chain,
        backward_input_seconds=share * chain.backward_seconds,
        backward_weight_seconds=(1 - share) * chain.backward_seconds,
    )
    levels = (Level("node", 2, Link(500.0, 0.01)), Level("network", None, Link(100.0, 0.05)))
    groups = (Group(FAST, 3), Group(replace(SLOW, speed=speed), 3))
    own = {"mini_batch": 4, "micro_batches": 2, "optimizer": "sgd", **options}
    return Problem(chain, Topology(groups, levels), PlanOptions(**own))


def make_tables(
    problem: Problem, name: str, recompute: Any = "never", ranks: Any = RANKS, *, anywhere: bool = False
) -> tuple[PipelineShape, PartTables]:
    chunks = find_schedule(name).default_virtual_stages
    program = find_schedule(name).program(len(ranks), 2, chunks)
    shape = PipelineShape(PipelineConfig(name, recompute, 2, 2, chunks), program, ranks)
    exchanges = LeastExchanges(problem.space)
    return shape, make_part_tables(problem.space, shape, exchanges, anywhere=anywhere)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("anywhere", [False, True])
def test_sums_of_layers(anywhere: bool, name: str, recompute: Any, make_chain: MakeChain) -> None:
    """Of the slowest device of a part, or, of any devices, the fastest that there is; a replica takes its
    share of a micro-batch of 2."""
    if (name, recompute) == ("zb-h1", "always"):
        recompute = "by_stage"
    problem = make_problem(make_chain)
    chain, split = problem.chain, name == "zb-h1"
    _, tables = make_tables(problem, name, recompute, anywhere=anywhere)
    for slot, own in tables.program.parts_by_slot.items():
        ranks = RANKS[slot.device]
        size = chain.sizes.index(2 // len(ranks))
        scale = 1.0 if anywhere or max(ranks) < 3 else 1 / 0.4
        for a, b in combinations(range(LAYERS + 1), 2):

            def over(values: Any, a: int = a, b: int = b, size: int = size) -> float:
                return float((values if values.ndim == 1 else values[:, size])[a:b].sum())

            forward, once = over(chain.forward_seconds), over(chain.accumulation_seconds)
            again = recompute == "always"
            assert tables.seconds["forward"][slot][a, b] == pytest.approx(scale * forward)
            if split:
                assert tables.seconds["backward"][slot][a, b] == pytest.approx(
                    scale * over(chain.backward_input_seconds)
                )
                assert tables.seconds["weight"][slot][a, b] == pytest.approx(
                    scale * over(chain.backward_weight_seconds)
                )
                assert 0 <= tables.seconds["accumulation"][slot][a, b] <= scale * once * (1 + 1e-9)
            else:
                whole = over(chain.backward_seconds) + again * forward
                assert tables.seconds["backward"][slot][a, b] == pytest.approx(scale * whole)
                assert not tables.seconds["weight"][slot].any()
                assert tables.seconds["accumulation"][slot][a, b] == pytest.approx(scale * once)
            launched = over(chain.forward_host_seconds)
            assert tables.seconds["forward_launch"][slot][a, b] == pytest.approx(launched)
            back = over(chain.backward_host_seconds) + again * launched
            assert tables.seconds["backward_launch"][slot][a, b] == pytest.approx(back)
        assert (tables.usable[own] == np.triu(np.ones((LAYERS + 1, LAYERS + 1)), 1)).all()
    assert tables.hosts == problem.space.hosts
    assert tables.parts == 3


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v", "dapple"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_costs_are_those_of_the_plans(name: str, recompute: Any, make_chain: MakeChain) -> None:
    """With one replica a stage and links that no two cuts share, a step is that of the plan."""
    if (
        recompute == "always"
        and find_schedule(name).program(3, 3, find_schedule(name).default_virtual_stages).splits_backward
    ):
        pytest.skip("nothing recomputes beside a backward in two parts")
    problem = make_problem(make_chain)
    shape, tables = make_tables(problem, name, recompute, ((0,), (2,), (4,)))
    inner = combinations(range(1, LAYERS), tables.parts - 1)
    rows = np.array([(0, *cuts, LAYERS) for cuts in inner])
    steps = step_seconds(shape.program, tables.costs(rows)).tolist()
    for row, step in zip(rows.tolist(), steps, strict=True):
        plan = fastest(problem.space, [shape.proposal(range(LAYERS + 1), row)])
        assert plan is not None
        assert step == pytest.approx(plan.step_seconds, rel=1e-9)


def test_what_is_sent_and_summed_up(make_chain: MakeChain) -> None:
    """Over the slowest of the links between two stages, the larger share of both sides; on any devices over
    the fastest link, the smaller share. Gradients of replicas are exchanged behind the last backward."""
    problem = make_problem(make_chain)
    chain = problem.chain
    _, tables = make_tables(problem, "1f1b", ranks=((0, 1), (2, 3), (4,)))
    _, least = make_tables(problem, "1f1b", ranks=((0, 1), (2, 3), (4,)), anywhere=True)
    bandwidth, latency = fastest_transfer(problem.topology)
    assert bandwidth >= 500.0
    half, whole = (chain.output_bytes[:, chain.sizes.index(size)] for size in (1, 2))
    for end in range(1, LAYERS):
        assert tables.occupancy[0, end] == pytest.approx(half[end - 1] / 100.0)
        assert tables.occupancy[1, end] == pytest.approx(whole[end - 1] / 100.0)
        assert least.occupancy[0, end] == pytest.approx(half[end - 1] / bandwidth)
        assert least.occupancy[1, end] == pytest.approx(half[end - 1] / bandwidth)
    assert tables.latency.tolist() == [0.05, 0.05]
    assert least.latency.tolist() == [latency, latency] == [0.01, 0.01]
    for slot in tables.program.parts_by_slot:
        after = tables.seconds["exposed"][slot]
        assert after.tolist() == least.seconds["exposed"][slot].tolist()
        assert bool(after[0, LAYERS] > 0) == (slot.device < 2)


def test_chunks_on_one_device_send_nothing_to_each_other(make_chain: MakeChain) -> None:
    """In a V the cut at its point is inside the last device."""
    problem = make_problem(make_chain)
    shape, tables = make_tables(problem, "zb-v", ranks=((0,), (2,)))
    inside = [here.device == there.device for here, there in pairwise(shape.program.pipes[0])]
    assert inside == [False, True, False]
    for cut, free in enumerate(inside):
        assert bool(tables.occupancy[cut, 1:-1].any()) != free
        assert tables.latency[cut] == (0.0 if free else 0.05)


def test_stages_that_exchange_by_layer_are_of_their_own_devices(make_chain: MakeChain) -> None:
    """Where parameters are sharded, what a layer waits for is of the links of its replicas, which the least
    on any devices leaves out."""
    problem = make_problem(make_chain, zero=3, speed=1.0)
    _, own = make_tables(problem, "1f1b", ranks=((0, 1), (3, 4)))
    _, least = make_tables(problem, "1f1b", ranks=((0, 1), (3, 4)), anywhere=True)
    near, far = (own.seconds["forward"][slot] for slot in own.program.parts_by_slot)
    size = problem.chain.sizes.index(1)
    for a, b in combinations(range(LAYERS + 1), 2):
        alone = problem.chain.forward_seconds[a:b, size].sum()
        assert far[a, b] >= near[a, b] >= alone * (1 - 1e-12)
        for slot in least.program.parts_by_slot:
            assert least.seconds["forward"][slot][a, b] == pytest.approx(alone)
    assert (far > near * (1 + 1e-9)).any()
