"""The pipelines that a check runs: the plan, or its alternative for a runtime, and the even split of as many
stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from typing import cast

import numpy as np

from ..cost_models.errors import ExportError, MachineError, UsageError
from ..cost_models.layer import Chain
from ..cost_models.runtime import RUNNABLE, find_runtime
from ..cost_models.simulator.costs import Costs
from ..cost_models.topology import Topology
from ..planner.balance import balance
from ..planner.build_plan import build_problem
from ..planner.fixed_partition import FixedPartition, plan_partition
from ..planner.plan_file import Plan
from ..planner.plan_options import PlanOptions
from ..planner.plan_simulation import Simulation, simulate_plan
from ..runtimes.checking.prediction import is_serial
from ..runtimes.checking.records import (
    Case,
    CaseResult,
    CheckedCase,
    CheckedDevice,
    CheckedDocument,
    CheckedStage,
    CutLink,
    Device,
    StageSeconds,
    StageWaits,
    WeightSum,
)
from ..runtimes.documents import TorchExport
from ..runtimes.exports import INSTEAD, choose, export_on

EVEN = "even split"
TORCH = "torch"


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


@dataclass(frozen=True, eq=False)
class PlanInputs:
    """The layers and the machine that a plan was made for."""

    chain: Chain
    topology: Topology
    profiles: Mapping[str, Chain]

    def choose_plan(self, plan: Plan, runtime: str) -> tuple[Plan, str | None]:
        """The plan itself, or a plan of its alternative for the runtime, and then a remark on it.

        Raises ExportError where the runtime runs neither.
        """
        about = find_runtime(runtime)
        choice, remark = choose(plan, about)
        launches = plan.runtime is not None and find_runtime(plan.runtime).one_process
        if remark is None and (launches or not about.one_process):
            return plan, None
        options = PlanOptions(
            micro_batches=choice.micro_batches,
            schedule=choice.schedule,
            recompute=choice.recompute,
            runtime=runtime,
        )
        partition = FixedPartition(tuple(accumulate(choice.balance)), 1, choice.replicas)
        text = None if remark is None else remark.replace("Exported instead", "Checked instead")
        return self._plan_partition(plan, partition, options), text

    def even_plan(self, plan: Plan) -> Plan:
        """The plan with its layers spread evenly by number.

        Raises:
            UsageError: The cuts allow no such plan.
            ExportError: The plan is the even split.
        """
        counts = balance(np.ones(len(self.chain)), len(plan.stages), cut_after=self.chain.cut_after)
        options = PlanOptions(
            micro_batches=plan.micro_batches,
            schedule=plan.schedule,
            recompute="auto" if plan.recompute == "selective" else plan.recompute,
            runtime=plan.runtime,
        )
        partition = FixedPartition(tuple(accumulate(counts)), plan.virtual_stages, plan.stages[0].replicas)
        even = self._plan_partition(plan, partition, options)
        if even.balance == plan.balance:
            raise ExportError("the plan is the even split", "Check the plan alone: `even=False`.")
        return even

    def _plan_partition(self, plan: Plan, partition: FixedPartition, options: PlanOptions) -> Plan:
        """Another partition with the training setting of the plan."""
        setting = replace(
            options,
            mini_batch=plan.mini_batch,
            optimizer=plan.optimizer,
            precision=plan.training_precision.name,
            gradient_dtype=plan.training_precision.gradient_dtype,
            zero=plan.zero,
        )
        problem = build_problem(self.chain, self.topology, setting, plan.profile, self.profiles)
        return plan_partition(problem, partition, model=plan.model, profile=plan.profile)

    def prepare_case(
        self, name: str, plan: Plan, runtime: str = TORCH, device: Device = "cpu", *, emulate: bool = False
    ) -> CheckCase:
        """The case of a plan. Raises ExportError where the runtime does not run the plan itself."""
        document, remark = export_on(find_runtime(runtime), plan, device)
        if remark is not None and (INSTEAD in remark or runtime != TORCH):
            raise ExportError(
                f"check: {remark.partition(INSTEAD)[0]}",
                f"Make one that it runs: pplan.solve(runtime={runtime!r}).",
            )
        simulated = simulate_plan(plan, self.chain, self.topology, profiles=self.profiles)
        costs, crossing, waits = simulated.timeline.costs, list[int](), None
        if isinstance(document, TorchExport):
            share = document.micro_batch_size / document.replicas
            output_bytes = self.chain.at(share, past_largest=True).output_bytes
            crossing = [round(float(output_bytes[end - 1])) for end in document.parts[1:-1]]
            if emulate:
                waits = StageWaits(stages=stage_seconds(simulated), crossing_bytes=crossing)
                alone = {
                    "parts": list(range(len(document.parts))),
                    "recompute": ["never"] * len(document.recompute),
                    "layers_sha256": "",
                }
                document = document.model_copy(update=alone)
        case = Case(
            name=name,
            document=cast(CheckedDocument, document),
            links=cut_links(costs, len(plan.stages) - 1),
            crossing_bytes=crossing,
            all_reduce=None if costs.all_reduce is None else costs.all_reduce.tolist(),
            tied=[] if emulate else WeightSum.from_costs(costs),
            waits=waits,
        )
        return CheckCase(name, plan, simulated, case)


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


def check_runtime(runtime: str, *, emulate: bool, calibrate: bool) -> None:
    """Raises UsageError for what only torch.distributed.pipelining does, MachineError without the package."""
    if runtime not in RUNNABLE:
        raise UsageError(f"check: no steps are run on {runtime!r}", f"Use one of {', '.join(RUNNABLE)}.")
    for option, is_given in (("`emulate`", emulate), ("`calibrate` and `calibration`", calibrate)):
        if is_given:
            raise UsageError(
                f"check: {option} with runtime={runtime!r}: only torch.distributed.pipelining does that",
                "Leave it out, or check with runtime='torch'.",
            )
    if find_spec(runtime) is None:
        raise MachineError(
            f"check: {runtime} is not installed", f'Install it: pip install "pplan[{runtime}]"'
        )


def serial_note(case: Case) -> list[str]:
    """A note on the prediction, where stages share one thread."""
    if not is_serial(case) or len(case.parts) == 2:
        return []
    return [
        f"on the CPU all stages of {case.document.runtime} share one thread and run one after another: the "
        "predicted step is the sum of all their work, whatever the cut; the plan's is that of its own machine"
    ]
