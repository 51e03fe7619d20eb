"""The tables of a plan: the short answer, or everything: proof, search space, baselines, alternatives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.plan_file import Alternative, Baseline, Plan, PlannedStage
from .number_format import compared, ranges
from .plan_answer import answer_lines
from .plan_summary import short_summary, summary_lines
from .table_style import Column, figure, line, table, table_of, text, titled, word

MOST_STAGES = 8
"""Rows of the short answer: of more stages the first and the last ones are shown."""
MOST_BASELINES = 3


def print_answer(plan: Plan, console: Console, next_steps: str) -> None:
    """Prints in about 20 lines what to do: the answer, stages, proof, some baselines, next steps."""
    _print_head(plan, console)
    titled(console, _stages_title(plan), _short_stages(plan, console))
    console.print()
    if len(plan.stages) > MOST_STAGES:
        line(console, f"Balance: {'-'.join(map(str, plan.balance))} layers.")
    for sentence in short_summary(plan):
        line(console, sentence)
    if plan.baselines:
        line(console, f"Baselines: {'; '.join(_baseline_words(base, plan) for base in _nearest(plan))}.")
    line(console, next_steps)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints everything about a plan but the ledger of its stages' memory."""
    _print_head(plan, console)
    titled(console, _stages_title(plan), _stages(plan, console))
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
        line(console, f"Note: {note}")


def _print_head(plan: Plan, console: Console) -> None:
    """The answer, and the warnings right under it."""
    answer, *more = answer_lines(plan)
    line(console, answer, style="bold")
    for further in more:
        line(console, further)
    for warning in plan.warnings:
        line(console, f"Warning: {warning}")


def _stages_title(plan: Plan) -> str:
    each = " per replica" if max(plan.replicas) > 1 else ""
    return f"Stages; time per micro-batch{each}"


def _short_stages(plan: Plan, console: Console) -> Table:
    """A row a stage; what answers (devices, layers, memory) stays at any width."""
    columns = [
        figure("stage"),
        text("devices", folds_at=8),
        figure("layers"),
        text("from", leaves=1, folds_at=12),
        text("to", leaves=1, folds_at=12),
        figure("forward", leaves=2),
        figure("backward", leaves=2),
        figure("memory"),
    ]
    if any(stage.memory_limit_bytes is not None for stage in plan.stages):
        columns += [figure("limit", leaves=3), figure("used", leaves=4)]
    rows = [
        _stage_row(number, stage, _end_names(plan, stage))[: len(columns)]
        for number, stage in enumerate(plan.stages)
    ]
    if len(rows) > MOST_STAGES:
        rows = [*rows[: MOST_STAGES // 2], ["..."] * len(columns), *rows[1 - MOST_STAGES // 2 :]]
    return table(console, columns, rows)


def _nearest(plan: Plan) -> list[Baseline]:
    """Data parallelism and the even split, and the fastest of the others."""
    simple = [base for base in plan.baselines if base.name in ("data-parallel", "even")]
    others = [base for base in plan.baselines if base not in simple]
    others.sort(key=lambda base: (base.step_seconds is None, base.step_seconds or 0.0))
    return [*simple, *others][:MOST_BASELINES]


def _baseline_words(base: Baseline, plan: Plan) -> str:
    if base.step_seconds is None:
        return f"{base.name} {base.reason or 'has no plan'}"
    versus = compared(base.step_seconds, plan.prediction.step_seconds)
    return f"{base.name} {format_seconds(base.step_seconds)} ({versus})"


def _stages(plan: Plan, console: Console) -> Table:
    columns = [
        figure("stage"),
        text("devices", folds_at=8),
        figure("layers"),
        text("first layer", leaves=6, folds_at=16),
        text("last layer", leaves=5, folds_at=16),
        figure("forward", leaves=7),
        figure("backward", leaves=7),
        figure("memory"),
    ]
    if any(stage.memory_limit_bytes is not None for stage in plan.stages):
        columns += [figure("limit", leaves=2), figure("used", leaves=3), word("", leaves=1)]
    rows = [
        _stage_row(number, stage, _end_names(plan, stage, numbered=True))[: len(columns)]
        for number, stage in enumerate(plan.stages)
    ]
    return table(console, columns, rows)


def _stage_row(number: int, stage: PlannedStage, ends: list[str]) -> list[str]:
    """With limit, share and bar at the end; `ends`: its first and its last layer."""
    return [
        str(number),
        ranges(stage.devices),
        str(stage.layers),
        *ends,
        format_seconds(stage.forward_seconds),
        format_seconds(stage.backward_seconds),
        format_bytes(stage.memory_bytes),
        *_memory_use(stage),
    ]


def _end_names(plan: Plan, stage: PlannedStage, *, numbered: bool = False) -> list[str]:
    """Of its first and its last layer; the numbers where the plan does not know the names."""
    names = plan.layer_names
    ends = (stage.first_layer, stage.last_layer)
    if len(names) <= stage.last_layer:
        return [str(index) for index in ends]
    return [f"{index} {names[index]}" if numbered else names[index] for index in ends]


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
    remark = "; ".join(part for part in (base.reason, base.detail) if part)
    if base.step_seconds is None:
        return [base.name, "-", "-", remark]
    versus = compared(base.step_seconds, plan.prediction.step_seconds)
    return [base.name, format_seconds(base.step_seconds), versus, remark]


def _alternatives(plan: Plan, console: Console) -> Table:
    columns: list[tuple[Column, Callable[[Alternative], str]]] = [
        (word("schedule\n"), lambda other: other.schedule),
        (text("for\n", folds_at=11), _for),
        (text("balance\n", folds_at=10), _balance),
        (
            word("micro-\nbatches", leaves=3),
            lambda other: f"{other.micro_batches} x {other.micro_batch_size}",
        ),
        (word("recompute\n", leaves=2), lambda other: other.recompute.replace("_", "-")),
        (figure("step\n"), lambda other: format_seconds(other.step_seconds)),
        (
            figure("most\nmemory", leaves=1),
            lambda other: format_bytes(max(other.memory_bytes)) if other.memory_bytes else "-",
        ),
    ]
    return table_of(console, columns, plan.alternatives)


def _for(other: Alternative) -> str:
    return "; ".join(part for part in (", ".join(other.runtimes), other.reason) if part)


def _balance(other: Alternative) -> str:
    balance = ", ".join(map(str, islice(other.balance, 16)))
    more = len(other.balance) - 16
    shared = f"; {other.replicas} replicas" if other.replicas > 1 else ""
    return balance + (f" and {more} more" if more > 0 else "") + shared
