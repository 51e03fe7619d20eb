"""What a caller may ask for: the options, each declared once, where it is used, and their keywords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

from ..cost_models import arguments
from ..cost_models.errors import UsageError
from ..cost_models.machines.machine_options import MachineKeywords
from ..cost_models.option_fields import Options, option
from ..cost_models.option_readers import read_whole_number
from ..cost_models.schedules.registration import optional_schedule
from ..planner.objectives.objective import ObjectiveKeywords
from ..planner.plan_options import PlanKeywords, TrainingKeywords


class ProblemKeywords(MachineKeywords, PlanKeywords, total=False):
    """The options of a problem."""

    gpus: int | None


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
