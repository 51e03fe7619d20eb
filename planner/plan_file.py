"""The plan: what to train with, and what to expect of it, as a file (`NAME.plan.json`)."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..cost_models.document import Document, MadeBy, Record
from ..cost_models.errors import UsageError
from ..cost_models.field_types import (
    Bytes,
    DeviceCount,
    DeviceIndex,
    LayerCount,
    LayerIndex,
    MiniBatch,
    PredictedSeconds,
    Rate,
    Ratio,
    StepSeconds,
    TotalBytes,
    ZeroStage,
)
from ..cost_models.option_fields import declared
from ..cost_models.precision import DtypeName, PrecisionName, TrainingPrecision, training_precision
from ..cost_models.runtime import RUNTIMES
from ..cost_models.schedules import SCHEDULES
from .plan_options import PlanOptions

TIE = 1e-9
"""Share of a step below which two are equal; a bound closer than this to a step excludes anything faster."""


def _known_schedule(name: str) -> str:
    if name not in SCHEDULES:
        raise ValueError(f"must be one of {', '.join(SCHEDULES)}")
    return name


def _known_runtime(name: str) -> str:
    if name not in RUNTIMES:
        raise ValueError(f"must be one of {', '.join(RUNTIMES)}")
    return name


def _as_tuples(value: Any) -> Any:
    """Arrays of a JSON file, which are lists by the time that strict validation sees them."""
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


Recompute = Literal["never", "always", "except_last", "selective"]
MOST_MICRO_BATCHES = 2**20
"""Of a step: orders of actions are written out."""
MicroBatches = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
ScheduleName = Annotated[str, AfterValidator(_known_schedule)]
RuntimeName = Annotated[str, AfterValidator(_known_runtime)]


class PlannedStage(Record):
    """Layers `first_layer` to `last_layer` (0-based, inclusive) on `replicas` devices.

    Seconds are those of one micro-batch on one replica, backward with what it recomputes.
    """

    first_layer: LayerIndex
    last_layer: LayerIndex
    replicas: DeviceCount = 1
    devices: list[DeviceIndex]
    forward_seconds: PredictedSeconds
    backward_seconds: PredictedSeconds
    memory_bytes: TotalBytes
    memory_limit_bytes: TotalBytes | None = None
    memory: dict[str, TotalBytes] = {}
    """The ledger: bytes by term."""
    recompute: Recompute | None = None
    """The stage's own, where the plan's is `selective`; else as the plan's."""

    @property
    def layers(self) -> int:
        """How many it holds."""
        return self.last_layer - self.first_layer + 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.last_layer < self.first_layer:
            raise ValueError(f"last_layer {self.last_layer} is before first_layer {self.first_layer}")
        if len(self.devices) != self.replicas:
            raise ValueError(f"replicas is {self.replicas}, the devices are {self.devices}")
        return self


class SharedWeight(Record):
    """A weight that layers of several `stages` use: each of these has a copy of its `bytes`, which the ledger
    counts. After the last backward its gradients are added up over all devices of these stages, which takes
    `sum_seconds` (0 of a frozen weight, and where one device has all)."""

    tensor: str
    bytes: Bytes
    stages: Annotated[list[LayerIndex], Field(min_length=2)]
    sum_seconds: PredictedSeconds = 0.0


class Prediction(Record):
    """What the simulator says of the plan, and what was proven of all plans of the searched space.

    `gap` is step_seconds / lower_bound_seconds - 1. `bound_covers` says in words which plans the bound holds
    for. `exact`: each of them was scored or excluded by the bound. `root_bound_seconds` is the bound before
    anything was searched. `uncertainty` is the share by which step_seconds may be off because the profile's
    layers do not add up to the whole model.

    In 8 of 10 cases the step lies from `low_seconds` to `high_seconds`, as far as the layers' seconds spread
    and miss the whole model (see planner/robust); None where their spread is not known. Both may lie above
    step_seconds, which is that of the layers' medians: of many stages some one is always late.
    """

    step_seconds: StepSeconds
    samples_per_second: Rate
    bubble: Ratio
    lower_bound_seconds: PredictedSeconds
    gap: Ratio
    exact: bool
    bound_covers: str = ""
    root_bound_seconds: PredictedSeconds | None = None
    uncertainty: Rate | None = None
    low_seconds: StepSeconds | None = None
    high_seconds: StepSeconds | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.low_seconds, self.high_seconds
        if (low is None) != (high is None):
            raise ValueError(f"low_seconds is {low} and high_seconds {high}: there are both or neither")
        if low is not None and high is not None and low > high:
            raise ValueError(f"low_seconds {low} is above high_seconds {high}")
        if self.lower_bound_seconds > self.step_seconds * (1 + TIE):
            raise ValueError(
                f"lower_bound_seconds {self.lower_bound_seconds} is above step_seconds {self.step_seconds}"
            )
        return self


class Baseline(Record):
    """A plan that a simpler tool would make, under the same costs and limits."""

    name: str
    step_seconds: StepSeconds | None
    reason: str | None = None
    """Why it has no step: it does not fit, or cannot be made."""
    detail: str = ""
    """The micro-batches, schedule and recomputation that were best for it."""


class Alternative(Record):
    """The best plan for the runtimes that run it: `replicas` of every stage, on the devices from rank 0 on.

    In a file, micro-batches and recomputation may be left out where they are the plan's own.
    """

    runtimes: list[RuntimeName]
    balance: Annotated[list[LayerCount], Field(min_length=1)]
    replicas: DeviceCount = 1
    schedule: ScheduleName
    virtual_stages: LayerCount = 1
    """Of each device; the balance is then by part."""
    micro_batches: MicroBatches
    micro_batch_size: MiniBatch
    recompute: Recompute
    stage_recompute: list[Recompute] = []
    """By stage, where `recompute` is `selective`."""
    step_seconds: StepSeconds
    samples_per_second: Rate = 0.0
    memory_bytes: list[TotalBytes] = []
    """By stage."""
    exact: bool = False
    reason: str = ""
    """Why it stands here, where that is not its runtimes: the fastest on all devices, say."""


class Aim(Record):
    """What the plan is the best of, where that is not its step. `lower_bound`: no plan has less of those
    that `covers` names (0: nothing is proven)."""

    name: str
    value: Ratio
    unit: str
    lower_bound: Rate
    exact: bool
    detail: str = ""
    covers: str = ""


def _read_options(value: Any) -> Any:
    """What was asked for, of a file; keys that it does not know may stand there."""
    if not isinstance(value, dict):
        return value
    try:
        return PlanOptions(**{name: value[name] for name in declared(PlanOptions) if name in value})
    except UsageError as error:
        raise ValueError(error.what) from error


class OtherMiniBatch(Record):
    """What another global batch would give: the best that a short search found; None where no plan was."""

    mini_batch: MiniBatch
    step_seconds: StepSeconds | None = None
    samples_per_second: Rate | None = None


class DefaultMiniBatch(Record):
    """The global batch that none was given for: so many samples a device, before it was rounded to what the
    micro-batches make. `others`: half and twice of it, where there was time to try them."""

    samples_per_device: MiniBatch
    others: list[OtherMiniBatch] = []


class ProfileReference(Record):
    """The profile a plan was made from. `layers_sha256` is the hash of the layer names, one a line;
    `granularity` how the model was cut into them."""

    file: str
    sha256: str
    layers_sha256: str = ""
    dtype: str = "float32"
    amp: str | None = None
    """The 16-bit dtype of autocast, under which it was measured."""
    device_name: str = ""
    granularity: str = "block"
    estimated: bool = False
    """Whether its seconds, and so the plan's, are an estimate and not measured."""
    device: str = ""
    """cpu, cuda, analytic or unknown, as in the profile; empty where the plan does not tell."""


GIVEN = "this partition alone"
"""What was searched of a plan whose partition was given."""


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
    gpus_per_node: DeviceCount | None = None
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
    wishes: Annotated[PlanOptions, BeforeValidator(_read_options)] = PlanOptions()
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
        _check_mini_batch(self, self.mini_batch)
        _check_precision(self)
        _check_layers(self)
        _check_balance(self)
        _check_devices(self)
        for number, other in enumerate(self.alternatives):
            _check_alternative(other, self, f"alternatives.{number}: ")
        return self

    @property
    def was_given(self) -> bool:
        """Whether its partition is another tool's, and it is compared with no other."""
        return self.searched == GIVEN

    @property
    def trained(self) -> TrainingPrecision:
        """In which numbers the weights are trained."""
        return training_precision(
            self.profile.dtype,
            self.profile.amp,
            precision=self.precision or "auto",
            gradient_dtype=self.gradient_dtype or "auto",
            runtime=self.runtime,
        )

    @property
    def replicas(self) -> list[int]:
        """Replicas of each stage."""
        return [stage.replicas for stage in self.stages]


_SHARED = ("micro_batches", "micro_batch_size", "recompute")
"""Keys of an alternative whose default is the plan's value."""


def _check_mini_batch(made: Plan | Alternative, mini_batch: int, where: str = "") -> None:
    if made.micro_batches > MOST_MICRO_BATCHES:
        raise ValueError(
            f"{where}micro_batches is {made.micro_batches}, at most {MOST_MICRO_BATCHES} are read"
        )
    if made.micro_batches * made.micro_batch_size != mini_batch:
        raise ValueError(
            f"{where}micro_batches {made.micro_batches} times micro_batch_size {made.micro_batch_size} "
            f"do not make a mini_batch of {mini_batch}"
        )


def _check_precision(plan: Plan) -> None:
    """The precision is one that the profile's passes are of."""
    if plan.precision is not None:
        try:
            plan.trained  # noqa: B018  raises
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
