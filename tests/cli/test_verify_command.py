"""`pplan verify` and `pplan.verify`: statuses 0, 4 and 2, the table, and the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.plan_file import Plan

Run = Callable[..., Any]

PROFILE: dict[str, Any] = {
    "schema": 1,
    "model": "toy",
    "device": "cuda:0",
    "layers": [
        {
            "name": f"layers.{index}",
            "parameter_bytes": 2**20 * (1 + index % 3),
            "cut_after": index != 4,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": 1e-3 * (size + 1) * (12 - index),
                    "backward_seconds": 2e-3 * (size + 1) * (12 - index),
                    "output_bytes": 2**18 * size,
                    "saved_bytes": 2**19 * size,
                }
                for size in (4, 8)
            ],
        }
        for index in range(8)
    ],
}


@pytest.fixture
def planned(here: Path, solve_once: Callable[..., Plan]) -> Path:
    """A plan beside its profile."""
    measured, plan = here / "toy.profile.json", here / "toy.plan.json"
    measured.write_text(json.dumps(PROFILE))
    solve_once(measured, gpus=2, bandwidth=1e9, mini_batch=32).save(plan, force=False)
    return plan


def change(plan: Path, key: str, value: Any) -> None:
    content = json.loads(plan.read_text())
    content["prediction"][key] = value
    plan.write_text(json.dumps(content))


def test_a_plan_that_agrees(run: Run, planned: Path) -> None:
    ran = run("verify")
    assert ran.status == 0
    assert "Using toy.plan.json" in ran.err
    assert "memory of stages" in ran.out
    assert "toy.plan.json with toy.profile.json:" in ran.out
    assert " 0 differ, " in ran.out
    assert json.loads(run("verify", str(planned), "--json").out)["agrees"] is True


def test_a_plan_that_differs(run: Run, planned: Path) -> None:
    change(planned, "samples_per_second", 0.987)
    ran = run("verify", "toy.plan.json", "toy.profile.json")
    assert ran.status == 4
    assert "step differs: samples_per_second: the plan says 0.987, expected " in ran.err
    assert "2 differ" in ran.out
    assert "the file was changed after pplan wrote it" in ran.out
    ran = run("verify", "toy.plan.json", "--json")
    assert ran.status == 4
    lines = {line["name"]: line for line in json.loads(ran.out)["lines"]}
    assert lines["step"]["state"] == "differs"
    assert lines["step"]["plan_value"] == 0.987
    assert lines["bound"]["state"] == "ok"


def test_another_profile(run: Run, planned: Path) -> None:
    other = PROFILE | {"layers": [layer | {"name": f"x{layer['name']}"} for layer in PROFILE["layers"]]}
    (planned.parent / "other.profile.json").write_text(json.dumps(other))
    ran = run("verify", "toy.plan.json", "other.profile.json")
    assert ran.status == 4
    assert "profile differs: SHA-256 of the profile file" in ran.err
    assert "layer names: the plan says" in ran.out


def test_without_the_profile(run: Run, planned: Path) -> None:
    (planned.parent / "toy.profile.json").unlink()
    ran = run("verify", "toy.plan.json")
    assert ran.status == 0
    assert "no profile was given, and toy.profile.json is not beside the plan" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("toy.profile.json",), "this is a profile, a plan is needed"),
        (("x.plan.json",), "no such plan file"),
        (("toy.plan.json", "x.profile.json"), "no such profile file"),
        (("toy.plan.json", "toy.plan.json"), "this is a plan, a profile is needed"),
    ],
)
def test_files_that_cannot_be_read(arguments: tuple[str, ...], what: str, run: Run, planned: Path) -> None:  # noqa: ARG001
    ran = run("verify", *arguments)
    assert ran.status == 2
    assert what in ran.lines[0]
    assert len(ran.lines) == 2


def test_names_that_would_steer_the_terminal(run: Run, planned: Path) -> None:
    content = json.loads(planned.read_text())
    content["baselines"][0]["name"] = "\x1b[2Jgone"
    content["stages"][0]["memory"]["\x1b[2Jterm"] = 5
    planned.write_text(json.dumps(content))
    ran = run("verify", "toy.plan.json")
    assert ran.status == 4
    assert "\x1b" not in ran.out + ran.err


def test_in_python(planned: Path) -> None:
    report = pplan.verify(planned)
    assert report.agrees
    assert report.line("profile").state == "ok"
    assert pplan.verify(planned, planned.parent / "toy.profile.json").lines == report.lines
    plan, profile = pplan.load_plan(planned), pplan.load_profile(planned.parent / "toy.profile.json")
    made = pplan.verify(plan, profile)
    assert made.agrees
    assert made.line("profile").state == "not checked"
    assert made.line("seconds of stages").state == "ok"
    assert pplan.verify(plan).line("seconds of stages").state == "not checked"
    with pytest.raises(pplan.UsageError, match="plan=5: is not a Plan"):
        pplan.verify(5)  # type: ignore[arg-type]
