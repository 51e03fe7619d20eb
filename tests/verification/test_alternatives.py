"""Alternatives are what a runtime runs: on the devices from rank 0 on, launched as it launches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import pplan

SLOW_FIRST = """
[[device]]
name = "slow"
count = 2
speed = 0.25
[[device]]
name = "fast"
count = 2
[[level]]
name = "node"
size = 2
bandwidth = "2GB/s"
latency = "10us"
[[level]]
name = "network"
bandwidth = "0.2GB/s"
latency = "50us"
"""
OWN_LAUNCHES = SLOW_FIRST.replace("speed = 0.25", 'profile = "own.profile.json"')


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_on_the_devices_from_rank_0_on(
    seed: int, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """The fast devices are the last: a plan that leaves the slow ones free is no alternative."""
    solved = solve_files(make_profile(seed, 6, cuts=1.0), gpus=4, mini_batch=8, topology=SLOW_FIRST)
    assert solved.plan["alternatives"]
    solved.check()


@pytest.mark.slow
def test_of_another_runtime_than_the_one_asked_for(
    make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """fairscale launches from one process, torch does not: its alternative has no such launches."""
    solved = solve_files(
        make_profile(0, 6, host=5.0), gpus=2, mini_batch=12, runtime="fairscale", bandwidth=1e9, latency=0.0
    )
    torch = next(own for own in solved.plan["alternatives"] if "torch" in own["runtimes"])
    assert torch["step_seconds"] < solved.plan["prediction"]["step_seconds"]
    solved.check()


@pytest.mark.slow
def test_the_launches_of_kinds_with_a_profile_of_their_own(
    make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """One host launches for all: the plan's figures and the simulator's are the same."""
    profile = make_profile(1, 6, host=5.0, cuts=1.0)
    options = {"gpus": 4, "mini_batch": 8, "topology": OWN_LAUNCHES, "runtime": "fairscale"}
    solved = solve_files(profile, **options)
    solved.check()
    timeline = pplan.simulate(
        pplan.Plan.parse(json.dumps(solved.plan), "plan"),
        solved.folder / "toy.profile.json",
        topology=solved.folder / "machine.toml",
    )
    assert timeline.step_seconds == pytest.approx(solved.plan["prediction"]["step_seconds"], rel=1e-9)


@pytest.mark.parametrize("schedule", ["auto", "zb-h1", "chimera"])
def test_the_launches_of_a_process_a_device(
    schedule: str, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """Verified and simulated as planned; without the launches the step is shorter."""
    options = {"gpus": 2, "mini_batch": 8, "schedule": schedule, "bandwidth": 1e9, "latency": 0.0}
    solved = solve_files(make_profile(1, 5, host=5.0, cuts=1.0), **options)
    step = solved.plan["prediction"]["step_seconds"]
    solved.check()
    shorter = {**solved.plan["prediction"], "step_seconds": 0.9 * step}
    assert "step_seconds" in {own.what for own in solved.attack({**solved.plan, "prediction": shorter})}
    plan, profile = (
        pplan.Plan.parse(json.dumps(solved.plan), "plan"),
        pplan.Profile.load(solved.folder / "toy.profile.json"),
    )
    assert pplan.simulate(plan, profile).step_seconds == pytest.approx(step, rel=1e-9)
    free = solve_files(make_profile(1, 5, host=0.0, cuts=1.0), **options)
    assert free.plan["prediction"]["step_seconds"] < 0.95 * step
