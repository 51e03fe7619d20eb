"""`pplan import-plan`: the partition that another tool holds becomes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.schedules import SCHEDULES
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
from .options import AsJson, Force, Output, number_or_auto, whole_number, word
from .streams import console
from .training_options import (
    GradientDtype,
    MicroBatches,
    MiniBatch,
    Optimizer,
    Precision,
    Runtime,
    SecondsOf,
    Zero,
)

if TYPE_CHECKING:
    from ..planner.plan_file import Plan

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
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Where the partition does not say it; default: the faster of 1f1b and gpipe.",
        parser=word("--schedule", SCHEDULES),
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="never|always|except-last|auto",
        help="Where the partition does not say it; default: if out of memory.",
        parser=word("--recompute", ("never", "always", "except-last", "auto")),
    ),
]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages",
        metavar="V",
        help="Stages on each device.",
        parser=whole_number("--virtual-stages", at_least=1),
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="R",
        help="Devices that share every stage.",
        parser=whole_number("--replicas", at_least=1),
    ),
]


def import_plan_command(
    source: Source,
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
    schedule: Schedule = None,
    virtual_stages: VirtualStages = None,
    replicas: Replicas = None,
    recompute: Recompute = None,
    optimizer: Optimizer = "sgd",
    precision: Precision = "auto",
    gradient_dtype: GradientDtype = "auto",
    zero: Zero = 0,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a plan of the partition that another tool holds: a balance or parts list, a Megatron layout,
    torchtitan's module names, a device_map, or what pplan export wrote."""
    from ..api.import_plan import import_plan
    from ..api.provenance import made_by
    from ..cost_models.document import as_text, read_bytes, sha256
    from ..cost_models.runtime import runtime_named
    from ..profiler.profile_file import Profile
    from .default_input import named_or_newest
    from .invocation import command_line
    from .output import chosen_target, file_stem

    machine = TypedMachine(gpus_per_node, gpu, memory, bandwidth, latency, topology).arguments()
    path = named_or_newest(profile_file, ("profile",))
    content = read_bytes(path, "profile")
    profile = Profile.parse(as_text(content, path, "profile"), str(path))
    about = {
        "model": profile.model,
        "profile.file": path.name,
        "profile.layers_sha256": profile.layers_sha256,
    }
    target = chosen_target(output, f"{file_stem(profile.model)}.imported.plan.json", force=force, about=about)
    target.check(path, topology)
    plan = import_plan(
        source,
        profile,
        gpus=gpus,
        **machine,
        topology=topology,
        runtime=None if runtime is None else runtime_named(runtime).name,
        mini_batch=mini_batch,
        micro_batches=number_or_auto(micro_batches, "--micro-batches"),
        schedule=schedule,
        virtual_stages=virtual_stages,
        replicas=replicas,
        recompute=recompute,
        optimizer=optimizer,
        seconds_of=seconds_of,
        precision=precision,
        gradient_dtype=gradient_dtype,
        zero=zero,
        profile_file=path.name,
        profile_sha256=sha256(content),
    )
    origin = made_by(plan.made_by, command=command_line(), measured=profile.made_by)
    plan = plan.model_copy(update={"made_by": origin})
    target.write(plan, as_json=as_json, show=lambda: _show(plan))


def _show(plan: Plan) -> None:
    from .plan_tables import print_plan

    print_plan(plan, console())
