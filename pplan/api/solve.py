"""The fastest plan, and the frontier of step time and memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, cast

from ..cost_models.arguments import Options, arguments_class, list_declarations, options_from, takes
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..cost_models.runtime import RUNTIMES, find_runtime
from ..cost_models.topology_file import check_processor_seconds, make_topology
from ..planner.build_plan import build_problem
from ..planner.candidate import watching_best as watching_best
from ..planner.degrees.degree_options import ConfigurationOptions, DegreeOptions
from ..planner.objectives.frontier import Frontier, build_frontier
from ..planner.objectives.objective import STEP_TIME, ObjectiveOptions
from ..planner.objectives.solve_objective import solve_objective
from ..planner.plan_file import DegreeResult, Plan, PlanRow, ProfileReference
from ..planner.plan_options import PlanOptions
from ..planner.problem import Problem
from ..profiler.profile_file import Profile, list_notes, list_warnings, profiled_device
from ..runtimes.transformer_blocks import blocks_or_none
from .configuration import Configuration, ProfileFile, configuration_of, read_source
from .degree_profiles import Profiles, allowed_degrees, measured_degrees, one_degree
from .machine import count_gpus, own_profiles
from .provenance import made_by
from .solve_options import FrontierOptions

MODELS = (MachineOptions, PlanOptions, ObjectiveOptions)


@arguments_class
class SolveArguments(ConfigurationOptions, ObjectiveOptions, PlanOptions, MachineOptions):
    """The arguments of `solve`."""

    profile: Profiles | Mapping[str, Any] = field(kw_only=False)
    profile_file: str = ""
    profile_sha256: str = ""


@takes(SolveArguments)
def solve(
    profile: Profiles | Mapping[str, Any],
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
) -> Plan:
    """The fastest plan for `profile` on `gpus` devices, with its proven bound.

    `profile` is a profile or the path of its file; or several, of layers that different numbers of devices
    share (as measured with --tp): then that number is chosen, too, the same for all stages, as where a table
    gave the costs for several. The `options` are those of `pplan solve --help`. Only `gpus` has to be given.

    It may also be the configuration of a transformer: its `config.json` (the path, or the keys), or `hf:` and
    a name that transformers knows. Then the plan has `degrees` of tensor, context, expert, pipeline and data
    parallelism. Besides `gpus` a known `gpu` or a `topology` has to be given.

    `profile_file` and `profile_sha256` are what the plan says of its profile (default: the name and the hash
    of the file, or the hash of the profile's JSON).

    >>> import pplan
    >>> profile = pplan.import_profile("gpt.csv", micro_batch_size=4)
    >>> plan = pplan.solve(profile, gpus=4, memory_bytes=6 * 2**30, mini_batch=64, optimizer="adam")
    >>> plan.balance, plan.replicas, f"{plan.prediction.gap:.0%}"
    ([3, 2, 2, 2], [1, 1, 1, 1], '0%')
    >>> gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> pplan.solve(gpt2, gpus=8, gpu="h100", mini_batch=64).degrees.describe()
    'DP 8, ZeRO 2'

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    source: object = profile
    if isinstance(profile, str | Path):
        source = read_source(profile)
    elif isinstance(profile, Mapping):
        source = configuration_of(profile)
    if isinstance(source, Configuration):
        from .degrees import read_options, solve_configuration  # most problems are of a profile

        refuse_options(options, "configuration", (MachineOptions, DegreeOptions))
        return solve_configuration(source, *read_options(options))
    if isinstance(source, ProfileFile):
        profile, profile_file, profile_sha256 = (
            source.profile,
            profile_file or source.file,
            profile_sha256 or source.sha256,
        )
    refuse_options(options, "profile", MODELS)
    return solve_alone(cast(Profiles, profile), options, profile_file, profile_sha256)


def refuse_options(options: Collection[str], kind: str, takes: Sequence[type[Options]]) -> None:
    """Refuse the options of `solve` that a profile or a configuration does not take. Raises UsageError."""
    own = {name for model in takes for name in list_declarations(model)}
    every = {name for model in (*MODELS, DegreeOptions) for name in list_declarations(model)}
    for name in options:
        if name in every - own:
            other = "profile" if kind == "configuration" else "config.json"
            raise UsageError(f"`{name}` is an option for a {other}, and this is a {kind}", f"Omit `{name}`.")


def solve_alone(
    profile: Profiles,
    options: Mapping[str, Any],
    profile_file: str,
    profile_sha256: str,
    *,
    compared: bool = True,
) -> Plan:
    """The fastest plan with these options; `compared` with others as any plan is, which takes longer."""
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


def _runnable_alternatives(plan: Plan) -> list[PlanRow]:
    """Alternatives for the runtimes that run the model, and that share layers if several devices do.

    A runtime with layers of its own runs transformers only.
    """
    shares, outputs = plan.profile.tensor_parallel > 1, plan.profile.undivided_outputs
    has_blocks = blocks_or_none(plan.layer_names) is not None
    runs = {
        name
        for name, runtime in RUNTIMES.items()
        if (runtime.shares_layers or not shares)
        and (has_blocks or not runtime.own_layers)
        and runtime.refuse_outputs(outputs) is None
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
    from ..planner.shared_layers import DegreeProblem, solve_degrees  # most profiles are of one degree

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


@arguments_class
class FrontierArguments(FrontierOptions, PlanOptions, MachineOptions):
    """The arguments of `frontier`."""

    profile: Profile | str | Path = field(kw_only=False)
    profile_file: str = ""
    profile_sha256: str = ""


@takes(FrontierArguments)
def frontier(
    profile: Profile | str | Path,
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
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
                f"{name}={options[name]!r}: a frontier is of step time against memory",
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
