"""`pplan report`: which files it takes and where the page goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.profiler.profile_file import Profile

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
