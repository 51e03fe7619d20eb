"""The fastest plan, the plans on the frontier of time and memory, and a grid of problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from ..cost_models import arguments
from ..cost_models.document import MadeBy
from ..cost_models.errors import UsageError
from ..cost_models.machines.topology_options import check_processor_seconds, make_topology
from ..cost_models.option_fields import check_values
from ..cost_models.runtime import RUNTIMES, find_runtime
from ..planner.build_plan import build_problem
from ..planner.candidate import watching_best as watching_best
from ..planner.joint_search import BEST
from ..planner.objectives.frontier import Frontier, build_frontier
from ..planner.objectives.objective import STEP_TIME
from ..planner.objectives.solve_objective import solve_objective
from ..planner.plan_file import Plan
from ..planner.plan_records import Alternative, DegreeResult, ProfileReference
from ..planner.planners import find_planner
from ..planner.problem import Problem
from ..planner.problem_grid import SweepResult, list_points, solve_points
from ..planner.shared_layers import DegreeProblem, solve_degrees
from ..profiler.profile_file import Profile
from ..profiler.profile_warnings import list_notes, list_warnings, profiled_device
from .degree_profiles import Profiles, allowed_degrees, measured_degrees, one_degree
from .load import profile_and_reference
from .machine import count_gpus, own_profiles
from .options import (
    FrontierKeywords,
    FrontierOptions,
    MachineOptions,
    ObjectiveOptions,
    PlanOptions,
    SolveKeywords,
    SweepKeywords,
    SweepOptions,
    describe_options,
    list_declarations,
    options_from,
    unknown_option,
)
from .provenance import made_by

MODELS = (MachineOptions, PlanOptions, ObjectiveOptions)
SWEEP = tuple(list_declarations(SweepOptions))


@describe_options(SolveKeywords, *MODELS)
def solve(
    profile: Profiles,
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Unpack[SolveKeywords],
) -> Plan:
    """The fastest plan for `profile` on `gpus` devices, with its proven bound.

    `profile` is a profile or the path of its file; or several, of layers that different numbers of devices
    share (as measured with --tp): then that number is chosen, too, the same for all stages, as where a table
    gave the costs for several. The `options` are those of `pplan solve --help`. Only `gpus` has to be given.

    `profile_file` and `profile_sha256` are what the plan says of its profile (default: the name and the hash
    of the file, or the hash of the profile's JSON).

    >>> import pplan
    >>> profile = pplan.import_profile("gpt.csv", micro_batch_size=4)
    >>> plan = pplan.solve(profile, gpus=4, memory_bytes=6 * 2**30, mini_batch=64, optimizer="adam")
    >>> plan.balance, plan.replicas, f"{plan.prediction.gap:.0%}"
    ([3, 2, 2, 2], [1, 1, 1, 1], '0%')

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    return _solve(profile, options, profile_file, profile_sha256)


def _solve(
    profile: Profiles,
    options: Mapping[str, Any],
    profile_file: str,
    profile_sha256: str,
    *,
    compared: bool = True,
) -> Plan:
    machine, plan_options, objective = options_from(options, *MODELS)
    degrees = allowed_degrees(measured_degrees(profile, profile_file, profile_sha256), plan_options)
    if len(degrees) > 1:
        plan = _solve_degrees(degrees, machine, plan_options, objective, compared=compared)
    else:
        ((measured_profile, reference),) = degrees
        problem = make_problem(measured_profile, reference, machine, plan_options)
        plan = solve_objective(
            objective.aim,
            problem,
            model=measured_profile.model,
            profile=reference,
            notes=list_notes(measured_profile),
            warnings=list_warnings(measured_profile, problem.topology, plan_options.runtime),
            compared=compared,
        )
    origin = made_by(plan.made_by, measured=degrees[0][0].made_by)
    return plan.model_copy(update={"made_by": origin, "alternatives": _runnable_alternatives(plan)})


def _runnable_alternatives(plan: Plan) -> list[Alternative]:
    """Alternatives for the runtimes that run the model, and that share layers if several devices do."""
    shares, outputs = plan.profile.tensor_parallel > 1, plan.profile.undivided_outputs
    runs = {
        name
        for name, runtime in RUNTIMES.items()
        if (runtime.shares_layers or not shares) and runtime.refuse_outputs(outputs) is None
    }
    rows = [
        row.model_copy(update={"runtimes": [name for name in row.runtimes if name in runs]})
        for row in plan.alternatives
    ]
    return [new for new, old in zip(rows, plan.alternatives, strict=True) if new.runtimes or not old.runtimes]


def _solve_degrees(
    degrees: Sequence[tuple[Profile, ProfileReference]],
    machine: MachineOptions,
    options: PlanOptions,
    objective: ObjectiveOptions,
    *,
    compared: bool,
) -> Plan:
    """The fastest plan of all numbers of devices that may share the layers. Raises UsageError where none
    divides the machine, or where something else than the shortest step is asked for."""
    if objective.aim.name != STEP_TIME or options.robust:
        what = f"`{options.robust_field}`" if options.robust else f"objective={objective.aim.name!r}"
        raise UsageError(
            f"{what}: how many devices share the layers is chosen for the shortest step alone",
            f"Give one number: tp={degrees[0][0].tensor_parallel}, say.",
        )
    problems, left_out, refusal = [], [], None
    for profile, reference in degrees:
        number = profile.tensor_parallel
        try:
            _check_shares(options.runtime, number)
            problem = make_problem(profile, reference, machine, options)
        except UsageError as error:
            refusal = refusal or error
            left_out.append(DegreeResult(tensor_parallel=number, reason=error.what))
            continue
        warnings = list_warnings(profile, problem.topology, options.runtime)
        problems.append(DegreeProblem(number, problem, reference, list_notes(profile), warnings))
    if not problems and refusal is not None:
        raise refusal
    model = degrees[0][0].model
    return solve_degrees(problems, model=model, left_out=left_out, compared=compared)


def _check_shares(runtime: str | None, sharers: int) -> None:
    """Raises UsageError where the runtime does not let so many devices share a layer."""
    if sharers > 1 and runtime is not None and not find_runtime(runtime).shares_layers:
        raise UsageError(
            f"runtime={runtime!r}: it does not let {sharers} devices share a layer",
            "Use tp=1, or another runtime.",
        )


def make_problem(
    measured: Profile, reference: ProfileReference, machine: MachineOptions, plan_options: PlanOptions
) -> Problem:
    """The problem of a profile on a machine. Raises UsageError, FileError."""
    runtime = None if plan_options.runtime is None else find_runtime(plan_options.runtime)
    if runtime is not None and (refusal := runtime.refuse_outputs(reference.undivided_outputs)):
        raise UsageError(f"runtime={runtime.name!r}: {refusal[0]}", refusal[1])
    profiled = profiled_device(measured)
    gpus = count_gpus(machine)
    topology = make_topology(gpus=gpus, **machine.parts, file=machine.topology, profiled=profiled)
    topology = topology.in_groups(measured.tensor_parallel)
    check_processor_seconds(profiled, topology, plan_options.seconds_of)
    profiles = own_profiles(topology, machine.folder, plan_options.seconds_of)
    return build_problem(measured.chain(), topology, plan_options, reference, profiles)


@describe_options(FrontierKeywords, MachineOptions, PlanOptions, FrontierOptions)
def frontier(
    profile: Profile | str | Path,
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Unpack[FrontierKeywords],
) -> Frontier:
    """The plans of which none is both faster and smaller: step time against the most that a device holds.

    At most `points` of them (24), the fastest first, each with less memory than the one before by the share
    `memory_step` at least (0.02; 0: none is left out). The other `options` are those of `solve`, but for
    `objective` and `price`. Of the result: `points`, each with `step_seconds`, `memory_bytes`, `exact` and
    its `plan`.

    >>> import pplan
    >>> curve = pplan.frontier("gpt.profile.json", gpus=4, mini_batch=64)
    >>> steps = [point.step_seconds for point in curve.points]
    >>> steps == sorted(steps)
    True

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    for name in ("objective", "price"):
        if name in options:
            raise UsageError(
                f"{name}={dict(options)[name]!r}: a frontier is of step time against memory",
                f"Omit {name}.",
            )
    machine, plan_options, frontier_options = options_from(
        options, MachineOptions, PlanOptions, FrontierOptions, of="frontier"
    )
    measured_profile, reference = one_degree(profile, profile_file, profile_sha256, plan_options, "frontier")
    problem = make_problem(measured_profile, reference, machine, plan_options)
    curve = build_frontier(
        problem,
        model=measured_profile.model,
        profile=reference,
        warnings=list_warnings(measured_profile, problem.topology, plan_options.runtime),
        points=frontier_options.points,
        memory_step=frontier_options.memory_step,
    )
    return curve.model_copy(update={"made_by": made_by(curve.made_by, measured=measured_profile.made_by)})


@describe_options(SweepKeywords, *MODELS, SweepOptions)
def sweep(
    profile: Profile | str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    progress: Callable[[float], None] | None = None,
    **options: Unpack[SweepKeywords],
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
    return _solve(profile, problem_options, profile_file, profile_sha256, compared=False)


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
