"""The plan: what to train with and what to expect, as a file (`NAME.plan.json`)."""

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
from ..cost_models.memory import MEMORY_ERROR, RECOMPUTES, check_stage_word, count_first_layers
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
    from ..cost_models.figures import Drawing


TIE = 1e-9
"""Relative difference of steps below which they are equal, and below which a bound closes the gap."""
BUFFER_WARNING = "in PyTorch's pipelining device "
"""Beginning of the warning that a device lacks room for PyTorch's buffers."""
MOST_DRAWN_LAYERS = 2_000
"""Most layers of a plan's page, whose time and memory grow with their square."""


def _one_of(name: str, names: Mapping[str, object]) -> str:
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return name


Recompute = Literal["never", "always", "except_last", "selective", "by_stage"]
"""Recomputation of a plan.

`selective` recomputes attention only, in plans from a transformer configuration. With `by_stage` the stages
state their own modes.
"""
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
    """Record that leaves out unset fields of plans from a transformer configuration."""

    @model_serializer(mode="wrap")
    def _leave_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        unset = {name for name in _OF_TRAINING & content.keys() if content[name] is None}
        return {name: value for name, value in content.items() if name not in unset}


class PlanShape(_PlanPart):
    """Layers of each part and how they run, common to every description of a plan.

    Attributes:
        balance: Layers by part, in the order in which a micro-batch passes them. Each device has
            `virtual_stages` parts.
        micro_batches: Micro-batches of a step.
        schedule: Name of the schedule.
        virtual_stages: Parts per device.
        recompute: Recomputation.
        degrees: Degrees of all stages, of a plan from a transformer configuration.
    """

    balance: Annotated[list[LayerBound], Field(min_length=1)]
    micro_batches: MicroBatches
    micro_batch_size: MiniBatch
    """Samples of a whole micro-batch. If r replicas share it, each computes ceil(size / r)."""
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
        """Micro-batches in words: `32 micro-batches x 8`."""
        return format_batch(self.micro_batches, self.micro_batch_size)

    @property
    def short_batch(self) -> str:
        """Micro-batches for a table: `32 x 8`."""
        return format_batch(self.micro_batches, self.micro_batch_size, short=True)

    @property
    def shape(self) -> dict[str, Any]:
        """These fields alone."""
        return {name: getattr(self, name) for name in PlanShape.model_fields}

    def check_shape(self, mini_batch: int, where: str = "") -> None:
        """Check that parts and micro-batches are whole.

        Args:
            mini_batch: Samples of a step.
            where: Beginning of the error text.

        Raises:
            ValueError: They are not.
        """
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
    """A given partition, for example from another tool's file. Fields that the file does not state are None.

    Attributes:
        format: Format of the file.
        ends: By stage, the number of layers up to its end. `virtual_stages` of them are on each device.
        virtual_stages: Stages per device.
        replicas: Replicas of every stage.
        devices: Ranks, device after device of the pipeline with its replicas.
        schedule: Name of the schedule.
        samples: Samples of a micro-batch on each replica.
        mini_batch: Samples of a step.
        recompute: Recomputation of all stages.
        stage_recompute: Recomputation by stage.
        runtime: Runtime for which the file was written.
        notes: What was understood or ignored.
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
        """Number of devices."""
        return len(self.ends) // (self.virtual_stages or 1) * (self.replicas or 1)

    def with_notes(self, *notes: str) -> Partition:
        """Return the partition with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def proposal(self, config: PipelineConfig) -> Proposal:
        """Return the proposal with a configuration.

        Raises:
            UsageError: The schedule does not run these parts.
        """
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

    Seconds are those of one micro-batch on one replica, backward with recomputation.
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
    """Memory ledger: bytes by term."""
    recompute: StageRecompute | None = None
    """Recomputation of the stage if the plan's is `by_stage`, else that of the plan."""
    host_bytes: TotalBytes | None = None
    """Bytes that each device keeps in host memory, if the stage offloads."""
    degrees: StageDegrees | None = None
    """Degrees of the stage, if stages have different ones."""
    update_seconds: PredictedSeconds | None = None
    """Seconds of the gradient exchange and the optimizer step, if the plan's step includes them."""
    transfer_seconds: PredictedSeconds | None = None
    """Seconds to send a micro-batch to the next stage, or its gradients back, if they are estimated."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.last_layer - self.first_layer + 1

    @property
    def layers_again(self) -> int | None:
        """Number of recomputed layers. None if the stage does what the plan says for all."""
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
                f"recompute is {self.recompute}, but the stage has {format_count(self.layers, 'layer')}"
            )
        return self


class SharedWeight(Record):
    """A weight that layers of several `stages` use.

    Each of these stages has a copy of its `bytes`, which the ledger counts. After the last backward, its
    gradients are summed over all devices of these stages in `sum_seconds` (0 for a frozen weight, and if one
    device has all).
    """

    tensor: str
    bytes: Bytes
    stages: Annotated[list[LayerIndex], Field(min_length=2)]
    sum_seconds: PredictedSeconds = 0.0


class Prediction(_PlanPart):
    """Simulated step of the plan, and what was proven about all plans of the searched space.

    Attributes:
        step_seconds: Simulated step, from the medians of the layers' seconds.
        samples_per_second: Global batch / step.
        bubble: Idle share of the devices' time.
        lower_bound_seconds: Lower bound on the step of the plans in `bound_covers`.
        gap: step_seconds / lower_bound_seconds - 1.
        exact: Whether each of these plans was scored or excluded by the bound.
        bound_covers: Plans for which the bound holds, in words.
        root_bound_seconds: The bound before searching.
        uncertainty: Share by which the sum of the profile's layers, before scaling, missed the whole model.
            The step of stages may be off by as much.
        low_seconds: Low end of the 80 % interval of the step, from the spread of the layers' seconds and
            their closing error (see `planner/robust`). None if the spread is unknown.
        high_seconds: High end of the interval. Both ends may lie above step_seconds: with many stages, some
            stage is always late.
        optimizer_seconds: Least seconds of the optimizer step, which follows step_seconds: its bytes at the
            memory bandwidth of the slowest device. None if no bandwidth is known. The search does not count
            it.
        tokens_per_second_per_gpu: Tokens of a transformer per second and GPU of the plan.
        tflops_per_gpu: FLOPs of a transformer in 10**12 per second and GPU of the plan.
        mfu: Model FLOPs utilization: tflops_per_gpu / dense peak of the GPU.
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
        """Wider interval of [low, high] and step ± uncertainty, in seconds. None if neither is known."""
        error = (self.uncertainty or 0.0) * self.step_seconds
        low, high = max(self.step_seconds - error, 0.0), self.step_seconds + error
        if self.low_seconds is None or self.high_seconds is None:
            return (low, high) if error else None
        if not error:  # both ends may lie above the step
            return self.low_seconds, self.high_seconds
        return min(low, self.low_seconds), max(high, self.high_seconds)

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
    """A plan that a simpler tool would make under the same costs and limits."""

    name: str
    step_seconds: StepSeconds | None
    reason: str | None = None
    """Why there is no step: the plan does not fit, or cannot be built."""
    detail: str = ""
    """Micro-batches, schedule and recomputation that were best for it."""


def _each_part(content: Any) -> Any:
    """Convert a row of an earlier file, with one number of replicas and no devices, to lists by part."""
    if not isinstance(content, dict) or isinstance(content.get("replicas", 1), list):
        return content
    balance, virtual = content.get("balance"), content.get("virtual_stages", 1)
    replicas = content.get("replicas", 1)
    counts = (replicas, virtual)
    if not isinstance(balance, list) or not all(isinstance(count, int) and count > 0 for count in counts):
        return content  # the checks of the fields report it
    stages = max(len(balance) // virtual, 1)
    if stages * replicas > MOST_DEVICES:
        return content
    firsts = [part % stages * replicas for part in range(len(balance))]
    devices = [list(range(first, first + replicas)) for first in firsts]
    return {"devices": devices} | content | {"replicas": [replicas] * len(balance)}


class PlanRow(PlanShape):
    """A plan and its predicted step in a row: an alternative, a runner-up, or the best plan after a change.

    `balance`, `replicas`, `devices`, `stage_recompute` and `memory_bytes` are lists by part of the layers. In
    a file, an alternative may omit micro-batches and recomputation that equal the plan's.
    """

    step_seconds: StepSeconds
    samples_per_second: Rate = 0.0
    replicas: list[DeviceCount]
    devices: list[list[DeviceIndex]]
    stage_recompute: list[StageRecompute] = []
    """Recomputation by part. Empty if all parts recompute as the plan does, or as `degrees` say."""
    memory_bytes: list[TotalBytes] = []
    runtimes: list[RuntimeName] = []
    """Runtimes that run it, of an alternative."""
    exact: bool = False
    reason: str = ""
    """Why it is listed, unless because of its runtimes: for example the fastest on all devices."""

    _fill = model_validator(mode="before")(_each_part)

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return len({rank for part in self.devices for rank in part})

    @property
    def ranks(self) -> tuple[int, ...]:
        """Devices of the pipeline in order, the replicas of each stage together."""
        return tuple(rank for part in self.devices[: self.pipeline_stages] for rank in part)

    @property
    def part_recompute(self) -> tuple[str, ...]:
        """Recomputation of each part of the layers."""
        return tuple(self.stage_recompute or [self.recompute] * len(self.balance))


class Aim(Record):
    """Objective of the plan, if that is not its step.

    `lower_bound`: no plan of those in `covers` has a smaller value (0: nothing is proven).
    """

    name: str
    value: Ratio
    unit: str
    lower_bound: Rate
    exact: bool
    detail: str = ""
    covers: str = ""


class OtherMiniBatch(Record):
    """Best plan of a short search for another global batch. Fields are None if no plan was found."""

    mini_batch: MiniBatch
    step_seconds: StepSeconds | None = None
    samples_per_second: Rate | None = None


class DefaultMiniBatch(Record):
    """Default global batch: samples per device, before rounding to what the micro-batches make.

    `others` are the results for half and twice of it, if there was time.
    """

    samples_per_device: MiniBatch
    others: list[OtherMiniBatch] = []


class DegreeResult(Record):
    """Plans in which a number of devices share every layer: best step and lower bound.

    Attributes:
        tensor_parallel: Number of devices.
        step_seconds: Step of the best plan found. None if none exists, for this `reason`.
        lower_bound_seconds: Lower bound on their steps. None if none fits.
        reason: Why no plan exists.
    """

    tensor_parallel: DeviceCount
    step_seconds: StepSeconds | None = None
    lower_bound_seconds: Rate | None = None
    reason: str = ""


class ProfileReference(Record):
    """Profile from which a plan was made.

    `layers_sha256` is the hash of the layer names, one a line; `granularity` says how the model was split
    into layers.
    """

    file: str
    sha256: str
    layers_sha256: str = ""
    dtype: str = "float32"
    amp: str | None = None
    """16-bit dtype of autocast, if the profile was measured under it."""
    device_name: str = ""
    granularity: str = "block"
    estimated: bool = False
    """True if its seconds, and so the plan's, are estimated instead of measured."""
    device: str = ""
    """cpu, cuda, analytic or unknown, as in the profile. Empty if the plan has no such key."""
    tensor_parallel: DeviceCount = 1
    """Devices that share every layer: each device of the plan stands for this many."""
    undivided_outputs: list[str] = []
    """Tensors of the model's output that hold no samples in dimension 0."""
    has_batch_norms: bool = False
    """True if some layer is a batch norm. Batch norms inside larger layers are not counted."""


def _read_options(value: Any) -> Any:
    """Return the options of a file, ignoring unknown keys."""
    if not isinstance(value, dict):
        return value
    if str(value.get("schedule", "")).endswith(SUFFIX):
        raise ValueError("schedule: a plan's file names a schedule, and opens no other file")
    with _value_errors():
        return PlanOptions(**{name: value[name] for name in list_declarations(PlanOptions) if name in value})


_HEADINGS = ("stage", "devices", "layers", "forward", "backward", "memory")
FIXED_PARTITION = "this partition alone"
"""Value of `searched` for a plan whose partition was given."""
REPLANNED = "plans without the lost devices"
"""Beginning of `searched` for a plan after the loss of devices, which moves least instead of being
fastest."""


class Plan(PlanShape, Document):
    """The plan: stages on devices, training setting, prediction, and comparison plans."""

    kind: ClassVar[str] = "plan"

    model: str
    mini_batch: MiniBatch
    order: Annotated[list[str], Field(max_length=MOST_DEVICES + 10)] | None = None
    """Lines of the text of a custom schedule, with every action of every device."""
    optimizer: str = "sgd"
    precision: PrecisionName | None = None
    """Precision of weights and states. None in files of early versions: as usual for the profile."""
    gradient_dtype: DtypeName | None = None
    zero: ZeroStage = 0
    """ZeRO stage: what the replicas of a stage shard."""
    runtime: RuntimeName | None = None
    gpus: DeviceCount | None = None
    """Devices that were offered. A plan may use fewer."""
    gpus_per_node: MemberCount | None = None
    device_kind: Literal["GPU", "CPU"] = "GPU"
    """Kind of machine: CPU if one was profiled and no GPU was named."""
    topology: str = ""
    """Devices and links for which the plan was made, in words."""
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
    """Model and training, of a plan from a transformer configuration."""
    sharing: list[DegreeResult] = []
    """Results by number of devices that share every layer, if that was chosen with the plan. The profile says
    which."""
    options: Annotated[PlanOptions, BeforeValidator(_read_options)] = PlanOptions()
    """Options of the request."""
    searched: str = ""
    """Searched space, to which `exact` and the bound refer."""
    warnings: list[str] = []
    """What may make the answer wrong: estimated or extrapolated seconds, or those of another device."""
    notes: list[str] = []
    default_mini_batch: DefaultMiniBatch | None = None
    """How the global batch was chosen. None if it was given."""
    layer_names: list[str] = []
    profile: ProfileReference
    made_by: MadeBy = MadeBy()

    @model_validator(mode="before")
    @classmethod
    def _rename_wishes(cls, content: Any) -> Any:
        """Rename `wishes`, the name of `options` until 0.1. The next release drops it."""
        if not isinstance(content, dict) or "wishes" not in content or "options" in content:
            return content
        warn("a plan's `wishes` are called `options`: solve again", DeprecationWarning, stacklevel=2)
        return {key: value for key, value in content.items() if key != "wishes"} | {
            "options": content["wishes"]
        }

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, content: Any) -> Any:
        """Register a custom order by its name, and fill omitted fields of alternatives with the plan's."""
        if not isinstance(content, dict):
            return content
        if isinstance(content.get("order"), list):
            _register_order(content)
        if isinstance(content.get("degrees"), list):  # so `sharing` was called until 0.1
            content = content | {"degrees": None, "sharing": content["degrees"]}
        if content.get("training") is None:
            content = _rename_selective(content)
        alternatives = content.get("alternatives")
        if not isinstance(alternatives, list):
            return content
        plan_fields = {key: content[key] for key in _SHARED if key in content}
        filled = [
            plan_fields | alternative if isinstance(alternative, dict) else alternative
            for alternative in alternatives
        ]
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
        for number, alternative in enumerate(self.alternatives):
            _check_alternative(alternative, self, f"alternatives.{number}: ")
        return self

    def check_degrees(self) -> None:
        """Check the degrees of a plan from a configuration.

        Raises:
            ValueError: They do not match the stages.
        """
        stage_degrees = [stage.degrees for stage in self.stages]
        if self.training is None:
            if (
                self.degrees
                or any(stage_degrees)
                or any(alternative.degrees for alternative in self.alternatives)
            ):
                raise ValueError("degrees: given without `training`")
            return
        if all(stage_degrees) == (self.degrees is not None) or (
            any(stage_degrees) and not all(stage_degrees)
        ):
            raise ValueError("degrees: must be those of the plan, or those of every stage")
        for shape in (self, *self.alternatives):
            if shape.degrees is None and shape is not self:
                raise ValueError("alternatives: one has no degrees")
            degrees = shape.degrees or Degrees(pipeline=len(shape.balance))
            degrees.check(self.training, shape.balance, shape.virtual_stages, shape.micro_batch_size)

    def __repr__(self) -> str:
        """Return the plan in one line."""
        layers = "-".join(map(str, self.balance[:16])) + ("-…" if len(self.balance) > 16 else "")
        return (
            f"<Plan of {self.model}: {format_count(self.pipeline_stages, 'stage')} of "
            f"{layers} {'layer' if layers == '1' else 'layers'}, {self.schedule}, {self.batch}, "
            f"{format_seconds(self.prediction.step_seconds)} a step>"
        )

    def _repr_html_(self) -> str:
        """Return a table of the stages for a notebook."""
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

    def plot(self, **style: Any) -> Drawing:
        """Draw the seconds of every stage, and the memory of one of its devices against the limit.

        Args:
            style: Fields of `FigureOptions`: `title`, `size`, `font`, `font_size`, `greyscale`.

        Returns:
            The figure. A notebook shows it; `save("plan.pdf")` writes it as PDF, PNG or SVG.

        Raises:
            MachineError: matplotlib is not installed.
            UsageError: An option is wrong.
        """
        from ..cost_models.figures import CostRow, draw_costs, figure_options  # most commands draw nothing

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
        headings = ("Time per micro-batch: forward + backward", "Memory of one device")
        return draw_costs(repr(self)[1:-1], *headings, rows, figure_options(style))

    @property
    def is_fixed_partition(self) -> bool:
        """True if the partition is another tool's, so that there are no comparisons."""
        return self.searched == FIXED_PARTITION

    @property
    def is_replanned(self) -> bool:
        """True if the plan was chosen by the weights that it moves."""
        return self.searched.startswith(REPLANNED)

    @property
    def training_precision(self) -> TrainingPrecision:
        """Precision of weights, gradients and states."""
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
        """Values that plans of one problem share: layers, machine, global batch, runtime and states."""
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
        """The plan as a row, its bound left out."""
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


def most_memory_bytes(stage: PlannedStage) -> float:
    """Return the memory up to which a stage of a configuration's plan is not refused.

    It is the limit of its device, with the share by which the estimate may be too high. Infinite where the
    limit is not known.
    """
    if stage.memory_limit_bytes is None:
        return float("inf")
    context = stage.memory.get("context", 0)
    return context + (stage.memory_limit_bytes - context) * (1 + MEMORY_ERROR)


def _devices(stage: PlannedStage) -> str:
    return f"device{'s' if stage.replicas > 1 else ''} {ranges(stage.devices)}"


_SHARED = ("micro_batches", "micro_batch_size", "recompute")
"""Keys of an alternative that default to the plan's values."""


def _register_order(content: dict[str, Any]) -> None:
    lines, stages = content["order"], content.get("stages")
    micro_batches, virtual = content.get("micro_batches"), content.get("virtual_stages", 1)
    if not isinstance(micro_batches, int) or not isinstance(virtual, int) or virtual < 1:
        return  # the checks of the fields report it
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
    """Convert a UsageError to the ValueError that pydantic reports."""
    try:
        yield
    except UsageError as error:
        raise ValueError(f"{where}{error.what}") from error


def _check_layers(plan: Plan) -> None:
    """Check that stages follow one another from layer 0, and that the names are those of all layers."""
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
    for weight in plan.tied:
        if weight.stages != sorted(set(weight.stages)) or weight.stages[-1] >= len(plan.stages):
            raise ValueError(
                f"tied {weight.tensor!r} is on the stages {weight.stages}, they must be ascending and of the "
                f"{len(plan.stages)} that there are"
            )
    if plan.layer_names and len(plan.layer_names) != expected:
        raise ValueError(f"layer_names has {len(plan.layer_names)} names, the stages hold {expected} layers")


def _check_ranks(parts: Sequence[Sequence[int]], virtual_stages: int, gpus: int | None, where: str) -> None:
    """Check that each device exists and has one part of the layers, or as many as virtual stages."""
    uses = Counter(device for part in parts for device in part)
    twice = sorted(device for device, count in uses.items() if count > virtual_stages)
    if twice:
        raise ValueError(f"{where}: device {twice[0]} is used {uses[twice[0]]} times")
    if gpus is not None and max(uses, default=0) >= gpus:
        raise ValueError(f"{where}: device {max(uses)} is used, of {gpus} gpus from 0 on")


def _check_devices(plan: Plan) -> None:
    """Check that each stage has as many devices as its replicas need, and that they exist."""
    _check_ranks([stage.devices for stage in plan.stages], plan.virtual_stages, plan.gpus, "stages")
    for number, stage in enumerate(plan.stages):
        degrees = stage.degrees or plan.degrees
        if len(stage.devices) != stage.replicas * (degrees.sharers if degrees else 1):
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
    """Rename `selective` in a plan of a profile, the name of `by_stage` until 0.2."""
    if isinstance(alternatives := content.get("alternatives"), list):
        renamed = [
            _rename_selective(alternative) if isinstance(alternative, dict) else alternative
            for alternative in alternatives
        ]
        content = content | {"alternatives": renamed}
    return content | {"recompute": "by_stage"} if content.get("recompute") == "selective" else content


_PLAN_WORDS: Mapping[str, Recompute] = {
    "never": "never",
    "always": "always",
    "except_last": "except_last",
    "selective": "selective",
}


def plan_word(words: Iterable[str]) -> Recompute:
    """Return the recomputation of a plan from that of its stages.

    It is `by_stage` if they differ, recompute first layers, or offload.
    """
    modes = set(words)
    return _PLAN_WORDS.get(modes.pop(), "by_stage") if len(modes) == 1 else "by_stage"


def plan_recompute(plan: ScoredPlan) -> Recompute:
    """Return the recomputation of a scored plan."""
    return plan_word(plan.recompute)


def plan_shape(plan: ScoredPlan) -> PlanShape:
    """Return the layers of each part of a scored plan, and how they run."""
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
    """Return the row of a scored plan, with `more` of its fields."""
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
    """Return micro-batches, schedule and recomputation: `32 micro-batches x 8, 1f1b, recompute never`."""
    config = plan.config
    virtual = f", {config.virtual_stages} virtual stages" if config.virtual_stages > 1 else ""
    words = set(plan.recompute)
    mode = (words.pop() if len(words) == 1 else "by_stage").replace("_", " ")
    batch = format_batch(config.micro_batches, config.micro_batch_size)
    return f"{batch}, {config.schedule}{virtual}, recompute {mode}"
