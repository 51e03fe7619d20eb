"""The plan: what to train with, and what to expect of it, as a file (`NAME.plan.json`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from warnings import warn

from pydantic import BeforeValidator, Field, model_validator

from ..cost_models.document import (
    DeviceCount,
    Document,
    LayerCount,
    MadeBy,
    MemberCount,
    MicroBatches,
    MiniBatch,
    ZeroStage,
)
from ..cost_models.errors import UsageError
from ..cost_models.number_format import html_table, ranges
from ..cost_models.option_fields import list_declarations
from ..cost_models.precision import DtypeName, PrecisionName, TrainingPrecision, training_precision
from ..cost_models.quantities import MOST_DEVICES, format_bytes, format_count, format_seconds
from ..cost_models.schedules import PUBLISHED
from ..cost_models.schedules.registration import SUFFIX, register_order
from .plan_options import PlanOptions
from .plan_records import (
    Aim,
    Alternative,
    Baseline,
    DefaultMiniBatch,
    DegreeResult,
    PlannedStage,
    Prediction,
    ProfileReference,
    Recompute,
    RuntimeName,
    ScheduleName,
    SharedWeight,
)

if TYPE_CHECKING:
    from ..cost_models.drawing import Drawing


def _read_options(value: Any) -> Any:
    """What was asked for, of a file; keys that it does not know may stand there."""
    if not isinstance(value, dict):
        return value
    if str(value.get("schedule", "")).endswith(SUFFIX):
        raise ValueError("schedule: a plan's file names a schedule, and opens no other file")
    try:
        return PlanOptions(**{name: value[name] for name in list_declarations(PlanOptions) if name in value})
    except UsageError as error:
        raise ValueError(error.what) from error


_HEADINGS = ("stage", "devices", "layers", "forward", "backward", "memory")
FIXED_PARTITION = "this partition alone"
"""What was searched of a plan whose partition was given."""
REPLANNED = "plans without the lost devices"
"""How it begins of a plan for devices that are left: it is not the fastest, but moves the least."""


class Plan(Document):
    """A partition, its micro-batches, schedule and recomputation, with its prediction."""

    kind: ClassVar[str] = "plan"

    model: str
    balance: Annotated[list[LayerCount], Field(min_length=1)]
    mini_batch: MiniBatch
    micro_batches: MicroBatches
    micro_batch_size: MiniBatch
    """Samples of a whole micro-batch; where r replicas share it, each computes 1/r of them, rounded up."""
    schedule: ScheduleName
    order: Annotated[list[str], Field(max_length=MOST_DEVICES + 10)] | None = None
    """Of a schedule that is not pplan's own: the lines of its text, with every action of every device."""
    virtual_stages: LayerCount = 1
    optimizer: str = "sgd"
    precision: PrecisionName | None = None
    """Of the weights and states; None in files from before it was said: as usual for the profile."""
    gradient_dtype: DtypeName | None = None
    zero: ZeroStage = 0
    """What the replicas of a stage spread over them: ZeRO's stage."""
    recompute: Recompute = "never"
    runtime: RuntimeName | None = None
    gpus: DeviceCount | None = None
    """Devices that were offered; a plan may use fewer."""
    gpus_per_node: MemberCount | None = None
    device_kind: Literal["GPU", "CPU"] = "GPU"
    """What it is for: processors where one was profiled and no GPU was named."""
    topology: str = ""
    """The devices and links the plan was made for, in words."""
    machine: str = ""
    """The same as a topology file (TOML)."""
    stages: Annotated[list[PlannedStage], Field(min_length=1)]
    tied: list[SharedWeight] = []
    """Weights that stages share."""
    prediction: Prediction
    objective: Aim | None = None
    baselines: list[Baseline] = []
    alternatives: list[Alternative] = []
    degrees: list[DegreeResult] = []
    """By how many devices share every layer, where that was chosen with the plan; the profile says which."""
    options: Annotated[PlanOptions, BeforeValidator(_read_options)] = PlanOptions()
    """What was asked for."""
    searched: str = ""
    """The space that `exact` and the bound speak of."""
    warnings: list[str] = []
    """What may make the answer wrong: seconds that were estimated, extrapolated or are another device's."""
    notes: list[str] = []
    default_mini_batch: DefaultMiniBatch | None = None
    """How the global batch was chosen; None where it was given."""
    layer_names: list[str] = []
    profile: ProfileReference
    made_by: MadeBy = MadeBy()

    @model_validator(mode="before")
    @classmethod
    def _rename_wishes(cls, content: Any) -> Any:
        """`options` was called `wishes` in files until 0.1; the next release reads it no more."""
        if not isinstance(content, dict) or "wishes" not in content or "options" in content:
            return content
        warn("a plan's `wishes` are called `options`: solve again", DeprecationWarning, stacklevel=2)
        return {key: value for key, value in content.items() if key != "wishes"} | {
            "options": content["wishes"]
        }

    @model_validator(mode="before")
    @classmethod
    def _register_order(cls, content: Any) -> Any:
        """A plan's own order is known by its name from now on."""
        if isinstance(content, dict) and isinstance(content.get("order"), list):
            _register_order(content)
        return content

    @model_validator(mode="before")
    @classmethod
    def _fill_alternatives(cls, content: Any) -> Any:
        """What an alternative leaves out is as in the plan."""
        others = content.get("alternatives") if isinstance(content, dict) else None
        if not isinstance(others, list):
            return content
        own = {key: content[key] for key in _SHARED if key in content}
        own.setdefault("recompute", cls.model_fields["recompute"].default)
        filled = [own | other if isinstance(other, dict) else other for other in others]
        return content | {"alternatives": filled}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.order is None) != (self.schedule in PUBLISHED):
            raise ValueError(
                f"order: belongs to a schedule that is not pplan's own, and this is {self.schedule}"
            )
        _check_mini_batch(self, self.mini_batch)
        _check_precision(self)
        _check_layers(self)
        _check_balance(self)
        _check_devices(self)
        for number, other in enumerate(self.alternatives):
            _check_alternative(other, self, f"alternatives.{number}: ")
        return self

    def __repr__(self) -> str:
        layers = "-".join(map(str, self.balance[:16])) + ("-…" if len(self.balance) > 16 else "")
        return (
            f"<Plan of {self.model}: {format_count(len(self.balance) // self.virtual_stages, 'stage')} of "
            f"{layers} {'layer' if layers == '1' else 'layers'}, {self.schedule}, {self.micro_batches} x "
            f"{self.micro_batch_size}, {format_seconds(self.prediction.step_seconds)} a step>"
        )

    def _repr_html_(self) -> str:
        """Of a notebook: the stages."""
        rows = [
            [
                str(number),
                ranges(stage.devices),
                str(stage.layers),
                format_seconds(stage.forward_seconds),
                format_seconds(stage.backward_seconds),
                format_bytes(stage.memory_bytes),
            ]
            for number, stage in enumerate(self.stages)
        ]
        return html_table(repr(self)[1:-1], _HEADINGS, rows)

    def plot(self) -> Drawing:
        """The seconds of every stage, and the memory of one device of it against its limit, as a drawing."""
        from ..cost_models.drawing import CostRow, draw_costs  # most commands draw nothing

        rows = [
            CostRow(
                f"stage {number}: {format_count(stage.layers, 'layer')}, {_devices(stage)}",
                stage.forward_seconds,
                stage.backward_seconds,
                stage.memory_bytes,
                stage.memory_limit_bytes,
            )
            for number, stage in enumerate(self.stages)
        ]
        return draw_costs(repr(self)[1:-1], "Seconds of a micro-batch", "Memory of one device", rows)

    @property
    def wishes(self) -> PlanOptions:
        """The old name of `options`, for one release."""
        warn("a plan's `wishes` are called `options`", DeprecationWarning, stacklevel=2)
        return self.options

    @property
    def is_fixed_partition(self) -> bool:
        """Whether its partition is another tool's, and it is compared with no other."""
        return self.searched == FIXED_PARTITION

    @property
    def is_replanned(self) -> bool:
        """Whether it was chosen by the weights that it moves."""
        return self.searched.startswith(REPLANNED)

    @property
    def training_precision(self) -> TrainingPrecision:
        """In which numbers the weights are trained."""
        return training_precision(
            self.profile.dtype,
            self.profile.amp,
            precision=self.precision or "auto",
            gradient_dtype=self.gradient_dtype or "auto",
            runtime=self.runtime,
            device=self.profile.device,
        )

    @property
    def problem(self) -> dict[str, str]:
        """What plans of one problem have in common: layers, machine, global batch, runtime and states."""
        return {
            "profile": self.profile.sha256,
            "machine": self.machine or self.topology,
            "global batch": str(self.mini_batch),
            "runtime": self.runtime or "any",
            "optimizer": self.optimizer,
            "precision": self.training_precision.name,
            "gradients": self.training_precision.gradient_dtype,
            "ZeRO": str(self.zero),
        }

    @property
    def replicas(self) -> list[int]:
        """Replicas of each stage."""
        return [stage.replicas for stage in self.stages]

    @property
    def device_count(self) -> int:
        """Number of devices that the plan uses."""
        return len({device for stage in self.stages for device in stage.devices})


def _devices(stage: PlannedStage) -> str:
    return f"device{'s' if stage.replicas > 1 else ''} {ranges(stage.devices)}"


_SHARED = ("micro_batches", "micro_batch_size", "recompute")
"""Keys of an alternative whose default is the plan's value."""


def _register_order(content: dict[str, Any]) -> None:
    lines, stages = content["order"], content.get("stages")
    micro_batches, virtual = content.get("micro_batches"), content.get("virtual_stages", 1)
    if not isinstance(micro_batches, int) or not isinstance(virtual, int) or virtual < 1:
        return  # the fields' own checks say it
    if not isinstance(stages, list) or not all(isinstance(line, str) for line in lines):
        return
    from ..cost_models.schedules.schedule_text import read_schedule  # most plans have a published schedule

    try:
        text = read_schedule("\n".join(lines))
        if text.name != content.get("schedule"):
            raise ValueError(f"order: is of the schedule {text.name!r}, which is not the plan's")
        register_order(text, len(stages) // virtual, micro_batches, virtual)
    except UsageError as error:
        raise ValueError(f"order: {error.what}") from error


def _check_mini_batch(plan: Plan | Alternative, mini_batch: int, where: str = "") -> None:
    if plan.micro_batches * plan.micro_batch_size != mini_batch:
        raise ValueError(
            f"{where}micro_batches {plan.micro_batches} times micro_batch_size {plan.micro_batch_size} "
            f"do not make a mini_batch of {mini_batch}"
        )


def _check_precision(plan: Plan) -> None:
    """The precision is one that the profile's passes are of."""
    if plan.precision is not None:
        try:
            plan.training_precision  # noqa: B018  raises
        except UsageError as error:
            raise ValueError(error.what) from error


def _check_layers(plan: Plan) -> None:
    """The stages follow one another from layer 0, and the names are those of all layers."""
    expected = 0
    for number, stage in enumerate(plan.stages):
        if stage.first_layer != expected:
            raise ValueError(
                f"stages.{number}: first_layer is {stage.first_layer}, it must be {expected}: "
                "the stages hold all layers from 0, one after another"
            )
        expected = stage.last_layer + 1
    if sum(plan.balance) != expected:
        raise ValueError(
            f"balance {plan.balance} adds up to {sum(plan.balance)}, the stages hold {expected} layers"
        )
    for own in plan.tied:
        if own.stages != sorted(set(own.stages)) or own.stages[-1] >= len(plan.stages):
            raise ValueError(
                f"tied {own.tensor!r} is on the stages {own.stages}, they must be ascending and of the "
                f"{len(plan.stages)} that there are"
            )
    if plan.layer_names and len(plan.layer_names) != expected:
        raise ValueError(f"layer_names has {len(plan.layer_names)} names, the stages hold {expected} layers")


def _check_balance(plan: Plan) -> None:
    counts = [stage.layers for stage in plan.stages]
    if counts != plan.balance:
        raise ValueError(f"balance is {plan.balance}, the stages hold {counts} layers")


def _check_devices(plan: Plan) -> None:
    """Each device has one part of the layers, or as many as there are virtual stages, and is there."""
    if len(plan.stages) % plan.virtual_stages:
        raise ValueError(
            f"virtual_stages is {plan.virtual_stages}, which does not divide the {len(plan.stages)} stages"
        )
    uses = Counter(device for stage in plan.stages for device in stage.devices)
    twice = sorted(device for device, count in uses.items() if count > plan.virtual_stages)
    if twice:
        raise ValueError(f"stages: device {twice[0]} is used {uses[twice[0]]} times")
    if plan.gpus is not None and max(uses) >= plan.gpus:
        raise ValueError(f"stages: device {max(uses)} is used, of {plan.gpus} gpus from 0 on")


def _check_alternative(other: Alternative, plan: Plan, where: str) -> None:
    if sum(other.balance) != sum(plan.balance):
        raise ValueError(
            f"{where}balance {other.balance} adds up to {sum(other.balance)}, "
            f"the plan has {sum(plan.balance)} layers"
        )
    parts = len(other.balance)
    if parts % other.virtual_stages:
        raise ValueError(
            f"{where}virtual_stages is {other.virtual_stages}, which does not divide the {parts} parts"
        )
    for name, values in (("stage_recompute", other.stage_recompute), ("memory_bytes", other.memory_bytes)):
        if len(values) not in (0, parts):
            raise ValueError(f"{where}{name} has {len(values)} entries for {parts} parts")
    _check_mini_batch(other, plan.mini_batch, where)
