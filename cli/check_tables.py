"""What `pplan check` prints: predicted, measured and error, of each stage and of the step."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import counted, format_bytes, format_rate, format_seconds
from ..runtimes.checking.check_report import PLAN, SAME_LOSS, Check, CheckedCase
from .number_format import compared, percent, ranges, three_digits
from .table_style import figure, line, table, text, titled, word


def print_check(found: Check, console: Console) -> None:
    """Prints everything about a check."""
    line(console, _answer(found), style="bold")
    line(console, _where(found))
    titled(console, "The step", _steps(found, console))
    for case in found.cases:
        name = "the plan" if case.name == PLAN else case.name
        titled(console, f"Stages of {name}; time per micro-batch per replica", _stages(case, console))
    for case in found.cases:
        if case.devices and any(own.measured_bytes is not None for own in case.devices):
            titled(console, f"Peak memory, {case.name}", _memory(case, console))
    console.print()
    for said in (
        *_gain(found),
        *_losses(found),
        *_corrections(found),
        *(f"Note: {note}" for note in found.notes),
    ):
        line(console, said)


def _answer(found: Check) -> str:
    own = found.of_plan
    return (
        f"{found.model}: a step takes {format_seconds(own.measured_step_seconds)}, predicted were "
        f"{format_seconds(own.expected_step_seconds)} ({signed(own.error)})."
    )


def _where(found: Check) -> str:
    how = "stages that wait, emulated" if found.emulated else "trained for real"
    steps = counted(len(found.of_plan.step_seconds), "step")
    processes = "1 process" if found.processes == 1 else f"{found.processes} processes"
    of = "torch.distributed.pipelining" if found.runtime == "torch" else found.runtime
    over = "" if found.processes == 1 and found.runtime != "torch" else f" over {found.backend}"
    return f"{processes} of {of}{over} on {found.device_name}; {how}, median of {steps}."


def signed(share: float) -> str:
    """`+3.1 %`."""
    return f"{'+' if share >= 0 else '-'}{percent(abs(share))}"


def _steps(found: Check, console: Console) -> Table:
    calibrated = any(case.calibrated_step_seconds is not None for case in found.cases)
    columns = [
        text("", folds_at=16),
        text("layers", leaves=2, folds_at=16),
        figure("plan says", leaves=3),
        figure("predicted"),
        figure("error", leaves=4),
        *([figure("calibrated"), figure("error ")] if calibrated else []),
        figure("measured"),
        figure("spread", leaves=1),
    ]
    rows = []
    for case in found.cases:
        measured = case.measured_step_seconds
        fixed = case.calibrated_step_seconds
        more = [] if fixed is None else [format_seconds(fixed), signed(fixed / measured - 1)]
        rows.append(
            [
                case.name,
                ", ".join(map(str, case.balance)),
                format_seconds(case.planned_step_seconds),
                format_seconds(case.predicted_step_seconds),
                signed(case.predicted_step_seconds / measured - 1),
                *(more if calibrated else []),
                format_seconds(measured),
                percent((max(case.step_seconds) - min(case.step_seconds)) / measured),
            ]
        )
    return table(console, columns, rows)


def _stages(case: CheckedCase, console: Console) -> Table:
    columns = [
        figure("stage"),
        word("layers", leaves=3),
        word("devices", leaves=2),
        figure("forward\nplan says", leaves=4),
        figure("\nalone"),
        figure("\nmeasured"),
        figure("\nerror", leaves=5),
        figure("backward\nplan says", leaves=4),
        figure("\nalone"),
        figure("\nmeasured"),
        figure("\nerror", leaves=5),
    ]
    rows = []
    for number, stage in enumerate(case.stages):
        cells = [str(number), f"{stage.first_layer}-{stage.last_layer}", ranges(stage.devices)]
        for name in ("forward", "backward"):
            planned, alone, measured = (
                float(getattr(own, name)) for own in (stage.planned, stage.alone, stage.measured)
            )
            cells += [*map(format_seconds, (planned, alone, measured))]
            cells.append(signed(alone / measured - 1) if measured else "-")
        rows.append(cells)
    return table(console, columns, rows)


def _memory(case: CheckedCase, console: Console) -> Table:
    rows = []
    for own in case.devices:
        measured = own.measured_bytes
        rows.append(
            [
                str(own.device),
                format_bytes(own.planned_bytes),
                "-" if measured is None else format_bytes(measured),
                "-" if not measured else signed(own.planned_bytes / measured - 1),
            ]
        )
    return table(console, [figure(head) for head in ("device", "predicted", "measured", "error")], rows)


def _gain(found: Check) -> list[str]:
    """The plan against the others, measured."""
    own = found.of_plan.measured_step_seconds
    said = []
    for other in found.cases:
        if other.name != PLAN:
            versus = compared(own, other.measured_step_seconds)
            than = {"the same": "as fast as", "nearly the same": "nearly as fast as"}.get(
                versus, f"{versus} than"
            )
            said.append(f"The plan is {than} the {other.name}, measured.")
    return said


def _losses(found: Check) -> list[str]:
    losses = found.of_plan.losses
    if losses is None:
        return []
    if losses.plain is None:
        return [f"The losses were not compared: {losses.reason}."]
    steps, difference = counted(len(losses.plain), "step"), losses.difference or 0.0
    if found.of_plan.same_losses:
        return [f"The losses of {steps} are the plain model's (difference {difference:.1e})."]
    pairs = ", ".join(
        f"{one:.6g} for {other:.6g}" for one, other in zip(losses.pipeline, losses.plain, strict=True)
    )
    return [f"The losses of {steps} are NOT the plain model's: {pairs} (allowed {SAME_LOSS:g})."]


def _corrections(found: Check) -> list[str]:
    made = found.corrections
    if made is None:
        return []
    parts = [
        f"an action takes {format_seconds(made.overhead)} besides "
        f"({format_seconds(made.looped_overhead)} in loops of several stages)",
        f"stages take {three_digits(made.slowdown)} x what they take alone",
    ]
    if made.latency is not None and made.bandwidth is not None:
        parts.append(f"a transfer {format_seconds(made.latency)} and {format_rate(made.bandwidth)}")
    return [f"Calibrated: {'; '.join(parts)}."]
