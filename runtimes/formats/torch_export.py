"""What torch.distributed.pipelining (PyTorch 2.11 to 2.15) is given: any order, several stages a process.

Where PyTorch has a class for the plan's schedule, that one runs it; the others, ZB-H1 for one, are handed to
its runtime as lists of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ...cost_models.document import (
    DeviceCount,
    DeviceIndex,
    LayerBound,
    LayerIndex,
    MadeBy,
    MemberCount,
    MicroBatches,
)
from ...cost_models.errors import ExportError
from ...cost_models.first_layers import count_first_layers
from ...cost_models.quantities import format_count
from ...cost_models.runtime import OFFLOAD, find_runtime
from ...cost_models.schedules import PUBLISHED, Program
from ...cost_models.schedules.schedule_text import NAME
from ...planner.plan_file import Plan
from .export_document import ExportDocument
from .plan_choice import Choice, choose, document_fields
from .torch_actions import (
    action_rows,
    are_bounds,
    build_program,
    device_stages,
    read_actions,
    schedule_class,
)


def _known_word(word: str) -> str:
    if word not in ("never", "always", OFFLOAD) and count_first_layers(word) is None:
        raise ValueError(
            f"must be one of never, always, {OFFLOAD}, or first_N for the first N layers of the stage"
        )
    return word


StageWord = Annotated[str, AfterValidator(_known_word)]


class TorchExport(ExportDocument):
    """What a process of torch.distributed.pipelining is to know.

    Stage i holds layers parts[i] up to, not including, parts[i + 1], and recomputes by the i-th word of
    `recompute`. stages[d] are the stages of device d of the pipeline: rank d * replicas + r is its replica r.
    """

    kind: ClassVar[str] = "torch"
    runtime: Literal["torch"]
    micro_batches: MicroBatches
    order: Annotated[str, Field(pattern=NAME.pattern)]
    """The plan's word for the schedule; of one that is not pplan's own, `actions` alone say what is done."""
    schedule: str
    """The class in torch.distributed.pipelining.schedules."""
    parts: Annotated[list[LayerBound], Field(min_length=2)]
    stages: Annotated[list[list[LayerIndex]], Field(min_length=1)]
    replicas: DeviceCount
    """Of every stage; they share every micro-batch."""
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    """1: the replicas of a stage spread the optimizer's states, by FSDP2."""
    devices: list[DeviceIndex]
    """By rank, as the plan numbers them."""
    gpus_per_node: MemberCount | None = None
    recompute: list[StageWord]
    granularity: str = "block"
    """How the model is cut into layers."""
    actions: list[str]
    """Lines of a schedule CSV, one a device of the pipeline, as `_load_csv(path, format="compute_only")` of
    a schedule takes them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        stages = len(self.parts) - 1
        if not are_bounds(self.parts):
            raise ValueError(f"parts {self.parts} are not the bounds of {stages} stages")
        if sorted(stage for device_stages in self.stages for stage in device_stages) != list(range(stages)):
            raise ValueError(f"stages {self.stages} are not stages 0 to {stages - 1}, once each")
        if len(self.devices) != len(self.stages) * self.replicas:
            raise ValueError(
                f"devices are {len(self.devices)}, {len(self.stages)} of the pipeline times replicas "
                f"{self.replicas} must be as many"
            )
        for name, words, needed in (
            ("recompute", self.recompute, stages),
            ("actions", self.actions, len(self.stages)),
        ):
            if len(words) != needed:
                raise ValueError(f"{name} has {len(words)} entries, there must be {needed}")
        self._check_sizes()
        return self

    def _check_sizes(self) -> None:
        for stage, (word, (first, end)) in enumerate(zip(self.recompute, pairwise(self.parts), strict=True)):
            if (count_first_layers(word) or 0) >= end - first:
                raise ValueError(
                    f"recompute: {word} of stage {stage}, which has {format_count(end - first, 'layer')}"
                )
        if self.micro_batches * self.micro_batch_size != self.mini_batch:
            raise ValueError(
                f"micro_batches {self.micro_batches} times micro_batch_size {self.micro_batch_size} "
                f"do not make a mini_batch of {self.mini_batch}"
            )

    @property
    def program(self) -> Program:
        """What the processes run. Raises UsageError, ExportError."""
        if self.order in PUBLISHED:
            return build_program(self.order, len(self.stages), self.micro_batches, len(self.stages[0]))
        return read_actions(self.actions, self.stages, self.micro_batches)

    @property
    def csv(self) -> str:
        """The order as a schedule CSV, for what reads one (torchtitan's pipeline_parallel_schedule_csv)."""
        return "\n".join(self.actions) + "\n"


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[TorchExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError, UsageError.

    `device` changes nothing: each process takes its own.
    """
    del device
    choice, remark = choose(plan, find_runtime("torch"))
    devices = len(choice.devices) // choice.replicas
    program = build_program(choice.schedule, devices, choice.micro_batches, choice.virtual_stages)
    stages = device_stages(program)
    if len(choice.balance) != program.slots:
        raise ExportError(
            f"the plan has {len(choice.balance)} stages, {choice.schedule} with {choice.virtual_stages} "
            f"virtual stages on {devices} devices has {program.slots}",
            "Make the plan again with pplan solve.",
        )
    if remark is None:
        _check_places(plan, stages)
    document = TorchExport(
        **document_fields(plan, choice, "torch"),
        micro_batches=choice.micro_batches,
        order=choice.schedule,
        schedule=schedule_class(choice.schedule, program),
        parts=[0, *accumulate(choice.balance)],
        stages=stages,
        replicas=choice.replicas,
        zero=plan.zero if choice.replicas > 1 else 0,
        devices=list(choice.devices),
        gpus_per_node=plan.gpus_per_node,
        recompute=_recompute(choice),
        granularity=plan.profile.granularity,
        actions=action_rows(program),
        made_by=made_by,
    )
    return document, remark


def _recompute(choice: Choice) -> list[str]:
    return ["never" if word == "except_last" else word for word in choice.stage_recompute]


def _check_places(plan: Plan, stages: Sequence[Sequence[int]]) -> None:
    """The plan's parts lie where the schedule has them: in a loop over the devices, or in a V."""
    for stages_of_device in stages:
        first = plan.stages[stages_of_device[0]].devices
        for stage in stages_of_device[1:]:
            if plan.stages[stage].devices != first:
                raise ExportError(
                    f"stage {stage} of the plan is on devices {plan.stages[stage].devices}, {plan.schedule} "
                    f"has it with stage {stages_of_device[0]}, on {first}",
                    "Make the plan again with pplan solve.",
                )
