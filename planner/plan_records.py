"""The parts of a plan file: its stages, prediction, baselines, alternatives, and where it comes from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..cost_models.document import (
    Bytes,
    DeviceCount,
    DeviceIndex,
    LayerCount,
    LayerIndex,
    MicroBatches,
    MiniBatch,
    PredictedSeconds,
    Rate,
    Ratio,
    Record,
    StepSeconds,
    TotalBytes,
)
from ..cost_models.first_layers import count_first_layers
from ..cost_models.memory import RECOMPUTES
from ..cost_models.quantities import format_count
from ..cost_models.runtime import OFFLOAD, RUNTIMES
from ..cost_models.schedules import SCHEDULES

TIE = 1e-9
"""Share of a step below which two are equal; a bound closer than this to a step excludes anything faster."""
BUFFER_WARNING = "in PyTorch's pipelining device "
"""How a plan's warning begins that a device lacks room for PyTorch's buffers."""
MOST_DRAWN_LAYERS = 2_000
"""Of a plan's page: time and memory grow with their square."""


def _known_schedule(name: str) -> str:
    if name not in SCHEDULES:
        raise ValueError(f"must be one of {', '.join(SCHEDULES)}")
    return name


def _known_runtime(name: str) -> str:
    if name not in RUNTIMES:
        raise ValueError(f"must be one of {', '.join(RUNTIMES)}")
    return name


def _known_recompute(word: str) -> str:
    words = (*RECOMPUTES, OFFLOAD)
    if word not in words and count_first_layers(word) is None:
        raise ValueError(f"must be one of {', '.join(words)}, or first_N for its first N layers")
    return word


Recompute = Literal["never", "always", "except_last", "selective"]
StageRecompute = Annotated[str, AfterValidator(_known_recompute)]
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
    recompute: StageRecompute | None = None
    """The stage's own, where the plan's is `selective`; else as the plan's."""
    host_bytes: TotalBytes | None = None
    """What each device keeps in its host's memory, where the stage offloads."""

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
        if self.last_layer < self.first_layer:
            raise ValueError(f"last_layer {self.last_layer} is before first_layer {self.first_layer}")
        if (count_first_layers(self.recompute or "") or 0) >= self.layers:
            raise ValueError(
                f"recompute is {self.recompute}, and it has {format_count(self.layers, 'layer')}"
            )
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
    anything was searched. `uncertainty` is the share by which the profile's layers, before they
    were scaled, missed the whole model: how far the step of stages, which are parts of it, may be off.

    In 8 of 10 cases the step lies from `low_seconds` to `high_seconds`, as far as the layers' seconds spread
    and miss the whole model (see planner/robust); None where their spread is not known. Both may lie above
    step_seconds, which is that of the layers' medians: of many stages some one is always late.

    `optimizer_seconds`: of the optimizer's own step, at the least: the bytes that it reads and writes on the
    device where that takes longest, at the bandwidth of its memory; None where no bandwidth is known. They
    come after step_seconds, which the search compares plans by without them.
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
    stage_recompute: list[StageRecompute] = []
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
