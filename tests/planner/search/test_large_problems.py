"""Problems with more than 64 devices: their bound against plans with every number of replicas."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import replicated_pipeline
from pplan.planner.joint_search import run_search
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

SIZES = (1, 2, 4, 8, 16, 32, 64)


def chain_of(starts: list[float], each: list[float], saved: float = 0.0, weights: float = 1.0) -> Chain:
    """Layers whose forward and backward take `starts` at any size and `each` a sample."""
    sizes, layers = np.array(SIZES, dtype=np.float64), len(starts)
    seconds = np.array(starts)[:, None] + np.array(each)[:, None] * sizes
    nothing = np.zeros((layers, len(SIZES)))
    kept = nothing + saved * sizes
    return Chain(
        names=tuple(f"l{index}" for index in range(layers)),
        sizes=SIZES,
        parameter_bytes=np.full(layers, weights),
        trainable_bytes=np.full(layers, weights),
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=0.0,
        forward_seconds=seconds,
        backward_seconds=seconds,
        output_bytes=nothing,
        saved_bytes=kept,
        saved_input_bytes=nothing,
        workspace_bytes=nothing,
        forward_host_seconds=nothing,
        backward_host_seconds=nothing,
    )


def free_links(devices: int, memory: int | None = None) -> Topology:
    """Devices between which everything is there at once."""
    link = Link(np.inf, 0.0)
    return Topology((Group(Device("gpu", memory), devices),), (Level("node", None, link),))


def test_odd_replicas_beside_single_devices_are_bounded() -> None:
    chain = chain_of([5e-4] * 17 + [0.0], [0.0] * 17 + [5e-4])
    options = PlanOptions(
        mini_batch=256 * 48, micro_batches=256, schedule="1f1b", recompute="never", time_limit=2.0
    )
    problem = Problem(chain, free_links(66), options)
    plan = replicated_pipeline(problem.configs[0], list(range(1, 19)), [1] * 17 + [48])
    assert problem.allows(plan)
    known = fastest(problem.space, [plan])
    assert known is not None
    assert known.step_seconds == pytest.approx(0.273, rel=1e-3)
    found = run_search(problem)
    assert found.bound_seconds <= known.step_seconds
    assert found.best is not None
    assert found.best.step_seconds <= known.step_seconds * 1.0001


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "seed"), [(66, 0), (97, 1), (130, 2)])
def test_no_number_of_replicas_is_below_the_bound(devices: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = chain_of(list(rng.uniform(0, 1e-3, 3)), list(rng.uniform(0, 1e-4, 3)), saved=1.0)
    memory = int(rng.integers(150, 1200))
    size = int(rng.choice([48, 60, 64]))
    options = PlanOptions(mini_batch=8 * size, micro_batches=8, schedule="1f1b", time_limit=0.2)
    problem = Problem(chain, free_links(devices, memory), options)
    config = problem.configs[0]
    few = [1, 2, 3, 5, 9, 16, 17, 25, 31, 32, 33, 47, 48, 60, 61, 64]
    plans = [
        replicated_pipeline(config, [*ends, 3], counts)
        for stages in (1, 2, 3)
        for ends in combinations((1, 2), stages - 1)
        for counts in product(range(1, devices + 1) if stages < 3 else few, repeat=stages)
        if sum(counts) <= devices and max(counts) <= size and (stages < 2 or sum(counts) > devices - 24)
    ]
    best = fastest(problem.space, plans)
    assert best is not None
    assert run_search(problem).bound_seconds <= best.step_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_the_bound_of_many_devices_sees_memory_and_bubbles() -> None:
    rng = np.random.default_rng(3)
    chain = chain_of(list(rng.uniform(0, 2e-4, 24)), list(rng.uniform(5e-4, 1e-3, 24)), 10.0, 100.0)
    options = PlanOptions(mini_batch=4096, micro_batches=64, schedule="1f1b", time_limit=2.0)
    problem = Problem(chain, free_links(256, 5_000), options)
    found = run_search(problem)
    assert found.best is not None
    assert len(found.best.proposal.ends) > 1
    assert found.best.step_seconds <= 1.1 * found.bound_seconds
    assert found.bound_seconds > 1.05 * found.root_bound_seconds
