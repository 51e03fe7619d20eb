"""What a check runs by torchgpipe, FairScale or DeepSpeed: the plan, or its alternative for that runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import cast

from ..cost_models.errors import ExportError, MachineError, UsageError
from ..cost_models.layer import Chain
from ..cost_models.runtime import RUNNABLE, find_runtime
from ..cost_models.topology import Topology
from ..planner.build_plan import build_problem
from ..planner.fixed_partition import FixedPartition, plan_partition
from ..planner.plan_file import Plan
from ..planner.plan_options import PlanOptions
from ..planner.plan_simulation import simulate_plan
from ..runtimes.checking.prediction import is_serial
from ..runtimes.checking.records import Case, CheckedDocument, Device, WeightSum
from ..runtimes.exports import Choice, choose, export_on
from .check_cases import CheckCase, cut_links, even_plan

TORCH = "torch"


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
        text = None if remark is None else remark.replace("Exported instead", "Checked instead")
        return self._plan_for(choice, plan, runtime), text

    def _plan_for(self, choice: Choice, plan: Plan, runtime: str) -> Plan:
        plan_options = PlanOptions(
            mini_batch=choice.micro_batches * choice.micro_batch_size,
            micro_batches=choice.micro_batches,
            schedule=choice.schedule,
            recompute=choice.recompute,
            optimizer=plan.optimizer,
            precision=plan.training_precision.name,
            gradient_dtype=plan.training_precision.gradient_dtype,
            zero=plan.zero,
            runtime=runtime,
        )
        problem = build_problem(self.chain, self.topology, plan_options, plan.profile, self.profiles)
        partition = FixedPartition(tuple(accumulate(choice.balance)), 1, choice.replicas)
        return plan_partition(problem, partition, model=plan.model, profile=plan.profile)

    def even(self, plan: Plan) -> Plan:
        """Raises ExportError where there is none."""
        even = even_plan(plan, self.chain, self.topology, self.profiles)
        if isinstance(even, str):
            raise ExportError(even, "Check the plan alone: `even=False`.")
        return even


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


def for_runtime(name: str, plan: Plan, machine: PlanInputs, runtime: str, device: Device) -> CheckCase:
    """Raises ExportError where the runtime does not run the plan itself."""
    document, remark = export_on(find_runtime(runtime), plan, device)
    if remark is not None:
        raise ExportError(
            f"check: {runtime} does not run this plan ({plan.schedule}, replicas {plan.replicas}, recompute "
            f"{plan.recompute})",
            f"Make one that it runs: pplan.solve(runtime={runtime!r}).",
        )
    simulated = simulate_plan(plan, machine.chain, machine.topology, profiles=machine.profiles)
    costs = simulated.timeline.costs
    case = Case(
        name=name,
        document=cast(CheckedDocument, document),
        links=cut_links(costs, len(plan.stages) - 1),
        all_reduce=None if costs.all_reduce is None else costs.all_reduce.tolist(),
        tied=WeightSum.from_costs(costs),
    )
    return CheckCase(name, plan, simulated, case)


def serial_note(case: Case) -> list[str]:
    """A note on the prediction, where stages share one thread."""
    if not is_serial(case) or len(case.parts) == 2:
        return []
    return [
        f"on the CPU all stages of {case.document.runtime} share one thread and run one after another: the "
        "predicted step is the sum of all their work, whatever the cut; the plan's is that of its own machine"
    ]
