"""Data parallelism against its formula, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import schedule_named
from pplan.cost_models.timeline import simulate
from pplan.cost_models.topology import Topology
from pplan.planner.data_parallel import costs, data_parallel
from pplan.planner.search import Space

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


@pytest.fixture
def space(make_chain: MakeChain, make_topology: MakeTopology) -> Space:
    """Two layers of 1 s forward, 2 s backward a sample plus 1 s and 1 s; 40 B of parameters each; 20 B/s."""
    per_sample, alone = np.array([[1.0], [1.0]]), np.ones((2, 1))
    sizes = np.array([[1.0, 2.0, 4.0]])
    chain = replace(
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
    return Space(chain, make_topology(2), "sgd", None)


def test_one_accumulation_is_best_where_overheads_count(space: Space) -> None:
    plan, _ = data_parallel(space, 2, 8, ["never"], None)
    assert plan is not None
    # One bucket of 80 B, ready with the last backward: 2 (2-1)/2 * 80 / 20 = 4 s after it.
    assert plan.exposed_seconds == pytest.approx(4)
    assert (plan.setting.micro_batches, plan.setting.micro_batch_size) == (1, 8)
    assert plan.step_seconds == pytest.approx(2 * (4 + 1) + 2 * (8 + 1) + 4)
    timeline = simulate(schedule_named("1f1b").actions(1, 1), costs(space, plan))
    assert timeline.step_seconds == pytest.approx(plan.step_seconds)


def test_memory_makes_it_accumulate_or_recompute(space: Space) -> None:
    # Weights, gradients and buckets take 240 B; saved activations 200 B a sample; 5 % on top.
    limited = replace(space, memory_limit=1.05 * (240 + 2 * 200))
    plan, _ = data_parallel(limited, 2, 8, ["never", "always"], None)
    assert plan is not None
    assert (plan.setting.micro_batches, plan.setting.recompute) == (2, "never")
    assert plan.memory_bytes == pytest.approx(1.05 * 640)
    assert data_parallel(replace(space, memory_limit=300.0), 2, 8, ["never", "always"], None) == (
        None,
        "does not fit",
    )


def test_what_does_not_divide(space: Space) -> None:
    assert (
        data_parallel(space, 2, 7, ["never"], None)[1] == "a mini-batch of 7 does not divide among 2 devices"
    )
    plan, reason = data_parallel(space, 2, 8, ["never"], 3)
    assert plan is None
    assert "share of 4 samples" in reason
