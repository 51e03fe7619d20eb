"""`pplan lint` and `pplan.lint`: statuses 0, 4 and 2, the table, and the JSON."""

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
    ran = run("lint")
    assert ran.status == 0
    assert "Using toy.plan.json" in ran.err
    assert "memory of stages" in ran.out
    assert "toy.plan.json with toy.profile.json:" in ran.out
    assert " 0 differ, " in ran.out
    assert json.loads(run("lint", str(planned), "--json").out)["agrees"] is True


def test_a_plan_that_differs(run: Run, planned: Path) -> None:
    change(planned, "samples_per_second", 0.987)
    ran = run("lint", "toy.plan.json", "--profile", "toy.profile.json")
    assert ran.status == 4
    assert "step differs: samples_per_second: the plan says 0.987, expected " in ran.err
    assert "2 differ" in ran.out
    assert "the file was changed after pplan wrote it" in ran.out
    ran = run("lint", "toy.plan.json", "--json")
    assert ran.status == 4
    lines = {line["name"]: line for line in json.loads(ran.out)["lines"]}
    assert lines["step"]["state"] == "differs"
    assert lines["step"]["plan_value"] == 0.987
    assert lines["bound"]["state"] == "ok"


def test_several_plans(run: Run, planned: Path) -> None:
    other = planned.with_name("other.plan.json")
    other.write_bytes(planned.read_bytes())
    change(other, "samples_per_second", 0.987)
    both = ("toy.plan.json", "other.plan.json")
    ran = run("lint", *both)
    assert ran.status == 4
    assert ran.lines[0].startswith("other.plan.json: step differs: ")
    ran = run("lint", *both, "--json")
    assert [report["agrees"] for report in json.loads(ran.out)] == [True, False]
    assert run("lint", "toy.plan.json", "toy.plan.json").status == 0


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (("EtL",), "lint EtL: a layout without its model", "--model config.json"),
        (("even",), "lint even: a layout without its model", "--model config.json"),
        (("toy.plan.json", "--pp", "2"), "lint --pp: is for a layout", "--model config.json"),
        (("toy.plan.json", "--gpus", "2"), "lint --gpus: is for a layout", "--model config.json"),
        (("toy.plan.json", "toy.plan.json", "--profile", "x"), "lint --profile x: with 2 plans", "one plan"),
        (("--model", "config.json"), "lint --model config.json: takes one layout", "pplan lint 'Et"),
        (
            ("EtL", "--model", "c.json", "--profile", "x"),
            "lint --model c.json: takes one layout",
            "no --model",
        ),
    ],
)
def test_layouts_and_plans_are_told_apart(
    run: Run, planned: Path, arguments: tuple[str, ...], what: str, hint: str
) -> None:
    assert planned.is_file()
    ran = run("lint", *arguments)
    assert (ran.status, len(ran.lines)) == (2, 2)
    assert ran.lines[0].startswith(f"pplan: {what}")
    assert hint in ran.lines[1]


def test_another_profile(run: Run, planned: Path) -> None:
    other = PROFILE | {"layers": [layer | {"name": f"x{layer['name']}"} for layer in PROFILE["layers"]]}
    (planned.parent / "other.profile.json").write_text(json.dumps(other))
    ran = run("lint", "toy.plan.json", "--profile", "other.profile.json")
    assert ran.status == 4
    assert "profile differs: SHA-256 of the profile file" in ran.err
    assert "layer names: the plan says" in ran.out


def test_without_the_profile(run: Run, planned: Path) -> None:
    (planned.parent / "toy.profile.json").unlink()
    ran = run("lint", "toy.plan.json")
    assert ran.status == 0
    assert "no profile was given, and toy.profile.json is not beside the plan" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("toy.profile.json",), "this is a profile, a plan is needed"),
        (("x.plan.json",), "no such plan file"),
        (("toy.plan.json", "--profile", "x.profile.json"), "no such profile file"),
        (("toy.plan.json", "--profile", "toy.plan.json"), "this is a plan, a profile is needed"),
    ],
)
def test_files_that_cannot_be_read(arguments: tuple[str, ...], what: str, run: Run, planned: Path) -> None:  # noqa: ARG001
    ran = run("lint", *arguments)
    assert ran.status == 2
    assert what in ran.lines[0]
    assert len(ran.lines) == 2


def test_names_that_would_steer_the_terminal(run: Run, planned: Path) -> None:
    content = json.loads(planned.read_text())
    content["baselines"][0]["name"] = "\x1b[2Jgone"
    content["stages"][0]["memory"]["\x1b[2Jterm"] = 5
    planned.write_text(json.dumps(content))
    ran = run("lint", "toy.plan.json")
    assert ran.status == 4
    assert "\x1b" not in ran.out + ran.err


def test_in_python(planned: Path) -> None:
    report = pplan.lint(planned)
    assert report.agrees
    assert report.line("profile").state == "ok"
    assert pplan.lint(planned, planned.parent / "toy.profile.json").lines == report.lines
    plan, profile = pplan.load_plan(planned), pplan.load_profile(planned.parent / "toy.profile.json")
    made = pplan.lint(plan, profile)
    assert made.agrees
    assert made.line("profile").state == "not checked"
    assert made.line("seconds of stages").state == "ok"
    assert pplan.lint(plan).line("seconds of stages").state == "not checked"
    with pytest.raises(pplan.UsageError, match="plan=5: is not a Plan"):
        pplan.lint(5)  # type: ignore[arg-type]
