"""The options that say what a plan must satisfy, which several verbs have, as `PlanOptions`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ..cost_models.errors import UsageError
from ..cost_models.quantities import parse_seconds
from ..planner.plan_options import PlanOptions
from .option_parameters import parameter
from .options import number_or_auto

Runtime = Annotated[str | None, parameter(PlanOptions, "runtime")]
MiniBatch = Annotated[int | None, parameter(PlanOptions, "mini_batch")]
MicroBatches = Annotated[str, parameter(PlanOptions, "micro_batches")]
Schedule = Annotated[str, parameter(PlanOptions, "schedule")]
Recompute = Annotated[str, parameter(PlanOptions, "recompute")]
Optimizer = Annotated[str, parameter(PlanOptions, "optimizer")]
Precision = Annotated[str, parameter(PlanOptions, "precision")]
GradientDtype = Annotated[str, parameter(PlanOptions, "gradient_dtype")]
Zero = Annotated[int, parameter(PlanOptions, "zero")]
Planner = Annotated[str, parameter(PlanOptions, "planner")]
TimeLimit = Annotated[str, parameter(PlanOptions, "time_limit")]
UseAll = Annotated[bool, parameter(PlanOptions, "use_all")]
MaxStages = Annotated[int | None, parameter(PlanOptions, "max_stages")]
Robust = Annotated[bool, parameter(PlanOptions, "robust")]
CutAfter = Annotated[list[str], parameter(PlanOptions, "cut_after")]
KeepTogether = Annotated[list[str], parameter(PlanOptions, "keep_together")]
Pin = Annotated[list[str], parameter(PlanOptions, "pins")]
SecondsOf = Annotated[str | None, parameter(PlanOptions, "seconds_of")]


@dataclass(frozen=True)
class TrainingOptions:
    """What the options hold, as typed."""

    runtime: str | None
    mini_batch: int | None
    micro_batches: str
    schedule: str
    recompute: str
    optimizer: str
    planner: str = "best"
    time_limit: str = "30s"
    use_all: bool = False
    max_stages: int | None = None
    cut_after: Sequence[str] = ()
    keep_together: Sequence[str] = ()
    pin: Sequence[str] = ()
    robust: bool = False
    precision: str = "auto"
    gradient_dtype: str = "auto"
    zero: int = 0

    def plan_options(self) -> PlanOptions:
        """Raises UsageError."""
        return PlanOptions(
            mini_batch=self.mini_batch,
            micro_batches=number_or_auto(self.micro_batches, "--micro-batches"),
            schedule=self.schedule,
            recompute=self.recompute.replace("-", "_"),
            optimizer=self.optimizer,
            precision=self.precision,
            gradient_dtype=self.gradient_dtype,
            zero=self.zero,
            runtime=self.runtime,
            planner=self.planner,
            time_limit=parse_seconds(self.time_limit, name="--time-limit"),
            use_all=self.use_all,
            max_stages=self.max_stages,
            cut_after=tuple(self.cut_after),
            keep_together=tuple(self.keep_together),
            pins=tuple(pinned(text) for text in self.pin),
            robust=self.robust,
        )


def pinned(text: str) -> tuple[str, int]:
    """`features.10=stage1` as a layer and a stage. Raises UsageError."""
    found = re.fullmatch(r"(.+)=(?:stage)?(\d+)", text)
    if not found:
        raise UsageError(f"--pin {text}: is not a layer and its stage", "Write --pin features.10=stage1.")
    return found[1], int(found[2])
