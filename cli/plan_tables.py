"""The tables of a plan: the answer first, then its stages, its proof, what else could be done, the memory."""

from __future__ import annotations

from itertools import islice

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.plan_file import Alternative, Baseline, Plan, PlannedStage
from .figures import percent, ranges, three_digits
from .table_style import ROOMY, line, table, titled

SAME = 1e-9
"""Relative difference below which two steps count as equally long."""


def print_plan(plan: Plan, console: Console) -> None:
    """Prints everything about a plan but the ledger of its stages' memory."""
    answer, *more = answer_lines(plan)
    line(console, answer, style="bold")
    for text in more:
        line(console, text)
    each = " on one replica" if max(plan.replicas) > 1 else ""
    titled(console, f"Stages; seconds of one micro-batch{each}", _stages(plan, console))
    console.print()
    for text in _summary(plan):
        line(console, text)
    if plan.baselines:
        titled(console, "Against simpler ways to train", _baselines(plan, console))
    if plan.alternatives:
        title = "Alternatives: straight pipelines, one device a stage"
        titled(console, title, _alternatives(plan, console))
    if plan.notes:
        console.print()
    for note in plan.notes:
        line(console, f"Note: {note}")


def answer_lines(plan: Plan) -> list[str]:
    """What to do, in one line, and what to know about it before anything else."""
    rival = _faster_baseline(plan)
    what = _what(plan)
    figures = _figures(plan.prediction.step_seconds, plan.prediction.samples_per_second)
    if rival is None:
        lines = [f"{what} is the fastest{_how_sure(plan)}: {figures}."]
    else:
        lines = [_rival_answer(plan, rival), f"This plan is {_lower(what)}: {figures}."]
    used = devices_used(plan)
    if plan.gpus is not None and used < plan.gpus:
        lines.append(_fewer(plan, used, plan.gpus))
    return lines


def _lower(what: str) -> str:
    return what.replace("A pipeline", "a pipeline").replace("Data", "data").replace("One GPU", "one GPU")


def devices_used(plan: Plan) -> int:
    """How many devices the plan uses."""
    return len({device for stage in plan.stages for device in stage.devices})


def _what(plan: Plan) -> str:
    used = devices_used(plan)
    if len(plan.stages) > 1:
        return f"A pipeline of {len(plan.stages)} stages over {_gpus(used)}"
    return f"Data parallelism over {_gpus(used)}" if used > 1 else "One GPU"


def _how_sure(plan: Plan) -> str:
    """What the plan is the fastest of."""
    within = f" that {plan.runtime} can run" if plan.runtime else ""
    return within if plan.prediction.exact else f"{within} of those scored"


def _figures(step: float, samples_per_second: float) -> str:
    return f"{format_seconds(step)} a step, {three_digits(samples_per_second)} samples/s"


def _rival_answer(plan: Plan, rival: Baseline) -> str:
    on = f" over {_gpus(plan.gpus)}" if rival.name == "data-parallel" and plan.gpus else ""
    step = rival.step_seconds or 0.0
    asked = f"{plan.runtime} does not run it" if plan.runtime else "the options given leave it out"
    return f"{_RIVALS[rival.name]}{on} is the fastest: {_figures(step, plan.mini_batch / step)}; {asked}."


def _fewer(plan: Plan, used: int, offered: int) -> str:
    """That devices stay free, and what using all of them would give, as far as the plan tells."""
    on_all = [
        (other.step_seconds, f"a straight {other.schedule} pipeline")
        for other in plan.alternatives
        if len(other.balance) == offered and _may_run(plan, other)
    ]
    on_all += [
        (base.step_seconds, "data parallelism")
        for base in plan.baselines
        if base.name == "data-parallel" and base.step_seconds is not None and plan.runtime is None
    ]
    # A faster one is not for this plan's options: it may not stand here as the price of using all.
    slower = [row for row in on_all if row[0] >= plan.prediction.step_seconds]
    text = f"It uses {used} of the {offered} GPUs"
    if not slower:
        return f"{text}: more of them would not be faster."
    step, what = min(slower)
    return f"{text}; on all {offered}, {what} takes {format_seconds(step)} a step."


def _may_run(plan: Plan, other: Alternative) -> bool:
    return plan.runtime is None or not other.runtimes or plan.runtime in other.runtimes


def _faster_baseline(plan: Plan) -> Baseline | None:
    """Data parallelism or one GPU where it beats the plan: the search was then held away from it."""
    limit = plan.prediction.step_seconds * (1 - SAME)
    faster = [
        base
        for base in plan.baselines
        if base.name in _RIVALS and base.step_seconds is not None and base.step_seconds < limit
    ]
    return min(faster, key=lambda base: base.step_seconds or 0.0, default=None)


_RIVALS = {"data-parallel": "Data parallelism", "one-gpu": "One GPU"}


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _stages(plan: Plan, console: Console) -> Table:
    limited = any(stage.memory_limit_bytes is not None for stage in plan.stages)
    roomy = console.width >= ROOMY
    rows = table(console)
    rows.add_column("stage", justify="right", no_wrap=True)
    rows.add_column("devices", overflow="fold")
    rows.add_column("first layer", overflow="fold")
    rows.add_column("last layer", overflow="fold")
    for name in ("forward", "backward", "memory", *(("limit", "used") if limited else ())):
        rows.add_column(name, justify="right", no_wrap=True)
    if limited and roomy:
        rows.add_column("", no_wrap=True)
    for number, stage in enumerate(plan.stages):
        rows.add_row(*_stage_row(number, stage, plan.layer_names), *_memory_use(stage, limited, roomy))
    return rows


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


def _memory_use(stage: PlannedStage, limited: bool, roomy: bool) -> list[str]:
    if not limited:
        return []
    if not stage.memory_limit_bytes:
        return ["-", "-", *([""] if roomy else [])]
    share = stage.memory_bytes / stage.memory_limit_bytes
    bar = "#" * min(10, round(10 * share))
    return [
        format_bytes(stage.memory_limit_bytes),
        f"{100 * share:.0f} %",
        *([bar.ljust(10, ".")] if roomy else []),
    ]


def _summary(plan: Plan) -> list[str]:
    predicted = plan.prediction
    lines = [
        f"Step {format_seconds(predicted.step_seconds)}, "
        f"{three_digits(predicted.samples_per_second)} samples/s, bubble {percent(predicted.bubble)}.",
        f"Mini-batch {plan.mini_batch} = {_micro_batches(plan.micro_batches, plan.micro_batch_size)}; "
        f"schedule {plan.schedule}; recompute {plan.recompute.replace('_', '-')}; "
        f"optimizer {plan.optimizer}.",
        _proof(plan),
    ]
    if plan.searched:
        lines.append(f"Searched: {plan.searched}")
    if plan.topology:
        lines.append(f"Devices: {plan.topology}")
    return lines


def _proof(plan: Plan) -> str:
    predicted = plan.prediction
    bound = format_seconds(predicted.lower_bound_seconds)
    how = "exact" if predicted.exact else "not exact: not every plan was scored or excluded"
    return (
        f"Proven: no plan of the searched space is faster than {bound} a step; "
        f"gap {percent(predicted.gap)}, {how}."
    )


def _micro_batches(count: int, size: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''} of {size}"


def _baselines(plan: Plan, console: Console) -> Table:
    rows = table(console)
    rows.add_column("way", no_wrap=True)
    rows.add_column("step", justify="right", no_wrap=True)
    rows.add_column("against the plan", justify="right", no_wrap=True)
    rows.add_column("how, or why not", overflow="fold")
    for base in plan.baselines:
        remark = "; ".join(part for part in (base.reason, base.detail) if part)
        if base.step_seconds is None:
            rows.add_row(base.name, "-", "-", remark)
        else:
            compared = _compared(base.step_seconds, plan.prediction.step_seconds)
            rows.add_row(base.name, format_seconds(base.step_seconds), compared, remark)
    return rows


def _compared(step: float, own: float) -> str:
    if abs(step - own) <= SAME * own:
        return "the same"
    if step > own:
        return f"{three_digits(step / own)} x slower"
    return f"{three_digits(own / step)} x faster"


def _alternatives(plan: Plan, console: Console) -> Table:
    rows = table(console)
    rows.add_column("schedule\n", no_wrap=True)
    rows.add_column("for\n", overflow="fold", min_width=11)
    rows.add_column("balance\n", overflow="fold", min_width=11)
    rows.add_column("micro-\nbatches", no_wrap=True)
    rows.add_column("recompute\n", no_wrap=True)
    rows.add_column("step\n", justify="right", no_wrap=True)
    rows.add_column("most\nmemory", justify="right", no_wrap=True)
    for other in plan.alternatives:
        rows.add_row(*_alternative_row(other))
    return rows


def _alternative_row(other: Alternative) -> list[str]:
    balance = ", ".join(map(str, islice(other.balance, 16)))
    more = len(other.balance) - 16
    return [
        other.schedule,
        "; ".join(part for part in (", ".join(other.runtimes), other.reason) if part),
        balance + (f" and {more} more" if more > 0 else ""),
        f"{other.micro_batches} of {other.micro_batch_size}",
        other.recompute.replace("_", "-"),
        format_seconds(other.step_seconds),
        format_bytes(max(other.memory_bytes)) if other.memory_bytes else "-",
    ]


def print_ledger(plan: Plan, console: Console) -> None:
    """Prints the memory of every stage by term: one device of it, a column a stage."""
    terms = list(dict.fromkeys(term for stage in plan.stages for term in stage.memory))
    if not terms:
        return
    at_once = max(1, (console.width - 20) // 11)
    for first in range(0, len(plan.stages), at_once):
        some = plan.stages[first : first + at_once]
        last = first + len(some) - 1
        which = f"stages {first} to {last}" if last > first else f"stage {first}"
        titled(console, f"Memory of one device, {which}", _ledger(some, first, terms, console))


def _ledger(stages: list[PlannedStage], first: int, terms: list[str], console: Console) -> Table:
    rows = table(console)
    rows.add_column("", no_wrap=True)
    for number in range(first, first + len(stages)):
        rows.add_column(f"stage {number}", justify="right", no_wrap=True)
    for term in terms:
        amounts = [stage.memory.get(term) for stage in stages]
        rows.add_row(
            term.replace("_", " "), *("-" if amount is None else format_bytes(amount) for amount in amounts)
        )
    rows.add_section()
    rows.add_row("all", *(format_bytes(stage.memory_bytes) for stage in stages))
    if any(stage.memory_limit_bytes is not None for stage in stages):
        limits = (stage.memory_limit_bytes for stage in stages)
        rows.add_row("limit", *("-" if limit is None else format_bytes(limit) for limit in limits))
    return rows
