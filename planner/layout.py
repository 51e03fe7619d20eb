"""The stages and devices of a plan in a simulation: its own, or those under overrides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.first_layers import whole_word
from ..cost_models.layer import Chain, list_cut_points
from ..cost_models.machines.topology_file import TopologyFile, parse_topology
from ..cost_models.quantities import format_count
from ..cost_models.runtime import find_runtime
from ..cost_models.schedules import Program, Schedule, find_schedule
from ..cost_models.simulator.costs import Hosts
from .balance import balance
from .overrides import Overrides
from .pipeline_config import MOST_MICRO_BATCHES, SEARCHED, abbreviate
from .plan_file import Plan


def count_devices(plan: Plan, overrides: Overrides) -> int:
    """How many devices the topology must have."""
    used = 1 + max(device for stage in plan.stages for device in stage.devices)
    stages = overrides.stages or len(plan.stages) // plan.virtual_stages
    return max(used, plan.gpus or 1, stages * (overrides.replicas or 1))


def read_machine(plan: Plan, where: str) -> TopologyFile | None:
    """The machine that the plan was made for, as a topology file; None where it does not say. `where` names
    the plan in errors. Raises FileError."""
    return parse_topology(plan.machine, Path(f"{where}: machine")) if plan.machine else None


@dataclass(frozen=True, eq=False)
class Layout:
    """The program of a plan under overrides, and which layers and devices its places have.

    Its properties raise UsageError for numbers that the schedule, the global batch or the cuts do not allow.
    """

    plan: Plan
    chain: Chain
    overrides: Overrides

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that is simulated."""
        return find_schedule(self.overrides.schedule or self.plan.schedule)

    @cached_property
    def virtual_stages(self) -> int:
        """Chunks of a device."""
        if self.overrides.virtual_stages is not None:
            return self.overrides.virtual_stages
        same = self.schedule.name == self.plan.schedule
        return self.plan.virtual_stages if same else self.schedule.default_virtual_stages

    @cached_property
    def planned_stages(self) -> int:
        """Devices of the plan's pipeline."""
        return max(len(self.plan.stages) // self.plan.virtual_stages, 1)

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.overrides.micro_batches or self.plan.micro_batches

    @cached_property
    def program(self) -> Program:
        """What runs where."""
        stages = self.planned_stages if self.overrides.stages is None else self.overrides.stages
        count = self.micro_batches
        if count > MOST_MICRO_BATCHES:
            raise UsageError(
                f"micro-batches {count}: at most {MOST_MICRO_BATCHES} are simulated",
                "Use fewer, larger ones.",
            )
        if stages * self.virtual_stages > self.chain.max_stages:
            chunks = self.virtual_stages
            each = f" of {chunks} virtual stages each" if chunks > 1 else ""
            raise UsageError(
                f"stages {stages}{each}: the allowed cuts make at most {self.chain.max_stages} parts of the "
                f"{format_count(len(self.chain), 'layer')}",
                "Use fewer stages, or fewer virtual stages." if chunks > 1 else "Use fewer stages.",
            )
        return self.schedule.program(stages, count, self.virtual_stages)

    @cached_property
    def size(self) -> int:
        """Samples of a micro-batch."""
        batch, count = self.plan.mini_batch, self.micro_batches
        if batch % count:
            fitting = [parts for parts in range(1, min(batch, MOST_MICRO_BATCHES) + 1) if batch % parts == 0]
            raise UsageError(
                f"micro-batches {count}: a global batch of {batch} does not divide into so many",
                f"Use a divisor of {batch}: {abbreviate(fitting)}.",
            )
        return batch // count

    @cached_property
    def keeps_stages(self) -> bool:
        """Whether the cuts and the devices are the plan's."""
        own = self.overrides.replicas
        same_replicas = own is None or set(self.plan.replicas) == {own}
        return self.same_devices and same_replicas and self.program.slots == len(self.plan.stages)

    @property
    def same_devices(self) -> bool:
        """Whether the pipeline is as long as the plan's."""
        return self.program.devices == self.planned_stages

    @cached_property
    def replicas(self) -> int:
        """Of every stage, where the cuts are not the plan's: its own, one where another number of stages is
        named, so many devices."""
        counts = set(self.plan.replicas)
        if self.overrides.replicas is not None:
            return self.overrides.replicas
        if not self.same_devices:
            return 1
        if len(counts) == 1:
            return counts.pop()
        text = "-".join(map(str, self.plan.replicas[:16]))
        raise UsageError(
            f"{self.schedule.name} with {self.program.slots} parts: the layers are cut anew, and the plan's "
            f"replicas ({text}) are those of its own stages",
            "Say how many each stage is to have: replicas=1, say.",
        )

    @cached_property
    def recompute(self) -> tuple[str, ...]:
        """By device of the program: the plan's word, or the stage's own; `except_last` is of GPipe alone."""
        plan, devices = self.plan, self.program.devices
        if plan.recompute == "except_last" and self.schedule.name != "gpipe":
            return ("always",) * devices
        if plan.recompute != "selective":
            return (plan.recompute,) * devices
        own = [stage.recompute for stage in plan.stages]
        if None in own:
            raise UsageError(
                "the plan recomputes selectively, and does not say which stages do",
                "Simulate a plan with another recomputation.",
            )
        if not self.keeps_stages:
            return ("always",) * devices
        words = [str(own[device]) for device in range(devices)]
        return tuple(words if self.schedule.name in SEARCHED else map(whole_word, words))

    @cached_property
    def hosts(self) -> Hosts:
        """Whether one process launches the work of all stages, or each stage has a process of its own."""
        runtime = None if self.plan.runtime is None else find_runtime(self.plan.runtime)
        is_one = runtime is not None and runtime.one_process and runtime.runs(self.schedule.name)
        return "one" if is_one else "each"

    @property
    def receives_ahead(self) -> bool:
        """Whether the plan is for a runtime with buffers for all micro-batches."""
        return self.plan.runtime is not None and find_runtime(self.plan.runtime).receives_ahead

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """By part, the places it lies between."""
        cut_points = list_cut_points(self.chain)
        ends = np.cumsum(self.balance).tolist()
        for end in ends:
            if end not in cut_points:
                raise UsageError(
                    f"the plan has a stage end after layer {end - 1}, {self.chain.names[end - 1]}, where the "
                    "profile allows no cut",
                    "Make the plan again with pplan solve, or cut anew with `stages`.",
                )
        return list(pairwise([0, *(cut_points.index(end) for end in ends)]))

    @cached_property
    def balance(self) -> list[int]:
        """Layers of each part."""
        if self.keeps_stages:
            return [stage.layers for stage in self.plan.stages]
        costs = self.chain.at(self.size, past_largest=True)
        recompute = self.plan.recompute != "never"
        work = costs.forward_seconds * (1 + recompute) + costs.backward_seconds
        return balance(work, self.program.slots, cut_after=self.chain.cut_after)

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The devices of each stage: its replicas."""
        if self.keeps_stages:
            return [self.plan.stages[stage].devices for stage in range(self.program.devices)]
        each = self.replicas
        if self.same_devices and set(self.plan.replicas) == {each}:
            return [self.plan.stages[stage].devices for stage in range(self.program.devices)]
        return [list(range(stage * each, (stage + 1) * each)) for stage in range(self.program.devices)]

    def layers(self, device: int) -> tuple[tuple[int, int], ...]:
        """First and last layer of every chunk."""
        cut_points = list_cut_points(self.chain)
        own = (
            (chunk, self.bounds[part])
            for (at, chunk), part in self.program.parts_by_slot.items()
            if at == device
        )
        return tuple((cut_points[i], cut_points[j] - 1) for _, (i, j) in sorted(own))
