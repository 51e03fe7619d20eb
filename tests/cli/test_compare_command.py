"""`pplan compare`: its table against golden files, its exit status, and what the planners make of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cli.compare_command import print_comparison, share
from pplan.cost_models.errors import UsageError
from pplan.planner.explanation.compare import ComparisonRow, PlanComparison, compare_plans
from pplan.planner.plan_file import FIXED_PARTITION, Plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.profiler.profile_file import Profile

Golden = Callable[[str, str], None]
Run = Callable[..., Any]
Terminal = Callable[[int], Any]


def with_step(plan: Plan, step: float) -> Plan:
    faster = {
        "step_seconds": step,
        "samples_per_second": 64 / step,
        "lower_bound_seconds": step / 2,
        "gap": 1,
    }
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=faster)})


@pytest.fixture
def files(here: Path, plan: Plan) -> Plan:
    """Two plans, the second 25 % faster."""
    plan.save(here / "a.plan.json", force=False)
    with_step(plan, 0.52).save(here / "b.plan.json", force=False)
    return plan


@pytest.mark.parametrize("width", [110, 80, 40])
def test_table(plan: Plan, golden: Golden, width: int, terminal: Terminal) -> None:
    small = plan.model_copy(update={"mini_batch": 32, "micro_batches": 8, "model": "other", "topology": ""})
    made = pplan.compare(plan, with_step(plan, 0.52), small)
    refused = ComparisonRow(name="one-gpu", reason="does not fit")
    console = terminal(width)
    print_comparison(made.model_copy(update={"rows": [*made.rows, refused]}), console)
    golden(f"compare_{width}.txt", console.text)


@pytest.mark.usefixtures("files")
def test_the_page_has_all_plans(run: Run, here: Path) -> None:
    for command in (["compare", "a.plan.json", "b.plan.json"], ["report", "b.plan.json", "a.plan.json"]):
        ran = run(*command, "-o", "page.html", "--force")
        assert ran.status == 0, ran.err
        page = (here / "page.html").read_text()
        assert f"Answer: <bdi>{command[1]}</bdi>" in page
        assert "2 plans</bdi>" in page
    assert run("compare", "a.plan.json", "b.plan.json", "-o", "page.html").status == 2


@pytest.mark.parametrize("width", [60, 80])
def test_names_of_planners_are_whole(plan: Plan, width: int, terminal: Terminal) -> None:
    made = pplan.compare(plan, with_step(plan, 0.52))
    rows = [made.rows[0].model_copy(update={"name": name}) for name in PLANNERS]
    console = terminal(width)
    print_comparison(made.model_copy(update={"rows": [*made.rows, *rows]}), console)
    first_words = {line.split()[0] for line in console.text.splitlines() if line.strip()}
    assert set(PLANNERS) <= first_words
    assert max(map(len, console.text.splitlines())) <= width


def test_files(run: Run, files: Plan) -> None:
    ran = run("compare", "a.plan.json", "b.plan.json", "--json")
    assert (ran.status, ran.err) == (0, "")
    made = PlanComparison.model_validate(json.loads(ran.out))
    first, second = made.rows
    assert (first.name, second.name) == ("a.plan.json", "b.plan.json")
    assert first.step_seconds == files.prediction.step_seconds
    assert first.plan is not None
    assert second.plan is not None
    assert (first.plan.device_count, first.memory_bytes, first.slower) == (6, 3 * 2**30, 0.0)
    assert (second.gap, second.plan.balance) == (1, [4, 5, 3])
    assert second.slower == pytest.approx(0.52 / 0.65 - 1)
    assert made.first_slower == pytest.approx(0.65 / 0.52 - 1)
    assert made == pplan.compare("a.plan.json", "b.plan.json")


@pytest.mark.parametrize(
    ("order", "limit", "status"),
    [("ab", "20%", 4), ("ab", "0.2", 4), ("ab", "30%", 0), ("ba", "0%", 0), ("aa", "0", 0)],
)
def test_fail_above(run: Run, files: Plan, order: str, limit: str, status: int) -> None:
    assert files
    ran = run("compare", *(f"{name}.plan.json" for name in order), "--fail-above", limit)
    assert ran.status == status
    told = ["a.plan.json is 25.0 % slower than the best of the others"]
    assert ran.lines == (told if status else [])
    assert ran.out.splitlines()[0].startswith("plan ")


@pytest.mark.parametrize("limit", ["9" * 400, "1" + "0" * 12 + "%", "1e3", "-1%", "\u0665%"])
def test_a_limit_that_is_none(run: Run, files: Plan, limit: str) -> None:
    """None that nothing exceeds, as one that is infinite as a float; no other digits than ASCII's."""
    assert files
    ran = run("compare", "a.plan.json", "b.plan.json", f"--fail-above={limit}")
    assert ran.status == 2
    assert ran.lines[0].startswith("pplan: --fail-above ")
    assert len(ran.lines[0]) < 200


def test_fail_above_is_of_the_samples(run: Run, here: Path, files: Plan) -> None:
    """Half of the mini-batch in as much time is slower."""
    stages = {"mini_batch": 32, "micro_batches": 8}
    alternatives = [files.alternatives[0].model_copy(update={"micro_batches": 8})]
    half = files.model_copy(update=stages | {"alternatives": alternatives})
    half.save(here / "half.plan.json", force=False)
    ran = run("compare", "half.plan.json", "a.plan.json", "--fail-above", "99%")
    assert ran.status == 4
    assert "100.0 % slower" in ran.err
    assert "global batch 64, half.plan.json 32" in " ".join(ran.out.split())


def test_the_planners_under_a_plans_wishes(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    plan = pplan.solve("toy.profile.json", gpus=2, mini_batch=16, micro_batches=4, planner="even")
    plan.save(here / "even.plan.json", force=False)
    ran = run("compare", "--json")
    assert ran.status == 0
    assert ran.lines == ["Using even.plan.json (newest plan in this directory)"]
    made = PlanComparison.model_validate(json.loads(ran.out))
    rows = {row.name: row for row in made.rows[1:]}
    assert set(rows) == {"best", *PLANNERS}
    assert made.rows[0].name == "even.plan.json"
    own = rows["even"].step_seconds
    assert own == pytest.approx(plan.prediction.step_seconds)
    steps = [row.step_seconds for row in made.rows[1:] if row.step_seconds is not None]
    assert steps == sorted(steps)
    best = rows["best"]
    assert best.step_seconds is not None
    assert best.step_seconds == pytest.approx(steps[0])
    assert best.gap == pytest.approx(0, abs=1e-9)
    assert made.first_slower == pytest.approx(own / best.step_seconds - 1)  # type: ignore[operator]
    assert {row.plan.micro_batches for row in rows.values() if row.plan} == {4}
    both = run("compare", "even.plan.json", "even.plan.json", "--planners", "--json")
    assert len(json.loads(both.out)["rows"]) == len(made.rows) + 1


@pytest.mark.parametrize("text", ["ten", "-1%", "10%%", "", "%"])
def test_a_share_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not a share of the step"):
        share(text)


def test_refusals(run: Run, here: Path, files: Plan) -> None:
    assert files
    ran = run("compare", "a.plan.json", "c.plan.json")
    assert (ran.status, ran.out) == (2, "")
    assert "c.plan.json: no such plan file" in ran.err
    ran = run("compare", "a.plan.json", "b.plan.json", "--profile", "x.json")
    assert ran.status == 2
    assert "--profile x.json: without --planners" in ran.err
    ran = run("compare", "a.plan.json")
    assert ran.status == 2
    assert "which is not beside it" in ran.err
    (here / "a.plan.json").unlink()
    (here / "b.plan.json").unlink()
    ran = run("compare")
    assert ran.status == 2
    assert "no plan named" in ran.err
    with pytest.raises(UsageError, match="no plan is given"):
        pplan.compare()


@pytest.mark.slow
def test_an_imported_plan_has_the_distance_from_what_solve_proved_of_its_problem(
    profile: Profile,
) -> None:
    machine: dict[str, Any] = {"gpus": 3, "mini_batch": 64, "runtime": "torch"}
    best = pplan.solve(profile, **machine)
    theirs = pplan.import_plan("2,4,6", profile, schedule="1f1b", **machine)
    step, bound = theirs.prediction.step_seconds, best.prediction.lower_bound_seconds
    assert step > 1.1 * bound
    ours, imported = pplan.compare(best, theirs).rows
    assert imported.gap == pytest.approx(step / bound - 1)
    assert ours.gap == pytest.approx(best.prediction.gap)


@pytest.mark.slow
def test_an_imported_plan_alone_has_no_gap(profile: Profile, terminal: Terminal) -> None:
    theirs = pplan.import_plan("2,4,6", profile, mini_batch=64, schedule="1f1b")
    larger = pplan.solve(profile, gpus=3, mini_batch=128)
    narrowed = pplan.solve(profile, gpus=3, mini_batch=64, max_stages=2)
    for made in (pplan.compare(theirs), pplan.compare(theirs, larger), pplan.compare(theirs, narrowed)):
        assert made.rows[0].gap is None
    console = terminal(110)
    print_comparison(pplan.compare(theirs), console)
    assert console.text.splitlines()[-1].count("%") == 1  # the bubble's


def test_the_planners_tell_an_imported_plans_gap(profile: Profile) -> None:
    theirs = pplan.import_plan("2,4,6", profile, mini_batch=64, schedule="1f1b")
    made = pplan.compare(theirs, profile=profile)
    best = next(row for row in made.rows if row.name == "best")
    assert made.rows[0].gap is not None
    assert best.step_seconds is not None
    assert made.rows[0].gap >= (made.rows[0].step_seconds or 0.0) / best.step_seconds - 1 - 1e-9


def test_what_was_proven_of_other_states_is_no_bound(plan: Plan) -> None:
    """With ZeRO, plans fit that did not, or take other seconds."""
    proven = plan.model_copy(update={"options": replace(PlanOptions(), mini_batch=plan.mini_batch)})
    theirs = proven.model_copy(update={"searched": FIXED_PARTITION})
    same = pplan.compare(theirs, proven).rows[0]
    assert same.gap is not None
    for other in ({"zero": 1}, {"optimizer": "adam"}):
        changed = theirs.model_copy(update=other)
        assert pplan.compare(changed, proven).rows[0].gap is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "adam"}, "b has optimizer adam, a optimizer sgd: "),
        ({"zero": 1}, "b has ZeRO 1, a ZeRO 0: "),
        ({"runtime": "torch", "optimizer": "adam"}, "b has runtime torch, optimizer adam, a runtime any, "),
        ({"machine": "another = true"}, "b is for a machine of other figures than that of a"),
        ({}, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_two_plans_do_not_have_in_common(plan: Plan, change: dict[str, Any], words: str) -> None:
    """Of another optimizer, say, the memory is another."""
    notes = compare_plans([("a", plan), ("b", plan.model_copy(update=change))]).notes
    assert len(notes) == bool(words)
    assert all(note.startswith(words) for note in notes)
