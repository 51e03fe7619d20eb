"""`pplan solve` with an objective, with --frontier and with --sweep, on a toy profile."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cli.sweep_options import read_grid
from pplan.cost_models.errors import UsageError
from pplan.planner.objectives.frontier import Frontier
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
MACHINE = ("--memory", "16GiB", "--bandwidth", "1GB/s", "--latency", "0")


@pytest.fixture
def toy(here: Path, profile: Profile) -> Path:
    """The profile's file, in the working directory."""
    path = here / "toy.profile.json"
    profile.save(path, force=False)
    return path


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("gpus=2,4,8", {"gpus": [2, 4, 8]}),
        ("mini-batch=64..512", {"mini_batch": [64, 128, 256, 512]}),
        ("mini-batch=3..20", {"mini_batch": [4, 8, 16]}),
        ("mini-batch=48, 64..128", {"mini_batch": [48, 64, 128]}),
        ("micro-batches=auto,1..2", {"micro_batches": ["auto", 1, 2]}),
        ("memory=16GiB,40GB", {"memory_bytes": [16 * 2**30, 40 * 10**9]}),
        ("bandwidth=25GB/s,inf", {"bandwidth": [(25e9,), (float("inf"),)]}),
        ("recompute=never,except-last", {"recompute": ["never", "except_last"]}),
        ("runtime=torchgpipe", {"runtime": ["torchgpipe"]}),
    ],
)
def test_what_is_swept(text: str, grid: dict[str, list[Any]]) -> None:
    assert read_grid([text], "--sweep") == grid


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["gpuss=2"], "Did you mean gpus?"),
        (["gpus"], "has no values"),
        (["gpus="], "has no values"),
        (["gpus=2,,4"], "a value is missing"),
        (["gpus=0"], "at least 1"),
        (["gpus=many"], "whole number"),
        (["mini-batch=5..7"], "no power of two"),
        (["mini-batch=64..8"], "no power of two"),
        (["memory=16GiB..32GiB"], "no ranges"),
        (["memory=16"], "unit"),
        (["gpus=2", "gpus=4"], "swept twice"),
    ],
)
def test_sweeps_that_cannot_be(texts: list[str], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_grid(texts, "--sweep")
    assert word in str(caught.value)


@pytest.mark.slow
def test_sweep_prints_and_writes_each_point_solved_alone(run: Run, toy: Path) -> None:
    ran = run(
        *("solve", "--sweep", "gpus=1,2", "--sweep", "mini-batch=8..16", "--csv", "x.csv", "--jobs", "1"),
        *MACHINE,
        "--json",
    )
    assert ran.status == 0, ran.err
    assert "Wrote x.csv" in ran.err
    rows = json.loads(ran.out)["rows"]
    with Path("x.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 4
    points = [(1, 8), (1, 16), (2, 8), (2, 16)]
    for (gpus, batch), row, line in zip(points, rows, lines, strict=True):
        assert row["point"] == {"gpus": gpus, "mini_batch": batch}
        assert (line["gpus"], line["mini_batch"]) == (str(gpus), str(batch))
        alone = pplan.solve(
            toy, gpus=gpus, mini_batch=batch, memory_bytes=16 * 2**30, bandwidth=1e9, latency=0.0
        )
        assert row["step_seconds"] == alone.prediction.step_seconds == float(line["step_seconds"])
        assert row["balance"] == alone.balance
        assert row["lower_bound_seconds"] == alone.prediction.lower_bound_seconds
    assert not Path("toy.plan.json").exists()


def test_points_that_do_not_fit_are_rows(run: Run, toy: Path) -> None:
    del toy
    given = ("--gpus", "2", "--mini-batch", "8", "--bandwidth", "1GB/s", "--jobs", "1")
    ran = run("solve", "--sweep", "memory=1MiB,16GiB", *given)
    assert ran.status == 0, ran.err
    assert "no plan fits into" in ran.out
    assert "16.00 GiB" in ran.out


@pytest.mark.slow
def test_a_sweep_of_python_uses_processes(toy: Path) -> None:
    grid = {"gpus": [1, 2]}
    options: dict[str, Any] = {"mini_batch": 8, "memory_bytes": 2**34, "bandwidth": 1e9}
    apart = pplan.sweep(toy, grid, jobs=2, **options)
    assert apart.rows == pplan.sweep(toy, grid, jobs=1, **options).rows
    assert all(row.step_seconds for row in apart.rows)


@pytest.mark.parametrize(
    ("grid", "options", "word"),
    [
        ({"gpu_count": [2]}, {}, "is no option of solve"),
        ({"gpus": [2]}, {"gpus": 4}, "an option besides"),
        ({"gpus": 2}, {}, "is not a list"),
        ({"gpus": []}, {}, "has no values"),
        ([2], {}, "is not a Mapping"),
    ],
)
def test_grids_of_python_that_cannot_be(grid: Any, options: dict[str, Any], word: str, toy: Path) -> None:
    with pytest.raises(UsageError) as caught:
        pplan.sweep(toy, grid, **options)
    assert word in str(caught.value)


@pytest.mark.slow
def test_frontier_is_printed_and_stored_beside_the_plan(run: Run, toy: Path) -> None:
    del toy
    ran = run("solve", "--gpus", "3", "--mini-batch", "16", *MACHINE, "--frontier")
    assert ran.status == 0, ran.err
    assert "Step time vs. peak memory of a device" in ran.out
    assert ran.lines[-2:] == ["Wrote toy.plan.json", "Wrote toy.frontier.json"]
    found, plan = Frontier.load("toy.frontier.json"), Plan.load("toy.plan.json")
    assert len(found.points) > 1
    assert found.points[0].step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert found.made_by.pplan
    for before, after in zip(found.points, found.points[1:], strict=False):
        assert before.step_seconds < after.step_seconds
        assert before.memory_bytes > after.memory_bytes


@pytest.mark.slow
def test_frontier_as_json_beside_a_named_plan(run: Run, toy: Path) -> None:
    del toy
    given = ("solve", "--gpus", "2", "--mini-batch", "16", *MACHINE, "--frontier", "-o", "mine.plan.json")
    ran = run(*given, "--points", "1", "--json")
    assert ran.status == 0, ran.err
    assert len(json.loads(ran.out)["points"]) == 1
    assert Path("mine.frontier.json").read_text() == ran.out
    Path("mine.plan.json").unlink()
    again = run(*given)
    assert again.status == 2
    assert "mine.frontier.json exists already" in again.err


def test_cost_is_printed_for_a_million_samples(run: Run, toy: Path) -> None:
    del toy
    ran = run(
        *("solve", "--gpus", "3", "--mini-batch", "16", "--objective", "cost", "--price", "2.5"), *MACHINE
    )
    assert ran.status == 0, ran.err
    plan = Plan.load("toy.plan.json")
    assert plan.objective is not None
    used = sum(plan.replicas)
    sample = used * 2.5 / 3600 * plan.prediction.step_seconds / 16
    assert plan.objective.value == pytest.approx(sample)
    assert f"is the cheapest: ${1e6 * sample:.4g} a million samples" in ran.out.splitlines()[0]


@pytest.mark.slow
def test_memory_is_the_least_within_the_share(run: Run, toy: Path) -> None:
    del toy
    given = ("solve", "--gpus", "3", "--mini-batch", "16", *MACHINE)
    assert run(*given).status == 0
    fastest = Plan.load("toy.plan.json")
    ran = run(*given, "--objective", "memory:200%")
    assert ran.status == 0, ran.err
    plan = Plan.load("toy.plan.json")
    assert "needs the least memory" in ran.out
    assert plan.prediction.step_seconds <= 3 * fastest.prediction.step_seconds
    assert max(own.memory_bytes for own in plan.stages) < max(own.memory_bytes for own in fastest.stages)


@pytest.mark.slow
def test_throughput_says_how_late_gradients_are(run: Run, toy: Path) -> None:
    del toy
    ran = run("solve", "--gpus", "3", "--mini-batch", "16", "--objective", "throughput", *MACHINE)
    assert ran.status == 0, ran.err
    plan = Plan.load("toy.plan.json")
    assert plan.schedule in ("pipedream", "pipedream-2bw")
    assert any("weight versions" in note and "late" in note for note in plan.notes)
    assert plan.stages[0].memory["weight_versions"] > 0
    assert plan.prediction.step_seconds == pytest.approx(16 / plan.prediction.samples_per_second)
    simulated = run("simulate", "toy.plan.json", "--json")
    assert simulated.status == 0, simulated.err
    assert "it says" not in simulated.out, "a step of the plan is no filling of the pipeline"
    rate = json.loads(simulated.out)["samples_per_second"]
    assert rate == pytest.approx(plan.prediction.samples_per_second, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--objective speed", "not known"),
        ("--objective cost", "needs the price of a device"),
        ("--objective cost --price 0", "must be above 0"),
        ("--objective cost --price T4=1", "no price of"),
        ("--price 2", "has no effect"),
        ("--csv x.csv", "is of --sweep"),
        ("--jobs 2", "--jobs 2: is of --sweep"),
        ("--backend dask", "--backend dask: is of --sweep"),
        ("--points 3", "--points 3: is of --frontier"),
        ("--sweep planner=even,evne", "Did you mean even?"),
        ("--sweep runtime=torch,touch", "unknown runtime 'touch'"),
        ("--sweep schedule=gpipe,f1b1", "--schedule f1b1: not known"),
        ("--sweep gpus=1,2 --frontier", "one or the other"),
        ("--sweep gpus=1,2 -o x.json", "a sweep writes no plan"),
        ("--frontier --objective memory", "step time against memory"),
        ("--frontier --points 0", "must be at least 1"),
        ("--sweep gpus=1,2 --backend slurm", "not known"),
        ("--sweep gpus=1,2 --csv none/x.csv", "does not exist"),
    ],
)
def test_options_that_cannot_be(options: str, word: str, run: Run, toy: Path) -> None:
    del toy
    ran = run("solve", "--gpus", "2", "--mini-batch", "16", *MACHINE, *options.split())
    assert ran.status == 2
    assert word in ran.err
