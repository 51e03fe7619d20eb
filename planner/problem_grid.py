"""A grid of problems that are solved independently, on all cores or on a cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from math import isinf
from typing import Any, ClassVar

import numpy as np
from pydantic import field_serializer

from ..cost_models.document import Document, MadeBy, Record
from ..cost_models.errors import InfeasibleError, MachineError, PplanError, UsageError
from .plan_file import Plan

PROCESSES = "processes"
BACKENDS = {PROCESSES: "joblib", "dask": "distributed", "ray": "ray"}
"""Backends that run the points, with the package that each needs."""
MOST_POINTS = 10_000
_WATCH_SECONDS = 1.0
"""Interval in seconds at which a process checks whether its parent still runs."""
LOST_WORKER = ("TerminatedWorkerError", "KilledWorker", "WorkerCrashedError", "NodeDiedError")
"""Errors of joblib, Dask and Ray for a lost worker; the clusters raise them after several attempts."""

Value = int | float | str | tuple[float, ...] | None
Point = Mapping[str, Any]
"""A value for each key of the grid."""


class SweepRow(Record):
    """Plan of a point, or the `reason` why it has none.

    `memory_bytes` is that of the fullest device; `gpus_used` are the devices of the plan.
    """

    point: dict[str, Any]
    step_seconds: float | None = None
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    gpus_used: int | None = None
    balance: list[int] = []
    replicas: list[int] = []
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    lower_bound_seconds: float | None = None
    gap: float | None = None
    exact: bool | None = None
    reason: str | None = None
    warnings: list[str] = []
    """Warnings of the plan."""

    @field_serializer("point", when_used="json")
    def _in_json(self, point: dict[str, Any]) -> dict[str, Any]:
        """Return infinite link speeds as "inf", because JSON has no infinity."""

        def to_json(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return [to_json(part) for part in value]
            return str(value) if isinstance(value, float) and isinf(value) else value

        return {key: to_json(value) for key, value in point.items()}


class SweepResult(Document):
    """Rows of a grid in its order; the last key changes fastest."""

    kind: ClassVar[str] = "sweep"

    model: str
    rows: list[SweepRow]
    warnings: list[str] = []
    """Warnings of all rows, without repetitions."""
    made_by: MadeBy = MadeBy()


def list_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of a grid; the last key changes fastest.

    Raises:
        UsageError: The grid is empty or too large, or a key has no values or repeats one.
    """
    for key, values in grid.items():
        if not values:
            raise UsageError(
                f"sweep={key!r}: has no values", f"Give values, for example sweep='{key}=2,4,8'."
            )
        twice = next((value for value in values if list(values).count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"sweep={key!r}: {twice} is given twice", "Give every value once.")
    if not grid:
        raise UsageError("`sweep`: the grid is empty", "Give for example sweep='gpus=2,4,8'.")
    plain = {key: [_plain(value) for value in values] for key, values in grid.items()}
    points = [dict(zip(grid, values, strict=True)) for values in product(*plain.values())]
    if len(points) > MOST_POINTS:
        raise UsageError(
            f"`sweep`: {len(points)} points", f"Give at most {MOST_POINTS}: fewer values, or several sweeps."
        )
    return points


def _plain(value: Any) -> Any:
    """Return a numpy number as a Python number, which files can hold."""
    return value.item() if isinstance(value, np.generic) else value


def solve_points(
    solve: Callable[..., Plan],
    points: Sequence[Point],
    *,
    backend: str = PROCESSES,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[SweepRow]:
    """Solve the points and return their rows in order.

    A point without a plan is a row with the reason. If no point has a plan, and not for lack of memory, its
    error is raised.

    Args:
        solve: Function that takes the values of a point by their keys.
        points: The points.
        backend: Backend that runs them.
        jobs: Points to solve in parallel. None for the number of cores.
        progress: Function that is called with the share of the points that are done.

    Raises:
        MachineError: The backend is not installed, or a worker was lost.
    """
    solved = []
    for outcome in _run(solve, points, backend, jobs):
        solved.append(outcome)
        if progress is not None:
            progress(len(solved) / len(points))
    errors = [error for _, error in solved]
    unusable = [error for error in errors if error is not None and not isinstance(error, InfeasibleError)]
    if len(unusable) == len(solved) and unusable:
        raise unusable[0]
    return [row for row, _ in solved]


def make_row(point: Point, plan: Plan) -> SweepRow:
    """Return the row of a plan, with its bound."""
    predicted = plan.prediction
    return SweepRow(
        point=dict(point),
        step_seconds=predicted.step_seconds,
        samples_per_second=predicted.samples_per_second,
        memory_bytes=max(stage.memory_bytes for stage in plan.stages),
        gpus_used=plan.device_count,
        balance=plan.balance,
        replicas=plan.replicas,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        schedule=plan.schedule,
        recompute=plan.recompute,
        lower_bound_seconds=predicted.lower_bound_seconds,
        gap=predicted.gap,
        exact=predicted.exact,
        warnings=plan.warnings,
    )


def _solve_point(solve: Callable[..., Plan], point: Point) -> tuple[SweepRow, PplanError | None]:
    try:
        return make_row(point, solve(**point)), None
    except PplanError as error:
        return SweepRow(point=dict(point), reason=error.what), error


def _run(
    solve: Callable[..., Plan], points: Sequence[Point], backend: str, jobs: int | None
) -> Iterator[tuple[SweepRow, PplanError | None]]:
    if backend not in BACKENDS:
        raise UsageError(f"backend={backend!r}: not known", f"Use one of: {', '.join(BACKENDS)}.")
    if backend == PROCESSES and (jobs == 1 or len(points) == 1):
        yield from (_solve_point(solve, point) for point in points)
        return
    run = _run_on_ray if backend == "ray" else _run_by_joblib
    try:
        yield from run(solve, points, backend, jobs)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in (*BACKENDS.values(), "dask"):
            raise
        extra = "joblib" if backend == PROCESSES else f"'pplan[{backend}]'"
        raise MachineError(
            f"backend={backend!r}: the Python package {package!r} is not installed",
            f"Install it: pip install {extra}",
        ) from None
    except Exception as error:
        if type(error).__name__ not in LOST_WORKER:
            raise
        raise MachineError(
            f"`sweep`: a worker process was lost ({type(error).__name__})",
            "The kernel kills processes when memory runs out: use fewer `jobs`, or jobs=1.",
        ) from None


def _solve_in_process(
    parent: int, solve: Callable[..., Plan], point: Point
) -> tuple[SweepRow, PplanError | None]:
    """Solve a point in a worker process that ends with its `parent`.

    joblib leaves the workers of a killed process running for minutes.
    """
    if os.getpid() != parent:
        _end_with(parent)
    return _solve_point(solve, point)


@cache
def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_by_joblib(
    solve: Callable[..., Plan], points: Sequence[Point], backend: str, jobs: int | None
) -> Iterator[tuple[SweepRow, PplanError | None]]:
    """Solve points in processes of this machine, or on Dask.

    Dask uses the cluster at DASK_SCHEDULER_ADDRESS, else one on this machine. It repeats a point whose worker
    is lost.
    """
    from joblib import Parallel, cpu_count, delayed, parallel_config

    if backend == PROCESSES:
        tasks = (delayed(_solve_in_process)(os.getpid(), solve, point) for point in points)
        workers = min(jobs or cpu_count(), len(points))
        yield from Parallel(n_jobs=workers, backend="loky", return_as="generator")(tasks)
        return
    from distributed import Client

    with Client(), parallel_config(backend=backend, n_jobs=-1 if jobs is None else jobs):
        yield from Parallel()(delayed(_solve_point)(solve, point) for point in points)


def _run_on_ray(
    solve: Callable[..., Plan], points: Sequence[Point], _: str, jobs: int | None
) -> Iterator[tuple[SweepRow, PplanError | None]]:
    """Solve at most `jobs` points at a time on Ray's cluster at RAY_ADDRESS, else one on this machine.

    Ray repeats tasks whose worker is lost. It does not repeat the actors that joblib's backend would use.
    """
    import ray

    if not ray.is_initialized():
        ray.init()
    run, shared_solve = ray.remote(_solve_point), ray.put(solve)
    limit = len(points) if jobs is None else jobs
    tasks = [run.remote(shared_solve, point) for point in points[:limit]]
    for number in range(len(points)):
        yield ray.get(tasks[number])
        if len(tasks) < len(points):
            tasks.append(run.remote(shared_solve, points[len(tasks)]))
