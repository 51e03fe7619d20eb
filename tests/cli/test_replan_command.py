"""`pplan replan`: a plan without the devices that are gone, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


@pytest.fixture
def planned(here: Path, profile: Profile, solve_once: Callable[..., Plan]) -> Path:
    """A plan on four devices, beside its profile."""
    profile.save(here / "toy.profile.json", force=False)
    plan = solve_once(here / "toy.profile.json", gpus=4, mini_batch=16, schedule="1f1b")
    plan.save(here / "toy.plan.json", force=False)
    return here / "toy.plan.json"


def test_the_plan_that_is_left(planned: Path, run: Run) -> None:
    ran = run("replan", str(planned), "--lost", "1", "--within", "20%")
    assert ran.status == 0
    assert "without device 1:" in ran.out
    assert (
        " moves the fewest weights of the plans without the lost devices that are at most 20% slower"
        in ran.out
    )
    (path,) = (own for own in Path().glob("*.replan.plan.json"))
    left = pplan.load_plan(path)
    assert {rank for stage in left.stages for rank in stage.devices} <= {0, 2, 3}
    assert run("verify", str(path)).status == 0
    printed = json.loads(run("replan", str(planned), "--lost", "1", "--json", "--force").out)
    assert "without device 1:" in printed["notes"][0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--lost", "9"], "--lost 9: there are 4 devices"),
        (["--lost", "0,1,2,3"], "no device is left"),
        (["--lost", "x"], "--lost x"),
        (["--lost", "1", "--within", "much"], "--within much: is not a share"),
        ([], "which devices are gone is not said"),
    ],
)
def test_what_cannot_be(options: list[str], what: str, planned: Path, run: Run) -> None:
    ran = run("replan", str(planned), *options)
    assert ran.status == 2
    assert what in " ".join(ran.err.split())
