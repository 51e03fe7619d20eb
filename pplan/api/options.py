"""What a caller may ask for: the options, each declared once, where it is used, and their keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

from ..cost_models import arguments
from ..cost_models.errors import UsageError
from ..cost_models.machines.machine_options import MachineKeywords, MachineOptions
from ..cost_models.option_fields import (
    Option,
    Options,
    describe_options,
    list_declarations,
    option,
    options_from,
    unknown_option,
)
from ..cost_models.option_readers import read_whole_number
from ..cost_models.schedules.registration import optional_schedule
from ..planner.degrees.degree_options import DegreeKeywords
from ..planner.explanation.explain_options import ExplainKeywords, ExplainOptions
from ..planner.objectives.objective import ObjectiveKeywords, ObjectiveOptions
from ..planner.overrides import OverrideKeywords, Overrides
from ..planner.plan_options import PlanKeywords, PlanOptions, TrainingKeywords
from ..profiler.importing.import_options import ImportKeywords, ProfileImportOptions
from ..profiler.profile_options import (
    LinkOptions,
    ProfileKeywords,
    ProfileOptions,
    TensorParallelKeywords,
    TensorParallelOptions,
    TransformerSizes,
)
from .check_options import CheckKeywords, CheckOptions
from .stage_costs import CostKeywords, CostOptions


class MeasuringKeywords(ProfileKeywords, TensorParallelKeywords, total=False):
    """The options of a profile, and of layers that several processes share."""


class ProblemKeywords(MachineKeywords, PlanKeywords, total=False):
    """The options of a problem."""

    gpus: int | None


class OtherMethodKeywords(ProblemKeywords, total=False):
    """The options of a problem, and the fields of `OtherMethodOptions`."""

    servers: int
    staleness: int
    push_every: int
    fetch_every: int
    memory_bandwidth: float | None
    watts: Mapping[str, tuple[float, float]] | str | None


class SolveKeywords(ProblemKeywords, ObjectiveKeywords, total=False):
    """The options of a problem, and what its plan is to be the best of."""


class FrontierKeywords(ProblemKeywords, total=False):
    """The options of a problem, and the fields of `FrontierOptions`."""

    points: int
    memory_step: float


class SweepKeywords(MachineKeywords, PlanKeywords, ObjectiveKeywords, total=False):
    """The options of all problems of a grid, and the fields of `SweepOptions`."""

    gpus: int
    jobs: int | None
    backend: Literal["processes", "dask", "ray"] | str


class DegreesKeywords(MachineKeywords, DegreeKeywords, total=False):
    """The options of `degrees`, besides the configuration."""


class SimulateKeywords(MachineKeywords, OverrideKeywords, total=False):
    """The options of `simulate`: overrides of the plan, and of its machine."""


class SimulateCostsKeywords(CostKeywords, total=False):
    """The options of `simulate_costs`."""

    schedule: Required[str]


class CompareSchedulesKeywords(MachineKeywords, total=False):
    """The options of `simulate`, where a plan is given, else those of `simulate_costs`; no schedule."""

    forward_ms: float | Sequence[float] | None
    backward_ms: float | Sequence[float] | None
    weight_ms: float | Sequence[float] | None
    transfer_ms: float | Sequence[float] | None
    stages: int | None
    micro_batches: int | None
    virtual_stages: int | None
    replicas: int | None
    transfers: Literal["overlapped", "blocking", "blocking-receive", "rendezvous"] | str


class PartitionKeywords(TypedDict, total=False):
    """The fields of `PartitionOptions`, as a caller may give them."""

    schedule: str | None
    virtual_stages: int | None
    replicas: int | None
    recompute: str | None


class ImportPlanKeywords(MachineKeywords, TrainingKeywords, PartitionKeywords, total=False):
    """The options of a plan that a partition of another tool makes."""

    gpus: int | None


def _number(form: str, help: str, panel: str | None = None) -> Any:
    return option(None, arguments.optional_whole, help, form, least=1, panel=panel)


def _schedule(help: str, panel: str | None = None) -> Any:
    return option(None, optional_schedule, help, "NAME|FILE", panel=panel)


@dataclass(frozen=True)
class PartitionOptions(Options):
    """What a partition of another tool does not say; None: as it says, else the best. `virtual_stages`: of a
    device; `replicas`: of every stage."""

    schedule: str | None = _schedule(
        "Where the partition does not say it; default: the faster of 1f1b and gpipe."
    )
    virtual_stages: int | None = _number("V", "Stages on each device.")
    replicas: int | None = _number("R", "Devices that share every stage.")
    recompute: str | None = option(
        None,
        arguments.optional_word,
        "Where the partition does not say it; default: if out of memory.",
        "never|always|except-last|auto",
        words=("never", "always", "except-last", "auto"),
    )


class ReplanKeywords(TypedDict, total=False):
    """The fields of `ReplanOptions`, as a caller may give them."""

    lost: Required[Sequence[int]]
    within: float


def _ranks(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise UsageError(f"{name}={values!r}: must be a list of ranks", f"Give {name}=[3, 7], say.")
    return tuple(arguments.whole(name, value, at_least=0) for value in values)


def _read_ranks(text: str, name: str) -> tuple[int, ...]:
    return tuple(read_whole_number(0)(part, name) for part in text.split(","))


def _read_share(text: str, name: str) -> float:
    number = text.strip().removesuffix("%").strip()
    try:
        return float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{name} {text}: is not a share of the step", f"Write {name} 5%, say.") from None


@dataclass(frozen=True)
class ReplanOptions(Options):
    """`lost`: ranks of the devices that are gone. `within`: of plans whose step is longer than the fastest
    one's by at most this share, the one that moves the fewest bytes."""

    lost: tuple[int, ...] = option(
        (), _ranks, "Ranks of the devices that are gone.", "N,N,...", read=_read_ranks
    )
    within: float = option(
        0.05,
        arguments.number,
        "Of plans at most so much slower than the fastest, the one that moves the fewest bytes of weights.",
        "5%",
        read=_read_share,
        default_text="5%",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.within <= 10:
            raise UsageError(f"within={self.within:g}: must be from 0 to 10", "Give within=0.05, say.")


@dataclass(frozen=True)
class FrontierOptions(Options):
    """`points`: at most so many plans, each with less memory than the one before by the share `memory_step`
    at least (0: none is left out)."""

    points: int = option(
        24,
        arguments.whole,
        "Of `frontier`: at most so many plans, 2 % of memory apart.",
        "N",
        least=1,
        panel="The objective",
    )
    memory_step: float = option(0.02, arguments.number)


@dataclass(frozen=True)
class SweepOptions(Options):
    """`jobs`: how many points run side by side (None: as many as there are cores). `backend`: processes of
    this machine, or a cluster of Dask (at DASK_SCHEDULER_ADDRESS) or Ray."""

    backend: str = option(
        "processes",
        arguments.word,
        "Of `sweep`: where it runs, on this machine or a cluster.",
        "processes|dask|ray",
        panel="Many problems",
    )
    jobs: int | None = _number(
        "N", "Of `sweep`: how many run at once; default: one per core.", "Many problems"
    )


__all__ = [
    "CheckKeywords",
    "CheckOptions",
    "CompareSchedulesKeywords",
    "CostOptions",
    "ExplainKeywords",
    "ExplainOptions",
    "FrontierKeywords",
    "FrontierOptions",
    "ImportKeywords",
    "ImportPlanKeywords",
    "LinkOptions",
    "MachineKeywords",
    "MachineOptions",
    "MeasuringKeywords",
    "ObjectiveKeywords",
    "ObjectiveOptions",
    "Option",
    "Options",
    "OtherMethodKeywords",
    "OverrideKeywords",
    "Overrides",
    "PartitionKeywords",
    "PartitionOptions",
    "PlanKeywords",
    "PlanOptions",
    "ProblemKeywords",
    "ProfileImportOptions",
    "ProfileKeywords",
    "ProfileOptions",
    "ReplanKeywords",
    "ReplanOptions",
    "SimulateCostsKeywords",
    "SimulateKeywords",
    "SolveKeywords",
    "SweepKeywords",
    "SweepOptions",
    "TensorParallelKeywords",
    "TensorParallelOptions",
    "TrainingKeywords",
    "TransformerSizes",
    "describe_options",
    "list_declarations",
    "options_from",
    "unknown_option",
]
