"""What a device sends both ways leaves by one port: orders are timed as the simulator has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.synthesis.exchanges import _Exchanges, improve_order
from pplan.planner.synthesis.orders import run_order
from pplan.planner.synthesis.synthesize import make_candidate

from .test_orders import list_steps

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def proposal(base: str, devices: int, micro_batches: int, layers: int) -> Proposal:
    program = SCHEDULES[base].program(devices, micro_batches)
    places = tuple((slot.device,) for slot in program.pipes[0])
    ends = (*range(1, len(places)), layers)
    return Proposal(PipelineConfig(base, "never", micro_batches, 1, program.chunks), ends, places)


@pytest.mark.parametrize("base", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved"])
@pytest.mark.parametrize("per_node", [4, 2, 1])
def test_orders_take_what_the_simulator_says(
    make_chain: MakeChain, make_topology: MakeTopology, base: str, per_node: int
) -> None:
    """Links so slow that transfers wait for each other; where devices of a node share its port, the order in
    which these send is not known, and the run of an order may be too short."""
    waited = 0
    for seed in range(3):
        chain = make_chain(seed, 9, cuts=1.0)
        slow = replace(chain, output_bytes=chain.output_bytes * 40)
        topology = make_topology(4, per_node=per_node, latency=0.01)
        problem = Problem(slow, topology, PlanOptions(mini_batch=8, micro_batches=8))
        own = proposal(base, 4, 8, 9)
        assembly = assemble(problem.space, own, ["never"] * len(own.ends))
        lists = list_steps(assembly.program)
        if lists is None:
            lists = list_steps(SCHEDULES["1f1b"].program(4, 8))
        assert lists is not None
        costs = assembly.costs()
        numbers = make_candidate(problem, own, ["never"] * len(own.ends)).problem
        run = run_order(numbers, lists)
        assert run is not None
        simulated = float(step_seconds(numbers.program(lists, assembly.program), costs)[0])
        if per_node == 2:
            assert run.step <= simulated * (1 + 1e-9)
        else:
            assert run.step == pytest.approx(simulated)
        apart = run_order(replace(numbers, forward_link=(), backward_link=()), lists)
        assert apart is not None
        waited += apart.step < run.step * (1 - 1e-9)
        row = _Exchanges(numbers, lists, run, Random(0))
        assert np.allclose(row.end[: row.actions], run.end)
    assert waited or per_node == 2


def test_exchanges_end_with_what_they_say(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    for seed in range(3):
        chain = make_chain(seed, 6, cuts=1.0)
        slow = replace(chain, output_bytes=chain.output_bytes * 20)
        problem = Problem(slow, make_topology(3, latency=0.01), PlanOptions(mini_batch=6, micro_batches=6))
        own = make_candidate(problem, proposal("zb-h1", 3, 6, 6), ["never"] * 3)
        start = list_steps(own.program)
        assert start is not None
        lists, step = improve_order(own.problem, start, own.bound, 20_000)
        costs = assemble(problem.space, own.proposal, own.recompute).costs()
        assert step == pytest.approx(float(step_seconds(own.problem.program(lists, own.program), costs)[0]))
