"""A grid of problems: its points, its rows, and where they run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from pplan.cli.app import main
from pplan.cost_models.errors import InfeasibleError, MachineError, UsageError
from pplan.planner.plan_file import Plan, PlannedStage, Prediction, ProfileReference
from pplan.planner.problem_grid import SweepResult, list_points, make_row, solve_points


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


def test_links_of_any_speed_are_written_as_they_are_typed() -> None:
    row = make_row({"bandwidth": (float("inf"), 1e9), "gpus": 2}, made(2))
    text = SweepResult(model="toy", rows=[row]).to_json()
    assert json.loads(text)["rows"][0]["point"] == {"bandwidth": ["inf", 1e9], "gpus": 2}
    assert row.point["bandwidth"][0] == float("inf")


def test_the_last_key_changes_fastest() -> None:
    assert list_points({"gpus": [4, 2], "size": [1, 8]}) == [
        {"gpus": 4, "size": 1},
        {"gpus": 4, "size": 8},
        {"gpus": 2, "size": 1},
        {"gpus": 2, "size": 8},
    ]


def test_numbers_of_numpy_are_rows_that_files_hold() -> None:
    (point,) = list_points({"gpus": [np.int64(4)]})
    assert type(point["gpus"]) is int


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


def test_a_row_has_the_fullest_device_and_all_that_are_used() -> None:
    plan = made(2)
    small = plan.stages[0].model_copy(update={"memory_bytes": 7, "devices": [1, 4], "replicas": 2})
    row = make_row({"gpus": 5}, plan.model_copy(update={"stages": [small, plan.stages[0]]}))
    assert (row.memory_bytes, row.gpus_used) == (2000, 3)
    assert (row.lower_bound_seconds, row.gap, row.exact) == (0.5, 0, True)


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


def _kill_itself_at_three(times: int, folder: str, gpus: int) -> Plan:
    """The process that solves the third point is killed so many times."""
    if gpus == 3 and len(list(Path(folder).iterdir())) < times:
        (Path(folder) / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return made(gpus + 10)


@pytest.fixture
def shipped() -> Iterator[Callable[..., Plan]]:
    """`_kill_itself_at_three` for other processes, which cannot import this file: a copy. What is
    found under its name Dask sends by that name alone, upon which its workers fail again and again."""
    cloudpickle, module = pytest.importorskip("cloudpickle"), sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield cloudpickle.loads(cloudpickle.dumps(_kill_itself_at_three))
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def dask_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two workers."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        yield


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    """Two workers."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of both packages, about sockets and ports
@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_cluster_that_loses_a_worker_has_all_rows(
    backend: str, shipped: Callable[..., Plan], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{backend}_cluster")
    points = list_points({"gpus": [1, 2, 3, 4, 5, 6]})
    rows = solve_points(partial(shipped, 1, str(tmp_path)), points, backend=backend, jobs=2)
    assert len(list(tmp_path.iterdir())) == 1
    assert rows == [make_row(point, made(point["gpus"] + 10)) for point in points]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_the_command_solves_its_points_on_a_cluster(
    backend: str, toy_profile: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Into the rows that it makes in this process."""
    request.getfixturevalue(f"{backend}_cluster")
    rows = []
    for name, where in (("alone", ("--jobs", "1")), (backend, ("--backend", backend))):
        file = tmp_path / f"{name}.csv"
        sweep = ("--sweep", "gpus=1,2,4", "--mini-batch", "32", "--csv", str(file))
        assert main(["solve", str(toy_profile), *sweep, *where]) == 0
        rows.append(file.read_text(encoding="utf-8"))
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 4


_SWEEP = """
import fcntl, sys, time
from pplan.cost_models.errors import InfeasibleError
from pplan.planner.problem_grid import solve_points

def solve(gpus):
    lock = open(f"{sys.argv[1]}/{gpus}", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    print(gpus, flush=True)
    time.sleep(120 * (gpus == 2))
    solve.lock = lock  # as long as the process is there
    raise InfeasibleError("no plan", "None.")

solve_points(solve, [{"gpus": 1}, {"gpus": 2}], jobs=2)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_is_killed(tmp_path: Path) -> None:
    """The one that has nothing more to do, and the one that solves a point."""
    sweep = subprocess.Popen([sys.executable, "-c", _SWEEP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert sweep.stdout is not None
    with sweep, sweep.stdout:
        assert {sweep.stdout.readline() for _ in range(2)} == {"1\n", "2\n"}
        sweep.kill()
    end = time.monotonic() + 20
    for name in ("1", "2"):
        with (tmp_path / name).open() as file:
            while not _is_free(file):
                assert time.monotonic() < end, f"the process of point {name} is still there"
                time.sleep(0.05)


def _is_free(file: TextIO) -> bool:
    """Whether no process holds its lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.slow
def test_a_process_of_this_machine_that_is_lost_is_said(shipped: Callable[..., Plan], tmp_path: Path) -> None:
    points = list_points({"gpus": [1, 2, 3, 4, 5, 6]})
    with pytest.raises(MachineError, match="a worker process was lost"):
        solve_points(partial(shipped, 1, str(tmp_path)), points, jobs=2)
