"""`pplan solve --robust`, from the command line to the plan's file and its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

pytestmark = pytest.mark.usefixtures("measured")


@pytest.fixture
def measured(here: Path) -> Path:
    """Four layers of which the first may as well take twice as long, at one size that fits twice."""
    layers = [
        {
            "name": f"layer{index}",
            "parameter_bytes": 2**30,
            "costs": [
                {
                    "micro_batch_size": 2,
                    "forward_seconds": seconds / 3,
                    "backward_seconds": 2 * seconds / 3,
                    "output_bytes": 64,
                    "saved_bytes": 64,
                    "spread": spread,
                }
            ],
        }
        for index, (seconds, spread) in enumerate([(3.0, 1.5), (1.0, 0.0), (2.0, 0.0), (2.1, 0.0)])
    ]
    path = here / "toy.profile.json"
    path.write_text(json.dumps({"schema": 1, "model": "toy", "layers": layers}))
    return path


MACHINE = ("--gpus", "2", "--mini-batch", "8", "--bandwidth", "0.1GB/s", "--latency", "1us")


def test_the_robust_plan(measured: Path, here: Path, run: Callable[..., Any]) -> None:
    ran = run("solve", *MACHINE, "--robust", "--details")
    assert ran.status == 0, ran.err
    plan = Plan.load(here / "toy.plan.json")
    assert plan.balance == [1, 3]
    assert plan.options.robust
    text = " ".join(ran.out.split())
    assert "is the fastest at the 90th percentile of those scored" in text
    assert "80 % interval" in text
    covers = plan.prediction.bound_covers
    assert covers
    assert f"Proven: no plan of the search space ({covers}) is faster than" in text
    assert "compared at the 90th percentile of their step" in text
    again = pplan.solve(
        Profile.load(measured), gpus=2, mini_batch=8, bandwidth=0.1e9, latency=1e-6, robust=True
    )
    assert again.balance == plan.balance
    assert again.prediction == plan.prediction


def test_slow_devices(here: Path, run: Callable[..., Any]) -> None:
    ran = run("solve", *MACHINE, "--slow-devices", "40%:5", "--details")
    assert ran.status == 0, ran.err
    plan, text = Plan.load(here / "toy.plan.json"), " ".join(ran.out.split())
    assert plan.options.slow_devices == (0.4, 5.0)
    assert plan.objective is not None
    assert "has the shortest mean step with slow devices of those scored" in text
    assert "in which each device, with a probability of 40 %, takes 5 times as long" in text
    assert "compared by the mean of their step" in text
    again = pplan.solve(
        Profile.load(here / "toy.profile.json"),
        gpus=2,
        mini_batch=8,
        bandwidth=0.1e9,
        latency=1e-6,
        slow_devices="40%:5",
    )
    assert again.objective == plan.objective


@pytest.mark.parametrize("text", ["5", "5:1.5", "0%:2", "100%:2", "5%:1", "5%:1e9", "x:2"])
def test_slow_devices_that_cannot_be(text: str, run: Callable[..., Any]) -> None:
    ran = run("solve", *MACHINE, "--slow-devices", text)
    assert ran.status == 2
    assert ran.err.startswith("pplan: --slow-devices ")


def test_without_it_the_fastest_by_the_medians(here: Path, run: Callable[..., Any]) -> None:
    ran = run("solve", *MACHINE)
    assert ran.status == 0, ran.err
    plan = Plan.load(here / "toy.plan.json")
    assert plan.balance == [2, 2]
    assert plan.objective is None
    assert "80 % interval" in " ".join(ran.out.split())


def test_not_with_the_frontier(here: Path, run: Callable[..., Any]) -> None:
    ran = run("solve", *MACHINE, "--robust", "--frontier")
    assert ran.status == 2
    assert "--robust" in ran.err
    assert not (here / "toy.plan.json").exists()
