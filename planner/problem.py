"""The problem to solve: a chain, a topology and checked options, and the plans to search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..cost_models.layer import Chain
from ..cost_models.precision import TrainingPrecision, training_precision
from ..cost_models.runtime import Runtime, find_runtime
from ..cost_models.schedules import PUBLISHED, SCHEDULES
from ..cost_models.topology import Topology
from .batch_sizes import SAMPLES_PER_DEVICE, BatchSizes
from .candidate import (
    ANY_SCHEDULE,
    INTERLEAVED,
    LIMITED_RECOMPUTE,
    MODES,
    SEARCHED,
    SYNTHESIZED,
    UNPROPOSED,
    Mode,
    PipelineConfig,
    Proposal,
    make_config_error,
    pipeline_configs,
)
from .cut_limits import check_layer_count, limit_cuts
from .plan_options import PlanOptions
from .search.budget import SearchBudget
from .search.device_sets import may_search_any
from .search.family import Family
from .search.placements import (
    ANY,
    EVERY_COUNT,
    MOST_DEVICES,
    Placement,
    list_placements,
    list_replica_counts,
    place_anywhere,
)
from .search.replica_group import find_host
from .search.space import Space

MOST_STAGES = 32
"""Most stages that are searched if stages may have replicas."""
FEW = 64
"""Most devices for which `replica_choices` lists every number."""


@dataclass(frozen=True)
class Problem:
    """A planning problem: what is asked, and the plans to search.

    Attributes:
        chain: Costs of the layers on the profiled device.
        topology: Devices and links.
        options: Options of the plan.
        dtype: Data type of the profile.
        profiles: The same layers on the kinds of devices with their own profile, by its name in the topology.
    """

    chain: Chain
    topology: Topology
    options: PlanOptions
    dtype: str = "float32"
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    budget: SearchBudget = field(default_factory=SearchBudget, compare=False)
    """Budget of the whole answer. Problems derived from this one share it."""
    samples_per_device: int = SAMPLES_PER_DEVICE  # of the default global batch, before rounding
    amp: str | None = None
    """Dtype of the autocast under which the profile was measured."""
    device: str = ""
    """Device of the profile: cpu, cuda or analytic. Empty if unknown."""
    sharers: int = 1  # GPUs that share every layer: each device of the topology stands for this many

    proofs: dict[tuple[str, ...], bool] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Cached answers of `nothing_fits`, by the asynchronous schedules that are allowed in addition."""

    def __post_init__(self) -> None:
        self.precision  # noqa: B018  raises
        check_layer_count(self.chain, self.topology.gpus, self.options)
        if not self.configs:
            raise make_config_error(self.options.schedule, self.options.recompute, self.runtime)

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.topology.gpus

    @property
    def runtime(self) -> Runtime | None:
        """Runtime for which the plan is made. None for any."""
        return None if self.options.runtime is None else find_runtime(self.options.runtime)

    @cached_property
    def precision(self) -> TrainingPrecision:
        """Precision of weights, gradients and states."""
        return training_precision(
            self.dtype,
            self.amp,
            precision=self.options.precision,
            gradient_dtype=self.options.gradient_dtype,
            runtime=self.options.runtime,
            device=self.device,
        )

    @cached_property
    def _batch_sizes(self) -> BatchSizes:
        return BatchSizes(
            self.sized_chain,
            self.gpus,
            self.gpus if self._replicated else 1,
            self.options.mini_batch,
            self.options.micro_batches,
            self.samples_per_device,
        )

    @property
    def mini_batch(self) -> int:
        """Samples of a step."""
        return self._batch_sizes.global_batch

    @property
    def sizes(self) -> list[int]:
        """Micro-batch sizes to search. Raises UsageError if none has known costs."""
        return self._batch_sizes.micro_batch_sizes

    @cached_property
    def stage_counts(self) -> range:
        """Numbers of stages to search.

        They begin with 1 and end with the usable devices, the allowed cuts or `max_stages`, with replicas
        with `MOST_STAGES`.
        """
        most = min(self.usable_gpus, self.space.chain.max_stages, self.options.max_stages or self.gpus)
        if self._replicated:
            most = min(most, MOST_STAGES)
        return range(1, most + 1)

    @property
    def _replicated(self) -> bool:
        """True if stages may have replicas."""
        return self.runtime is None or self.runtime.replicas != "none"

    @property
    def usable_gpus(self) -> int:
        """Devices that the runtime can use for a pipeline. A single process has those of one node."""
        one_process = self.runtime is not None and self.runtime.one_process
        return min(self.gpus, self.topology.gpus_per_node) if one_process else self.gpus

    @cached_property
    def cut_chain(self) -> Chain:
        """Chain without cuts between users of one weight if there is an `untied_reason`."""
        return self.sized_chain.without_tied_cuts() if self.untied_reason else self.sized_chain

    @cached_property
    def sized_chain(self) -> Chain:
        """Chain without costs of fewer samples than `min_micro_batch`."""
        least = self.options.min_micro_batch
        return self.chain if least is None else replace(self.chain, least_size=least)

    @property
    def untied_reason(self) -> str:
        """Why no cut may lie between the users of one weight. Empty if it may, or if no weight is tied."""
        runtime = self.runtime
        if not self.chain.tied:
            return ""
        if runtime is not None and not runtime.trains_tied(
            [len(weight.layers) for weight in self.chain.tied]
        ):
            return f"{runtime.name}: {runtime.no_tied}"
        return (
            f"zero={self.options.zero}: stages that share a weight keep it whole"
            if self.options.zero > 1
            else ""
        )

    @cached_property
    def space(self) -> Space:
        """The plans to search, with costs and limits."""
        chain, limits = limit_cuts(self.cut_chain, self.options, untied_reason=self.untied_reason)
        return Space(
            chain=chain,
            topology=self.topology,
            optimizer=self.options.optimizer,
            memory_limit=self.options.memory_limit,
            past_largest=self.options.micro_batches is not None,
            runtime=self.runtime,
            dtype=self.dtype,
            precision=self.precision.bytes,
            zero=self.options.zero,
            profiles={
                name: replace(layers, cut_after=chain.cut_after, tied=chain.tied)
                for name, layers in self.profiles.items()
            },
            limits=limits,
            budget=self.budget,
            mini_batch=self.mini_batch if self.runtime is not None and self.runtime.receives_ahead else None,
            host=find_host(self.topology, self.options, self.sharers),
        )

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Schedules that the options and the runtime allow, those that are searched exactly first."""
        runtime, requested = self.runtime, self.options.schedule
        if requested not in ("auto", ANY_SCHEDULE, SYNTHESIZED):
            return (requested,) if runtime is None or runtime.runs(requested) else ()
        further = (
            name
            for name, schedule in SCHEDULES.items()
            if name in PUBLISHED
            and name not in SEARCHED
            and schedule.synchronous
            and schedule.trains_one_model
        )
        candidates = SEARCHED if requested == "auto" and runtime is None else (*SEARCHED, *further)
        names = LIMITED_RECOMPUTE.get(self.options.recompute, candidates)
        return tuple(name for name in names if runtime is None or runtime.runs(name))

    @property
    def allowed_schedules(self) -> tuple[str, ...]:
        """Schedules that a plan may have. Interleaved is included if its planner was asked for by name."""
        left_open = self.options.schedule == "auto" and self.runtime is None
        proposes_interleaved = self.options.planner == INTERLEAVED and left_open
        return (*self.schedules, INTERLEAVED) if proposes_interleaved else self.schedules

    @property
    def makes_orders(self) -> bool:
        """True if an order of actions may be synthesized for the plan."""
        takes_any = self.runtime is None or self.runtime.any_order
        limited = self.options.recompute in LIMITED_RECOMPUTE
        return self.options.schedule == SYNTHESIZED and takes_any and not limited

    @property
    def unsearched_reason(self) -> str:
        """Why only a part of the requested schedules is searched. Empty if all are."""
        options, runtime = self.options, self.runtime
        if options.schedule in (ANY_SCHEDULE, SYNTHESIZED) and options.recompute in LIMITED_RECOMPUTE:
            return f"other schedules do not combine with recompute={options.recompute!r}"
        if options.schedule == SYNTHESIZED and runtime is not None and not runtime.any_order:
            return f"{runtime.name} takes no orders of actions"
        return ""

    def may_run(self, schedule: str) -> bool:
        """Return whether plans of this schedule are allowed."""
        is_order = self.makes_orders and schedule.startswith(f"{SYNTHESIZED}-")
        return is_order or schedule in self.allowed_schedules

    @property
    def heuristic_schedules(self) -> tuple[str, ...]:
        """Allowed schedules other than 1F1B and GPipe, for which `cut_search` searches plans."""
        return tuple(name for name in self.allowed_schedules if name not in SEARCHED)

    @cached_property
    def configs(self) -> list[PipelineConfig]:
        """Configurations that the options and the runtime allow."""
        return [
            config
            for schedule in self.schedules
            for config in pipeline_configs(self.mini_batch, (schedule,), self.modes(schedule), self.sizes)
        ]

    def modes(self, schedule: str) -> tuple[Mode, ...]:
        """Return the recomputation modes that the runtime and the options allow."""
        requested, runtime = self.options.recompute, self.runtime
        if requested == "auto" and schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
            return ("never",)  # torch.utils.checkpoint would recompute once per group of weights
        mode_of_stages: Mode = next((mode for mode in UNPROPOSED if mode == requested), "by_stage")
        if runtime is None:
            # except_last differs little from always, and would double the search on many devices.
            modes: Sequence[Mode] = (
                (mode_of_stages, "except_last") if self.gpus <= EVERY_COUNT else (mode_of_stages,)
            )
        elif runtime.recompute_by_stage:
            modes = (mode_of_stages,)
        else:
            modes = [mode for mode in MODES if mode in runtime.recompute]
        allowed = runtime is None or requested in runtime.recompute
        if requested == "auto" or (allowed and requested in UNPROPOSED):
            return tuple(mode for mode in modes if mode != "except_last" or schedule == "gpipe")
        return tuple(mode for mode in MODES if mode == requested and allowed)

    @cached_property
    def families(self) -> list[Family]:
        """Families to search exactly: configurations with orders of the devices and numbers of replicas."""
        return [
            Family(config, placement, counts, self.options.use_all, any_count=self.any_count)
            for config in self.configs
            if config.schedule in SEARCHED
            for counts in self.replica_sets
            for placement in (*self.placements, *self._anywhere(counts))
            if self.may_share(config.micro_batch_size, counts)
        ]

    def _anywhere(self, counts: tuple[int, ...]) -> list[Placement]:
        """Return the placement of any devices per stage, if few exist and no runtime fixes the ranks."""
        searchable = may_search_any(self.topology, counts, self.space.chain.max_stages)
        return [place_anywhere(self.topology)] if searchable and self.runtime is None else []

    @cached_property
    def placements(self) -> list[Placement]:
        """Orders of the devices. A runtime fixes the rank order of its usable devices."""
        if self.runtime is None:
            return list_placements(self.topology)
        return list_placements(self.topology.with_gpus(self.usable_gpus))[:1]

    @property
    def any_devices(self) -> bool:
        """True if any devices are searched for each stage, instead of orders of the devices only."""
        return any(family.placement.name == ANY for family in self.families)

    @cached_property
    def replica_sets(self) -> list[tuple[int, ...]]:
        """Numbers of replicas that stages may have together."""
        if not self._replicated:
            return [(1,)]
        usable = self.usable_gpus
        counts = list_replica_counts(usable)
        if self.runtime is not None and self.runtime.replicas == "equal":
            return [(count,) for count in counts]
        return [counts]

    def replica_choices(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of replicas that stages of any plan may have together, searched or not.

        On many devices, the fewest of the numbers with equal shares stand for all.

        Args:
            size: Samples of a micro-batch.
        """
        most = min(self.usable_gpus, size) if self._replicated else 1
        fewest = {-(-size // count): count for count in range(most, 0, -1)}
        counts = range(1, most + 1) if self.usable_gpus <= FEW else sorted(fewest.values())
        usable = tuple(n for n in counts if self.may_share(size, [n]) and self.space.fits_someone(size, n))
        if self.runtime is None or not self._replicated:
            return [usable] if usable else []
        return [(count,) for count in usable]

    @property
    def may_be_deeper(self) -> bool:
        """True if plans with more stages than are searched are allowed."""
        return self.options.max_stages is None or self.options.max_stages > self.stage_counts[-1]

    @property
    def any_count(self) -> bool:
        """True if the bound must hold for every number of replicas, because too many exist to search them."""
        return self.runtime is None and (self.usable_gpus > MOST_DEVICES or self.space.is_long)

    def may_share(self, size: int, replicas: Iterable[int]) -> bool:
        """Return whether these numbers of replicas may share micro-batches of `size` samples.

        A runtime only shares them evenly.
        """
        return self.runtime is None or all(size % count == 0 for count in replicas)

    @property
    def every_replica_count(self) -> bool:
        """True if no number of replicas was left out."""
        complete = len(list_replica_counts(self.usable_gpus)) == self.usable_gpus
        return complete or not self._replicated or not self.families

    def allows(self, proposal: Proposal) -> bool:
        """Return whether the options and the runtime allow a proposal."""
        return next(self.violations(proposal), None) is None

    def violations(self, proposal: Proposal) -> Iterator[str]:
        """Yield the options and runtime limits that a proposal violates, with their values."""
        options, runtime, config = self.options, self.runtime, proposal.config
        stages = len(proposal.ends) // config.virtual_stages
        chunked = config.virtual_stages > 1
        if not self.may_run(config.schedule):
            yield f"its schedule is {config.schedule}, not one of {', '.join(self.allowed_schedules)}"
        if options.max_stages is not None and stages > options.max_stages:
            yield f"{stages} stages are more than max_stages={options.max_stages}"
        share = config.micro_batch_size / max(proposal.replicas)
        if options.min_micro_batch is not None and share < options.min_micro_batch:
            yield f"a replica gets {share:g} samples, fewer than min_micro_batch={options.min_micro_batch}"
        if options.use_all and proposal.device_count != self.usable_gpus:
            yield f"`use_all` requires {self.usable_gpus} devices, but it uses {proposal.device_count}"
        if not self.space.limits.allow(proposal.bounds):
            yield "its stages do not end where `cut_after` and `pins` require"
        if runtime is not None and not runtime.runs_replicas(proposal.replicas):
            replicas = ", ".join(map(str, proposal.replicas[:16]))
            yield f"{runtime.name} does not run stages of {replicas} replicas"
        if not self.may_share(config.micro_batch_size, proposal.replicas):
            size = config.micro_batch_size
            yield f"micro-batches of {size} do not divide by {max(proposal.replicas)} replicas"
        if chunked and stages == 1:
            yield f"{config.schedule} needs two devices or more"
        if chunked and runtime is not None and not runtime.virtual_stages:
            yield f"{runtime.name} does not run several stages on a device"
        if max(map(max, proposal.devices)) >= self.usable_gpus:
            yield f"it uses device {max(map(max, proposal.devices))}, but only {self.usable_gpus} are usable"

    def with_time_limit(self) -> Problem:
        """Return the problem with its time limit running, which all computations for it share."""
        return replace(self, budget=SearchBudget.of_seconds(self.options.time_limit))
