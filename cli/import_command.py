"""`pplan import`: costs of another tool become a profile, its partition of a model becomes a plan."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..api.partition_options import PartitionOptions
from ..cost_models.arguments import list_declarations
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..planner.plan_options import PlanOptions, TrainingOptions
from ..profiler.profile_options import ProfileImportOptions
from .field_names import FIELDS
from .option_parameters import Only, Typed, Without
from .output import AsJson, Force, Output, choose_input, choose_target, file_stem
from .streams import console

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE|PARTITION",
        help="A file of costs or of a partition; or a partition: 12,34 or 0,12,46 or 'Et*3|t*5L'.",
        show_default=False,
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="The profile of the model's layers; default: newest in this directory.",
        rich_help_panel="The partition",
    ),
]
TRAINING = {*list_declarations(TrainingOptions), "seconds_of"} - list_declarations(PartitionOptions).keys()


def import_command(
    source: Source,
    *,
    costs: Annotated[Typed[ProfileImportOptions], Without("tensor_parallel")],
    profile_file: ProfileFile = None,
    partition: Typed[PartitionOptions],
    training: Annotated[Typed[PlanOptions], Only(*TRAINING)],
    machine: Typed[MachineOptions],
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a profile of other tools' costs, or a plan of a partition.

    Costs are a PipeDream graph, or a table as CSV or JSON, one row a layer. Columns: name, forward_seconds,
    backward_seconds, activation_bytes, parameter_bytes; optional saved_bytes, micro_batch_size,
    backward_input_seconds; other units end the name, as in forward_ms or activation_mib; tp2_forward_ms and
    so on are those of one of two devices that share the layer.

    A partition is a balance or parts list, a Megatron layout, torchtitan's module names, a device_map, or
    what pplan export wrote.
    """
    from ..api.import_plan import import_plan, is_costs

    options = training.read()
    if "format" in costs.names or is_costs(source):
        _refuse((partition.names | training.names | machine.names) - {"tp"}, f"{source} holds costs")
        _import_costs(Path(source), costs.read(), options.tp, output, force=force, as_json=as_json)
        return
    from ..api.load import read_profile
    from .plan_tables import print_plan

    _refuse(costs.names, f"{source} is a partition")
    place, settings = machine.read(), partition.read()
    path = choose_input(profile_file, ("profile",))
    profile, sha = read_profile(path)
    about = {
        "model": profile.model,
        "profile.file": path.name,
        "profile.layers_sha256": profile.layers_sha256,
    }
    name = f"{file_stem(profile.model)}.imported.plan.json"
    target = choose_target(output, name, force=force, about=about, kind="plan")
    target.check(path, place.topology)
    plan = import_plan(
        source,
        profile,
        **vars(place),
        **vars(settings),
        **{name: getattr(options, name) for name in TRAINING},
        profile_file=path.name,
        profile_sha256=sha,
    )
    target.write(plan, as_json=as_json, show=lambda: print_plan(plan, console()))


def _refuse(names: Iterable[str], why: str) -> None:
    """Raise UsageError for options of the other kind of source."""
    for name in sorted(names):
        raise UsageError(f"{FIELDS[name]}: {why}, which takes no such option", "Omit it.")


def _import_costs(
    path: Path,
    options: ProfileImportOptions,
    degrees: tuple[int, ...] | None,
    output: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write the profile of a file of costs; `degrees`: what --tp says."""
    from ..api.profiles import import_profile
    from .profile_tables import print_profile

    if degrees is not None and len(degrees) > 1:
        raise UsageError(
            f"--tp {','.join(map(str, degrees))}: costs are those of one number of devices",
            "Give one number, as in --tp 2.",
        )
    profile = import_profile(path, **vars(options) | {"tensor_parallel": degrees[0] if degrees else 1})
    about = {"model": profile.model, "device": profile.device}
    name = f"{file_stem(profile.model)}.profile.json"
    target = choose_target(output, name, force=force, about=about, kind="profile")
    target.check(path)
    target.write(profile, as_json=as_json, show=lambda: print_profile(profile, console()))
