"""Scored plans as they stand in a plan file: their stages with times and ledgers, and their bubble."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..cost_models.schedules import schedule_named
from ..cost_models.timeline import simulate
from .data_parallel import DataParallel
from .data_parallel import costs as data_parallel_costs
from .plan_file import PlannedStage
from .search import Candidate, Space, pipeline_costs
from .setting import Setting


@dataclass(frozen=True)
class Planned:
    """A scored plan: seconds of a step, idle share of its stages."""

    setting: Setting
    stages: list[PlannedStage]
    step_seconds: float
    bubble: float

    @property
    def balance(self) -> list[int]:
        """Layers of each stage."""
        return [stage.last_layer - stage.first_layer + 1 for stage in self.stages]


def planned_pipeline(space: Space, plan: Candidate) -> Planned:
    """A straight pipeline, stage s on device s."""
    instance, setting, stages = space.instance(plan.setting), plan.setting, len(plan.ends)
    schedule = schedule_named(setting.schedule)
    made = []
    for stage, (i, j) in enumerate(pairwise([0, *plan.ends])):
        held = schedule.in_flight(stage, stages, setting.micro_batches)
        ledger = instance.table.stage_ledger(i, j, held, setting.recompute, space.optimizer)
        made.append(
            PlannedStage(
                first_layer=instance.table.places[i],
                last_layer=instance.table.places[j] - 1,
                devices=[stage],
                forward_seconds=float(instance.table.forward[i, j]),
                backward_seconds=float(instance.usual_backward[i, j]),
                memory_bytes=sum(ledger.values()),
                memory_limit_bytes=space.topology.device.memory_bytes,
                memory=ledger,
            )
        )
    costs = pipeline_costs(instance, np.array([plan.ends])).candidate(0)
    timeline = simulate(schedule.actions(stages, setting.micro_batches), costs)
    return Planned(setting, made, plan.step_seconds, timeline.bubble)


def planned_data_parallel(space: Space, plan: DataParallel) -> Planned:
    """One stage on all devices."""
    setting, table = plan.setting, space.table(plan.setting.micro_batch_size / plan.replicas)
    ledger = table.stage_ledger(0, table.blocks, 1, setting.recompute, space.optimizer, plan.replicas)
    costs = data_parallel_costs(space, plan)
    stage = PlannedStage(
        first_layer=0,
        last_layer=len(space.chain) - 1,
        replicas=plan.replicas,
        devices=list(range(plan.replicas)),
        forward_seconds=float(costs.forward[0, 0]),
        backward_seconds=float(costs.backward[0, 0]),
        memory_bytes=sum(ledger.values()),
        memory_limit_bytes=space.topology.device.memory_bytes,
        memory=ledger,
    )
    timeline = simulate(schedule_named(setting.schedule).actions(1, setting.micro_batches), costs)
    return Planned(setting, [stage], plan.step_seconds, timeline.bubble)
