"""`pplan solve`: the fastest plan for a profile on so many GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..api.replan_options import ReplanOptions
from ..api.solve_options import FrontierOptions, SweepOptions
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..planner.degrees.degree_options import DegreeOptions
from ..planner.objectives.objective import ObjectiveOptions
from ..planner.plan_options import PlanOptions
from .field_names import FIELDS, TYPED, typed_text
from .option_parameters import Typed
from .output import AsJson, Force, Output, choose_input, choose_target, file_stem
from .streams import console, waiting
from .sweep_options import GridOptions

if TYPE_CHECKING:
    from ..planner.objectives.frontier import Frontier
    from ..planner.plan_file import Plan
    from ..profiler.profile_file import Profile
    from .output import Target


Details = Annotated[
    bool, typer.Option("--details", help="Print everything: the search space, all baselines, other runtimes.")
]
ProfileFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="PROFILE",
        help="A profile, or one for each number of devices that share layers (--tp); default: newest here. "
        "Or a transformer's config.json, or hf: and its name in transformers. With --lost: a plan.",
        show_default=False,
    ),
]


PlanProfile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Of the plan that lost devices, where it is not beside it.",
        rich_help_panel="After a loss",
    ),
]
WithFrontier = Annotated[
    bool,
    typer.Option(
        "--frontier",
        help="Also the plans of which none is both faster and smaller, in a file.",
        rich_help_panel="The objective",
    ),
]


def solve_command(
    profile_files: ProfileFiles = [],  # noqa: B006  typer takes a list
    *,
    machine: MachineOptions,
    typed_options: Typed[PlanOptions],
    objective: ObjectiveOptions,
    frontier: WithFrontier = False,
    frontier_options: FrontierOptions,
    grid: GridOptions,
    sweep_options: SweepOptions,
    degree_options: Typed[DegreeOptions],
    loss: ReplanOptions,
    profile_file: PlanProfile = None,
    output: Output = None,
    force: Force = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan, and how far it is from the best possible.

    The model is a profile, or the configuration of a transformer. With --lost it is a plan, whose devices
    are gone in part: of the fast plans for the others, the one that moves the fewest weights.
    """

    _check_owners(
        ("--frontier", frontier, ["points"]),
        ("--sweep gpus=2,4,8", bool(grid.sweep), ["csv", "backend", "jobs"]),
        ("--lost 3", bool(loss.lost), ["within"]),
    )
    typed = {*TYPED.get({}), *typed_options.names, *degree_options.names}
    if loss.lost:
        from .lost_devices import solve_without

        more = {"frontier"} if frontier else set()
        solve_without(loss, profile_files, profile_file, typed | more, output, force=force, as_json=as_json)
        return
    if profile_file is not None:
        raise UsageError(f"--profile {profile_file}: is of --lost", "Name the profile without --profile.")
    if not profile_files:
        typed_options.read()  # what it refuses needs no profile
    files: Sequence[Path | None] = profile_files or [None]
    paths = [
        path if path is not None and str(path).startswith("hf:") else choose_input(path, ("profile",))
        for path in files
    ]
    from ..api.configuration import Configuration, read_source
    from ..api.machine import count_gpus
    from ..api.solve import MODELS, refuse_options, solve, watching_best

    source = read_source(str(paths[0]))
    if isinstance(source, Configuration):
        from ..api.degrees import solve_configuration

        if len(paths) > 1:
            raise UsageError(
                f"{paths[0]} with {len(paths) - 1} more: a configuration is planned alone", "Name one file."
            )
        for option, is_given in (("--frontier", frontier), ("--sweep", grid.sweep)):
            if is_given:
                raise UsageError(
                    f"{option} is an option for a profile, {paths[0]} is a configuration", "Omit it."
                )
        refuse_options(typed, "configuration", (MachineOptions, DegreeOptions))
        options = degree_options.read()
        target = choose_target(
            output,
            f"{file_stem(source.name)}.plan.json",
            force=force,
            about={"model": source.name},
            kind="plan",
        )
        target.check(*paths, machine.topology, options.kernels, options.machine)
        with waiting("Searching"):
            plan = solve_configuration(source, machine, options)
        target.write(plan, as_json=as_json, show=lambda: _show(plan, target.path, details=details))
        return
    refuse_options(typed, "profile", MODELS)
    plan_options = typed_options.read()
    aim = f"--objective {objective.objective}"
    if plan_options.robust:
        aim = FIELDS[plan_options.robust_field]
    _check_together(bool(grid.sweep), frontier, output, aim)
    path, profile = _only(paths, bool(grid.sweep), frontier), source.profile
    if "gpus" not in grid.sweep and machine.gpus is None:
        machine = replace(machine, gpus=count_gpus(machine))
    keywords: dict[str, Any] = {**vars(machine), **vars(plan_options), **vars(objective)}
    about = {"model": profile.model, "profile.layers_sha256": profile.layers_sha256}
    if len(paths) == 1:
        keywords |= {"profile_file": source.file, "profile_sha256": source.sha256}
        about["profile.file"] = source.file
    if grid.sweep:
        from .sweep_command import run_sweep

        run_sweep(grid, sweep_options, profile, keywords, force=force, as_json=as_json)
        return
    name = f"{file_stem(profile.model)}.plan.json"
    target = choose_target(output, name, force=force, about=about, kind="plan")
    target.check(*paths, machine.topology)
    frontier_target = _frontier_target(target)
    if frontier:
        frontier_target.check(path, machine.topology)
    with waiting("Searching", plan_options.time_limit) as wait, watching_best(wait.tell_best):
        plan = solve(profile if len(paths) == 1 else paths, **keywords)
    quiet = frontier and as_json
    target.write(
        plan,
        as_json=as_json and not frontier,
        show=lambda: None if quiet else _show(plan, target.path, details=details),
    )
    if frontier:
        with waiting("Searching for every memory"):
            curve = _frontier(profile, frontier_options, keywords)
        frontier_target.write(curve, as_json=as_json, show=lambda: _show_frontier(curve))


def _check_owners(*owners: tuple[str, bool, Sequence[str]]) -> None:
    """Raises UsageError for options that belong to another one, which is not given."""

    for owner, is_given, fields in owners:
        for name in () if is_given else fields:
            if (text := typed_text(name)) is not None:
                raise UsageError(
                    f"{FIELDS[name]} {text}: is of {owner.split()[0]}", f"Give {owner}, say, or omit it."
                )


def _check_together(sweep: bool, frontier: bool, output: Path | None, aim: str) -> None:
    """Raises UsageError for options that say nothing beside the others; `aim`: the one that says what the
    plan is to be the best of."""

    if sweep and frontier:
        raise UsageError("--frontier with --sweep: one or the other", "Omit one of the two.")
    if sweep and output is not None:
        raise UsageError(f"-o {output}: a sweep writes no plan", "Give --csv FILE for its rows.")
    if frontier and aim != "--objective step-time":
        raise UsageError(
            f"--frontier with {aim}: it is of step time against memory",
            "Omit one of the two.",
        )


def _only(paths: Sequence[Path], sweep: bool, frontier: bool) -> Path:
    """The first profile. Raises UsageError for several of what takes one."""

    if len(paths) > 1 and (sweep or frontier):
        option = "--sweep" if sweep else "--frontier"
        raise UsageError(f"{option} with {len(paths)} profiles: it takes one", "Name one profile.")
    return paths[0]


def _frontier_target(plan: Target) -> Target:
    """NAME.frontier.json beside NAME.plan.json."""
    stem = plan.path.name.removesuffix(".json").removesuffix(".plan")
    return replace(plan, path=plan.path.with_name(f"{stem}.frontier.json"), kind="frontier")


def _frontier(profile: Profile, options: FrontierOptions, keywords: Mapping[str, Any]) -> Frontier:
    from ..api.solve import frontier

    problem_options = {name: value for name, value in keywords.items() if name not in ("objective", "price")}
    return frontier(profile, **vars(options), **problem_options)


def _show(plan: Plan, path: Path, *, details: bool) -> None:
    from .plan_tables import print_answer, print_plan

    if details:
        print_plan(plan, console())
    else:
        print_answer(plan, console(), _next_step(plan, path))


def _next_step(plan: Plan, path: Path) -> str:
    """Name the command that may follow: the export that does not refuse the plan, or what shows all of it."""
    from ..cost_models.runtime import RUNTIMES
    from ..cost_models.transformer.implementations import IMPLEMENTATIONS
    from ..runtimes.choice import refusals

    runtimes = [name for name, runtime in RUNTIMES.items() if not refusals(plan, runtime)]
    if plan.training is not None:
        runtimes = [IMPLEMENTATIONS[plan.training.implementation].runtimes[0]]
    # PyTorch's own comes first: it is installed, and a script of it trains as it is.
    runtime = plan.runtime or ("torch" if "torch" in runtimes else next(iter(runtimes), None))
    # Without a name the verbs take the newest plan of the working directory: this one.
    newest = path == Path(path.name) and path.name.endswith(".plan.json")
    verb = "show" if runtime is None else f"export {runtime}"
    return f"Next: pplan {verb}{'' if newest else f' {path}'}"


def _show_frontier(frontier: Frontier) -> None:
    from .frontier_table import print_frontier

    print_frontier(frontier, console())
