"""The plan: what to train with, and what to expect of it, as a file (`NAME.plan.json`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from warnings import warn

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ..cost_models.arguments import list_declarations
from ..cost_models.document import (
    Bytes,
    DeviceCount,
    DeviceIndex,
    Document,
    LayerBound,
    LayerCount,
    LayerIndex,
    MadeBy,
    MemberCount,
    MicroBatches,
    MiniBatch,
    PredictedSeconds,
    Rate,
    Ratio,
    Record,
    StepSeconds,
    TotalBytes,
    ZeroStage,
)
from ..cost_models.errors import UsageError
from ..cost_models.memory import RECOMPUTES, check_stage_word, count_first_layers
from ..cost_models.precision import DtypeName, PrecisionName, TrainingPrecision, training_precision
from ..cost_models.quantities import (
    MOST_DEVICES,
    format_batch,
    format_bytes,
    format_count,
    format_seconds,
    html_table,
    ranges,
)
from ..cost_models.runtime import OFFLOAD, RUNTIMES
from ..cost_models.schedule_text import SUFFIX, register_order
from ..cost_models.schedules import PUBLISHED, SCHEDULES, find_schedule
from .candidate import PipelineConfig, Proposal, ScoredPlan
from .plan_degrees import Degrees, StageDegrees, TransformerTraining
from .plan_options import PlanOptions

if TYPE_CHECKING:
    from ..cost_models.drawing import Drawing


TIE = 1e-9
"""Share of a step below which two are equal; a bound closer than this to a step excludes anything faster."""
BUFFER_WARNING = "in PyTorch's pipelining device "
"""How a plan's warning begins that a device lacks room for PyTorch's buffers."""
MOST_DRAWN_LAYERS = 2_000
"""Of a plan's page: time and memory grow with their square."""


def _one_of(name: str, names: Mapping[str, object]) -> str:
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return name


Recompute = Literal["never", "always", "except_last", "selective", "by_stage"]
"""`selective`: attention alone, of a transformer's configuration; `by_stage`: the stages say what they do."""
StageRecompute = Annotated[str, AfterValidator(partial(check_stage_word, words=(*RECOMPUTES, OFFLOAD)))]
ScheduleName = Annotated[str, AfterValidator(partial(_one_of, names=SCHEDULES))]
RuntimeName = Annotated[str, AfterValidator(partial(_one_of, names=RUNTIMES))]


_OF_TRAINING = frozenset(
    {
        "degrees",
        "training",
        "update_seconds",
        "transfer_seconds",
        "tokens_per_second_per_gpu",
        "tflops_per_gpu",
        "mfu",
    }
)


class _PlanPart(Record):
    """A record whose fields of plans from a transformer's configuration are in no other plan's file."""

    @model_serializer(mode="wrap")
    def _leave_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        unset = {name for name in _OF_TRAINING & content.keys() if content[name] is None}
        return {name: value for name, value in content.items() if name not in unset}


class PlanShape(_PlanPart):
    """What every description of a plan has: the layers of each part, and how they run.

    `balance` is by part of the layers, in the order in which a micro-batch passes them. Each device has
    `virtual_stages` parts. `degrees`: of all stages, of a plan from a transformer's configuration.
    """

    balance: Annotated[list[LayerBound], Field(min_length=1)]
    micro_batches: MicroBatches
    micro_batch_size: MiniBatch
    """Samples of a whole micro-batch; where r replicas share it, each computes 1/r of them, rounded up."""
    schedule: ScheduleName
    virtual_stages: LayerCount = 1
    recompute: Recompute = "never"
    degrees: Degrees | None = None

    @property
    def pipeline_stages(self) -> int:
        """Stages of the pipeline: devices, or groups of replicas."""
        return len(self.balance) // self.virtual_stages

    @property
    def batch(self) -> str:
        """The micro-batches in words: `32 micro-batches x 8`."""
        return format_batch(self.micro_batches, self.micro_batch_size)

    @property
    def short_batch(self) -> str:
        """The same for a table: `32 x 8`."""
        return format_batch(self.micro_batches, self.micro_batch_size, short=True)

    @property
    def shape(self) -> dict[str, Any]:
        """These fields alone."""
        return {name: getattr(self, name) for name in PlanShape.model_fields}

    def check_shape(self, mini_batch: int, where: str = "") -> None:
        """Check that parts and micro-batches are whole. Raises ValueError, whose text begins with `where`."""
        if len(self.balance) % self.virtual_stages:
            raise ValueError(
                f"{where}virtual_stages is {self.virtual_stages}, which does not divide the "
                f"{len(self.balance)} parts"
            )
        if 0 in self.balance and self.degrees is None:
            raise ValueError(f"{where}balance is {self.balance}: every part has a layer")
        if self.micro_batches * self.micro_batch_size != mini_batch:
            raise ValueError(
                f"{where}micro_batches {self.micro_batches} times micro_batch_size {self.micro_batch_size} "
                f"do not make a mini_batch of {mini_batch}"
            )


@dataclass(frozen=True)
class Partition:
    """A given partition, for example of another tool's file. What the file does not say is None.

    `ends`: by stage, the layers before its end; `virtual_stages` of them are on each device. `replicas`: of
    every stage. `devices`: ranks, device after device of the pipeline with its replicas. `samples`: of a
    micro-batch, on each replica. `stage_recompute`: a word for each stage. `runtime`: that the file was
    written for. `notes`: what was understood, or passed over.
    """

    format: str
    ends: tuple[int, ...]
    virtual_stages: int | None = None
    replicas: int | None = None
    devices: tuple[int, ...] | None = None
    schedule: str | None = None
    samples: int | None = None
    mini_batch: int | None = None
    recompute: Recompute | None = None
    stage_recompute: tuple[str, ...] | None = None
    runtime: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Devices that it takes."""
        return len(self.ends) // (self.virtual_stages or 1) * (self.replicas or 1)

    def with_notes(self, *notes: str) -> Partition:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def proposal(self, config: PipelineConfig) -> Proposal:
        """The candidate of a configuration. Raises UsageError where its schedule does not run such parts."""
        config = replace(config, virtual_stages=self.virtual_stages or 1)
        pipeline, count = len(self.ends) // config.virtual_stages, self.replicas or 1
        program = find_schedule(config.schedule).program(
            pipeline, config.micro_batches, config.virtual_stages
        )
        ranks = self.devices or range(self.gpus)
        firsts = [place.device * count for place in program.pipes[0]]
        return Proposal(
            config, self.ends, tuple(tuple(sorted(ranks[first : first + count])) for first in firsts)
        )


class PlannedStage(_PlanPart):
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
    recompute: StageRecompute | None = None
    """The stage's own, where the plan's is `by_stage`; else as the plan's."""
    host_bytes: TotalBytes | None = None
    """What each device keeps in its host's memory, where the stage offloads."""
    degrees: StageDegrees | None = None
    """The stage's own, where the stages have different ones."""
    update_seconds: PredictedSeconds | None = None
    """Seconds of the exchange of gradients and the optimizer's step, where the plan's step includes them."""
    transfer_seconds: PredictedSeconds | None = None
    """Seconds of a micro-batch to the next stage, or of its gradients back, where they are estimated."""

    @property
    def layers(self) -> int:
        """How many it holds."""
        return self.last_layer - self.first_layer + 1

    @property
    def layers_again(self) -> int | None:
        """How many of them it recomputes; None where it does not say, as all stages do what the plan does."""
        if self.recompute is None:
            return None
        whole = 0 if self.recompute in ("never", OFFLOAD) else self.layers
        return count_first_layers(self.recompute) or whole

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.last_layer < self.first_layer - 1:
            raise ValueError(f"last_layer {self.last_layer} is before first_layer {self.first_layer}")
        if (count_first_layers(self.recompute or "") or -1) >= self.layers:
            raise ValueError(
                f"recompute is {self.recompute}, and it has {format_count(self.layers, 'layer')}"
            )
        return self


class SharedWeight(Record):
    """A weight that layers of several `stages` use: each of these has a copy of its `bytes`, which the ledger
    counts. After the last backward its gradients are added up over all devices of these stages, which takes
    `sum_seconds` (0 of a frozen weight, and where one device has all)."""

    tensor: str
    bytes: Bytes
    stages: Annotated[list[LayerIndex], Field(min_length=2)]
    sum_seconds: PredictedSeconds = 0.0


class Prediction(_PlanPart):
    """What the simulator says of the plan, and what was proven of all plans of the searched space.

    `gap` is step_seconds / lower_bound_seconds - 1. `bound_covers` says in words which plans the bound holds
    for. `exact`: each of them was scored or excluded by the bound. `root_bound_seconds` is the bound before
    anything was searched. `uncertainty` is the share by which the profile's layers, before they
    were scaled, missed the whole model: how far the step of stages, which are parts of it, may be off.

    In 8 of 10 cases the step lies from `low_seconds` to `high_seconds`, as far as the layers' seconds spread
    and miss the whole model (see planner/robust); None where their spread is not known. Both may lie above
    step_seconds, which is that of the layers' medians: of many stages some one is always late.

    `optimizer_seconds`: of the optimizer's own step, at the least: the bytes that it reads and writes on the
    device where that takes longest, at the bandwidth of its memory; None where no bandwidth is known. They
    come after step_seconds, which the search compares plans by without them.

    `tokens_per_second_per_gpu`, `tflops_per_gpu` (10**12 FLOPs of the model a second) and `mfu`, the share of
    the GPU's dense peak that these are: of a transformer's configuration, for each GPU that the plan uses.
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
    optimizer_seconds: PredictedSeconds | None = None
    tokens_per_second_per_gpu: Rate | None = None
    tflops_per_gpu: Rate | None = None
    mfu: Rate | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Widest interval of the step that is known, in seconds; None where nothing is known of its error."""
        error = (self.uncertainty or 0.0) * self.step_seconds
        if self.low_seconds is None or self.high_seconds is None:
            return (self.step_seconds - error, self.step_seconds + error) if error else None
        if self.high_seconds - self.low_seconds < 2 * error:
            return self.step_seconds - error, self.step_seconds + error
        return self.low_seconds, self.high_seconds

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


def _each_part(content: Any) -> Any:
    """Turn a row of an earlier file, with one number of replicas and no devices, into one by part."""
    if not isinstance(content, dict) or isinstance(content.get("replicas", 1), list):
        return content
    balance, virtual = content.get("balance"), content.get("virtual_stages", 1)
    each = content.get("replicas", 1)
    counts = (each, virtual)
    if not isinstance(balance, list) or not all(isinstance(count, int) and count > 0 for count in counts):
        return content  # the fields' own checks say it
    stages = max(len(balance) // virtual, 1)
    if stages * each > MOST_DEVICES:
        return content
    firsts = [part % stages * each for part in range(len(balance))]
    devices = [list(range(first, first + each)) for first in firsts]
    return {"devices": devices} | content | {"replicas": [each] * len(balance)}


class PlanRow(PlanShape):
    """A plan and its predicted step in a row: an alternative, a runner-up, the best plan after a change.

    By part of the layers, in order: `balance`, `replicas`, `devices`, `stage_recompute` and `memory_bytes`.
    In a file, an alternative may leave out micro-batches and recomputation where they are the plan's own.
    """

    step_seconds: StepSeconds
    samples_per_second: Rate = 0.0
    replicas: list[DeviceCount]
    devices: list[list[DeviceIndex]]
    stage_recompute: list[StageRecompute] = []
    """Empty where all parts recompute as the plan does, or as `degrees` say."""
    memory_bytes: list[TotalBytes] = []
    runtimes: list[RuntimeName] = []
    """Of an alternative: those that run it."""
    exact: bool = False
    reason: str = ""
    """Why it stands here, where that is not its runtimes: the fastest on all devices, say."""

    _fill = model_validator(mode="before")(_each_part)

    @property
    def device_count(self) -> int:
        """Number of devices that it takes."""
        return len({rank for part in self.devices for rank in part})

    @property
    def ranks(self) -> tuple[int, ...]:
        """Devices of the pipeline in turn, each one's replicas together."""
        return tuple(rank for part in self.devices[: self.pipeline_stages] for rank in part)

    @property
    def part_recompute(self) -> tuple[str, ...]:
        """The recomputation of each part of the layers."""
        return tuple(self.stage_recompute or [self.recompute] * len(self.balance))


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


class DegreeResult(Record):
    """The plans in which so many devices share every layer: the step of the best that was found (None: none,
    for this `reason`), and the seconds that none takes less than (None: there is none that fits)."""

    tensor_parallel: DeviceCount
    step_seconds: StepSeconds | None = None
    lower_bound_seconds: Rate | None = None
    reason: str = ""


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
    """cpu, cuda, analytic or unknown, as in the profile; empty where the plan has no such key."""
    tensor_parallel: DeviceCount = 1
    """Devices that share every layer: each device of the plan is so many."""
    undivided_outputs: list[str] = []
    """Tensors of the model's output that hold no samples in dimension 0."""


def _read_options(value: Any) -> Any:
    """What was asked for, of a file; keys that it does not know may stand there."""
    if not isinstance(value, dict):
        return value
    if str(value.get("schedule", "")).endswith(SUFFIX):
        raise ValueError("schedule: a plan's file names a schedule, and opens no other file")
    with _value_errors():
        return PlanOptions(**{name: value[name] for name in list_declarations(PlanOptions) if name in value})


_HEADINGS = ("stage", "devices", "layers", "forward", "backward", "memory")
FIXED_PARTITION = "this partition alone"
"""What was searched of a plan whose partition was given."""
REPLANNED = "plans without the lost devices"
"""How it begins of a plan for devices that are left: it is not the fastest, but moves the least."""


class Plan(PlanShape, Document):
    """The plan: stages on devices, the training setting, the prediction, and what it is compared with."""

    kind: ClassVar[str] = "plan"

    model: str
    mini_batch: MiniBatch
    order: Annotated[list[str], Field(max_length=MOST_DEVICES + 10)] | None = None
    """Of a schedule that is not pplan's own: the lines of its text, with every action of every device."""
    optimizer: str = "sgd"
    precision: PrecisionName | None = None
    """Of the weights and states; None in files from before it was said: as usual for the profile."""
    gradient_dtype: DtypeName | None = None
    zero: ZeroStage = 0
    """What the replicas of a stage spread over them: ZeRO's stage."""
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
    alternatives: list[PlanRow] = []
    training: TransformerTraining | None = None
    """Of a plan from a transformer's configuration."""
    sharing: list[DegreeResult] = []
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
    def _complete(cls, content: Any) -> Any:
        """Register the plan's own order by its name, and fill what alternatives leave out with the plan's."""
        if not isinstance(content, dict):
            return content
        if isinstance(content.get("order"), list):
            _register_order(content)
        if isinstance(content.get("degrees"), list):  # so `sharing` was called until 0.1
            content = content | {"degrees": None, "sharing": content["degrees"]}
        if content.get("training") is None:
            content = _rename_selective(content)
        others = content.get("alternatives")
        if not isinstance(others, list):
            return content
        own = {key: content[key] for key in _SHARED if key in content}
        filled = [own | other if isinstance(other, dict) else other for other in others]
        return content | {"alternatives": filled}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.order is None) != (self.schedule in PUBLISHED):
            raise ValueError(
                f"order: belongs to a schedule that is not pplan's own, and this is {self.schedule}"
            )
        if self.precision is not None:
            with _value_errors():
                self.training_precision  # noqa: B018  raises
        _check_layers(self)
        self.check_shape(self.mini_batch)
        _check_devices(self)
        self.check_degrees()
        for number, other in enumerate(self.alternatives):
            _check_alternative(other, self, f"alternatives.{number}: ")
        return self

    def check_degrees(self) -> None:
        """Check the degrees of a plan from a configuration. Raises ValueError."""
        own = [stage.degrees for stage in self.stages]
        if self.training is None:
            if self.degrees or any(own) or any(other.degrees for other in self.alternatives):
                raise ValueError("degrees: without `training`, of which they are")
            return
        if all(own) == (self.degrees is not None) or (any(own) and not all(own)):
            raise ValueError("degrees: must be those of the plan, or those of every stage")
        for shape in (self, *self.alternatives):
            if shape.degrees is None and shape is not self:
                raise ValueError("alternatives: one has no degrees")
            degrees = shape.degrees or Degrees(pipeline=len(shape.balance))
            degrees.check(self.training, shape.balance, shape.virtual_stages, shape.micro_batch_size)

    def __repr__(self) -> str:
        layers = "-".join(map(str, self.balance[:16])) + ("-…" if len(self.balance) > 16 else "")
        return (
            f"<Plan of {self.model}: {format_count(self.pipeline_stages, 'stage')} of "
            f"{layers} {'layer' if layers == '1' else 'layers'}, {self.schedule}, {self.batch}, "
            f"{format_seconds(self.prediction.step_seconds)} a step>"
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
    def row(self) -> PlanRow:
        """The plan in a row."""
        return PlanRow(
            **self.shape,
            step_seconds=self.prediction.step_seconds,
            samples_per_second=self.mini_batch / self.prediction.step_seconds,
            replicas=self.replicas,
            devices=[stage.devices for stage in self.stages],
            stage_recompute=[]
            if self.training
            else [stage.recompute or self.recompute for stage in self.stages],
            memory_bytes=[stage.memory_bytes for stage in self.stages],
            exact=self.prediction.exact,
        )

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
    from ..cost_models.schedule_text import read_schedule

    with _value_errors("order: "):
        text = read_schedule("\n".join(lines))
        if text.name != content.get("schedule"):
            raise UsageError(f"is of the schedule {text.name!r}, which is not the plan's")
        register_order(text, len(stages) // virtual, micro_batches, virtual)


@contextmanager
def _value_errors(where: str = "") -> Iterator[None]:
    """Turn a UsageError into the ValueError that pydantic reports."""
    try:
        yield
    except UsageError as error:
        raise ValueError(f"{where}{error.what}") from error


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
    counts = [stage.layers for stage in plan.stages]
    if counts != plan.balance:
        raise ValueError(f"balance is {plan.balance}, the stages hold {counts} layers")
    for own in plan.tied:
        if own.stages != sorted(set(own.stages)) or own.stages[-1] >= len(plan.stages):
            raise ValueError(
                f"tied {own.tensor!r} is on the stages {own.stages}, they must be ascending and of the "
                f"{len(plan.stages)} that there are"
            )
    if plan.layer_names and len(plan.layer_names) != expected:
        raise ValueError(f"layer_names has {len(plan.layer_names)} names, the stages hold {expected} layers")


def _check_ranks(parts: Sequence[Sequence[int]], virtual_stages: int, gpus: int | None, where: str) -> None:
    """Each device has one part of the layers, or as many as there are virtual stages, and is there."""
    uses = Counter(device for part in parts for device in part)
    twice = sorted(device for device, count in uses.items() if count > virtual_stages)
    if twice:
        raise ValueError(f"{where}: device {twice[0]} is used {uses[twice[0]]} times")
    if gpus is not None and max(uses, default=0) >= gpus:
        raise ValueError(f"{where}: device {max(uses)} is used, of {gpus} gpus from 0 on")


def _check_devices(plan: Plan) -> None:
    """Each stage has as many devices as its replicas take, and they are there."""
    _check_ranks([stage.devices for stage in plan.stages], plan.virtual_stages, plan.gpus, "stages")
    for number, stage in enumerate(plan.stages):
        own = stage.degrees or plan.degrees
        if len(stage.devices) != stage.replicas * (own.sharers if own else 1):
            raise ValueError(
                f"stages.{number}: replicas is {stage.replicas}, the devices are {stage.devices}"
            )


def _check_alternative(other: PlanRow, plan: Plan, where: str) -> None:
    if sum(other.balance) != sum(plan.balance):
        raise ValueError(
            f"{where}balance {other.balance} adds up to {sum(other.balance)}, "
            f"the plan has {sum(plan.balance)} layers"
        )
    parts = len(other.balance)
    for name in ("replicas", "devices", "stage_recompute", "memory_bytes"):
        values = getattr(other, name)
        if len(values) != parts and (values or name in ("replicas", "devices")):
            raise ValueError(f"{where}{name} has {len(values)} entries for {parts} parts")
    sharers = other.degrees.sharers if other.degrees else 1
    for number, (count, ranks) in enumerate(zip(other.replicas, other.devices, strict=True)):
        if len(ranks) != count * sharers:
            raise ValueError(f"{where}replicas.{number} is {count}, the devices are {ranks}")
    _check_ranks(other.devices, other.virtual_stages, plan.gpus, f"{where}devices")
    other.check_shape(plan.mini_batch, where)


def _rename_selective(content: dict[str, Any]) -> dict[str, Any]:
    """Rename `selective` in a plan of a profile and its alternatives: the name of `by_stage` until 0.2."""
    if isinstance(others := content.get("alternatives"), list):
        renamed = [_rename_selective(other) if isinstance(other, dict) else other for other in others]
        content = content | {"alternatives": renamed}
    return content | {"recompute": "by_stage"} if content.get("recompute") == "selective" else content


_PLAN_WORDS: Mapping[str, Recompute] = {
    "never": "never",
    "always": "always",
    "except_last": "except_last",
    "selective": "selective",
}


def plan_word(words: Iterable[str]) -> Recompute:
    """Return the word of a plan whose stages have these: `by_stage` where they differ, run their first layers
    again, or offload."""
    modes = set(words)
    return _PLAN_WORDS.get(modes.pop(), "by_stage") if len(modes) == 1 else "by_stage"


def plan_recompute(plan: ScoredPlan) -> Recompute:
    """Return the word of a scored plan."""
    return plan_word(plan.recompute)


def plan_shape(plan: ScoredPlan) -> PlanShape:
    """The layers of each part of a scored plan, and how they run."""
    config = plan.config
    return PlanShape(
        balance=[end - first for first, end in plan.proposal.bounds],
        micro_batches=config.micro_batches,
        micro_batch_size=config.micro_batch_size,
        schedule=config.schedule,
        virtual_stages=config.virtual_stages,
        recompute=plan_recompute(plan),
    )


def plan_row(plan: ScoredPlan, **more: Any) -> PlanRow:
    """The row of a scored plan, with `more` of its fields."""
    return PlanRow(
        **dict(plan_shape(plan)),
        step_seconds=plan.step_seconds,
        samples_per_second=plan.config.mini_batch / plan.step_seconds,
        replicas=list(plan.proposal.replicas),
        devices=[list(ranks) for ranks in plan.proposal.devices],
        stage_recompute=list(plan.recompute),
        **more,
    )


def run_in_words(plan: ScoredPlan) -> str:
    """Its micro-batches, schedule and recomputation: `32 micro-batches x 8, 1f1b, recompute never`."""
    config = plan.config
    virtual = f", {config.virtual_stages} virtual stages" if config.virtual_stages > 1 else ""
    words = set(plan.recompute)
    mode = (words.pop() if len(words) == 1 else "by_stage").replace("_", " ")
    batch = format_batch(config.micro_batches, config.micro_batch_size)
    return f"{batch}, {config.schedule}{virtual}, recompute {mode}"
