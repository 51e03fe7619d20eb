"""`pplan solve`: the fastest plan for a profile on so many GPUs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .machine_options import (
    Bandwidth,
    Gpu,
    Gpus,
    GpusPerNode,
    Latency,
    MachineOptions,
    Memory,
    TopologyFile,
)
from .options import AsJson, Force, Output
from .streams import console
from .training_options import (
    CutAfter,
    KeepTogether,
    MaxStages,
    MicroBatches,
    MiniBatch,
    Optimizer,
    Pin,
    Planner,
    Recompute,
    Runtime,
    Schedule,
    TimeLimit,
    TrainingOptions,
    UseAll,
)

if TYPE_CHECKING:
    from ..planner.plan_file import Plan


ProfileFile = Annotated[
    Path | None,
    typer.Argument(metavar="PROFILE", help="A profile; else the newest here.", show_default=False),
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
    runtime: Runtime = None,
    mini_batch: MiniBatch = None,
    micro_batches: MicroBatches = "auto",
    schedule: Schedule = "auto",
    recompute: Recompute = "auto",
    optimizer: Optimizer = "sgd",
    planner: Planner = "best",
    time_limit: TimeLimit = "30s",
    use_all: UseAll = False,
    max_stages: MaxStages = None,
    cut_after: CutAfter = [],  # noqa: B006 - typer's way
    keep_together: KeepTogether = [],  # noqa: B006
    pin: Pin = [],  # noqa: B006
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a measured model on N GPUs, and how far it is from the best possible."""
    from .. import solve
    from ..cost_models.document import as_text, read_bytes, sha256
    from ..profiler.profile_file import Profile
    from .newest import named_or_newest
    from .output import chosen_target, file_stem
    from .provenance import command_line, made_by

    count = gpus if gpus is not None else _gpus_of(topology)
    machine = MachineOptions(gpus_per_node, gpu, memory, bandwidth, latency, topology).arguments()
    wishes = TrainingOptions(
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
    ).wishes()
    path = named_or_newest(profile_file, ("profile",))
    content = read_bytes(path, "profile")
    profile = Profile.parse(as_text(content, path, "profile"), str(path))
    target = chosen_target(output, f"{file_stem(profile.model)}.plan.json", force=force)
    target.check(path, topology)
    plan = solve(
        profile,
        gpus=count,
        topology=topology,
        **asdict(wishes),
        profile_file=path.name,
        profile_sha256=sha256(content),
        **machine,
    )
    origin = made_by(plan.made_by, command=command_line(), measured=profile.made_by)
    plan = plan.model_copy(update={"made_by": origin})
    target.write(plan, as_json=as_json, show=lambda: _show(plan))


def _gpus_of(topology: Path | None) -> int:
    """The number of GPUs of the topology, where the command line names none. Raises UsageError."""
    from ..cost_models.errors import UsageError
    from ..cost_models.machines.topology_options import named_topology

    gpus = None if topology is None else named_topology(topology).gpus
    if gpus is None:
        raise UsageError("solve: missing option '--gpus'", "Give it: pplan solve --gpus N.")
    return gpus


def _show(plan: Plan) -> None:
    from .plan_tables import print_plan

    print_plan(plan, console())
