"""The fastest plan, the plans on the frontier of time and memory, and a grid of problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..cost_models import arguments
from ..cost_models.document import MadeBy
from ..cost_models.errors import UsageError
from ..planner.objectives.frontier import build_frontier
from ..planner.objectives.frontier_file import Frontier
from ..planner.objectives.solved import solve_for
from ..planner.plan_file import Plan
from ..planner.sweep import Sweep, list_points, solve_points
from ..profiler.profile_file import Profile
from ..profiler.profile_warnings import notes_of, warnings_of
from .load import profile_and_reference
from .problem_arguments import ProblemArguments, check_grid
from .provenance import made_by


def solve(
    profile: Profile | str | Path,
    *,
    gpus: int,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: float | Sequence[float] | None = None,
    latency: float | Sequence[float] | None = None,
    topology: str | Path | None = None,
    runtime: str | None = None,
    mini_batch: int | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    schedule: str = "auto",
    recompute: str = "auto",
    optimizer: str = "sgd",
    precision: Literal["auto", "fp32", "mixed", "bf16"] | str = "auto",
    gradient_dtype: Literal["auto", "fp32", "bf16", "fp16"] | str = "auto",
    zero: int = 0,
    planner: str = "best",
    time_limit: float = 30.0,
    use_all: bool = False,
    max_stages: int | None = None,
    cut_after: Sequence[str] = (),
    keep_together: Sequence[str] = (),
    pins: Sequence[tuple[str, int]] = (),
    memory_limit: float | None = None,
    robust: bool = False,
    objective: Literal["step-time", "throughput", "memory", "cost"] | str = "step-time",
    price: float | str | Mapping[str, float] | None = None,
    seconds_of: Literal["cpu"] | str | None = None,
    profile_file: str = "",
    profile_sha256: str = "",
) -> Plan:
    """The fastest plan for `profile` on `gpus` devices, with its proven bound.

    `profile` is a profile or the path of its file. `bandwidth` (bytes per second) and `latency` (seconds)
    hold one value inside a node and, where given, a second between nodes; None takes those of `gpu`, of the
    profiled device or of `topology`, a machine's name or a TOML file. `mini_batch` defaults to 32 samples a
    GPU, as nearly as micro-batches make it, `micro_batches` to the best number. `schedule`: one of `pplan
    schedules`, or auto, the better of gpipe and 1f1b; `recompute`: never, always, except_last or auto;
    `optimizer`: sgd, momentum, adam, adamw or adamw-8bit; `runtime` keeps the answer to what that runtime
    runs.

    `precision`: fp32, mixed or bf16; auto is mixed for a profile in 16 bits or under autocast. Micro-batches
    add their gradients up in `gradient_dtype`: fp32, bf16 or fp16. `zero`: what the replicas of a stage
    spread over them, 1 the optimizer's states, 2 the gradients too, 3 the weights too.

    `planner`: "best", the joint search, or a known tool's way. `time_limit`: seconds of processor time for
    the whole answer. `use_all`: no device may stay free. `cut_after`: layers after which a stage must end;
    `keep_together`: patterns of layers between which none may; `pins`: layers and their stages, from 0.
    `memory_limit`: bytes that no device may exceed, besides what it has. `robust`: of plans near the fastest,
    the one with the best step at the 90th percentile, as the layers' seconds vary in the profile.

    `objective`: "step-time"; "throughput", for which the weights may be an update or more late; "memory", the
    least that the fullest device holds with a step at most 5 % longer than the fastest ("memory:10%"); or
    "cost", dollars per sample. `price`: dollars per device hour, one for all or by the kind of device.

    `seconds_of`: "cpu" where GPUs are to be planned with the seconds of a profile of a processor, which is
    refused otherwise.

    `profile_file` and `profile_sha256` are what the plan says of its profile (default: the name and the hash
    of the file, or the hash of the profile's JSON).

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    given = ProblemArguments(
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        latency=latency,
        topology=topology,
        runtime=runtime,
        mini_batch=mini_batch,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        optimizer=optimizer,
        precision=precision,
        gradient_dtype=gradient_dtype,
        zero=zero,
        planner=planner,
        time_limit=time_limit,
        use_all=use_all,
        max_stages=max_stages,
        cut_after=cut_after,
        keep_together=keep_together,
        pins=pins,
        memory_limit=memory_limit,
        robust=robust,
        objective=objective,
        price=price,
        seconds_of=seconds_of,
    )
    return _solved(profile, given, profile_file, profile_sha256)


def _solved(
    profile: Profile | str | Path,
    given: ProblemArguments,
    profile_file: str,
    profile_sha256: str,
    *,
    compared: bool = True,
) -> Plan:

    measured, reference = profile_and_reference(profile, profile_file, profile_sha256)
    aim, problem = given.aim, given.problem(measured, reference)
    plan = solve_for(
        aim,
        problem,
        model=measured.model,
        profile=reference,
        notes=notes_of(measured),
        warnings=warnings_of(measured, problem.topology),
        compared=compared,
    )
    return plan.model_copy(update={"made_by": made_by(plan.made_by, measured=measured.made_by)})


def frontier(
    profile: Profile | str | Path,
    *,
    points: int = 24,
    memory_step: float = 0.02,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
) -> Frontier:
    """The plans of which none is both faster and smaller: step time against the most that a device holds.

    At most `points` of them, the fastest first, each with less memory than the one before by the share
    `memory_step` at least (0: none is left out). `options` are those of `solve`, but for `objective` and
    `price`. Of the result: `points`, each with `step_seconds`, `memory_bytes`, `exact` and its `plan`.

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    for name in ("objective", "price"):
        if name in options:
            raise UsageError(
                f"{name}={options[name]!r}: a frontier is of step time against memory", f"Omit {name}."
            )
    measured, reference = profile_and_reference(profile, profile_file, profile_sha256)
    problem = ProblemArguments(**options).problem(measured, reference)
    found = build_frontier(
        problem,
        model=measured.model,
        profile=reference,
        warnings=warnings_of(measured, problem.topology),
        points=arguments.whole("points", points),
        memory_step=arguments.number("memory_step", memory_step),
    )
    return found.model_copy(update={"made_by": made_by(found.made_by, measured=measured.made_by)})


def sweep(
    profile: Profile | str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    jobs: int | None = None,
    backend: Literal["processes", "dask", "ray"] | str = "processes",
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
) -> Sweep:
    """A grid of problems, each solved by itself: `pplan.sweep(profile, {"gpus": [2, 4]}, mini_batch=64)`.

    `grid`: values for some options of `solve`, by name; every combination is a point, the last name changing
    fastest. `options`: those of `solve` that are the same for all. `jobs`: how many run side by side (None:
    as many as there are cores). `backend`: processes of this machine, or a cluster of Dask (at
    DASK_SCHEDULER_ADDRESS) or Ray. Of the result: `rows`, each with its `point`, the figures of the plan
    (step_seconds, memory_bytes, balance and so on), or the `reason` why there is none.

    Raises UsageError (also the points', where none is usable), FileError, MachineError (the backend is not
    installed).
    """
    check_grid(grid, options)
    measured, reference = profile_and_reference(profile, profile_file, profile_sha256)
    rows = solve_points(
        partial(_solved_point, measured, reference.file, reference.sha256, options),
        list_points(grid),
        backend=arguments.word("backend", backend),
        jobs=arguments.optional_whole("jobs", jobs),
    )
    return Sweep(
        model=measured.model,
        rows=rows,
        warnings=list(dict.fromkeys(text for row in rows for text in row.warnings)),
        made_by=made_by(MadeBy(), measured=measured.made_by),
    )


def _solved_point(
    profile: Profile, profile_file: str, profile_sha256: str, options: Mapping[str, Any], **point: Any
) -> Plan:
    """In a process of its own: without comparisons, which no row shows."""
    given = ProblemArguments(**{**options, **point})
    return _solved(profile, given, profile_file, profile_sha256, compared=False)
