"""A partition that another tool holds, with a profile and options, as a plan."""

from __future__ import annotations

import re
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from ..cost_models import arguments
from ..cost_models.arguments import Converted, arguments_class, list_declarations, options_from, takes
from ..cost_models.errors import FileError, UsageError
from ..cost_models.machines import MachineOptions
from ..cost_models.quantities import format_count
from ..cost_models.runtime import OFFLOAD, find_runtime
from ..cost_models.text_files import read_text
from ..planner.build_plan import plan_partition
from ..planner.candidate import FIRST_LAYERS
from ..planner.plan_file import Partition, Plan, ProfileReference
from ..planner.plan_options import PlanOptions, TrainingOptions, seconds_option
from ..profiler.imports import COST_FORMATS, looks_like_costs
from ..profiler.profile_file import Profile, list_notes, list_warnings
from ..runtimes.imports import looks_like_partition, read_partition, with_virtual_stages
from ..runtimes.trainer_options import FORMATS
from .degree_profiles import one_degree
from .partition_options import PartitionOptions
from .provenance import made_by
from .solve import make_problem


@arguments_class
class ImportPlanArguments(PartitionOptions, TrainingOptions, MachineOptions):  # type: ignore[misc]
    """The arguments of `import_plan`. Its schedule and recomputation are those of the partition."""

    seconds_of: Converted[Literal["cpu"] | str | None, str | None] = seconds_option()
    source: str | Path = field(kw_only=False)
    profile: Profile | str | Path = field(kw_only=False)
    profile_file: str = ""
    profile_sha256: str = ""


@takes(ImportPlanArguments)
def import_plan(
    source: str | Path,
    profile: Profile | str | Path,
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
) -> Plan:
    """The partition that another tool holds, as a plan of the layers of `profile`.

    `source` is a file, or the partition itself: "12,34" (a balance list), "0,12,46" (DeepSpeed's parts),
    "Et*3|t*5L" (a Megatron layout; also the options it stands among, or those that it follows from),
    torchtitan's lists of module names or split points, a device_map, or what `export` wrote. `virtual_stages`
    are those of a device, `replicas` those of every stage; `gpus` defaults to what the partition takes. What
    is not given is as the source says: else the best schedule of 1f1b and gpipe (interleaved, where devices
    have several stages), the best number of micro-batches, recomputation where it does not fit without. The
    rest as for `solve`.

    >>> import pplan
    >>> pplan.import_plan("5,4", "gpt.profile.json", mini_batch=64, micro_batches=16, schedule="gpipe")
    <Plan of gpt: 2 stages of 5-4 layers, gpipe, 16 micro-batches x 4, 822 ms a step>

    A plan that does not fit says so in its warnings. Raises UsageError, FileError (the source, the profile,
    the topology).
    """
    machine, partition, training = options_from(
        options,
        *(MachineOptions, PartitionOptions, PlanOptions),
        of="import_plan",
        takes=list_declarations(ImportPlanArguments),
    )
    measured_profile, reference = one_degree(profile, profile_file, profile_sha256, training, "import_plan")
    if not isinstance(source, Path):
        source = arguments.word("source", source)
    plan = _import_partition(source, measured_profile, reference, machine, partition, training)
    return plan.model_copy(update={"made_by": made_by(plan.made_by, measured=measured_profile.made_by)})


def _import_partition(
    source: str | Path,
    profile: Profile,
    reference: ProfileReference,
    machine: MachineOptions,
    partition: PartitionOptions,
    training: PlanOptions,
) -> Plan:
    """The plan of `source`, a file or the partition itself. Raises FileError, UsageError."""
    text, where = _content(source)
    chain = profile.chain()
    read = with_virtual_stages(read_partition(text, chain.names, where), partition.virtual_stages, where)
    read = replace(read, replicas=partition.replicas or read.replicas)
    options = _plan_options(read, partition, training)
    problem = make_problem(profile, reference, replace(machine, gpus=machine.gpus or read.gpus), options)
    read = _on_known_devices(read, problem.usable_gpus)
    return plan_partition(
        problem,
        replace(read, stage_recompute=None) if partition.recompute else read,
        model=profile.model,
        profile=reference,
        notes=[*list_notes(profile), *read.notes],
        warnings=list_warnings(profile, problem.topology, problem.options.runtime),
    )


def _on_known_devices(read: Partition, usable: int) -> Partition:
    """The partition on the devices that the source names; on those from rank 0 on, with a note, where the
    machine has fewer."""
    if read.devices is None or len(read.devices) != read.gpus:
        return replace(read, devices=None)
    if max(read.devices) < usable:
        return read
    ranks = ", ".join(map(str, read.devices[:8])) + (", ..." if len(read.devices) > 8 else "")
    note = f"it names the devices {ranks}, of a machine with more than {usable}: taken from rank 0 on"
    return replace(read, devices=None).with_notes(note)


def is_costs(source: str) -> bool:
    """Return whether a source holds costs of layers, for `import_profile`, or a partition.

    Args:
        source: The name of a file, or a partition itself.

    Raises:
        FileError: The file cannot be read, or holds neither.
    """
    text, where = _content(source, "costs or partition")
    if looks_like_costs(text):
        return True
    if not looks_like_partition(text):
        what = "holds no costs and no partition that pplan knows" if text.strip() else "is empty"
        raise FileError(
            f"{where}: {what}",
            f"Costs are {COST_FORMATS}. A partition is {FORMATS}.",
        )
    return False


def _content(source: str | Path, kind: str = "partition") -> tuple[str, str]:
    """The text, and what errors call it. A text that names no file is a partition where it looks like one."""
    if source == "":
        raise UsageError(
            "source='': is no partition, and no file",
            'Give the layers of each stage, as in "12,34", or a file.',
        )
    if isinstance(source, Path) or _is_file(source) or not re.search(r"[|,\[{\s]|^\d+$", source):
        return read_text(Path(source), kind), str(source)
    text = " ".join(source.split())
    return source, f"{text[:40]}…" if len(text) > 40 else text


def _is_file(source: str) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null
        return False


def _plan_options(read: Partition, partition: PartitionOptions, training: PlanOptions) -> PlanOptions:
    """The options of the plan: those given, else what the partition says."""
    several = (read.virtual_stages or 1) > 1
    mini_batch = training.mini_batch or read.mini_batch
    words = read.stage_recompute or ()
    by_layer = set(words) - {"never", "always"}
    recompute = OFFLOAD if OFFLOAD in words else FIRST_LAYERS if by_layer else read.recompute or "auto"
    runtime = training.runtime or read.runtime
    alike = runtime is not None and not find_runtime(runtime).recompute_by_stage
    if words and not by_layer and alike and partition.recompute is None:
        raise UsageError(
            f"runtime={runtime!r}: recomputes all stages in one way, and the partition some of them",
            "Give `recompute`, or runtime='torch'.",
        )
    return replace(
        training,
        mini_batch=mini_batch,
        micro_batches=training.micro_batches or _micro_batches(read, mini_batch),
        schedule=partition.schedule or read.schedule or ("interleaved" if several else "auto"),
        recompute=partition.recompute or recompute,
        runtime=runtime,
    )


def _micro_batches(read: Partition, mini_batch: int | None) -> int | None:
    """The number of micro-batches that the partition's micro-batch size makes of the global batch; None where
    it does not say."""
    if mini_batch is None or read.samples is None:
        return None
    samples = read.samples * (read.replicas or 1)
    if mini_batch % samples:
        raise UsageError(
            f"a global batch of {mini_batch} does not divide into micro-batches of "
            f"{format_count(read.samples, 'sample')} on "
            f"each of {read.replicas or 1} replicas, as the partition says",
            "Give `micro_batches`, or another `mini_batch` or `replicas`.",
        )
    return mini_batch // samples
