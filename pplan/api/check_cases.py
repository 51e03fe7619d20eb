"""The pipelines that a check runs: the plan, and the even split of as many stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np

from ..cost_models.errors import ExportError, PplanError
from ..cost_models.layer import Chain
from ..cost_models.runtime import find_runtime
from ..cost_models.simulator.costs import Costs
from ..cost_models.topology import Topology
from ..planner.balance import balance
from ..planner.build_plan import build_problem
from ..planner.fixed_partition import FixedPartition, plan_partition
from ..planner.plan_file import Plan
from ..planner.plan_options import PlanOptions
from ..planner.plan_simulation import Simulation, simulate_plan
from ..runtimes.checking.records import (
    PLAN,
    Case,
    CaseResult,
    CheckedCase,
    CheckedDevice,
    CheckedStage,
    CutLink,
    StageSeconds,
    StageWaits,
    WeightSum,
)
from ..runtimes.documents import TorchExport
from ..runtimes.exports import INSTEAD, export_on

EVEN = "even split"


@dataclass(frozen=True, eq=False)
class CheckCase:
    """A plan to be run, what it predicts, and its case."""

    name: str
    plan: Plan
    simulated: Simulation
    case: Case

    def check_against(self, result: CaseResult) -> CheckedCase:
        """The prediction beside the measurement."""
        planned = stage_seconds(self.simulated)
        replicas = self.plan.stages[0].replicas
        peaks = result.ran.peak_bytes or [None] * len(self.simulated.memory)
        return CheckedCase(
            name=self.name,
            balance=self.plan.balance,
            schedule=self.plan.schedule,
            micro_batches=self.plan.micro_batches,
            micro_batch_size=self.plan.micro_batch_size,
            planned_step_seconds=self.simulated.timeline.step_seconds,
            predicted_step_seconds=result.predicted.step_seconds,
            calibrated_step_seconds=result.predicted.calibrated_step_seconds,
            step_seconds=result.ran.step_seconds,
            stages=[
                CheckedStage(
                    first_layer=stage.first_layer,
                    last_layer=stage.last_layer,
                    devices=stage.devices,
                    planned=planned[index],
                    alone=result.predicted.stages[index],
                    measured=result.ran.stages[index],
                )
                for index, stage in enumerate(self.plan.stages)
            ],
            devices=[
                CheckedDevice(device=device * replicas, planned_bytes=memory.bytes, measured_bytes=peak)
                for device, (memory, peak) in enumerate(zip(self.simulated.memory, peaks, strict=True))
            ],
            losses=result.losses,
        )


def prepare_case(
    name: str, plan: Plan, chain: Chain, topology: Topology, profiles: Mapping[str, Chain], *, emulate: bool
) -> CheckCase:
    """Raises ExportError where torch.distributed.pipelining does not run the plan itself."""
    document, remark = export_on(find_runtime("torch"), plan, "cpu")
    if remark is not None and INSTEAD in remark:
        raise ExportError(
            f"check: {remark.partition(INSTEAD)[0]}",
            "Make one that it runs: pplan.solve(runtime='torch').",
        )
    simulated = simulate_plan(plan, chain, topology, profiles=profiles)
    return CheckCase(
        name, plan, simulated, _case(name, cast(TorchExport, document), chain, simulated, emulate=emulate)
    )


def even_plan(plan: Plan, chain: Chain, topology: Topology, profiles: Mapping[str, Chain]) -> Plan | str:
    """The plan with its layers spread evenly by number; or why there is none."""
    try:
        counts = balance(np.ones(len(chain)), len(plan.stages), cut_after=chain.cut_after)
        plan_options = PlanOptions(
            mini_batch=plan.mini_batch,
            micro_batches=plan.micro_batches,
            schedule=plan.schedule,
            recompute="auto" if plan.recompute == "selective" else plan.recompute,
            optimizer=plan.optimizer,
            precision=plan.training_precision.name,
            gradient_dtype=plan.training_precision.gradient_dtype,
            zero=plan.zero,
            runtime=plan.runtime,
        )
        partition = FixedPartition(tuple(accumulate(counts)), plan.virtual_stages, plan.stages[0].replicas)
        problem = build_problem(chain, topology, plan_options, plan.profile, profiles)
        plan_of_split = plan_partition(problem, partition, model=plan.model, profile=plan.profile)
    except PplanError as error:
        return error.what
    return "the plan is the even split" if plan_of_split.balance == plan.balance else plan_of_split


def stage_seconds(simulated: Simulation) -> list[StageSeconds]:
    """The simulated seconds of each stage; backward includes what it recomputes."""
    costs, program = simulated.timeline.costs, simulated.timeline.program
    seconds = []
    for device, chunk in program.pipes[0]:
        forward = float(costs.forward[device, chunk, 0])
        share = 0.0 if costs.recompute is None else float(costs.recompute[device, 0, 0])
        first = float(costs.backward[device, chunk, 0]) + share * forward
        weight = 0.0 if costs.weight is None else float(costs.weight[device, chunk, 0])
        seconds.append(
            StageSeconds(
                forward=forward,
                backward=first + weight,
                input=first if program.splits_backward else 0.0,
                weight=weight,
            )
        )
    return seconds


def _case(name: str, document: TorchExport, chain: Chain, simulated: Simulation, *, emulate: bool) -> Case:
    costs = simulated.timeline.costs
    share = document.micro_batch_size / document.replicas
    output_bytes = chain.at(share, past_largest=True).output_bytes
    crossing = [round(float(output_bytes[end - 1])) for end in document.parts[1:-1]]
    waits = None
    if emulate:
        waits = StageWaits(stages=stage_seconds(simulated), crossing_bytes=crossing)
        document = document.model_copy(
            update={
                "parts": list(range(len(document.parts))),
                "recompute": ["never"] * len(document.recompute),
                "layers_sha256": "",
            }
        )
    return Case(
        name=name,
        document=document,
        links=cut_links(costs, len(crossing)),
        crossing_bytes=crossing,
        all_reduce=None if costs.all_reduce is None else costs.all_reduce.tolist(),
        tied=[] if emulate else WeightSum.from_costs(costs),
        waits=waits,
    )


def cut_links(costs: Costs, cuts: int) -> list[CutLink]:
    """The latency and occupancy of a transfer over each cut."""
    latency, occupancy = costs.forward_latency, costs.forward_occupancy
    return [
        CutLink(
            latency=0.0 if latency is None else float(latency[0, cut]),
            occupancy=0.0 if occupancy is None else float(occupancy[0, cut]),
        )
        for cut in range(cuts)
    ]


__all__ = ["EVEN", "PLAN", "CheckCase", "cut_links", "even_plan", "prepare_case", "stage_seconds"]
