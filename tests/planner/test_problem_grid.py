"""A grid of problems: its points, its rows, and where they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pplan.cost_models.errors import InfeasibleError, MachineError, UsageError
from pplan.planner.plan_file import Plan
from pplan.planner.plan_records import PlannedStage, Prediction, ProfileReference
from pplan.planner.problem_grid import list_points, make_row, solve_points


def made(gpus: int, size: int = 1, **others: Any) -> Plan:
    """A plan of one stage, whose figures say what it was made for."""
    if gpus == 3:
        raise InfeasibleError("does not fit", "Use more.")
    if gpus == 5:
        raise UsageError("five is refused", "Use four.")
    stage = PlannedStage(
        first_layer=0,
        last_layer=1,
        replicas=gpus,
        devices=list(range(gpus)),
        forward_seconds=0.1,
        backward_seconds=0.2,
        memory_bytes=1000 * gpus,
    )
    step = size / gpus
    prediction = Prediction(
        step_seconds=step, samples_per_second=gpus, bubble=0, lower_bound_seconds=step, gap=0, exact=True
    )
    return Plan(
        model="toy",
        balance=[2],
        mini_batch=size,
        micro_batches=1,
        micro_batch_size=size,
        schedule="1f1b",
        stages=[stage],
        prediction=prediction,
        profile=ProfileReference(file="", sha256=""),
        notes=[str(others)],
    )


def test_the_last_key_changes_fastest() -> None:
    assert list_points({"gpus": [4, 2], "size": [1, 8]}) == [
        {"gpus": 4, "size": 1},
        {"gpus": 4, "size": 8},
        {"gpus": 2, "size": 1},
        {"gpus": 2, "size": 8},
    ]


@pytest.mark.parametrize(
    "grid", [{}, {"gpus": []}, {"gpus": [2, 2]}, {"gpus": range(200), "size": range(200)}]
)
def test_grids_that_cannot_be(grid: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="sweep"):
        list_points(grid)


def test_every_row_is_the_point_solved_alone() -> None:
    """In this process: others could not import this file."""
    points = list_points({"gpus": [4, 3, 1], "size": [8, 2]})
    rows = solve_points(made, points, jobs=1)
    assert [row.point for row in rows] == points
    for point, row in zip(points, rows, strict=True):
        if point["gpus"] == 3:
            assert row.reason == "does not fit"
            assert row.step_seconds is None
        else:
            assert row == make_row(point, made(**point))
            assert row.step_seconds == point["size"] / point["gpus"]
            assert row.memory_bytes == 1000 * point["gpus"]


def test_an_error_of_some_points_is_their_rows_reason() -> None:
    rows = solve_points(made, list_points({"gpus": [5, 1]}), jobs=1)
    assert [row.reason for row in rows] == ["five is refused", None]


def test_an_error_of_all_points_is_raised() -> None:
    with pytest.raises(UsageError, match="five is refused"):
        solve_points(partial(made, 5), list_points({"size": [1, 2]}), jobs=1)
    rows = solve_points(partial(made, 3), list_points({"size": [1, 2]}), jobs=1)
    assert {row.reason for row in rows} == {"does not fit"}


def test_a_backend_that_is_unknown() -> None:
    with pytest.raises(UsageError, match="backend='slurm': not known"):
        solve_points(made, list_points({"gpus": [1, 2]}), backend="slurm")


@pytest.mark.parametrize(("backend", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_backend_that_is_missing_is_named_with_its_extra(
    backend: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("distributed", "dask", "ray", "ray.util", "ray.util.joblib"):
        monkeypatch.setitem(sys.modules, name, None)
    solve: Callable[..., Plan] = made
    with pytest.raises(MachineError) as caught:
        solve_points(solve, list_points({"gpus": [1, 2]}), backend=backend)
    assert package in caught.value.what
    assert f"pplan[{backend}]" in caught.value.hint
