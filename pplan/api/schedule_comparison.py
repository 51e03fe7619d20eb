"""Schedules side by side, on a plan's layers or on costs alone, and the list of those that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..cost_models.arguments import arguments_class, list_declarations, takes
from ..cost_models.errors import UsageError, short_repr
from ..cost_models.figures import Drawing
from ..cost_models.machines import DeviceOptions
from ..cost_models.program import Schedule
from ..cost_models.quantities import compare_steps, format_bytes, format_seconds, html_table, percent
from ..cost_models.schedule_text import schedule_word
from ..cost_models.schedules import SCHEDULES
from ..planner.plan_file import TIE, Plan
from ..planner.plan_options import Overrides
from ..profiler.profile_file import Profile
from .simulate import (
    SimulateArguments,
    SimulateCostsArguments,
    SimulatedStep,
    plot_timelines,
    simulate,
    simulate_costs,
)
from .stage_costs import CostOptions

Update: TypeAlias = Literal["", "asynchronous", "no barrier"]


class ScheduleList(dict[str, Schedule]):
    """Schedules by their names; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = [(own.name, own.bubble, own.in_flight_formula, own.source) for own in self.values()]
        return html_table("Schedules", ("name", "bubble", "micro-batches in flight", "source"), rows)


def schedules() -> ScheduleList:
    """The schedules that pplan simulates, by name, those of papers first and then those that you registered.

    >>> import pplan
    >>> schedule = pplan.schedules()["zb-h1"]
    >>> schedule.needs
    'input and weight gradients computed apart'
    >>> len(schedule.program(stages=4, micro_batches=8).actions)
    4
    """
    return ScheduleList(SCHEDULES)


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule in a comparison.

    Attributes:
        schedule: Name of the schedule.
        seconds: One step by itself, from an empty pipeline until all stages are done: the pace if the
            optimizer step is a barrier. None if the schedule cannot run these numbers.
        bubble: Idle share of the devices in `seconds`.
        steady_seconds: One step where steps follow one another without a barrier.
        steady_bubble: Idle share of the devices in `steady_seconds`.
        update: What a pace of `steady_seconds` needs: "asynchronous" weight updates, with stale gradients, or
            a synchronous update with "no barrier" between stages. Empty if it needs neither.
        in_flight: Micro-batches on the device that holds most.
        memory_bytes: Memory of the device of a plan that needs most.
        fits: Whether all devices of a plan have the memory that they need.
        reason: Why the schedule cannot run these numbers.
    """

    schedule: str
    seconds: float | None = None
    bubble: float | None = None
    steady_seconds: float | None = None
    steady_bubble: float | None = None
    update: Update = ""
    in_flight: float | None = None
    memory_bytes: int | None = None
    fits: bool | None = None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class ScheduleComparison:
    """Schedules side by side.

    Attributes:
        rows: The schedules by `steady_seconds`, then by `seconds`; those that cannot run are last.
        steps: Simulated steps by the schedules' names.
    """

    rows: tuple[ScheduleRow, ...]
    steps: dict[str, SimulatedStep]

    def __repr__(self) -> str:
        first = self.rows[0]
        seconds = format_seconds(first.steady_seconds or 0.0)
        return f"<ScheduleComparison of {len(self.rows)}: {first.schedule} is the fastest, {seconds}>"

    def _repr_html_(self) -> str:
        """Of a notebook."""
        measures = ("step by itself", "bubble", "steady step", "bubble", "vs. the first", "needs")
        return html_table(
            "Schedules", ("schedule", *measures, "in flight", "most memory"), map(self._cells, self.rows)
        )

    def _cells(self, row: ScheduleRow) -> list[str]:
        if row.seconds is None:
            return [row.schedule, "-", "-", "-", "-", row.reason, "-", "-", "-"]
        steady = row.steady_seconds or 0.0
        return [
            row.schedule,
            format_seconds(row.seconds),
            percent(row.bubble or 0.0),
            format_seconds(steady),
            percent(row.steady_bubble or 0.0),
            compare_steps(steady, self.rows[0].steady_seconds or 0.0),
            row.update or "-",
            f"{row.in_flight:g}",
            _memory_words(row),
        ]

    def plot(self, **style: Any) -> Drawing:
        """Draw the timelines of all schedules that can run, the fastest first, on one time axis.

        Args:
            style: Fields of `FigureOptions`: `title`, `size`, `font`, `font_size`, `greyscale`, `colour_by`.

        Returns:
            The figure. A notebook shows it; `save("schedules.pdf")` writes it as PDF, PNG or SVG.

        Raises:
            MachineError: matplotlib is not installed.
            UsageError: An option is wrong.
        """
        steps = {row.schedule: self.steps[row.schedule] for row in self.rows if row.seconds is not None}
        return plot_timelines(steps, **{"title": "Schedules side by side", **style})

    def to_records(self) -> list[dict[str, Any]]:
        """The rows, for a table of another library: `pandas.DataFrame(comparison.to_records())`."""
        return [vars(row) for row in self.rows]


def _memory_words(row: ScheduleRow) -> str:
    if row.memory_bytes is None:
        return "-"
    return format_bytes(row.memory_bytes) + ("" if row.fits else ", does not fit")


@arguments_class
class CompareSchedulesArguments(CostOptions, Overrides, DeviceOptions):
    """The arguments of `compare_schedules`: those of `simulate` for a plan, else of `simulate_costs`."""

    schedules: Sequence[str] = field(default=(), kw_only=False)
    plan: Plan | str | Path | None = field(default=None, kw_only=False)
    profile: Profile | str | Path | None = field(default=None, kw_only=False)


@takes(CompareSchedulesArguments)
def compare_schedules(
    schedules: Sequence[str] = (),
    plan: Plan | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    **options: Any,
) -> ScheduleComparison:
    """Simulate the `schedules` (none named: all) with the same costs, and list the fastest first.

    Of a `plan` with the `profile` that it was made from, on its cuts: the `options` are those of `simulate`.
    Without a plan, of costs: the `options` are those of `simulate_costs`.

    >>> import pplan
    >>> comparison = pplan.compare_schedules(
    ...     ["gpipe", "1f1b", "zb-h1"], stages=4, micro_batches=8, forward_ms=10, backward_ms=10, weight_ms=10
    ... )
    >>> [(row.schedule, round(row.seconds, 3), row.in_flight) for row in comparison.rows]
    [('zb-h1', 0.27, 4), ('gpipe', 0.33, 8), ('1f1b', 0.33, 4)]

    Without a barrier at the optimizer step, steps of ZB-H2 follow one another faster:

    >>> (row,) = pplan.compare_schedules(
    ...     ["zb-h2"], stages=4, micro_batches=8, forward_ms=10, backward_ms=10, weight_ms=10
    ... ).rows
    >>> round(row.seconds, 3), round(row.steady_seconds, 3), row.update
    (0.27, 0.24, 'no barrier')

    Of the result: `rows`, `steps`, `plot()`, `to_records()`. Raises UsageError (also where no schedule can
    run), FileError.
    """
    if isinstance(schedules, str) or not hasattr(schedules, "__iter__"):
        raise UsageError(
            f"schedules={short_repr(schedules)}: is no list of names but of type {type(schedules).__name__}",
            'For example: ["1f1b", "zb-h1"].',
        )
    names = [schedule_word(f"schedules[{index}]", name, ()) for index, name in enumerate(schedules)]
    step = _simulator(plan, profile, dict(options))
    steps: dict[str, SimulatedStep] = {}
    rows, errors = [], []
    for name in dict.fromkeys(names or SCHEDULES):
        try:
            steps[name] = step(name)
            rows.append(_row(name, steps[name]))
        except UsageError as error:
            errors.append(error)
            rows.append(ScheduleRow(name, reason=error.what))
    if not steps:
        raise errors[0]
    rows.sort(key=lambda row: (row.seconds is None, row.steady_seconds, row.seconds))
    return ScheduleComparison(tuple(rows), steps)


def _simulator(
    plan: Plan | str | Path | None, profile: Profile | str | Path | None, options: dict[str, Any]
) -> Callable[[str], SimulatedStep]:
    """What simulates a schedule. Raises UsageError for options that the other way has."""
    of_plan = plan is not None or profile is not None
    names = list_declarations(SimulateArguments if of_plan else SimulateCostsArguments).keys()
    for name in options:
        if name == "schedule":
            raise UsageError(f"schedule={short_repr(options[name])}: one", "Give all of them in `schedules`.")
        if name not in names:
            hint = "Omit it, or the plan." if of_plan else "Give a plan and its profile, or omit it."
            raise UsageError(f"{name}={short_repr(options[name])}: {_OTHER[of_plan]}", hint)
    if plan is None and of_plan:
        raise UsageError("plan=None: a profile without the plan", "Give the plan, too.")
    if plan is None:
        return lambda name: simulate_costs(schedule=name, **options)
    if profile is None:
        raise UsageError("profile=None: the plan without its profile", "Give the profile of the plan, too.")
    return lambda name: simulate(plan, profile, schedule=name, **options)


_OTHER = {True: "is of costs without a plan", False: "is of a plan"}


def _row(name: str, step: SimulatedStep) -> ScheduleRow:
    simulation, seconds = step.simulation, step.step_seconds
    steady = step.longest_span_seconds
    update: Update = ""
    if simulation.steady is not None:
        steady = simulation.steady.seconds_per_micro_batch * simulation.micro_batches
        update = "asynchronous"
    elif steady < seconds * (1 - TIE):
        update = "no barrier"
    else:
        steady = seconds
    row = ScheduleRow(
        schedule=name,
        seconds=seconds,
        bubble=step.bubble,
        steady_seconds=steady,
        steady_bubble=max(0.0, 1 - sum(step.busy_seconds) / (step.stages * steady)) if steady else 0.0,
        update=update,
        in_flight=max(step.peak_in_flight),
    )
    if not simulation.memory:
        return row
    fits = all(own.limit_bytes is None or own.bytes <= own.limit_bytes for own in simulation.memory)
    return replace(row, memory_bytes=max(int(own.bytes) for own in simulation.memory), fits=fits)
