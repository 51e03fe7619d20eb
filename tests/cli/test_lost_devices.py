"""`pplan solve --lost`: a plan without the devices that are gone, and what cannot be."""

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
    ran = run("solve", str(planned), "--lost", "1", "--within", "20%")
    assert ran.status == 0
    assert "without device 1:" in ran.out
    assert "to resume, export this plan with --script" in " ".join(ran.out.split())
    assert (
        " moves the fewest weights of the plans without the lost devices that are at most 20 % slower"
        in ran.out
    )
    (path,) = (own for own in Path().glob("*.replan.plan.json"))
    left = pplan.load_plan(path)
    assert {rank for stage in left.stages for rank in stage.devices} <= {0, 2, 3}
    assert run("lint", str(path)).status == 0
    printed = json.loads(run("solve", str(planned), "--lost", "1", "--json", "--force").out)
    assert "without device 1:" in printed["notes"][0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--lost", "9"], "--lost 9: there are 4 devices"),
        (["--lost", "0,1,2,3"], "--lost names all 4 devices"),
        (["--lost", "x"], "--lost x"),
        (["--lost", "1", "--within", "much"], "--within much: is not a share"),
        (
            ["--lost", "1", "--gpus", "3"],
            "--gpus with --lost: the machine and the training are those of the plan",
        ),
        (["--lost", "1", "--mini-batch", "8"], "--mini-batch with --lost"),
        (["--lost", "1", "--frontier"], "--frontier with --lost"),
        (["--lost", "1", "--sweep", "gpus=2,3"], "--sweep with --lost"),
        (["--lost", "1", "--pp", "2"], "--pp with --lost"),
        (["toy.profile.json", "--lost", "1"], "--lost with 2 files: it takes one plan"),
        (["--within", "20%"], "--within 20%: is of --lost"),
        (["--profile", "toy.profile.json"], "--profile toy.profile.json: is of --lost"),
    ],
)
def test_what_cannot_be(options: list[str], what: str, planned: Path, run: Run) -> None:
    ran = run("solve", str(planned), *options)
    assert ran.status == 2
    assert what in " ".join(ran.err.split())


def test_all_devices_are_all_that_are_left(profile: Profile) -> None:
    """Of a plan that was to use all of them: verify asks for no lost one."""
    plan = pplan.solve(profile, gpus=3, mini_batch=8, use_all=True, time_limit=1)
    left = pplan.replan(plan, profile, lost=[1]).plan
    assert {rank for stage in left.stages for rank in stage.devices} == {0, 2}
    assert left.prediction.bound_covers.endswith(", on all devices that are left")
    assert pplan.lint(left, profile).differing == []


def test_unlike_devices_are_not_tried_in_every_order(here: Path, profile: Profile) -> None:
    """Few cuts and replicas, all of which were looked at; but not on all devices."""
    machine = "[[device]]\nname = 'fast'\ncount = 2\nspeed = 2\n[[device]]\nname = 'slow'\ncount = 1\n"
    (here / "two.toml").write_text(machine)
    unlike = pplan.solve(profile, gpus=3, mini_batch=8, topology=here / "two.toml", schedule="1f1b")
    alike = pplan.solve(profile, gpus=3, mini_batch=8, schedule="1f1b")
    for plan, said in ((unlike, True), (alike, False)):
        notes = pplan.replan(plan, profile, lost=[2]).plan.notes
        assert any("the devices, or the links between them, are not alike" in note for note in notes) == said
