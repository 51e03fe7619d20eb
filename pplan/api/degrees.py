"""Plans by degrees of parallelism, from the configuration of a transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import options_from
from ..cost_models.document import MadeBy
from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.machines import (
    ROOFLINES,
    MachineOptions,
    device_context,
    device_preset,
    host_bandwidth,
    same_device,
)
from ..cost_models.memory import FRAGMENTATION_RESERVE, MEMORY_ERROR
from ..cost_models.quantities import format_bytes, format_count, format_seconds, percent
from ..cost_models.topology import UNKNOWN_DEVICE, Topology
from ..cost_models.topology_file import ProfiledDevice, make_topology
from ..cost_models.transformer.configuration import load_transformer_shape, transformer_shape
from ..cost_models.transformer.implementations import IMPLEMENTATIONS
from ..cost_models.transformer.kernel_table import TERA, KernelTable
from ..cost_models.transformer.kernel_table_file import load_kernel_table
from ..cost_models.transformer.measured_share import measured_share
from ..cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from ..cost_models.transformer.training_setting import block_ranges
from ..cost_models.transformer.transformer_shape import TransformerShape
from ..planner.degrees.degree_baselines import degree_baselines
from ..planner.degrees.degree_combinations import options_to_allow
from ..planner.degrees.degree_options import DegreeOptions
from ..planner.degrees.degree_plan import build_degree_plan
from ..planner.degrees.degree_search import DegreeAnswer, search_degrees
from ..planner.degrees.stage_degree_bound import check_device_parts
from ..planner.degrees.stage_degree_search import check_blocks, search_stage_degrees
from ..planner.plan_file import Plan, PlannedStage
from ..profiler.machine_file import MachineFile
from .configuration import OF_TRANSFORMERS, Configuration, named_configuration
from .fitting_changes import fitting_changes
from .machine import count_gpus
from .measured_machine import machine_notes
from .provenance import made_by

_GPUS = ", ".join(name for name, roofline in ROOFLINES.items() if "bfloat16" in roofline.peaks)


def search_configuration(config: str | Path | Mapping[str, Any], **options: Any) -> DegreeAnswer:
    """Search the degrees of a configuration, with the options of `solve`. Raises as `solve`."""
    machine, degree_options = read_options(options)
    return find_degrees(read_shape(config), degree_options, machine_costs(machine, degree_options))


def read_options(options: Mapping[str, Any]) -> tuple[MachineOptions, DegreeOptions]:
    """Read the options of a configuration. Raises UsageError for those of a profile."""
    values = dict(options)
    if "batch_size" in values:  # the name of earlier versions
        values.setdefault("mini_batch", values.pop("batch_size"))
    machine, degree_options = options_from(
        values, MachineOptions, DegreeOptions, of="solve with a configuration"
    )
    return machine, degree_options


def read_shape(config: str | Path | Mapping[str, Any]) -> TransformerShape:
    """Read a configuration: a config.json, its keys, or `hf:` and a name. Raises UsageError and FileError."""
    if isinstance(config, Mapping):
        return transformer_shape(config)
    if str(config).startswith(OF_TRANSFORMERS):
        return named_configuration(str(config)).shape
    return load_transformer_shape(arguments.path("config", config))


def solve_configuration(config: Configuration, machine: MachineOptions, options: DegreeOptions) -> Plan:
    """Find the fastest plan of a configuration. Raises UsageError, FileError and InfeasibleError."""
    costed = machine_costs(machine, options)
    answer = find_degrees(config.shape, options, costed)
    plan = costed.plan(answer)
    reference = plan.profile.model_copy(update={"file": config.file, "sha256": config.sha256})
    notes, prediction, training = _notes(answer, costed.measured), plan.prediction, plan.training
    if costed.measured is not None and training is not None:
        best = answer.plans[0]
        share = measured_share(best.layers, block_ranges(best.blocks))
        notes = [*machine_notes(costed.measured, best.layers, share), *notes]
        prediction = prediction.model_copy(update={"uncertainty": share.error})
        training = training.model_copy(update={"measured_share": min(1.0, share.whole + share.kernels)})
    update = {
        "profile": reference,
        "warnings": memory_warnings(plan.stages),
        "notes": notes,
        "prediction": prediction,
        "training": training,
        "made_by": made_by(MadeBy()),
    }
    return plan.model_copy(update=update)


def find_degrees(shape: TransformerShape, options: DegreeOptions, machine: MachineCosts) -> DegreeAnswer:
    """Search the degrees of a shape, and compare with the baselines."""
    if options.layers is not None:
        shape = shape.with_blocks(options.layers)
    if options.by_stage:
        options.check_by_stage()
        check_blocks(shape)
        check_device_parts(machine.topology)
    topology, costs, limit = machine.topology, machine.costs, machine.limit_bytes
    try:
        answer = search_degrees(shape, topology.gpus, costs, options, limit)
    except InfeasibleError as error:
        changes = fitting_changes(shape, options, topology, costs, limit)
        raise _with_changes(error, topology, list(changes)) from None
    if options.by_stage:
        best = answer.plans[0].estimate.step_seconds
        by_stage = search_stage_degrees(shape, topology, costs, options, limit, best)
        answer = replace(answer, by_stage=by_stage)
    return answer.with_baselines(degree_baselines(shape, topology, costs, options, limit))


@dataclass(frozen=True)
class MachineCosts:
    """Devices and links, seconds of kernels on them, and the memory of a device.

    `limit_bytes`: the most that the ledger of a device may add up to. `context_bytes`: memory that its
    process takes first.
    """

    topology: Topology
    costs: RankCosts
    limit_bytes: float
    context_bytes: float
    measured: MachineFile | None = None
    """What was measured of the machine."""

    def plan(self, answer: DegreeAnswer) -> Plan:
        """Build the plan of an answer."""
        return build_degree_plan(answer, self.topology, self.context_bytes)


def machine_costs(machine: MachineOptions, options: DegreeOptions) -> MachineCosts:
    """Read the machine and the kernels that the options name. Raises UsageError and FileError."""
    measured = None if options.machine is None else MachineFile.load(options.machine)
    topology = build_machine(machine, measured, options.machine)
    device = topology.device(0)
    if measured is None or options.machine is None:
        table = None if options.kernels is None else load_kernel_table(options.kernels)
        costs = rank_costs(topology, table)
    elif options.kernels is not None:
        raise UsageError(
            f"kernels={str(options.kernels)!r}: the file of `machine` has kernels, too", "Omit `kernels`."
        )
    else:
        has_links = measured.links is not None and not _states_links(machine)
        costs = measured.rank_costs(topology, options.machine, has_own_links=has_links)
    rate = host_bandwidth(device.name) if options.host_bandwidth is None else options.host_bandwidth
    if options.offload and rate is None:
        raise UsageError(
            f"`offload`: how fast {device.name} copies to its host is not known",
            "Set it, for example host_bandwidth=25e9 for 25 GB/s.",
        )
    context = device_context(device.name)
    return MachineCosts(
        topology,
        replace(costs, host_bandwidth=rate, implementation=IMPLEMENTATIONS[options.implementation]),
        usable_bytes(topology),
        0.0 if context is None else context.value,
        measured,
    )


def _states_links(machine: MachineOptions) -> bool:
    """Return whether the options say what links there are."""
    return any(each is not None for each in (machine.topology, machine.bandwidth, machine.latency))


def _with_changes(error: InfeasibleError, topology: Topology, changes: list[str]) -> InfeasibleError:
    """Return the error with what would fit: memory of a device, context and reserve included, or a change."""
    device = topology.device(0)
    context = device_context(device.name)
    needed = error.details["needed_bytes"] * (1 + FRAGMENTATION_RESERVE)
    needed += 0 if context is None else context.value
    would_fit = [f"memory='{needed / 2**30 + 0.005:.2f}GiB' a device", *changes]
    return InfeasibleError(
        f"{error.what} of its {format_bytes(device.memory_bytes or 0)}",
        f"What would fit: {'; or '.join(would_fit)}. Or {error.hint[:1].lower()}{error.hint[1:]}",
        error.details | {"would_fit": would_fit},
    )


def usable_bytes(topology: Topology) -> float:
    """Return the most that the ledger of a device may add up to.

    That is its memory without the process's context, and without the share that the caching allocator cannot
    use, but with the share by which a ledger may be too high.
    """
    device = topology.device(0)
    if device.memory_bytes is None:
        return float("inf")
    context = device_context(device.name)
    memory_bytes = device.memory_bytes - (0 if context is None else context.value)
    return memory_bytes / (1 + FRAGMENTATION_RESERVE) * (1 + MEMORY_ERROR)


def memory_warnings(stages: Sequence[PlannedStage]) -> list[str]:
    """Warn of a device whose ledger is above its memory by less than the ledger's error."""
    stage = max(stages, key=lambda own: own.memory_bytes)
    limit = stage.memory_limit_bytes
    if limit is None or stage.memory_bytes <= limit:
        return []
    context = stage.memory.get("context", 0)
    enough = int(context + (limit - context) / (1 + MEMORY_ERROR)) // 2**20 * 2**20
    return [
        f"a device needs {format_bytes(stage.memory_bytes)} of its {format_bytes(limit)}: more by less than "
        f"the estimate's error of {percent(MEMORY_ERROR)}, so it may run out of memory; leave room with "
        f"memory_bytes={enough}"
    ]


def build_machine(
    machine: MachineOptions, measured: MachineFile | None = None, path: Path | None = None
) -> Topology:
    """Build the topology of the options, else of the measured machine.

    Raises UsageError where the number of devices is missing, or they are unlike, or others than the measured.
    """
    if measured is None or path is None:
        gpus = count_gpus(machine)
        if machine.gpu is None and machine.topology is None:
            raise UsageError(
                "`gpu` is missing", f"Name the GPU: `gpu`, one of {_GPUS}; or measure it: `machine`."
            )
        profiled, file = ProfiledDevice(UNKNOWN_DEVICE, "", None), machine.topology
        topology = make_topology(gpus=gpus, file=file, profiled=profiled, **machine.parts)
    else:
        own = measured.topology_file(path) if machine.topology is None else machine.topology
        gpus = measured.devices if machine.gpus is None and machine.topology is None else count_gpus(machine)
        profiled = measured.profiled_device()
        topology = make_topology(gpus=gpus, file=own, profiled=profiled, **machine.parts)
        name = topology.device(0).name
        if not same_device(name, measured.device_name):
            raise UsageError(
                f"machine={str(path)!r}: was measured on {measured.device_name}, the plan is for {name}",
                "Omit `gpu` and `topology`, or measure that device.",
            )
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
    limits = DeviceLimits(
        peak, roofline.bandwidth.value, product_share=roofline.product_share.value, stated_flops=stated
    )
    return RankCosts(limits, TopologyLinks(topology), table)


def configuration_notes(shape: TransformerShape, sequence: int, predictors: int) -> list[str]:
    """Say what is not known of a configuration, or not counted.

    Args:
        shape: What was read.
        sequence: Tokens of a sample.
        predictors: Multi-token predictors that are counted.
    """
    notes = [shape.note] if shape.note else []
    if (share := shape.attended_share(sequence)) < 1:
        local = sum(own is not None for own in shape.windows)
        notes.append(
            f"attention of {local} of {len(shape.windows)} blocks is local; each block is given the mean, "
            f"{share:.0%} of what whole attention computes, and a ring of context parallelism all of it"
        )
    if shape.predictors > predictors:
        notes.append(
            f"the configuration has {format_count(shape.predictors, 'multi-token predictor')}, of which "
            f"{predictors} are counted: set `predictors`, or place each in the layout as m"
        )
    return notes


def _by_stage_notes(answer: DegreeAnswer) -> list[str]:
    assert answer.by_stage is not None
    if answer.by_stage.plan is None:
        step, bound = answer.plans[0].estimate.step_seconds, answer.by_stage.bound_seconds
        if bound < step * (1 - 1e-9):
            none = f"none was found that is faster; one would take at least {format_seconds(bound)}"
            return [f"degrees by stage: {none}"]
        return ["degrees by stage: none of the 1F1B pipelines that were searched is faster"]
    notes = [
        "no arguments for degrees by stage: Megatron-LM, torchtitan and NeMo AutoModel have one set of "
        "degrees for all stages, and a stage of PyTorch's pipelining sends to one rank; a runtime must send "
        "from every device of a stage to those of the next that hold the same tokens (as Alpa's cross-mesh "
        "resharding)"
    ]
    if answer.shape.tied:
        notes.append(
            "embedding and head share their weights: adding up their gradients is not counted, nor what "
            "it takes where the first and the last stage have different degrees"
        )
    return notes


_LEAST_PEAK, _LARGEST_PEAK = 0.3, 1.05
"""Of what the maker states: a table without a stated peak has that of its fastest kernel."""


def _offload_note(answer: DegreeAnswer) -> str:
    rate, stated = answer.costs.host_bandwidth or 0.0, answer.options.host_bandwidth is not None
    source = "as given" if stated else "an assumption: 85 % of the GPU's own PCIe link, not shared"
    return (
        f"offload is an estimate, of which nothing was measured: copies to the host and back run at "
        f"{rate / 1e9:.3g} GB/s each ({source}; `host_bandwidth` gives another), beside the computing, and "
        "slow it only where they take longer; whether the host has the memory is not checked"
    )


def _assumed_note(answer: DegreeAnswer, table: KernelTable, shares: str) -> str:
    """Of the kernels of the fastest that the table has no row of."""
    neighbours = [kernel for kernel in answer.assumed_kernels if table.knows(kernel)]
    beyond = sum(not table.surrounds(kernel) for kernel in neighbours)
    note = (
        f"{len(answer.assumed_kernels)} of {len(answer.kernels)} kernels of the fastest are not in the table"
    )
    parts = []
    if neighbours:
        parts.append(f"{len(neighbours)} are taken from its nearest shapes")
        parts[-1] += f", {beyond} of them beyond its smallest or largest sizes" if beyond else ""
    if missing := len(answer.assumed_kernels) - len(neighbours):
        parts.append(f"{missing}, of whose kind it has none, are assumed to reach {shares}")
    return f"{note}: {'; '.join(parts)}"


def _expectation(answer: DegreeAnswer) -> str:
    """Say how far the step may be off, from published steps that were not fitted to (docs/solving.md)."""
    memory = "memory by 0.6 %, at most 1.1 %"
    if answer.costs.table is not None:
        return (
            "of published B200 steps whose model was left out of the fit, seconds were off by 2.5 % in the "
            f"median and 5.7 % at most, {memory}; expect more on other machines"
        )
    return (
        "of 16 published throughputs without a table of kernels, seconds were off by 6 % in the median, by "
        f"up to 17 % on GPUs of full power and by 45 % on others; of B200 steps {memory}"
    )


def _notes(answer: DegreeAnswer, measured: MachineFile | None) -> list[str]:
    limits, overheads = answer.costs.limits, answer.costs.overheads
    shares = (
        f"products {limits.product_share:.0%} of the GPU's FLOP/s, attention {limits.attention_share:.0%}, "
        f"passes over memory {limits.memory_share:.0%} of its bandwidth"
    )
    notes = configuration_notes(answer.shape, answer.options.sequence, answer.options.predictors)
    best = answer.plans[0].estimate.step_seconds
    for own in answer.baselines:
        plan = own.plan
        if plan is not None and plan.estimate.step_seconds < best:
            changes = options_to_allow(answer.shape, plan, answer.options)
            notes.append(
                f"the baseline {own.name} is faster, but not among what is allowed: "
                f"{plan.degrees.describe()}; allow it with "
                + " and ".join(f"{field}={value!r}" for field, value in changes.items())
            )
    if answer.by_stage is not None:
        notes += _by_stage_notes(answer)
    if answer.options.offload:
        notes.append(_offload_note(answer))
    if answer.costs.table is None:
        notes.append(
            f"no kernels are measured: by assumption they reach {shares}; give what `pplan machine measure` "
            "wrote with `machine`"
        )
    else:
        if limits.stated_flops and not _LEAST_PEAK <= limits.flops / limits.stated_flops <= _LARGEST_PEAK:
            notes.append(
                f"the table's peak is {limits.flops / TERA:g} TFLOP/s, and that of the GPU in bfloat16 "
                f"{limits.stated_flops / TERA:g}: its kernels may be another device's"
            )
        if answer.assumed_kernels and measured is None:
            notes.append(_assumed_note(answer, answer.costs.table, shares))
    if measured is None or not limits.measures_memory:
        notes.append(
            f"as measured on B200, {format_seconds(overheads.gap)} follow each pass over memory, and each "
            "kernel of a layer with experts"
        )
    if answer.costs.table is not None and measured is None:
        notes.append(
            f"as fitted to a training loop on B200, the table's products take {overheads.slowdown - 1:.0%} "
            "longer"
        )
    if measured is None:
        notes.append(_expectation(answer))
    notes.append(
        "not modelled: overlap of the communication inside a layer with computing (but a ring's with its "
        "attention), experts that get unequal numbers of tokens, expert-tensor parallelism"
    )
    return notes
