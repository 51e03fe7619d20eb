"""What the report's page shows where it was computed: an explanation, a frontier, a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isclose
from typing import TYPE_CHECKING, Any

from ...cost_models.quantities import compare_percent, format_bytes, format_seconds, percent
from ...planner.explanation.step_limits import KINDS
from ...planner.plan_file import PlanRow
from ...runtimes.checking.records import Check, CheckedCase
from .page_tables import (
    Column,
    PageTable,
    TableCell,
    bytes_cell,
    count_cell,
    make_table,
    seconds_cell,
    share_cell,
)

if TYPE_CHECKING:
    from ...planner.explanation.explanation import Explanation
    from ...planner.explanation.rivals import Crossover, Sensitivity
    from ...planner.objectives.frontier import Frontier, Point


def summary_text(plan: PlanRow | None, reason: str = "none fits") -> str:
    """A plan in words, or why there is none."""
    if plan is None:
        return reason
    balance = "-".join(map(str, islice(plan.balance, 16))) + ("-…" if len(plan.balance) > 16 else "")
    replicas = f", replicas {'-'.join(map(str, islice(plan.replicas, 16)))}" if max(plan.replicas) > 1 else ""
    again = "" if plan.recompute == "never" else f", recompute {plan.recompute.replace('_', '-')}"
    return f"{balance}{replicas}, {plan.batch}, {plan.schedule}{again}"


def explanation_tables(explanation: Explanation) -> Iterator[PageTable]:
    """What limits the step, the runner-up plans, the sensitivity and the what-ifs."""
    step = explanation.plan.step_seconds
    kinds: list[Column] = [
        ("the step waits for", lambda row: TableCell(KINDS[row.kind])),
        ("time", lambda row: seconds_cell(row.seconds, row.share)),
        ("of the step", lambda row: share_cell(row.share)),
    ]
    yield make_table("Critical path", kinds, explanation.limits.kinds)
    yield make_table("Runner-up plans", _plan_columns("differs in", step), list(_rivals(explanation)))
    if explanation.holds:
        yield _sensitivity_table(explanation.holds)
    changes = [(own.change, own.plan, own.proven, own.reason) for own in explanation.what_if]
    yield make_table("What-if (one change at a time)", _plan_columns("change", step), changes)


def _rivals(explanation: Explanation) -> Iterator[tuple[str, PlanRow | None, bool | None, str]]:
    """The best plan for the same options where it is faster, one that is as fast, and the runner-up plans."""
    better, as_fast = explanation.better, explanation.as_fast
    if better is not None:
        yield ("the shortest step" if explanation.made_for else "the best for its options"), better, None, ""
    if as_fast is not None:
        yield "as fast", as_fast, None, ""
    for own in (explanation.second_best, explanation.other_stages):
        yield own.differs, own.plan, own.proven, own.reason


def _plan_columns(name: str, step: float) -> list[Column]:
    """Of rows of a name, a plan or None, whether it is proven, and why there is none."""
    return [
        (name, lambda row: TableCell(row[0])),
        ("step", lambda row: seconds_cell(None if row[1] is None else row[1].step_seconds)),
        (
            "vs. this plan",
            lambda row: TableCell("-") if row[1] is None else _versus(row[1].step_seconds, step),
        ),
        ("the best plan found", lambda row: TableCell(summary_text(row[1], row[3]))),
        (
            "proven",
            lambda row: TableCell("-" if row[1] is None or row[2] is None else "yes" if row[2] else "no"),
        ),
    ]


def _versus(other: float, step: float) -> TableCell:
    return TableCell(compare_percent(other, step), other / step)


def _sensitivity_table(sensitivities: Sequence[Sensitivity]) -> PageTable:
    rows = [
        (own, turn, end, way)
        for own in sensitivities
        for turn, end, way in ((own.below, own.least, "down"), (own.above, own.most, "up"))
    ]
    columns: list[Column] = [
        ("what", lambda row: TableCell(row[0].what)),
        ("another plan is better from", lambda row: _turn(row[1], row[2], row[3])),
        ("better plan", lambda row: TableCell("-" if row[1] is None else summary_text(row[1].rival))),
        ("its step", lambda row: seconds_cell(None if row[1] is None else row[1].rival.step_seconds)),
        ("the plan's", lambda row: seconds_cell(None if row[1] is None else row[1].plan_seconds)),
    ]
    return make_table("Sensitivity: how wrong an input may be", columns, rows)


def _turn(turn: Crossover | None, end: float, way: str) -> TableCell:
    if turn is None:
        return TableCell("-" if isclose(end, 1.0) else f"none {way} to x {end:.2g}")
    return TableCell(f"x {turn.factor:.2g}", turn.factor)


@dataclass(frozen=True)
class Dot:
    """A plan of the frontier in its drawing, in per cent of it from the left and from the top."""

    x: float
    y: float
    text: str


def frontier_dots(frontier: Frontier) -> list[Dot]:
    """The plans of a frontier, step to the right and memory upwards."""
    steps = [point.step_seconds for point in frontier.points]
    sizes = [point.memory_bytes for point in frontier.points]

    def share(value: float, values: Sequence[float]) -> float:
        low, high = min(values), max(values)
        return 0.5 if high == low else (value - low) / (high - low)

    return [
        Dot(
            round(5 + 90 * share(point.step_seconds, steps), 2),
            round(95 - 90 * share(point.memory_bytes, sizes), 2),
            f"{format_seconds(point.step_seconds)} a step, {format_bytes(point.memory_bytes)}",
        )
        for point in frontier.points
    ]


def frontier_table(frontier: Frontier) -> PageTable:
    """The plans of a frontier."""
    columns: list[Column] = [
        ("step", lambda point: seconds_cell(point.step_seconds)),
        ("most memory", lambda point: bytes_cell(point.memory_bytes)),
        ("", lambda point: TableCell("exact" if point.exact else "best found")),
        ("layers", lambda point: TableCell("-".join(map(str, point.plan.balance[:32])))),
        ("configuration", lambda point: TableCell(_configuration(point))),
    ]
    return make_table("Step time against the most memory that a device needs", columns, frontier.points)


def _configuration(point: Point) -> str:
    plan = point.plan
    recompute = plan.recompute.replace("_", "-")
    return f"{plan.batch}, {plan.schedule}, recompute {recompute}"


def check_tables(check: Check) -> Iterator[PageTable]:
    """Predicted against measured: the step of every case, and the stages of the plan."""
    columns: list[Column] = [
        ("", lambda case: TableCell(case.name)),
        ("predicted", lambda case: seconds_cell(case.expected_step_seconds)),
        ("measured", lambda case: seconds_cell(case.measured_step_seconds)),
        ("error", lambda case: _signed(case.error)),
    ]
    yield make_table("The step, predicted against measured", columns, check.cases)
    yield _checked_stages(check.of_plan)
    if any(device.measured_bytes is not None for device in check.of_plan.devices):
        yield _checked_memory(check.of_plan)


def _checked_stages(case: CheckedCase) -> PageTable:
    def seconds(source: str, direction: str) -> Column:
        word = {"planned": "predicted", "measured": "measured"}[source]
        return f"{direction}: {word}", lambda row: seconds_cell(getattr(getattr(row[1], source), direction))

    columns: list[Column] = [
        ("stage", lambda row: count_cell(row[0])),
        *(seconds(source, way) for way in ("forward", "backward") for source in ("planned", "measured")),
    ]
    return make_table(
        "Stages of the plan; time per micro-batch per replica", columns, list(enumerate(case.stages))
    )


def _checked_memory(case: CheckedCase) -> PageTable:
    columns: list[Column] = [
        ("device", lambda device: count_cell(device.device)),
        ("ledger", lambda device: bytes_cell(device.planned_bytes)),
        ("of it not seen", lambda device: bytes_cell(sum(device.unseen.values()))),
        ("measured", lambda device: bytes_cell(device.measured_bytes)),
        ("error", lambda device: TableCell("") if device.error is None else _signed(device.error)),
    ]
    return make_table("Peak memory, the ledger against a measured step", columns, case.devices)


def _signed(share: float) -> TableCell:
    return TableCell(f"{'+' if share >= 0 else '-'}{percent(abs(share))}", share)


def check_sentence(check: Check) -> str:
    """What was measured, in a line."""
    own: Any = check.of_plan
    how = "its stages waited instead of computing" if check.emulated else "trained for real"
    return (
        f"Measured on {check.device_name} ({how}): {format_seconds(own.measured_step_seconds)} a step, "
        f"predicted were {format_seconds(own.expected_step_seconds)}."
    )
