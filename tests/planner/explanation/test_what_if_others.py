"""What one more device brings to a plan of a schedule that is not 1F1B or GPipe: against every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.planner.candidate import Proposal
from pplan.planner.explanation.explain_context import resolve
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

FORWARD_MS = (20, 10, 1, 20, 20, 5, 10)
BACKWARD_MS = (50, 20, 1, 20, 20, 10, 10)
OUTPUT_BYTES = (1e3, 1e6, 2e7, 1e5, 1e3, 1e6, 0)
PARAMETERS_MB = (400, 0, 0, 400, 0, 400, 400)


def list_plans(problem: Problem) -> Iterator[Proposal]:
    """Every plan whose second parts of the layers run on the devices of the first, the other way round."""
    layers = len(problem.chain)
    for stages in range(2, problem.gpus + 1):
        for cuts in combinations(range(1, layers), 2 * stages - 1):
            for bounds in combinations(range(1, problem.gpus + 1), stages):
                devices = tuple(tuple(range(a, b)) for a, b in zip((0, *bounds), bounds, strict=False))
                for config in problem.configs:
                    yield Proposal(
                        replace(config, virtual_stages=2), (*cuts, layers), (*devices, *devices[::-1])
                    )


@pytest.mark.slow
def test_one_more_device_under_zero_bubble_v(make_chain: Callable[..., Chain]) -> None:
    made, sizes = make_chain(1, 7, sizes=(1, 2, 4), cuts=1.1), np.array([[1, 2, 4]])
    weights = 1e6 * np.array(PARAMETERS_MB, dtype=float)
    forward, backward = (np.array(own)[:, None] * sizes / 1e3 for own in (FORWARD_MS, BACKWARD_MS))
    nothing = np.zeros((7, 3))
    chain = replace(
        made,
        parameter_bytes=weights,
        trainable_bytes=weights,
        forward_seconds=forward,
        backward_seconds=backward,
        backward_input_seconds=backward / 2,
        backward_weight_seconds=backward / 2,
        output_bytes=np.array(OUTPUT_BYTES)[:, None] * sizes,
        forward_host_seconds=nothing,
        backward_host_seconds=nothing,
        accumulation_seconds=np.zeros(7),
    )
    link = Link(31.5e9, 1e-5)
    topology = two_level_topology(Device("toy", None), 2, 8, link, link)
    problem = Problem(chain, topology, PlanOptions(mini_batch=4, schedule="zb-v"))
    own = find_best_plan(problem).best
    assert own is not None
    more = replace(problem, topology=topology.with_gpus(3))
    best = fastest(more.space, list_plans(more))
    answer = resolve(more, [own], 0.5, fully=True)
    assert best is not None
    assert answer.best is not None
    assert answer.best.step_seconds <= best.step_seconds * (1 + 1e-9)
