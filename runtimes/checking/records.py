"""What the processes of a check are told and find, and the check's file (`NAME.check.json`). Needs no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from ...cost_models.collectives import TiedSum
from ...cost_models.document import (
    DeviceCount,
    DeviceIndex,
    Document,
    LayerBound,
    LayerIndex,
    MadeBy,
    MicroBatches,
    MiniBatch,
    Ratio,
    Record,
    Seconds,
    StepSeconds,
    TotalBytes,
)
from ...cost_models.quantities import LEAST_RATE, MOST_RATE, MOST_SECONDS, MOST_SPEED
from ...cost_models.runtime import find_runtime
from ...cost_models.step_costs import Costs
from ..documents import BuiltExport, TorchExport

Device = Literal["cpu", "cuda"]


class ModelSpec(Record):
    """A model by its name, made again as `pplan profile` made it."""

    name: str
    settings: dict[str, Any] = {}
    input_shape: list[int] | None = None
    input_like: str | None = None
    classes: int | None = None
    seed: int = 0
    dtype: str = "float32"
    granularity: str = "block"
    loss: str = "none"
    channels_last: bool = False
    layers_sha256: str = ""
    """Of the names of the layers that it must have, one a line; empty: not known."""
    profiled: str = ""
    """What the profile calls the model."""
    by_user: tuple[str, ...] = Field(default=(), exclude=True)
    """The names, of a model, a loss and a function of its input, that the user gave: only these may be
    code. No file holds them."""


SignedSeconds = Annotated[float, Field(ge=-MOST_SECONDS, le=MOST_SECONDS)]
"""Of differences of measurements, say."""


class StageSeconds(Record):
    """Seconds of one micro-batch on one replica of a stage.

    `backward` is the whole one; `input` and `weight` are its two parts where the schedule runs them apart.
    `accumulation`: what of it (of `weight`) the first of a step does not take, which adds to no gradients.
    """

    forward: SignedSeconds
    backward: SignedSeconds
    input: SignedSeconds = 0.0
    weight: SignedSeconds = 0.0
    accumulation: SignedSeconds = 0.0


class StageWaits(Record):
    """Stages that wait instead of computing: how long, by stage, and the bytes that they hand on, by cut, of
    a micro-batch on one replica."""

    stages: list[StageSeconds]
    crossing_bytes: list[int]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.crossing_bytes) != len(self.stages) - 1:
            raise ValueError(f"{len(self.crossing_bytes)} cuts between {len(self.stages)} stages")
        return self


class CutLink(Record):
    """Seconds of a transfer: `latency` occupies nothing, `occupancy` is bytes over bandwidth."""

    latency: float
    occupancy: float


class WeightSum(Record):
    """Seconds of adding up the gradients of a weight that several devices of the pipeline hold."""

    name: str
    devices: list[int]
    seconds: float

    @classmethod
    def from_costs(cls, costs: Costs) -> list[WeightSum]:
        """The weight sums of a simulated plan."""
        return [
            cls(name=weight.name, devices=list(weight.stages), seconds=weight.seconds)
            for weight in costs.tied
        ]

    def cost(self) -> TiedSum:
        """The sum as the simulator takes it."""
        devices = tuple(self.devices)
        return TiedSum(self.name, devices, devices, devices, 0.0, self.seconds)


class Corrections(Record):
    """What a calibration adds to a prediction: stages take their planned seconds times `slowdown`, and every
    action takes `overhead` besides: `looped_overhead` where a device holds several stages or its schedule
    splits the backward, which PyTorch runs by another loop. A transfer takes `latency` and its bytes over
    `bandwidth` (None: as without)."""

    overhead: Seconds = 0.0
    looped_overhead: Seconds = 0.0
    slowdown: Annotated[float, Field(gt=0, le=MOST_SPEED)] = 1.0
    latency: Seconds | None = None
    bandwidth: Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)] | None = None


MEMORY_STEPS = 2
"""Steps whose memory is measured: one makes the optimizer's states."""


class Case(Record):
    """One pipeline to be run, by any runtime whose stages pplan builds.

    `planned`: seconds by stage as the plan predicts them. `links` by cut, `all_reduce` by device and chunk:
    seconds, as for the plan's machine. `crossing_bytes` by cut and `waits` are those of
    torch.distributed.pipelining. `optimizer`: the plan's, whose states are measured.
    """

    name: str
    document: Annotated[BuiltExport, Field(discriminator="runtime")]
    links: list[CutLink]
    planned: list[StageSeconds] = []
    optimizer: str = "sgd"
    crossing_bytes: list[int] = []
    all_reduce: list[list[float]] | None = None
    tied: list[WeightSum] = []
    waits: StageWaits | None = None

    @property
    def torch(self) -> TorchExport:
        """The document of torch.distributed.pipelining."""
        return cast(TorchExport, self.document)

    @property
    def parts(self) -> list[int]:
        """Layers before each stage, and all."""
        return self.document.parts

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.document.mini_batch // self.document.micro_batch_size

    @property
    def replicas(self) -> int:
        """Replicas of every stage."""
        return self.document.replicas

    @property
    def processes(self) -> int:
        """One for all stages, or one for each device of the plan."""
        return 1 if find_runtime(self.document.runtime).one_process else len(self.document.devices)


class Job(Record):
    """A check: its cases one after another, in the same processes. `model`: None where all stages wait."""

    model: ModelSpec | None
    cases: Annotated[list[Case], Field(min_length=1)]
    device: Device = "cpu"
    steps: int = 5
    warm_ups: int = 2
    compared_steps: int = 2
    """Of which the losses are compared with the plain model's; 0: of none."""
    step_seconds: Seconds = 0.0
    """Of the plan, as it was predicted: what is left of the check is told by it."""
    timeout_seconds: float = 120.0
    calibration: list[Case] = []
    """Run before the cases, for corrections to be fitted to them."""
    measures_memory: bool = True
    link_sizes: list[int] = []
    """Bytes of the transfers that are measured between neighbours; none where it is empty."""

    @property
    def processes(self) -> int:
        """The number of processes, the same for every case."""
        return self.cases[0].processes

    @property
    def total_steps(self) -> int:
        """Steps that are run, those of the plain model counted by the devices that share them."""
        calibration = len(self.calibration) * self.case_steps(compared=0)
        return calibration + len(self.cases) * self.case_steps(self.compared_steps)

    def case_steps(self, compared: int) -> int:
        """Of one case."""
        plain = 0 if self.model is None else compared * self.processes
        memory = MEMORY_STEPS if self.measures_memory and self.model is not None else 0
        return plain + compared + self.warm_ups + self.steps + memory

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = {case.processes for case in (*self.cases, *self.calibration)}
        if len(counts) != 1:
            raise ValueError(f"the cases take {sorted(counts)} processes, they must take the same")
        kinds = {case.document.runtime for case in self.cases}
        if len(kinds) != 1:
            raise ValueError(f"the cases are of {sorted(kinds)}, they must be of one runtime")
        return self

    def naming(self, names: Sequence[str]) -> Job:
        """The same where the user gave these names of a model or a loss, and no others."""
        if self.model is None:
            return self
        return self.model_copy(update={"model": self.model.model_copy(update={"by_user": tuple(names)})})


class RunSeconds(Record):
    """The measured times of a case: medians over the steps by stage, and `step_seconds` of every step."""

    stages: list[StageSeconds]
    step_seconds: list[StepSeconds]
    peak_bytes: list[TotalBytes | None] = []
    """By device of the pipeline: the most that a replica held in a step and its update, without the input of
    the global batch; None where it was not measured."""


class Losses(Record):
    """The losses of the first steps; the plain model's are None where they cannot be compared, with the
    reason."""

    pipeline: list[Ratio]
    plain: list[Ratio] | None = None
    reason: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.plain is not None and len(self.plain) != len(self.pipeline):
            raise ValueError(
                f"losses of {len(self.pipeline)} steps, and of {len(self.plain)} of the plain model"
            )
        return self

    @property
    def difference(self) -> float | None:
        """The largest, relative to the plain model's."""
        if self.plain is None:
            return None
        pairs = zip(self.pipeline, self.plain, strict=True)
        return max((abs(one - other) / max(abs(other), 1e-12) for one, other in pairs), default=0.0)


class CaseResult(Record):
    """A case that was run."""

    name: str
    ran: RunSeconds
    losses: Losses | None = None


class LinkSeconds(Record):
    """Transfers between neighbouring processes: median seconds over all pairs, by size."""

    sizes: list[TotalBytes]
    seconds: list[Seconds]


class CheckMeasurements(Record):
    """All measurements of a check."""

    backend: str
    device_name: str
    cases: list[CaseResult]
    links: LinkSeconds | None = None
    calibration: list[CaseResult] = []


PLAN = "plan"
"""The name of the case that is the plan; the others stand beside it."""
SAME_LOSS = 1e-3
"""Relative: floating-point numbers of 32 bits, added in another order."""


class CheckedStage(Record):
    """Seconds of a micro-batch, as the plan predicts them and as measured in the steps."""

    first_layer: LayerIndex
    last_layer: LayerIndex
    devices: list[DeviceIndex]
    planned: StageSeconds
    measured: StageSeconds


class CheckedDevice(Record):
    """Peak bytes of a device of the pipeline: the plan's ledger, and what was measured.

    `unseen`: terms of the ledger that the measurement cannot see. `measured_bytes`: by CUDA's allocator, or
    of the live tensors of a process on a CPU, without the input of the global batch, which the ledger does
    not count. None if it was not measured.
    """

    device: DeviceIndex
    planned_bytes: TotalBytes
    unseen: dict[str, TotalBytes] = {}
    measured_bytes: TotalBytes | None = None

    @property
    def expected_bytes(self) -> int:
        """The ledger without what the measurement cannot see."""
        return self.planned_bytes - sum(self.unseen.values())

    @property
    def error(self) -> float | None:
        """The relative error of the ledger: expected over measured, less 1."""
        return self.expected_bytes / self.measured_bytes - 1 if self.measured_bytes else None


class CheckedCase(Record):
    """A pipeline that was run.

    `predicted_step_seconds`: the plan's prediction, from its profile and for its machine (on a CPU, where
    stages share a thread, the sum of their seconds); `calibrated_step_seconds` with corrections besides.
    `step_seconds`: of every step.
    """

    name: str
    balance: list[LayerBound]
    schedule: str
    micro_batches: MicroBatches
    micro_batch_size: MiniBatch
    predicted_step_seconds: StepSeconds
    calibrated_step_seconds: StepSeconds | None = None
    step_seconds: Annotated[list[StepSeconds], Field(min_length=1)]
    stages: list[CheckedStage]
    devices: list[CheckedDevice] = []
    losses: Losses | None = None

    @property
    def measured_step_seconds(self) -> float:
        """The median."""
        return median(self.step_seconds)

    @property
    def expected_step_seconds(self) -> float:
        """The best prediction there is: calibrated, else the plan's."""
        calibrated = self.calibrated_step_seconds
        return self.predicted_step_seconds if calibrated is None else calibrated

    @property
    def error(self) -> float:
        """The relative error of the best prediction: predicted over measured, less 1."""
        return self.expected_step_seconds / self.measured_step_seconds - 1

    @property
    def same_losses(self) -> bool | None:
        """Whether they are the plain model's; None where they were not compared."""
        difference = None if self.losses is None else self.losses.difference
        return None if difference is None else difference <= SAME_LOSS


class HeldOutCase(Record):
    """A case that the corrections were not fitted to, predicted without them and with them."""

    name: str
    predicted_step_seconds: StepSeconds
    calibrated_step_seconds: StepSeconds
    measured_step_seconds: StepSeconds

    @property
    def predicted_error(self) -> float:
        """The relative error without the corrections."""
        return self.predicted_step_seconds / self.measured_step_seconds - 1

    @property
    def calibrated_error(self) -> float:
        """The relative error with the corrections."""
        return self.calibrated_step_seconds / self.measured_step_seconds - 1


class CrossValidation(Record):
    """Predictions of cases that the corrections were not fitted to, the plan and the even split included."""

    cases: Annotated[list[HeldOutCase], Field(min_length=1)]

    @property
    def predicted_error(self) -> float:
        """The mean size of the errors without the corrections."""
        return fmean(abs(case.predicted_error) for case in self.cases)

    @property
    def calibrated_error(self) -> float:
        """The mean size of the errors with the corrections."""
        return fmean(abs(case.calibrated_error) for case in self.cases)

    @property
    def worse_plan(self) -> HeldOutCase | None:
        """The plan, if the corrections make its prediction worse."""
        return next(
            (
                case
                for case in self.cases
                if case.name == PLAN and abs(case.calibrated_error) > abs(case.predicted_error)
            ),
            None,
        )

    @property
    def improves(self) -> bool:
        """Return whether the mean error falls, and the plan's does not grow."""
        return self.calibrated_error < self.predicted_error and self.worse_plan is None


def _with_plan(cases: list[CheckedCase]) -> list[CheckedCase]:
    if all(case.name != PLAN for case in cases):
        raise ValueError(f"no case is named {PLAN!r}")
    return cases


class Check(Document):
    """A plan that was run, and the even split of as many stages beside it."""

    kind: ClassVar[str] = "check"

    plan: str
    """Its file."""
    plan_sha256: str = ""
    model: str
    runtime: str = "torch"
    backend: str
    device_name: str
    processes: DeviceCount
    emulated: bool = False
    """Whether its stages waited instead of computing."""
    cases: Annotated[list[CheckedCase], AfterValidator(_with_plan)]
    links: LinkSeconds | None = None
    corrections: Corrections | None = None
    """Given by the user, or fitted here and kept because they improve the prediction of other cases."""
    calibration: list[CaseResult] = []
    cross_validation: CrossValidation | None = None
    notes: list[str] = []
    made_by: MadeBy = MadeBy()

    @property
    def of_plan(self) -> CheckedCase:
        """The plan itself."""
        return next(case for case in self.cases if case.name == PLAN)
