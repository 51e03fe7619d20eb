"""What a caller may ask for: the options, each declared once, where it is used, and their keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, read_whole_number, settings_option
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineKeywords
from ..cost_models.quantities import parse_time
from ..cost_models.runtime import RUNNABLE
from ..cost_models.schedule_text import optional_schedule
from ..planner.degrees.degree_options import ConfigurationKeywords
from ..planner.objectives.objective import ObjectiveKeywords
from ..planner.plan_options import PlanKeywords, TrainingKeywords


class ProblemKeywords(MachineKeywords, PlanKeywords, total=False):
    """The options of a problem."""

    gpus: int | None


class SolveKeywords(ProblemKeywords, ObjectiveKeywords, ConfigurationKeywords, total=False):
    """The options of a problem, what its plan is to be the best of, and those of a configuration."""


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


class CheckKeywords(TypedDict, total=False):
    """The fields of `CheckOptions`, as a caller may give them."""

    runtime: str
    model: str | None
    settings: Mapping[str, object] | None
    loss: str | None
    input_like: str | None
    device: Literal["auto", "cpu", "cuda"] | str
    emulate: bool
    even: bool
    calibrate: bool
    calibration: str | Path | None
    steps: int
    timeout: float | None


def _settings(name: str, value: Any) -> dict[str, object]:
    return arguments.settings(name, value) or {}


def _check_device(name: str, value: Any) -> str:
    if arguments.word(name, value) not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {value!r} is not known", "Use auto, cpu or cuda.")
    return str(value)


@dataclass(frozen=True)
class CheckOptions(Options):
    """The options of a check. Raises UsageError.

    `runtime`: torch (torch.distributed.pipelining), torchgpipe, fairscale or deepspeed. `model`, `loss` and
    `input_like` of yours, where the profile's are not taken (their code is imported then, and else never),
    with `settings`, what the model was profiled with. `device`: CUDA with a GPU each, "cpu" with one thread
    each, or what there is enough of. `emulate`: the stages wait as long as the plan says they compute.
    `even`: the even split of as many stages runs beside it. `calibrate`: other schedules run first,
    overhead, link and slowdown are fitted to them, and the fit is kept only if it improves the prediction of
    cases that were not fitted; `calibration`: a file of what was fitted before. `steps`:
    how many are timed. `timeout`: seconds after which a step that does not end is given up (None: 120, or
    several times what it is predicted to take).
    """

    model: str | None = option(
        None,
        arguments.optional_word,
        "The model, where it is your own: package.module:factory. A file's word runs no code.",
        "NAME",
    )
    settings: Mapping[str, Any] = settings_option("As the model was profiled with; repeatable.", _settings)
    loss: str | None = option(
        None,
        arguments.optional_word,
        "The loss, where it is your own: package.module:function.",
        "NAME",
    )
    input_like: str | None = option(
        None,
        arguments.optional_word,
        "The function that the example input is of, where the model was profiled with one.",
        "MODULE:FUNCTION",
    )
    runtime: str = option(
        "torch",
        arguments.word,
        f"What runs it: {', '.join(RUNNABLE)}.",
        "NAME",
        words=RUNNABLE,
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto",
        _check_device,
        "auto: CUDA where there are enough GPUs, else a core for each process.",
        "auto|cpu|cuda",
        words=("auto", "cpu", "cuda"),
    )
    emulate: bool = option(
        False,
        arguments.flag,
        "Stages wait as long as the plan says they compute: for more devices than this machine has.",
    )
    even: bool = option(True, arguments.flag, "Do not run the even split beside the plan.", flag="no-even")
    calibrate: bool = option(
        False,
        arguments.flag,
        "Run other schedules first and fit overhead, link and slowdown to them. Only if that improves the "
        "prediction of cases that were not fitted, write it beside the plan and solve again; else end with "
        "status 4.",
    )
    calibration: Path | None = option(
        None, arguments.optional_path, "Corrections that an earlier `calibrate` wrote.", "FILE"
    )
    steps: int = option(5, arguments.whole, "Steps that are timed.", "N", least=1)
    timeout: float | None = option(
        None,
        arguments.optional_number,
        "How long a step may take before the check gives up; default: 120 s, or more where the plan says so.",
        "120s",
        read=parse_time,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate and self.calibration is not None:
            raise UsageError("check: both `calibrate` and `calibration`", "Give one of them.")
        if self.timeout is not None and self.timeout < 1:
            raise UsageError(f"timeout={self.timeout:g}: must be at least 1 s", "For example: timeout=120.")
