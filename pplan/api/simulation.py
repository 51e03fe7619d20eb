"""What `pplan simulate` found, as its tables, pictures and files take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..cost_models.quantities import counted
from ..cost_models.schedules import Schedule
from ..cost_models.simulator.steady import SteadyState, steady_state
from ..cost_models.timeline import Timeline
from ..planner.assembly import DeviceMemory

LONG_ENOUGH = 8
"""Micro-batches a stage in a row from which an asynchronous schedule is taken to be steady."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated step, where it is from and what is to be said about it.

    `layers` and `memory`, by device, where a plan was simulated; `plan_seconds`: the step of that plan as it
    stands, where something was overridden.
    """

    schedule: Schedule
    micro_batches: int
    virtual_stages: int
    timeline: Timeline
    plan: str = ""
    mini_batch: int | None = None
    plan_seconds: float | None = None
    layers: tuple[tuple[tuple[int, int], ...], ...] | None = None
    memory: tuple[DeviceMemory, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """Devices of the pipeline."""
        return self.timeline.stages

    @property
    def title(self) -> str:
        """`zb-h1, 8 stages, 24 micro-batches`."""
        chunks = f" of {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        stages, parts = counted(self.stages, "stage"), counted(self.micro_batches, "micro-batch")
        return f"{self.schedule.name}, {stages}{chunks}, {parts}"

    @property
    def weight_versions(self) -> list[float]:
        """By stage."""
        return [
            self.schedule.weight_versions(stage, self.stages, self.micro_batches)
            for stage in range(self.stages)
        ]

    @property
    def staleness(self) -> list[int]:
        """By stage, in updates."""
        return [
            self.schedule.staleness(stage, self.stages, self.micro_batches) for stage in range(self.stages)
        ]

    @property
    def samples_per_second(self) -> float | None:
        """Of a plan; in the steady state where there is one."""
        if self.mini_batch is None:
            return None
        if self.steady is not None:
            return self.mini_batch / self.micro_batches / self.steady.seconds_per_micro_batch
        return self.mini_batch / self.timeline.step_seconds

    @property
    def mini_batch_seconds(self) -> float:
        """Of a step; of a plan with an asynchronous schedule, of a further global batch in its steady
        state."""
        rate = self.samples_per_second
        if self.mini_batch is None or rate is None or self.steady is None:
            return self.timeline.step_seconds
        return self.mini_batch / rate

    @cached_property
    def steady(self) -> SteadyState | None:
        """The steady state of an asynchronous schedule, over as many micro-batches as it takes to see it."""
        if self.schedule.synchronous:
            return None
        rounds = max(-(-self.micro_batches // self.stages), LONG_ENOUGH)
        program = self.schedule.program(self.stages, rounds * self.stages, self.virtual_stages)
        if self.mini_batch is not None and (program.update_every or 0) > 1:
            # A plan's global batch is what an update is made from.
            program = replace(program, update_every=max(self.micro_batches, self.stages))
        return steady_state(program, self.timeline.costs)
