"""A partition that another tool holds, with a profile and options, as a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..cost_models import arguments
from ..cost_models.document import read_text
from ..cost_models.errors import UsageError
from ..cost_models.machines.processor_seconds import check_processor_seconds
from ..cost_models.machines.topology_options import make_topology
from ..planner.build_plan import build_problem
from ..planner.fixed_partition import FixedPartition, plan_partition
from ..planner.plan_file import Plan, ProfileReference
from ..planner.plan_options import PlanOptions
from ..profiler.profile_file import Profile
from ..profiler.profile_warnings import list_notes, list_warnings, profiled_device
from ..runtimes.reading.partition import Partition
from ..runtimes.reading.read import read_partition, with_virtual_stages
from .load import profile_and_reference
from .machine import own_profiles
from .provenance import made_by


def import_plan(
    source: str | Path,
    profile: Profile | str | Path,
    *,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: float | Sequence[float] | None = None,
    latency: float | Sequence[float] | None = None,
    topology: str | Path | None = None,
    runtime: str | None = None,
    mini_batch: int | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    replicas: int | None = None,
    recompute: str | None = None,
    optimizer: str = "sgd",
    seconds_of: Literal["cpu"] | str | None = None,
    precision: Literal["auto", "fp32", "mixed", "bf16"] | str = "auto",
    gradient_dtype: Literal["auto", "fp32", "bf16", "fp16"] | str = "auto",
    zero: int = 0,
    profile_file: str = "",
    profile_sha256: str = "",
) -> Plan:
    """The partition that another tool holds, as a plan of the layers of `profile`.

    `source` is a file, or the partition itself: "12,34" (a balance list), "0,12,46" (DeepSpeed's parts),
    "Et*3|t*5L" (a Megatron layout; also the options it stands among), torchtitan's lists of module names, a
    device_map, or what `export` wrote. `virtual_stages` are those of a device, `replicas` those of every
    stage; `gpus` defaults to what the partition takes. What is not given is as the source says: else the best
    schedule of 1f1b and gpipe (interleaved, where devices have several stages), the best number of
    micro-batches, recomputation where it does not fit without. The rest as for `solve`.

    A plan that does not fit says so in its warnings. Raises UsageError, FileError (the source, the profile,
    the topology).
    """
    measured, reference = profile_and_reference(profile, profile_file, profile_sha256)
    options = PlanImportOptions(
        gpus=arguments.optional_whole("gpus", gpus),
        machine={
            "gpu": arguments.optional_word("gpu", gpu),
            "memory_bytes": arguments.optional_whole("memory_bytes", memory_bytes, example="16 * 2**30"),
            "bandwidth": arguments.by_level("bandwidth", bandwidth, "(300e9, 25e9)"),
            "latency": arguments.by_level("latency", latency, "(5e-6, 20e-6)"),
            "gpus_per_node": arguments.optional_whole("gpus_per_node", gpus_per_node),
            "file": None if topology is None else arguments.path("topology", topology),
            "profiled": profiled_device(measured),
        },
        runtime=arguments.optional_word("runtime", runtime),
        mini_batch=arguments.optional_whole("mini_batch", mini_batch),
        micro_batches=arguments.whole_or_auto("micro_batches", micro_batches),
        schedule=arguments.optional_word("schedule", schedule),
        virtual_stages=arguments.optional_whole("virtual_stages", virtual_stages),
        replicas=arguments.optional_whole("replicas", replicas),
        recompute=arguments.optional_word("recompute", recompute),
        optimizer=arguments.word("optimizer", optimizer),
        seconds_of=arguments.optional_word("seconds_of", seconds_of),
        precision=arguments.word("precision", precision),
        gradient_dtype=arguments.word("gradient_dtype", gradient_dtype),
        zero=arguments.whole("zero", zero, at_least=0),
    )
    if not isinstance(source, Path):
        source = arguments.word("source", source)
    plan = imported_plan(source, measured, reference, options)
    return plan.model_copy(update={"made_by": made_by(plan.made_by, measured=measured.made_by)})


@dataclass(frozen=True)
class PlanImportOptions:
    """What is asked beside the partition; None: as it says, else the best. `machine`: of `make_topology`."""

    gpus: int | None
    machine: Mapping[str, Any]
    runtime: str | None
    mini_batch: int | None
    micro_batches: int | None
    schedule: str | None
    virtual_stages: int | None
    replicas: int | None
    recompute: str | None
    optimizer: str
    seconds_of: str | None = None
    precision: str = "auto"
    gradient_dtype: str = "auto"
    zero: int = 0


def imported_plan(
    source: str | Path, profile: Profile, reference: ProfileReference, options: PlanImportOptions
) -> Plan:
    """The plan of `source`, a file or the partition itself. Raises FileError, UsageError."""
    text, where = _content(source)
    chain = profile.chain()
    read = with_virtual_stages(read_partition(text, chain.names, where), options.virtual_stages, where)
    read = replace(read, replicas=options.replicas or read.replicas)
    given = FixedPartition(read.ends, read.virtual_stages or 1, read.replicas or 1)
    topology = make_topology(gpus=options.gpus or given.gpus, **options.machine)
    check_processor_seconds(profiled_device(profile), topology, options.seconds_of)
    file = options.machine["file"]
    profiles = own_profiles(topology, Path() if file is None else file.parent, options.seconds_of)
    problem = build_problem(chain, topology, _plan_options(read, given, options), reference, profiles)
    return plan_partition(
        problem,
        given,
        model=profile.model,
        profile=reference,
        notes=[*list_notes(profile), *read.notes],
        warnings=list_warnings(profile, topology),
    )


def _content(source: str | Path) -> tuple[str, str]:
    """The text, and what errors call it. A text that names no file is a partition where it looks like one."""
    if isinstance(source, Path) or _is_file(source) or not re.search(r"[|,\[{\s]|^\d+$", source):
        return read_text(Path(source), "partition"), str(source)
    shown = " ".join(source.split())
    return source, f"{shown[:40]}…" if len(shown) > 40 else shown


def _is_file(source: str) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null
        return False


def _plan_options(read: Partition, given: FixedPartition, options: PlanImportOptions) -> PlanOptions:
    several = given.virtual_stages > 1
    mini_batch = options.mini_batch or read.mini_batch
    return PlanOptions(
        mini_batch=mini_batch,
        micro_batches=options.micro_batches or _micro_batches(read, given, mini_batch),
        schedule=options.schedule or read.schedule or ("interleaved" if several else "auto"),
        recompute=(options.recompute or read.recompute or "auto").replace("-", "_"),
        optimizer=options.optimizer,
        precision=options.precision,
        gradient_dtype=options.gradient_dtype,
        zero=options.zero,
        runtime=options.runtime or read.runtime,
        seconds_of=options.seconds_of,
    )


def _micro_batches(read: Partition, given: FixedPartition, mini_batch: int | None) -> int | None:
    """As many as make the mini-batch of micro-batches as the partition is for; None: it does not say."""
    if mini_batch is None or read.samples is None:
        return None
    whole = read.samples * given.replicas
    if mini_batch % whole:
        raise UsageError(
            f"a global batch of {mini_batch} does not divide into micro-batches of {read.samples} samples on "
            f"each of {given.replicas} replicas, as the partition says",
            "Give `micro_batches`, or another `mini_batch` or `replicas`.",
        )
    return mini_batch // whole
