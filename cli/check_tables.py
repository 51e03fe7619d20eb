"""What `pplan check` prints: predicted, measured and error, of each stage and of the step."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console

from ..cost_models.quantities import (
    compare_steps,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    percent,
    ranges,
    three_digits,
)
from ..runtimes.checking.records import (
    PLAN,
    SAME_LOSS,
    Check,
    CheckedCase,
    CheckedDevice,
    CheckedStage,
    CrossValidation,
    HeldOutCase,
    StageSeconds,
)
from .table import Column, line, number, print_table, text, word


def print_check(check: Check, console: Console) -> None:
    """Prints everything about a check."""
    line(console, _answer(check), style="bold")
    line(console, _where(check))
    _print_steps(check, console)
    for case in check.cases:
        _print_stages(case, console)
    for case in check.cases:
        if case.devices and any(device.measured_bytes is not None for device in case.devices):
            _print_memory(case, console)
    if check.cross_validation is not None:
        _print_held_out(check.cross_validation, console)
    console.print()
    for remark_line in (
        *_gain(check),
        *_losses(check),
        *_corrections(check),
        *_verdict(check),
        *(f"Note: {note}" for note in check.notes),
    ):
        line(console, remark_line)


def _answer(check: Check) -> str:
    case = check.of_plan
    return (
        f"{check.model}: a step takes {format_seconds(case.measured_step_seconds)}, predicted were "
        f"{format_seconds(case.expected_step_seconds)} ({signed(case.error)})."
    )


def _where(check: Check) -> str:
    how = "stages that wait, emulated" if check.emulated else "trained for real"
    steps = format_count(len(check.of_plan.step_seconds), "step")
    processes = "1 process" if check.processes == 1 else f"{check.processes} processes"
    of = "torch.distributed.pipelining" if check.runtime == "torch" else check.runtime
    over = "" if check.processes == 1 and check.runtime != "torch" else f" over {check.backend}"
    return f"{processes} of {of}{over} on {check.device_name}; {how}, median of {steps}."


def signed(share: float) -> str:
    """`+3.1 %`."""
    return f"{'+' if share >= 0 else '-'}{percent(abs(share))}"


def _print_steps(check: Check, console: Console) -> None:
    calibrated = any(case.calibrated_step_seconds is not None for case in check.cases)
    columns: list[Column[CheckedCase]] = [
        text("", lambda case: case.name, min_width=16),
        text("layers", lambda case: ", ".join(map(str, case.balance)), drop=2, min_width=16),
        number("predicted", lambda case: case.predicted_step_seconds, format_seconds),
        number("error", lambda case: _error(case, case.predicted_step_seconds), signed, drop=4),
        number("calibrated", lambda case: case.calibrated_step_seconds, format_seconds, visible=calibrated),
        number("error ", lambda case: _error(case, case.calibrated_step_seconds), signed, visible=calibrated),
        number("measured", lambda case: case.measured_step_seconds, format_seconds),
        number("spread", _spread, percent, drop=1),
    ]
    print_table(console, columns, check.cases, title="The step")


def _error(case: CheckedCase, predicted: float | None) -> float | None:
    return None if predicted is None else predicted / case.measured_step_seconds - 1


def _spread(case: CheckedCase) -> float | None:
    """None: one step was timed."""
    if len(case.step_seconds) < 2:
        return None
    return (max(case.step_seconds) - min(case.step_seconds)) / case.measured_step_seconds


class _PassRow(NamedTuple):
    """A stage's forward, or its backward."""

    number: int
    name: str
    stage: CheckedStage
    planned: float
    measured: float


def _print_stages(case: CheckedCase, console: Console) -> None:
    rows = [
        row
        for number, stage in enumerate(case.stages)
        for row in (
            _PassRow(number, "forward", stage, *(own.forward for own in _seconds(stage))),
            _PassRow(number, "backward", stage, *(own.backward for own in _seconds(stage))),
        )
    ]
    columns: list[Column[_PassRow]] = [
        number("stage", lambda row: row.number),
        word("layers", lambda row: f"{row.stage.first_layer}-{row.stage.last_layer}", drop=1),
        word("devices", lambda row: row.stage.devices, ranges),
        word("pass", lambda row: row.name),
        number("predicted", lambda row: row.planned, format_seconds),
        number("measured", lambda row: row.measured, format_seconds),
        number("error", lambda row: row.planned / row.measured - 1 if row.measured else None, signed),
    ]
    name = "the plan" if case.name == PLAN else case.name
    title = f"Stages of {name}; time per micro-batch per replica"
    print_table(console, columns, rows, title=title)


def _seconds(stage: CheckedStage) -> tuple[StageSeconds, StageSeconds]:
    return stage.planned, stage.measured


def _print_memory(case: CheckedCase, console: Console) -> None:
    unseen = list(dict.fromkeys(term for device in case.devices for term in device.unseen))
    columns: list[Column[CheckedDevice]] = [
        number("device", lambda device: device.device),
        number("ledger", lambda device: device.planned_bytes, format_bytes),
        *(_unseen_column(term) for term in unseen),
        number("predicted", lambda device: device.expected_bytes, format_bytes),
        number("measured", lambda device: device.measured_bytes, format_bytes),
        number("error", lambda device: device.error, signed),
    ]
    print_table(console, columns, case.devices, title=f"Peak memory, {case.name}")


def _unseen_column(term: str) -> Column[CheckedDevice]:
    """A term of the ledger that the measurement cannot see."""
    label = f"less {term.replace('_', ' ')}"
    return number(label, lambda device: device.unseen.get(term), format_bytes, drop=1)


def _print_held_out(validation: CrossValidation, console: Console) -> None:
    columns: list[Column[HeldOutCase]] = [
        text("", lambda case: case.name, min_width=16),
        number("predicted", lambda case: case.predicted_step_seconds, format_seconds),
        number("error", lambda case: case.predicted_error, signed),
        number("calibrated", lambda case: case.calibrated_step_seconds, format_seconds),
        number("error ", lambda case: case.calibrated_error, signed),
        number("measured", lambda case: case.measured_step_seconds, format_seconds),
    ]
    title = "Calibration, tested on cases that it was not fitted to"
    print_table(console, columns, validation.cases, title=title)


def _verdict(check: Check) -> list[str]:
    """Return whether the calibration improves the prediction of other cases."""
    validation = check.cross_validation
    if validation is None:
        return []
    errors = (
        f"their mean error is {percent(validation.calibrated_error)} with it and "
        f"{percent(validation.predicted_error)} without it"
    )
    if validation.improves:
        return [f"The calibration improves the prediction of cases that it was not fitted to: {errors}."]
    if (plan := validation.worse_plan) is None:
        return [
            "The calibration is rejected, because it does not improve the prediction of cases that it was "
            f"not fitted to: {errors}."
        ]
    return [
        "The calibration is rejected, because it makes the prediction of the plan worse: its error is "
        f"{signed(plan.calibrated_error)} with it and {signed(plan.predicted_error)} without it."
    ]


def _gain(check: Check) -> list[str]:
    """The plan against the others, measured."""
    plan_seconds = check.of_plan.measured_step_seconds
    lines = []
    for other in check.cases:
        if other.name != PLAN:
            versus = compare_steps(plan_seconds, other.measured_step_seconds)
            than = {"the same": "as fast as", "nearly the same": "nearly as fast as"}.get(
                versus, f"{versus} than"
            )
            lines.append(f"The plan is {than} the {other.name}, measured.")
    return lines


def _losses(check: Check) -> list[str]:
    losses = check.of_plan.losses
    if losses is None:
        return []
    if losses.plain is None:
        return [f"The losses were not compared: {losses.reason}."]
    steps, difference = format_count(len(losses.plain), "step"), losses.difference or 0.0
    if check.of_plan.same_losses:
        return [f"The losses of {steps} are the plain model's (difference {difference:.1e})."]
    pairs = ", ".join(
        f"{one:.6g} for {other:.6g}" for one, other in zip(losses.pipeline, losses.plain, strict=True)
    )
    return [f"The losses of {steps} are NOT the plain model's: {pairs} (allowed {SAME_LOSS:g})."]


def _corrections(check: Check) -> list[str]:
    corrections = check.corrections
    if corrections is None:
        return []
    parts = [
        f"an action takes {format_seconds(corrections.overhead)} besides "
        f"({format_seconds(corrections.looped_overhead)} in loops of several stages)",
        f"stages take {three_digits(corrections.slowdown)} x what the plan says",
    ]
    if corrections.latency is not None and corrections.bandwidth is not None:
        parts.append(
            f"a transfer {format_seconds(corrections.latency)} and {format_rate(corrections.bandwidth)}"
        )
    return [f"Calibrated: {'; '.join(parts)}."]
