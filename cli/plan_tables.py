"""The tables of a plan: the answer first, then its stages, its proof, what else could be done, the memory."""

from __future__ import annotations

from itertools import islice

from rich.console import Console
from rich.table import Table

from ..cost_models.optimizers import optimizer_named
from ..cost_models.quantities import counted, format_bytes, format_seconds
from ..cost_models.runtime import runtime_named
from ..planner.pipeline_config import SEARCHED
from ..planner.plan_file import TIE, Alternative, Baseline, Plan, PlannedStage, Prediction
from .aim_lines import aim_line, aim_proof
from .default_lines import default_lines
from .field_names import as_options
from .figures import percent, ranges, three_digits
from .table_style import figure, line, table, text, titled, word


def print_plan(plan: Plan, console: Console) -> None:
    """Prints everything about a plan but the ledger of its stages' memory."""
    answer, *more = answer_lines(plan)
    line(console, answer, style="bold")
    for further in more:
        line(console, further)
    for warning in plan.warnings:
        line(console, f"Warning: {as_options(warning)}")
    each = " on one replica" if max(plan.replicas) > 1 else ""
    titled(console, f"Stages; seconds of one micro-batch{each}", _stages(plan, console))
    console.print()
    for sentence in _summary(plan):
        line(console, sentence)
    if plan.baselines:
        titled(console, "Against simpler ways to train", _baselines(plan, console))
    if plan.alternatives:
        title = "Alternatives: the best 1f1b and gpipe plans by runtime"
        titled(console, title, _alternatives(plan, console))
    if plan.notes:
        console.print()
    for note in plan.notes:
        line(console, f"Note: {as_options(note)}")


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


def _summary(plan: Plan) -> list[str]:
    predicted = plan.prediction
    lines = [
        f"Step {format_seconds(predicted.step_seconds)}{_interval(predicted)}, "
        f"{three_digits(predicted.samples_per_second)} samples/s, bubble {percent(predicted.bubble)}.",
        f"Mini-batch {plan.mini_batch} = "
        f"{counted(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size}; "
        f"schedule {plan.schedule}; recompute {plan.recompute.replace('_', '-')}; "
        f"optimizer {plan.optimizer}{_states(plan)}.",
        _proof(plan),
    ]
    if plan.searched not in ("", predicted.bound_covers) and not plan.was_given:
        lines.append(f"Searched: {plan.searched}")
    if plan.topology:
        lines.append(f"Devices: {plan.topology}")
    return lines


def _states(plan: Plan) -> str:
    """In which numbers it trains, where the plan says it: `; mixed precision, bf16 gradients, ...`."""
    if plan.precision is None or (plan.precision in ("fp32", "fp64") and not plan.zero):
        return ""
    trained = plan.trained
    size = trained.bytes_per_parameter(optimizer_named(plan.optimizer))
    name = {"mixed": "mixed precision", "bf16": "pure bf16"}.get(trained.name, trained.name)
    gradients = f", {trained.gradient_dtype} gradients" if trained.name == "mixed" else ""
    spread = f"; ZeRO-{plan.zero} over the replicas of a stage" if plan.zero else ""
    return f"; {name}{gradients}: {size:.3g} bytes a parameter{spread}"


def _interval(predicted: Prediction) -> str:
    """Where the step lies as a rule: ` (12.1 to 12.9 ms in 8 of 10 cases)`, as far as it would show."""
    if predicted.low_seconds is None or predicted.high_seconds is None:
        return ""
    low, high = format_seconds(predicted.low_seconds), format_seconds(predicted.high_seconds)
    if low == high == format_seconds(predicted.step_seconds):
        return ""
    number, unit = low.split()
    return f" ({number if high.endswith(f' {unit}') else low} to {high} in 8 of 10 cases)"


def _proof(plan: Plan) -> str:
    if plan.was_given:
        return "No other partition was looked at: pplan solve finds the best."
    if plan.objective is not None:
        return aim_proof(plan, plan.objective)
    predicted = plan.prediction
    covers = f" ({predicted.bound_covers})" if predicted.bound_covers else ""
    if predicted.exact:
        return f"Optimal in the search space{covers}: none of these plans is faster."
    bound = format_seconds(predicted.lower_bound_seconds)
    return f"Best found; at most {percent(predicted.gap)} from the proven bound of {bound}{covers}."


def _baselines(plan: Plan, console: Console) -> Table:
    columns = [
        word("way"),
        figure("step"),
        figure("against the plan", leaves=1),
        text("how, or why not", folds_at=16),
    ]
    return table(console, columns, [_baseline_row(base, plan) for base in plan.baselines])


def _baseline_row(base: Baseline, plan: Plan) -> list[str]:
    remark = "; ".join(part for part in (base.reason, base.detail) if part)
    if base.step_seconds is None:
        return [base.name, "-", "-", remark]
    compared = _compared(base.step_seconds, plan.prediction.step_seconds)
    return [base.name, format_seconds(base.step_seconds), compared, remark]


def _compared(step: float, own: float) -> str:
    if abs(step - own) <= TIE * own:
        return "the same"
    if step > own:
        return f"{three_digits(step / own)} x slower"
    return f"{three_digits(own / step)} x faster"


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
