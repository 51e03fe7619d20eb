"""What a device sends both ways leaves by one port: orders are timed as the simulator has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.synthesis.exchanges import improve_order
from pplan.planner.synthesis.synthesize import make_candidate

from .test_orders import list_steps

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def proposal(base: str, devices: int, micro_batches: int, layers: int) -> Proposal:
    program = SCHEDULES[base].program(devices, micro_batches)
    places = tuple((slot.device,) for slot in program.pipes[0])
    ends = (*range(1, len(places)), layers)
    return Proposal(PipelineConfig(base, "never", micro_batches, 1, program.chunks), ends, places)


def test_exchanges_end_with_what_they_say(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    for seed in range(3):
        chain = make_chain(seed, 6, cuts=1.0)
        slow = replace(chain, output_bytes=chain.output_bytes * 20)
        problem = Problem(slow, make_topology(3, latency=0.01), PlanOptions(mini_batch=6, micro_batches=6))
        own = make_candidate(problem, proposal("zb-h1", 3, 6, 6), ["never"] * 3)
        start = list_steps(own.problem.program)
        assert start is not None
        lists, step = improve_order(own.problem, start, own.bound, 20_000)
        costs = assemble(problem.space, own.proposal, own.recompute).costs()
        assert step == pytest.approx(float(step_seconds(own.problem.arrange(lists), costs)[0]))
