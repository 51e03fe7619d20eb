"""More schedules to choose from give no slower plan under the same time limit.

The limit may end the search, so plans may be slower by `TOLERANCE`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

TOLERANCE = 1.05
SIZES = (1, 2, 4, 8, 16)
CASES = [
    pytest.param(10, 4, 1.7, 64, id="10x4"),
    pytest.param(24, 16, 1.9, 128, id="24x16"),
    pytest.param(50, 32, 2.5, 512, id="50x32"),
]


def chain_of(layers: int) -> Chain:
    """Uneven layers of about 1 ms forward and 30 MB of activations a sample."""
    rng = np.random.default_rng(0)

    def costs(each: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return each * 2.0 ** rng.uniform(-1, 1, (layers, 1)) * np.array(SIZES, dtype=np.float64) + start

    weights = 20e6 * 2.0 ** rng.uniform(-1, 1, layers)
    return Chain(
        names=tuple(f"l{index}" for index in range(layers)),
        sizes=SIZES,
        parameter_bytes=weights,
        trainable_bytes=weights,
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=4e6,
        forward_seconds=costs(1e-3, 2e-4),
        backward_seconds=costs(2e-3, 4e-4),
        output_bytes=costs(4e6),
        saved_bytes=costs(30e6),
        saved_input_bytes=costs(4e6),
        workspace_bytes=costs(10e6),
        forward_host_seconds=np.full((layers, len(SIZES)), 1e-4),
        backward_host_seconds=np.full((layers, len(SIZES)), 2e-4),
    )


def problem_of(layers: int, devices: int, gib: float, batch: int, seconds: float = 1.0) -> Problem:
    topology = two_level_topology(
        Device("gpu", round(gib * 2**30)), devices, 8, Link(3e11, 1e-6), Link(2.5e10, 1e-5)
    )
    return Problem(chain_of(layers), topology, PlanOptions(mini_batch=batch, time_limit=seconds))


def step(problem: Problem, **options: str | int) -> float:
    """Seconds of the best plan; inf where none is found."""
    chosen = replace(problem.options, **options)  # type: ignore[arg-type]
    best = find_best_plan(replace(problem, options=chosen).with_time_limit()).best
    return inf if best is None else best.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "devices", "gib", "batch"), CASES)
def test_more_schedules(layers: int, devices: int, gib: float, batch: int) -> None:
    problem = problem_of(layers, devices, gib, batch)
    every = step(problem, schedule="any")
    for schedule in ("auto", "1f1b", "autopipe", "interleaved", "chimera", "zb-h1"):
        assert every <= step(problem, schedule=schedule) * TOLERANCE, schedule


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["any", "interleaved", "zb-v"])
@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_time_limit(schedule: str, seconds: float) -> None:
    """Where no simple plan fits, too, an answer takes 1.2 times the limit and a second at most."""
    problem = problem_of(50, 32, 1.2, 512, seconds)
    start = time.process_time()
    step(problem, schedule=schedule)
    assert time.process_time() - start <= 1.2 * seconds + 1.0
