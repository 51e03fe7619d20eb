"""A grid of problems, each solved by itself, on all cores or on a cluster."""

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
"""What runs the points, and the package that it needs."""
MOST_POINTS = 10_000
_WATCH_SECONDS = 1.0
"""Between two looks of a process whether the one that started it still runs."""
LOST_WORKER = ("TerminatedWorkerError", "KilledWorker", "WorkerCrashedError", "NodeDiedError")
"""What joblib, Dask and Ray raise where a worker is lost, the clusters' more than a few times."""

Value = int | float | str | tuple[float, ...] | None
Point = Mapping[str, Any]
"""A value for each of the grid's keys."""


class SweepRow(Record):
    """The plan of a point; where it has none, `reason` says why. `memory_bytes`: of the device that needs
    most; `gpus_used`: by the plan."""

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
    """Of the plan."""

    @field_serializer("point", when_used="json")
    def _in_json(self, point: dict[str, Any]) -> dict[str, Any]:
        """Links of any speed are "inf", as they are typed: JSON has no such number."""

        def value(own: Any) -> Any:
            if isinstance(own, tuple | list):
                return [value(part) for part in own]
            return str(own) if isinstance(own, float) and isinf(own) else own

        return {key: value(own) for key, own in point.items()}


class SweepResult(Document):
    """The rows of a grid, in its order: the last key changes fastest."""

    kind: ClassVar[str] = "sweep"

    model: str
    rows: list[SweepRow]
    warnings: list[str] = []
    """Those of all rows, once each."""
    made_by: MadeBy = MadeBy()


def list_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last key changing fastest. Raises UsageError."""
    for key, values in grid.items():
        if not values:
            raise UsageError(f"sweep={key!r}: has no values", f"Give some: sweep='{key}=2,4,8'.")
        twice = next((value for value in values if list(values).count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"sweep={key!r}: {twice} stands twice", "Give every value once.")
    if not grid:
        raise UsageError("`sweep`: the grid is empty", "Give sweep='gpus=2,4,8', say.")
    plain = {key: [_plain(value) for value in values] for key, values in grid.items()}
    points = [dict(zip(grid, values, strict=True)) for values in product(*plain.values())]
    if len(points) > MOST_POINTS:
        raise UsageError(
            f"`sweep`: {len(points)} points", f"Give at most {MOST_POINTS}: fewer values, or several sweeps."
        )
    return points


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python, which files can hold."""
    return value.item() if isinstance(value, np.generic) else value


def solve_points(
    solve: Callable[..., Plan],
    points: Sequence[Point],
    *,
    backend: str = PROCESSES,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[SweepRow]:
    """The rows of the points, in their order; `solve` takes a point's values by their keys.

    `jobs`: how many run side by side, None for as many as there are cores. `progress` is told the share of
    the points that are done. A point that has no plan is a row with the reason; where none has one, and not
    for lack of memory, its error is raised. Raises MachineError for a backend that is not installed.
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
    """The row of a plan."""
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
            f"`sweep`: a process that solved points was lost ({type(error).__name__})",
            "As the kernel does where memory runs out: give fewer `jobs`, or jobs=1.",
        ) from None


def _solve_in_process(
    parent: int, solve: Callable[..., Plan], point: Point
) -> tuple[SweepRow, PplanError | None]:
    """In a process that `parent`, by its id, started, and that ends with it: joblib leaves the processes of
    one that is killed behind for minutes."""
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
    """In processes of this machine, or on Dask's cluster at DASK_SCHEDULER_ADDRESS, else one on this machine.
    Dask runs a point again whose worker is lost."""
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
    """On Ray's cluster at RAY_ADDRESS, else one on this machine; at most `jobs` points at a time.

    As tasks, which Ray runs again where their worker is lost: joblib's backend has actors, which it does not.
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
