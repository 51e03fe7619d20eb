"""A grid of problems, each solved by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import (
    arguments_class,
    check_values,
    list_declarations,
    options_from,
    takes,
    unknown_option,
)
from ..cost_models.document import MadeBy
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..planner.joint_search import BEST
from ..planner.objectives.objective import ObjectiveOptions
from ..planner.plan_file import Plan
from ..planner.plan_options import PlanOptions
from ..planner.planners import find_planner
from ..planner.problem_grid import SweepResult, list_points, solve_points
from ..profiler.profile_file import Profile
from .load import profile_and_reference
from .provenance import made_by
from .solve import MODELS, solve_alone
from .solve_options import SweepOptions

SWEEP = tuple(list_declarations(SweepOptions))


@arguments_class
class SweepArguments(SweepOptions, ObjectiveOptions, PlanOptions, MachineOptions):
    """The arguments of `sweep`."""

    profile: Profile | str | Path = field(kw_only=False)
    grid: Mapping[str, Sequence[Any]] = field(kw_only=False)
    profile_file: str = ""
    profile_sha256: str = ""
    progress: Callable[[float], None] | None = None


@takes(SweepArguments)
def sweep(
    profile: Profile | str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> SweepResult:
    """A grid of problems, each solved by itself: `pplan.sweep(profile, {"gpus": [2, 4]}, mini_batch=64)`.

    `grid`: values for some options of `solve`, by name; every combination is a point, the last name changing
    fastest. `options`: those of `solve` that are the same for all, and those of `SweepOptions`: `jobs`, how
    many run side by side (None: as many as there are cores); `backend`, "processes" of this machine, or a
    cluster of "dask" (at DASK_SCHEDULER_ADDRESS) or "ray". `progress` is told, point by point, the share of
    all that is done.

    Of the result: `rows`, each with its `point`, the figures of the plan (step_seconds, memory_bytes, balance
    and so on), or the `reason` why there is none.

    >>> import pplan
    >>> table = pplan.sweep("gpt.profile.json", {"gpus": [1, 2]}, mini_batch=64, jobs=1)
    >>> [(row.point["gpus"], f"{row.step_seconds:.2f} s") for row in table.rows]
    [(1, '1.46 s'), (2, '0.75 s')]

    Raises UsageError (also the points', where none is usable), FileError, MachineError (the backend is not
    installed).
    """
    arguments.function("progress", progress)
    (sweep_options,) = options_from(
        {name: value for name, value in options.items() if name in SWEEP}, SweepOptions
    )
    common = {name: value for name, value in options.items() if name not in SWEEP}
    check_grid(grid, common)
    # Here, and not in a process that may not know the type of a wrong value.
    check_values(common, *MODELS)
    measured_profile, reference = profile_and_reference(profile, profile_file, profile_sha256)
    rows = solve_points(
        partial(_solve_point, measured_profile, reference.file, reference.sha256, common),
        list_points(grid),
        backend=sweep_options.backend,
        jobs=sweep_options.jobs,
        progress=progress,
    )
    return SweepResult(
        model=measured_profile.model,
        rows=rows,
        warnings=list(dict.fromkeys(text for row in rows for text in row.warnings)),
        made_by=made_by(MadeBy(), measured=measured_profile.made_by),
    )


def _solve_point(
    profile: Profile, profile_file: str, profile_sha256: str, options: Mapping[str, Any], **point: Any
) -> Plan:
    """Solves one point in a worker process, without the comparisons, which no row shows."""
    problem_options = {**options, **point}
    return solve_alone(profile, problem_options, profile_file, profile_sha256, compared=False)


def check_grid(grid: Any, options: Mapping[str, Any]) -> None:
    """Raises UsageError for keys that are no arguments, or stand in both, and for values that are no list."""
    arguments.instance("grid", grid, Mapping, 'For example: grid={"gpus": [2, 4]}.')
    names = [name for model in MODELS for name in list_declarations(model)]
    for key in (*grid, *options):
        if key not in names:
            raise unknown_option(key, names, "solve")
    twice = next((key for key in grid if key in options), None)
    if twice is not None:
        raise UsageError(f"{twice}: is in the grid and an option besides", "Omit one of the two.")
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UsageError(
                f"grid[{key!r}]={values!r}: is not a list", f'For example: grid={{"{key}": [...]}}.'
            )
    for key in WORDS:
        for value in grid.get(key, ()):
            _check_word(key, value)


WORDS = ("runtime", "schedule", "planner", "recompute", "optimizer", "precision", "gradient_dtype", "zero")
"""Arguments of which a value that no problem knows is refused at once: it would be a row without a plan."""


def _check_word(key: str, value: Any) -> None:
    """Raises UsageError for a word that is not known."""
    values: dict[str, Any] = {key: value}
    planner = PlanOptions(**values).planner
    if planner != BEST:
        find_planner(planner)
