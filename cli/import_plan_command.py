"""`pplan import-plan`: the partition that another tool holds becomes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..api.partition_options import PartitionOptions
from ..cost_models.arguments import list_declarations
from ..cost_models.machines import MachineOptions
from ..planner.plan_options import PlanOptions, TrainingOptions
from .option_parameters import Only
from .output import AsJson, Force, Output, choose_input, choose_target, file_stem
from .streams import console

Source = Annotated[
    str,
    typer.Argument(
        metavar="PARTITION",
        help="A file, or the partition itself: 12,34 or 0,12,46 or 'Et*3|t*5L'.",
        show_default=False,
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="Of the model's layers; default: newest profile in this directory."
    ),
]
TRAINING = {*list_declarations(TrainingOptions), "seconds_of"} - list_declarations(PartitionOptions).keys()
Training = Annotated[PlanOptions, Only(*TRAINING)]


def import_plan_command(
    source: Source,
    profile_file: ProfileFile = None,
    *,
    machine: MachineOptions,
    training: Training,
    partition: PartitionOptions,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a plan of the partition that another tool holds.

    A balance or parts list, a Megatron layout, torchtitan's module names, a device_map, or what pplan export
    wrote.
    """
    from ..api.import_plan import import_plan
    from ..api.load import read_profile
    from .plan_tables import print_plan

    path = choose_input(profile_file, ("profile",))
    profile, sha = read_profile(path)
    about = {
        "model": profile.model,
        "profile.file": path.name,
        "profile.layers_sha256": profile.layers_sha256,
    }
    name = f"{file_stem(profile.model)}.imported.plan.json"
    target = choose_target(output, name, force=force, about=about, kind="plan")
    target.check(path, machine.topology)
    options = {name: getattr(training, name) for name in TRAINING}
    plan = import_plan(
        source,
        profile,
        **vars(machine),
        **options,
        **vars(partition),
        profile_file=path.name,
        profile_sha256=sha,
    )
    target.write(plan, as_json=as_json, show=lambda: print_plan(plan, console()))
