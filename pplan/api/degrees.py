"""Plans by degrees of parallelism, from the configuration of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ..cost_models import arguments
from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.hardware import UNKNOWN_DEVICE
from ..cost_models.machines.catalogue import device_context, device_preset
from ..cost_models.machines.machine_options import MachineKeywords, MachineOptions
from ..cost_models.machines.rooflines import ROOFLINES, host_bandwidth
from ..cost_models.machines.topology_options import ProfiledDevice, make_topology
from ..cost_models.memory import FRAGMENTATION_RESERVE
from ..cost_models.option_fields import describe_options, options_from
from ..cost_models.quantities import format_bytes
from ..cost_models.topology import Topology
from ..cost_models.transformer.configuration import load_transformer_shape, transformer_shape
from ..cost_models.transformer.kernel_table import KernelTable
from ..cost_models.transformer.kernel_table_file import load_kernel_table
from ..cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from ..cost_models.transformer.transformer_shape import TransformerShape
from ..planner.degrees.degree_baselines import degree_baselines
from ..planner.degrees.degree_options import DegreeKeywords, DegreeOptions
from ..planner.degrees.degree_search import DegreeAnswer, search_degrees
from ..planner.degrees.stage_degree_bound import check_device_parts
from ..planner.degrees.stage_degree_search import check_blocks, search_stage_degrees
from .machine import count_gpus

_GPUS = ", ".join(name for name, roofline in ROOFLINES.items() if "bfloat16" in roofline.peaks)


class DegreesKeywords(MachineKeywords, DegreeKeywords, total=False):
    """The options of `degrees`, besides the configuration."""


@describe_options(DegreesKeywords, DegreeOptions, MachineOptions)
def degrees(
    config: str | Path | Mapping[str, Any],
    *,
    gpus: int | None = None,
    kernels: str | Path | None = None,
    **options: Unpack[DegreesKeywords],
) -> DegreeAnswer:
    """The fastest ways to train a transformer on `gpus`, or on all of a `topology`: tensor, context, expert,
    pipeline and data parallelism.

    `config`: the model's config.json (its path, or what it says). `kernels`: a CSV file of measured kernels.
    The machine as of `solve`, `gpu` or a topology with devices of a preset; options as of `DegreeOptions`.
    Of the result: `plans`, the fastest first, each with its `estimate` of step and memory, and
    `bound_seconds`; with `by_stage` also `by_stage.plan`, whose stages have degrees of their own, where that
    is faster.

    >>> import pplan
    >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> answer = pplan.degrees(config, gpus=8, gpu="h100", mini_batch=64)
    >>> answer.plans[0].degrees
    ParallelDegrees(tensor=1, context=1, expert=1, pipeline=1, data=8, zero=2, exchange='all-to-all')

    Raises UsageError, FileError, and InfeasibleError where nothing fits.
    """
    table = arguments.optional_path("kernels", kernels)
    values: dict[str, Any] = dict(options) if gpus is None else {**options, "gpus": gpus}
    if "batch_size" in values:  # the name of earlier versions
        values.setdefault("mini_batch", values.pop("batch_size"))
    degree_options, machine = options_from(values, DegreeOptions, MachineOptions, of="degrees")
    return find_degrees(read_shape(config), machine, degree_options, table)


def read_shape(config: str | Path | Mapping[str, Any]) -> TransformerShape:
    """Of a config.json (its path, or what it says). Raises UsageError and FileError."""
    if isinstance(config, Mapping):
        return transformer_shape(config)
    return load_transformer_shape(arguments.path("config", config))


def find_degrees(
    shape: TransformerShape, machine: MachineOptions, options: DegreeOptions, kernels: Path | None
) -> DegreeAnswer:
    """The same, of what is read."""
    if options.layers is not None:
        shape = shape.with_blocks(options.layers)
    if options.by_stage:
        options.check_by_stage()
        check_blocks(shape)
    topology, costs, limit = machine_costs(machine, kernels, options.host_bandwidth)
    if options.by_stage:
        check_device_parts(topology)
    try:
        answer = search_degrees(shape, topology.gpus, costs, options, limit)
    except InfeasibleError as error:
        raise _with_memory(error, topology) from None
    if options.by_stage:
        best = answer.plans[0].estimate.step_seconds
        by_stage = search_stage_degrees(shape, topology, costs, options, limit, best)
        answer = replace(answer, by_stage=by_stage)
    return answer.with_baselines(degree_baselines(shape, topology, costs, options, limit))


def machine_costs(
    machine: MachineOptions, kernels: Path | None, host_rate: float | None = None
) -> tuple[Topology, RankCosts, float]:
    """The devices and links, what kernels take on them, and what the ledger of a device may add up to.
    `host_rate`: bytes per second of copies to the host; None: those of the GPU's link."""
    topology = build_machine(machine)
    costs = rank_costs(topology, None if kernels is None else load_kernel_table(kernels))
    rate = host_bandwidth(topology.device(0).name) if host_rate is None else host_rate
    return topology, replace(costs, host_bandwidth=rate), usable_bytes(topology)


def _with_memory(error: InfeasibleError, topology: Topology) -> InfeasibleError:
    """The same, with the memory of a device that would do, its context and the reserve included."""
    device = topology.device(0)
    context = device_context(device.name)
    needed = error.details["needed_bytes"] * (1 + FRAGMENTATION_RESERVE)
    needed += 0 if context is None else context.value
    would_fit = f"memory='{needed / 2**30 + 0.005:.2f}GiB' a device"
    return InfeasibleError(
        f"{error.what} of its {format_bytes(device.memory_bytes or 0)}",
        f"What would fit: {would_fit}. Or {error.hint[:1].lower()}{error.hint[1:]}",
        error.details | {"would_fit": [would_fit]},
    )


def usable_bytes(topology: Topology) -> float:
    """What the ledger of a device may add up to: its memory without the process's context, and without the
    share that the caching allocator cannot use."""
    device = topology.device(0)
    if device.memory_bytes is None:
        return float("inf")
    context = device_context(device.name)
    memory_bytes = device.memory_bytes - (0 if context is None else context.value)
    return memory_bytes / (1 + FRAGMENTATION_RESERVE)


def build_machine(machine: MachineOptions) -> Topology:
    """The topology. Raises UsageError where the number of devices is missing, or they are unlike."""
    gpus = count_gpus(machine)
    if machine.gpu is None and machine.topology is None:
        raise UsageError("`gpu` is missing", f"Name the GPU: `gpu`, one of {_GPUS}.")
    no_profile = ProfiledDevice(UNKNOWN_DEVICE, "", None)
    topology = make_topology(gpus=gpus, file=machine.topology, profiled=no_profile, **machine.parts)
    if len(topology.kinds) > 1:
        kinds = ", ".join(kind.name for kind in topology.kinds)
        raise UsageError(f"devices of several kinds ({kinds})", "Degrees are found for devices of one kind.")
    return topology


def rank_costs(topology: Topology, table: KernelTable | None) -> RankCosts:
    """The costs of the device's preset. Raises UsageError where its FLOP/s are not known."""
    name = topology.device(0).name
    preset = device_preset(name)
    if preset is None or preset.name not in ROOFLINES:
        raise UsageError(f"there are no figures of the FLOP/s of {name}", f"Name one with `gpu`: {_GPUS}.")
    roofline = ROOFLINES[preset.name]
    if table is None and "bfloat16" not in roofline.peaks:
        raise UsageError(
            f"{preset.name} does not compute in bfloat16, as this training does",
            f"Name one that does with `gpu`: {_GPUS}; or give a table of its kernels, `kernels`.",
        )
    stated = roofline.peak("bfloat16") if "bfloat16" in roofline.peaks else None
    peak = roofline.peak("bfloat16") if table is None else table.peak
    limits = DeviceLimits(peak, roofline.bandwidth.value, stated_flops=stated)
    return RankCosts(limits, TopologyLinks(topology), table)
