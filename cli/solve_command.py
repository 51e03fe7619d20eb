"""`pplan solve`: the fastest plan for a profile on so many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .machine_options import (
    Bandwidth,
    Gpu,
    Gpus,
    GpusPerNode,
    Latency,
    Memory,
    TopologyFile,
    TypedMachine,
)
from .objective_options import Backend, Csv, FrontierToo, Jobs, Objective, Points, Price, Sweep
from .options import AsJson, Force, Output
from .streams import console
from .training_options import (
    CutAfter,
    GradientDtype,
    KeepTogether,
    MaxStages,
    MicroBatches,
    MiniBatch,
    Optimizer,
    Pin,
    Planner,
    Precision,
    Recompute,
    Robust,
    Runtime,
    Schedule,
    SecondsOf,
    TimeLimit,
    TrainingOptions,
    UseAll,
    Zero,
)

if TYPE_CHECKING:
    from ..planner.objectives.frontier import Frontier
    from ..planner.plan_file import Plan
    from ..profiler.profile_file import Profile
    from .output import Target


Details = Annotated[
    bool, typer.Option("--details", help="Print everything: the search space, all baselines, other runtimes.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="PROFILE", help="A profile; default: newest in this directory.", show_default=False
    ),
]


def solve_command(
    profile_file: ProfileFile = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    gpu: Gpu = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    topology: TopologyFile = None,
    seconds_of: SecondsOf = None,
    runtime: Runtime = None,
    mini_batch: MiniBatch = None,
    micro_batches: MicroBatches = "auto",
    schedule: Schedule = "auto",
    recompute: Recompute = "auto",
    optimizer: Optimizer = "sgd",
    precision: Precision = "auto",
    gradient_dtype: GradientDtype = "auto",
    zero: Zero = 0,
    planner: Planner = "best",
    time_limit: TimeLimit = "30s",
    use_all: UseAll = False,
    max_stages: MaxStages = None,
    cut_after: CutAfter = [],  # noqa: B006 - typer's way
    keep_together: KeepTogether = [],  # noqa: B006
    pin: Pin = [],  # noqa: B006
    robust: Robust = False,
    objective: Objective = "step-time",
    price: Price = None,
    frontier: FrontierToo = False,
    points: Points = None,
    sweep: Sweep = [],  # noqa: B006
    csv: Csv = None,
    backend: Backend = None,
    jobs: Jobs = None,
    output: Output = None,
    force: Force = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a measured model on N GPUs, and how far it is from the best possible."""
    from ..api.provenance import made_by
    from ..api.solve import solve
    from ..cost_models.document import as_text, read_bytes, sha256
    from ..profiler.profile_file import Profile
    from .default_input import named_or_newest
    from .invocation import command_line
    from .output import chosen_target, file_stem
    from .sweep_command import SweepOptions, run_sweep

    _check_owners(
        ("--frontier", frontier, {"--points": points}),
        ("--sweep gpus=2,4,8", bool(sweep), {"--csv": csv, "--backend": backend, "--jobs": jobs}),
    )
    sweeping = SweepOptions(sweep, csv, backend or "processes", jobs, force, as_json) if sweep else None
    if sweeping is None or "gpus" not in sweeping.grid:
        gpus = gpus if gpus is not None else _gpus_of(topology)
    _check_together(sweep, frontier, output, "--robust" if robust else f"--objective {objective}")
    machine = TypedMachine(gpus_per_node, gpu, memory, bandwidth, latency, topology).arguments()
    plan_options = TrainingOptions(
        runtime,
        mini_batch,
        micro_batches,
        schedule,
        recompute,
        optimizer,
        planner,
        time_limit,
        use_all,
        max_stages,
        cut_after,
        keep_together,
        pin,
        robust,
        precision,
        gradient_dtype,
        zero,
    ).plan_options()
    path = named_or_newest(profile_file, ("profile",))
    content = read_bytes(path, "profile")
    profile = Profile.parse(as_text(content, path, "profile"), str(path))
    given = {
        "gpus": gpus,
        "topology": topology,
        **asdict(plan_options),
        "seconds_of": seconds_of,
        "objective": objective,
        "price": price,
        "profile_file": path.name,
        "profile_sha256": sha256(content),
        **machine,
    }
    if sweeping is not None:
        run_sweep(sweeping, profile, given)
        return
    about = {
        "model": profile.model,
        "profile.file": path.name,
        "profile.layers_sha256": profile.layers_sha256,
    }
    target = chosen_target(output, f"{file_stem(profile.model)}.plan.json", force=force, about=about)
    target.check(path, topology)
    beside = _frontier_target(target)
    if frontier:
        beside.check(path, topology)
    plan = solve(profile, **given)
    origin = made_by(plan.made_by, command=command_line(), measured=profile.made_by)
    plan = plan.model_copy(update={"made_by": origin})
    quiet = frontier and as_json
    target.write(
        plan,
        as_json=as_json and not frontier,
        show=lambda: None if quiet else _show(plan, target.path, details=details),
    )
    if frontier:
        found = _frontier(profile, points or 24, given).model_copy(update={"made_by": origin})
        beside.write(found, as_json=as_json, show=lambda: _show_frontier(found))


def _check_owners(*owners: tuple[str, bool, Mapping[str, object]]) -> None:
    """Raises UsageError for options that belong to another one, which is not given."""
    from ..cost_models.errors import UsageError

    for owner, given, options in owners:
        for option, value in options.items():
            if value is not None and not given:
                raise UsageError(
                    f"{option} {value}: is of {owner.split()[0]}", f"Give {owner}, say, or omit it."
                )


def _check_together(sweep: list[str], frontier: bool, output: Path | None, aim: str) -> None:
    """Raises UsageError for options that say nothing beside the others; `aim`: the one that says what the
    plan is to be the best of."""
    from ..cost_models.errors import UsageError

    if sweep and frontier:
        raise UsageError("--frontier with --sweep: one or the other", "Omit one of the two.")
    if sweep and output is not None:
        raise UsageError(f"-o {output}: a sweep writes no plan", "Give --csv FILE for its rows.")
    if frontier and aim != "--objective step-time":
        raise UsageError(
            f"--frontier with {aim}: it is of step time against memory",
            "Omit one of the two.",
        )


def _frontier_target(plan: Target) -> Target:
    """NAME.frontier.json beside NAME.plan.json."""
    stem = plan.path.name.removesuffix(".json").removesuffix(".plan")
    return replace(plan, path=plan.path.with_name(f"{stem}.frontier.json"))


def _frontier(profile: Profile, points: int, given: Mapping[str, Any]) -> Frontier:
    from ..api.solve import frontier

    own = {name: value for name, value in given.items() if name not in ("objective", "price")}
    return frontier(profile, points=points, **own)


def _gpus_of(topology: Path | None) -> int:
    """The number of GPUs of the topology, where the command line names none. Raises UsageError."""
    from ..cost_models.errors import UsageError
    from ..cost_models.machines.topology_options import named_topology

    gpus = None if topology is None else named_topology(topology).gpus
    if gpus is None:
        raise UsageError("solve: missing option '--gpus'", "Give it: pplan solve --gpus N.")
    return gpus


def _show(plan: Plan, path: Path, *, details: bool) -> None:
    from .plan_tables import print_answer, print_plan

    if details:
        print_plan(plan, console())
    else:
        print_answer(plan, console(), _next_steps(plan, path))


def _next_steps(plan: Plan, path: Path) -> str:
    """The commands that may follow."""
    from ..cost_models.runtime import RUNTIMES
    from ..runtimes.formats.plan_choice import refusals

    runtimes = [name for name, own in RUNTIMES.items() if name == plan.runtime or not refusals(plan, own)]
    export = [f"export {plan.runtime or runtimes[0]}"] if runtimes else []
    # Without a name the verbs take the newest plan of the working directory: this one.
    newest = path == Path(path.name) and path.name.endswith(".plan.json")
    commands = [
        f"pplan {verb}{'' if newest else f' {path}'}" for verb in ("check", "explain", *export, "show")
    ]
    return f"Next: {', '.join(commands)} (all details)."


def _show_frontier(frontier: Frontier) -> None:
    from .frontier_table import print_frontier

    print_frontier(frontier, console())
