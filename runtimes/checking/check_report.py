"""What a check found, as a file (`NAME.check.json`): predictions beside measurements. Needs no torch."""

from __future__ import annotations

from statistics import fmean, median
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from ...cost_models.document import (
    DeviceCount,
    DeviceIndex,
    Document,
    LayerBound,
    LayerIndex,
    MadeBy,
    MicroBatches,
    MiniBatch,
    Record,
    StepSeconds,
    TotalBytes,
)
from .job import CaseResult, Corrections, LinkSeconds, Losses, StageSeconds

PLAN = "plan"
"""The name of the case that is the plan; the others stand beside it."""
SAME_LOSS = 1e-3
"""Relative: floating-point numbers of 32 bits, added in another order."""


class CheckedStage(Record):
    """Seconds of a micro-batch: as the plan says, as measured alone before the steps (from which the step is
    predicted), and in the steps."""

    first_layer: LayerIndex
    last_layer: LayerIndex
    devices: list[DeviceIndex]
    planned: StageSeconds
    alone: StageSeconds
    measured: StageSeconds


class CheckedDevice(Record):
    """Bytes of a device of the pipeline; measured only on a GPU."""

    device: DeviceIndex
    planned_bytes: TotalBytes
    measured_bytes: TotalBytes | None = None


class CheckedCase(Record):
    """A pipeline that was run.

    `planned_step_seconds`: the plan's own prediction, from its profile and for its machine.
    `predicted_step_seconds`: from the stages as they were measured here, before the steps;
    `calibrated_step_seconds` with corrections besides. `step_seconds`: of every step.
    """

    name: str
    balance: list[LayerBound]
    schedule: str
    micro_batches: MicroBatches
    micro_batch_size: MiniBatch
    planned_step_seconds: StepSeconds
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
        """The best prediction there is: calibrated, else from the stages alone."""
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
