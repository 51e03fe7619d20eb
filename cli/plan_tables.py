"""The tables of a plan: the answer first, then its stages, its proof, what else could be done, the memory."""

from __future__ import annotations

from itertools import islice

from rich.console import Console
from rich.table import Table

<<<<<<< HEAD
from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.plan_file import Alternative, Baseline, Plan, PlannedStage
from .field_names import as_options
from .number_format import compared, ranges
from .plan_answer import answer_lines
from .plan_summary import summary_lines
=======
from ..cost_models.optimizers import optimizer_named
from ..cost_models.quantities import counted, format_bytes, format_seconds
from ..cost_models.runtime import runtime_named
from ..planner.pipeline_config import SEARCHED
from ..planner.plan_file import TIE, Alternative, Baseline, Plan, PlannedStage, Prediction
from .aim_lines import aim_line, aim_proof
from .default_lines import default_lines
from .field_names import as_options
from .figures import percent, ranges, three_digits
>>>>>>> main
from .table_style import figure, line, table, text, titled, word


def print_plan(plan: Plan, console: Console) -> None:
    """Prints everything about a plan but the ledger of its stages' memory."""
    answer, *more = answer_lines(plan)
    line(console, answer, style="bold")
    for further in more:
        line(console, further)
    for warning in plan.warnings:
        line(console, f"Warning: {as_options(warning)}")
<<<<<<< HEAD
    each = " per replica" if max(plan.replicas) > 1 else ""
    titled(console, f"Stages; time per micro-batch{each}", _stages(plan, console))
=======
    each = " on one replica" if max(plan.replicas) > 1 else ""
    titled(console, f"Stages; seconds of one micro-batch{each}", _stages(plan, console))
>>>>>>> main
    console.print()
    for sentence in summary_lines(plan):
        line(console, sentence)
    if plan.baselines:
        titled(console, "Baselines", _baselines(plan, console))
    if plan.alternatives and plan.runtime is None:
        title = "Alternatives: the best 1f1b and gpipe plans by runtime"
        titled(console, title, _alternatives(plan, console))
    if plan.notes:
        console.print()
    for note in plan.notes:
        line(console, f"Note: {as_options(note)}")
<<<<<<< HEAD
=======


def answer_lines(plan: Plan) -> list[str]:
    """What to do, in one line, and what to know about it before anything else."""
    answer, *more = _answer(plan)
    return [answer, *default_lines(plan), *more]


def _answer(plan: Plan) -> list[str]:
    what = _what(plan)
    if plan.objective is not None:
        return [aim_line(plan, plan.objective, what)]
    rival = _faster_baseline(plan)
    figures = _figures(plan.prediction.step_seconds, plan.prediction.samples_per_second)
    figures += _give_or_take(plan.prediction.uncertainty)
    if plan.was_given:
        return [f"{what} as given: {figures}."]
    if rival is None:
        lines = [f"{what} is the fastest{_how_sure(plan)}: {figures}."]
    else:
        lines = [_rival_answer(plan, rival), f"This plan is {_lower(what).rstrip(',')}: {figures}."]
    used = devices_used(plan)
    if plan.gpus is not None and used < plan.gpus:
        lines.append(_fewer(plan, used, plan.gpus))
    return lines


def _lower(what: str) -> str:
    return what.replace("A pipeline", "a pipeline").replace("Data", "data").replace("One ", "one ")


def devices_used(plan: Plan) -> int:
    """How many devices the plan uses."""
    return len({device for stage in plan.stages for device in stage.devices})


def _what(plan: Plan) -> str:
    used = devices_used(plan)
    stages, chunks = len(plan.stages) // plan.virtual_stages, plan.virtual_stages
    if len(plan.stages) > 1:
        each = f", {chunks} virtual stages on each," if chunks > 1 else ""
        return f"A pipeline of {counted(stages, 'stage')} over {counted(used, plan.device_kind)}{each}"
    return (
        f"Data parallelism over {counted(used, plan.device_kind)}" if used > 1 else f"One {plan.device_kind}"
    )


def _how_sure(plan: Plan) -> str:
    """What the plan is the fastest of."""
    within = f" that {plan.runtime} can run" if plan.runtime else ""
    if not plan.prediction.exact:
        return f"{within} of those scored"
    step = plan.prediction.step_seconds * (1 - TIE)
    proposed = any(
        other.step_seconds < step and other.schedule not in SEARCHED and _may_run(plan, other)
        for other in plan.alternatives
    )
    return f"{within} of the schedules that are searched" if proposed else within


def _figures(step: float, samples_per_second: float) -> str:
    return f"{format_seconds(step)} a step, {three_digits(samples_per_second)} samples/s"


def _give_or_take(uncertainty: float | None) -> str:
    """How far the seconds may be off, where that would show."""
    shown = uncertainty is not None and uncertainty >= _SHOWN
    return f", give or take {uncertainty:.0%}" if shown else ""


def _rival_answer(plan: Plan, rival: Baseline) -> str:
    on = (
        f" over {counted(plan.gpus, plan.device_kind)}" if rival.name == "data-parallel" and plan.gpus else ""
    )
    step = rival.step_seconds or 0.0
    unable = rival.name == "data-parallel" and plan.runtime and plan.gpus and not _replicates(plan)
    asked = f"{plan.runtime} does not run it" if unable else "the options given leave it out"
    return f"{_rival(plan, rival)}{on} is the fastest: {_figures(step, plan.mini_batch / step)}; {asked}."


def _rival(plan: Plan, rival: Baseline) -> str:
    return "Data parallelism" if rival.name == "data-parallel" else f"One {plan.device_kind}"


def _replicates(plan: Plan) -> bool:
    return runtime_named(plan.runtime or "").runs_replicas([plan.gpus or 1])


def _fewer(plan: Plan, used: int, offered: int) -> str:
    """That devices stay free, and what using all of them would give, as far as the plan tells."""
    on_all = [
        (other.step_seconds, f"a straight {other.schedule} pipeline")
        for other in plan.alternatives
        if other.replicas == other.virtual_stages == 1
        and len(other.balance) == offered
        and _may_run(plan, other)
    ]
    on_all += [
        (base.step_seconds, "data parallelism")
        for base in plan.baselines
        if base.name == "data-parallel" and base.step_seconds is not None and plan.runtime is None
    ]
    # A faster one is not for this plan's options: it may not stand here as the price of using all.
    slower = [row for row in on_all if row[0] >= plan.prediction.step_seconds]
    uses = f"It uses {used} of the {counted(offered, plan.device_kind)}"
    runtime = None if plan.runtime is None else runtime_named(plan.runtime)
    if runtime is not None and runtime.one_process and used == plan.gpus_per_node:
        return f"{uses}: {runtime.name} reaches those of one node."
    if not slower and not plan.prediction.exact:
        return f"{uses}: no faster plan was found on more of them."
    if not slower:
        return f"{uses}: more of them would not be faster."
    step, what = min(slower)
    return f"{uses}; on all {offered}, {what} takes {format_seconds(step)} a step."


def _may_run(plan: Plan, other: Alternative) -> bool:
    return plan.runtime is None or not other.runtimes or plan.runtime in other.runtimes


def _faster_baseline(plan: Plan) -> Baseline | None:
    """Data parallelism or one GPU where it beats the plan: the search was then held away from it."""
    limit = plan.prediction.step_seconds * (1 - TIE)
    faster = [
        base
        for base in plan.baselines
        if base.name in _RIVALS and base.step_seconds is not None and base.step_seconds < limit
    ]
    return min(faster, key=lambda base: base.step_seconds or 0.0, default=None)


_SHOWN = 0.01
"""Share from which on the profile's uncertainty is said."""
_RIVALS = ("data-parallel", "one-gpu")
>>>>>>> main


def _stages(plan: Plan, console: Console) -> Table:
    columns = [
        figure("stage"),
        text("devices", leaves=4, folds_at=12),
        text("first layer"),
        text("last layer", leaves=5),
        figure("forward"),
        figure("backward"),
        figure("memory", leaves=6),
    ]
    if any(stage.memory_limit_bytes is not None for stage in plan.stages):
        columns += [figure("limit", leaves=2), figure("used", leaves=3), word("", leaves=1)]
    rows = [
        [*_stage_row(number, stage, plan.layer_names), *_memory_use(stage)][: len(columns)]
        for number, stage in enumerate(plan.stages)
    ]
    return table(console, columns, rows)


def _stage_row(number: int, stage: PlannedStage, names: list[str]) -> list[str]:
    ends = (stage.first_layer, stage.last_layer)
    return [
        str(number),
        ranges(stage.devices),
        *(f"{index} {names[index]}" if index < len(names) else str(index) for index in ends),
        format_seconds(stage.forward_seconds),
        format_seconds(stage.backward_seconds),
        format_bytes(stage.memory_bytes),
    ]


def _memory_use(stage: PlannedStage) -> list[str]:
    """Limit, share and bar."""
    if not stage.memory_limit_bytes:
        return ["-", "-", ""]
    share = stage.memory_bytes / stage.memory_limit_bytes
    bar = "#" * min(10, round(10 * share))
    return [format_bytes(stage.memory_limit_bytes), f"{100 * share:.0f} %", bar.ljust(10, ".")]


def _baselines(plan: Plan, console: Console) -> Table:
    columns = [
        word("baseline"),
        figure("step"),
        figure("vs. this plan", leaves=1),
        text("configuration / reason", folds_at=16),
    ]
    return table(console, columns, [_baseline_row(base, plan) for base in plan.baselines])


def _baseline_row(base: Baseline, plan: Plan) -> list[str]:
    remark = as_options("; ".join(part for part in (base.reason, base.detail) if part))
    if base.step_seconds is None:
        return [base.name, "-", "-", remark]
    versus = compared(base.step_seconds, plan.prediction.step_seconds)
    return [base.name, format_seconds(base.step_seconds), versus, remark]


def _alternatives(plan: Plan, console: Console) -> Table:
    columns = [
        word("schedule\n"),
        text("for\n", folds_at=11),
        text("balance\n", folds_at=10),
        word("micro-\nbatches", leaves=3),
        word("recompute\n", leaves=2),
        figure("step\n"),
        figure("most\nmemory", leaves=1),
    ]
    return table(console, columns, [_alternative_row(other) for other in plan.alternatives])


def _alternative_row(other: Alternative) -> list[str]:
    balance = ", ".join(map(str, islice(other.balance, 16)))
    more = len(other.balance) - 16
    shared = f"; {other.replicas} replicas" if other.replicas > 1 else ""
    return [
        other.schedule,
        "; ".join(part for part in (", ".join(other.runtimes), other.reason) if part),
        balance + (f" and {more} more" if more > 0 else "") + shared,
        f"{other.micro_batches} of {other.micro_batch_size}",
        other.recompute.replace("_", "-"),
        format_seconds(other.step_seconds),
        format_bytes(max(other.memory_bytes)) if other.memory_bytes else "-",
    ]
