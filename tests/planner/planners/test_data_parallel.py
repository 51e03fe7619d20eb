"""Data parallelism against its formula, counted by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import ScoredPlan
from pplan.planner.joint_search import plan_with
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import find_planner
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


@pytest.fixture
def chain(make_chain: MakeChain) -> Chain:
    """Two layers of 1 s forward, 2 s backward a sample plus 1 s and 1 s; 40 B of parameters each."""
    per_sample, alone = np.array([[1.0], [1.0]]), np.ones((2, 1))
    sizes = np.array([[1.0, 2.0, 4.0]])
    return replace(
        make_chain(0, 2),
        forward_seconds=per_sample * sizes + alone,
        backward_seconds=2 * per_sample * sizes + alone,
        parameter_bytes=np.array([40.0, 40.0]),
        trainable_bytes=np.array([40.0, 40.0]),
        buffer_bytes=np.zeros(2),
        saved_bytes=100 * per_sample * sizes,
        saved_input_bytes=np.zeros((2, 3)),
        workspace_bytes=np.zeros((2, 3)),
    )


def shared(chain: Chain, topology: Topology, **options: Any) -> ScoredPlan | str:
    problem = Problem(chain, topology, PlanOptions(**options))
    return plan_with(find_planner("data-parallel"), problem)


def test_one_accumulation_is_best_where_overheads_count(chain: Chain, make_topology: MakeTopology) -> None:
    """On two devices at 20 B/s: one bucket of 80 B, ready with the last backward, takes 4 s after it."""
    plan = shared(chain, make_topology(2), mini_batch=8)
    assert isinstance(plan, ScoredPlan)
    assert (plan.config.micro_batches, plan.config.micro_batch_size) == (1, 8)
    assert plan.proposal.devices == ((0, 1),)
    assert plan.step_seconds == pytest.approx(2 * (4 + 1) + 2 * (8 + 1) + 2 * (2 - 1) / 2 * 80 / 20)


def test_memory_makes_it_accumulate_or_recompute(chain: Chain, make_topology: MakeTopology) -> None:
    """Weights, gradients and buckets take 240 B; saved activations 200 B a sample; 5 % on top."""
    options = {"mini_batch": 8, "recompute": "never"}
    plan = shared(chain, make_topology(2), memory_limit=1.05 * (240 + 2 * 200), **options)
    assert isinstance(plan, ScoredPlan)
    assert (plan.config.micro_batches, plan.recompute) == (2, ("never",))
    reason = shared(chain, make_topology(2), memory_limit=300.0, mini_batch=8)
    assert isinstance(reason, str)
    assert re.fullmatch(r"does not fit: device 0 needs \d+ B of 300 B", reason)


def test_what_does_not_divide(chain: Chain, make_topology: MakeTopology) -> None:
    """The largest share counts; a runtime shares evenly."""
    uneven, even = (shared(chain, make_topology(2), mini_batch=batch) for batch in (7, 8))
    assert isinstance(uneven, ScoredPlan)
    assert isinstance(even, ScoredPlan)
    assert uneven.proposal.devices == ((0, 1),)
    assert uneven.step_seconds <= even.step_seconds
    assert isinstance(shared(chain, make_topology(2), mini_batch=7, runtime="deepspeed"), str)
