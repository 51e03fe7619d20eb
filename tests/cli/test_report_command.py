"""`pplan report`: which files it takes and where the page goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import UsageError
from pplan.cost_models.text_files import sha256
from pplan.profiler.profile_file import Profile
from pplan.runtimes.checking.records import PLAN, Check

Run = Callable[..., Any]


@pytest.fixture
def planned(run: Run, here: Path, profile: Profile) -> Path:
    """The profile of the plan and the frontier beside it."""
    path = here / "toy.profile.json"
    profile.save(path, force=False)
    solve = ("solve", path.name, "--gpus", "2", "--mini-batch", "8", "--frontier", "--schedule", "1f1b")
    assert run(*solve).status == 0
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_the_page_takes_what_lies_beside_the_plan(run: Run) -> None:
    ran = run("report")
    assert (ran.status, ran.out, ran.lines[-1]) == (0, "", "Wrote toy.html")
    page = Path("toy.html").read_text()
    assert "Step time against the most memory" in page
    assert "Where the time of each stage goes" in page
    # Its own page is written again; one that was changed stays.
    assert run("report").status == 0
    assert Path("toy.html").read_text() == page
    Path("toy.html").write_text(page.replace("<h1>", "<h1>My "))
    ran = run("report")
    assert (ran.status, "not as pplan wrote it" in ran.err) == (2, True)
    assert run("report", "--force", "--explain").status == 0
    assert "What-if" in Path("toy.html").read_text()


def test_a_profile_of_another_plan_is_refused(run: Run, planned: Path) -> None:
    other = Path("other.profile.json")
    other.write_text(planned.read_text() + "\n")
    ran = run("report", "--profile", str(other))
    assert ran.status == 2
    assert "is not the profile" in ran.err
    planned.unlink()
    assert "not at hand" in (run("report").err + Path("toy.html").read_text())
    ran = run("report", "--explain", "--force")
    assert (ran.status, "--profile FILE" in ran.err) == (2, True)


@pytest.mark.usefixtures("planned")
def test_other_files_are_not_overwritten(run: Run) -> None:
    Path("mine.html").write_text("<!DOCTYPE html><title>mine</title>")
    ran = run("report", "-o", "mine.html", "--force")
    assert (ran.status, "is a HTML page" in ran.err) == (2, True)
    assert Path("mine.html").read_text() == "<!DOCTYPE html><title>mine</title>"


@pytest.mark.usefixtures("planned")
def test_a_frontier_of_another_machine_is_no_part_of_the_page(run: Run) -> None:
    """Not unasked, and not where it is named; nor the check of another plan."""
    other = ("solve", "toy.profile.json", "--gpus", "1", "--mini-batch", "8", "-o", "one.plan.json")
    assert run(*other).status == 0
    assert run("report", "one.plan.json").status == 0
    assert "Step time against the most memory" not in Path("one.html").read_text()
    ran = run("report", "one.plan.json", "--frontier", "toy.frontier.json", "-o", "x.html")
    assert (ran.status, "is of another machine than the plan" in ran.err) == (2, True)


def test_the_check_of_another_plan_is_refused(here: Path, profile: Profile) -> None:
    one, two = (
        pplan.solve(profile, gpus=1, mini_batch=8, optimizer=name, time_limit=1) for name in ("sgd", "adam")
    )
    one.save(here / "one.plan.json", force=False)
    two.save(here / "two.plan.json", force=False)
    stage = {"first_layer": 0, "last_layer": 1, "devices": [0]}
    seconds = {"forward": 1.0, "backward": 1.0}
    check = Check.model_validate(
        {
            "plan": "one.plan.json",
            "plan_sha256": sha256((here / "one.plan.json").read_text()),
            "model": one.model,
            "backend": "gloo",
            "device_name": "toy",
            "processes": 1,
            "cases": [
                {
                    "name": PLAN,
                    "balance": one.balance,
                    "schedule": "1f1b",
                    "micro_batches": 1,
                    "micro_batch_size": 8,
                    "predicted_step_seconds": 1.0,
                    "step_seconds": [1.0],
                    "stages": [stage | dict.fromkeys(("planned", "measured"), seconds)],
                    "devices": [
                        {"device": 0, "planned_bytes": 3 << 30, "measured_bytes": 1 << 30}
                        | {"unseen": {"reserve": 1 << 30}}
                    ],
                }
            ],
        }
    )
    page = pplan.report(here / "one.plan.json", check=check).html
    assert "predicted were" in page
    assert "Peak memory, the ledger against a measured step" in page
    assert "+100.0 %" in page
    with pytest.raises(UsageError, match="check: it is of one"):
        pplan.report(here / "two.plan.json", check=check)
