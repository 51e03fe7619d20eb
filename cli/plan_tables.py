"""The tables of a plan: the short answer; or proof, search space, baselines, alternatives, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from rich.console import Console

from ..api.plan_summary import answer_lines, short_summary, summary_lines
from ..cost_models.quantities import compare_steps, format_bytes, format_seconds, ranges, whole_percent
from ..cost_models.runtime import other_layers_warning
from ..planner.plan_degrees import Degrees, StageDegrees
from ..planner.plan_file import Baseline, Plan, PlannedStage, PlanRow, SharedWeight
from .table import Column, gap, height, line, number, print_head, print_notes, print_table, text, word

MOST_LINES = 15
"""Lines of the short answer, for which stages in the middle are left out, down to `LEAST_ROWS`."""
LEAST_ROWS = 3
MOST_BASELINES = 3


def print_answer(plan: Plan, console: Console, next_step: str) -> None:
    """Print the answer, its warnings, stages, proof, some baselines and the next command in few lines."""
    ends = [*_shared_lines(plan)[:1], *short_summary(plan)]
    if plan.baselines:
        ends.append(f"Baselines: {'; '.join(_baseline_words(base, plan) for base in _nearest(plan))}.")
    ends.append(next_step)
    heads = _head_lines(plan, short=True)
    used = sum(height(console, text) for text in (*heads, *ends))
    print_head(console, heads)
    console.print()
    _print_stages(plan, console, most_rows=max(LEAST_ROWS, MOST_LINES - 3 - used))
    for sentence in ends:
        line(console, sentence)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints everything about a plan but the ledger of its stages' memory."""
    print_head(console, _head_lines(plan))
    _print_stages(plan, console)
    console.print()
    for sentence in (*_shared_lines(plan), *summary_lines(plan)):
        line(console, sentence)
    if plan.baselines:
        _print_baselines(plan, console)
    if plan.alternatives and plan.runtime is None:
        _print_alternatives(plan, console)
    print_notes(console, plan.notes)


def _head_lines(plan: Plan, *, short: bool = False) -> list[str]:
    """List the answer, the gravest warning, what qualifies the answer, and the other warnings."""
    answer, *further = answer_lines(plan, short=short)
    other_layers = other_layers_warning(plan.runtime, plan.profile.device)
    gravest = [f"Warning: {other_layers}"] if other_layers else []
    warnings = [f"Warning: {warning}" for warning in plan.warnings if warning != other_layers]
    return [answer, *gravest, *further, *warnings]


def _shared_lines(plan: Plan) -> list[str]:
    """List the weights that several stages hold; those on the same stages together."""
    groups: dict[tuple[int, ...], list[SharedWeight]] = {}
    for weight in plan.tied:
        groups.setdefault(tuple(weight.stages), []).append(weight)
    lines = []
    for stages, weights in groups.items():
        names = weights[0].tensor + (f" and {len(weights) - 1} more" if len(weights) > 1 else "")
        bytes_text = format_bytes(sum(weight.bytes for weight in weights))
        seconds = sum(weight.sum_seconds for weight in weights)
        added = f"; adding up its gradients takes {format_seconds(seconds)} of the step" if seconds else ""
        lines.append(f"Shared: {names} ({bytes_text}) on each of stages {_stage_list(stages)}{added}.")
    return lines


def _stage_list(stages: Sequence[int]) -> str:
    *most, last = map(str, stages)
    return f"{', '.join(most)} and {last}"


def _nearest(plan: Plan) -> list[Baseline]:
    """Data parallelism and the even split, and the fastest of the others."""
    simple = [base for base in plan.baselines if base.name in ("data-parallel", "even")]
    others = [base for base in plan.baselines if base not in simple]
    others.sort(key=lambda base: (base.step_seconds is None, base.step_seconds or 0.0))
    return [*simple, *others][:MOST_BASELINES]


def _baseline_words(base: Baseline, plan: Plan) -> str:
    if base.step_seconds is None:
        return f"{base.name} {(base.reason or 'has no plan').partition(':')[0]}"
    versus = compare_steps(base.step_seconds, plan.prediction.step_seconds)
    return f"{base.name} {format_seconds(base.step_seconds)} ({versus})"


def _print_stages(plan: Plan, console: Console, *, most_rows: int | None = None) -> None:
    """Print a row a stage; what answers (devices, layers, seconds, memory, its share of the limit) stays down
    to 60 columns. In the short answer there are `most_rows`: the first and the last stages."""
    stages, count, short = plan.stages, len(plan.stages), most_rows is not None
    first, last, seconds, limit, used, width = (1, 1, 3, 2, 4, 12) if short else (4, 3, 6, 2, 7, 16)
    limited = any(stage.memory_limit_bytes is not None for stage in stages)
    recomputes = any(stage.layers_again for stage in stages)
    shares = any(stage.degrees for stage in stages)
    offloads = any(stage.host_bytes is not None for stage in stages)

    def name(layer: int) -> str:
        """A layer's name, or its number where the plan does not know the name."""
        if layer >= len(plan.layer_names):
            return str(layer)
        return plan.layer_names[layer] if short else f"{layer} {plan.layer_names[layer]}"

    columns: list[Column[int]] = [
        number("stage", lambda row: row),
        text("devices", lambda row: stages[row].devices, _short_ranges if short else ranges, min_width=8),
        text("degrees", lambda row: stages[row].degrees, StageDegrees.describe, min_width=12, visible=shares),
        number("layers", lambda row: stages[row].layers),
        number("recomputed", lambda row: stages[row].layers_again, visible=recomputes),
        text(
            "from" if short else "first layer",
            lambda row: stages[row].first_layer,
            name,
            first,
            min_width=width,
        ),
        text(
            "to" if short else "last layer", lambda row: stages[row].last_layer, name, last, min_width=width
        ),
        number("forward", lambda row: stages[row].forward_seconds, format_seconds, seconds),
        number("backward", lambda row: stages[row].backward_seconds, format_seconds, seconds),
        number(
            "update",
            lambda row: stages[row].update_seconds,
            format_seconds,
            seconds,
            visible=not short and plan.training is not None,
        ),
        number("memory", lambda row: stages[row].memory_bytes, format_bytes),
        number("on the host", lambda row: stages[row].host_bytes, format_bytes, visible=offloads),
        number("limit", lambda row: stages[row].memory_limit_bytes, format_bytes, limit, visible=limited),
        number("used", lambda row: _memory_share(stages[row]), whole_percent, used, visible=limited),
        word(
            "", lambda row: _memory_share(stages[row]), _bar, drop=1, none="", visible=limited and not short
        ),
    ]
    rows: list[int | None] = [*range(count)]
    if most_rows is not None and count > most_rows:
        rows[most_rows // 2 : count + 1 - (most_rows + 1) // 2] = [None]
    each = " per replica" if max(plan.replicas) > 1 else ""
    print_table(console, columns, rows, title="" if short else f"Stages; time per micro-batch{each}")


def _short_ranges(devices: Sequence[int]) -> str:
    """List the first and the last of many ranges: `0-3, ..., 56-59`."""
    first, *others = ranges(devices).split(", ")
    return ", ".join([first, *others] if len(others) < 2 else [first, "...", others[-1]])


def _memory_share(stage: PlannedStage) -> float | None:
    """Share of the memory limit."""
    return stage.memory_bytes / stage.memory_limit_bytes if stage.memory_limit_bytes else None


def _bar(used: float) -> str:
    return ("#" * min(10, round(10 * used))).ljust(10, ".")


def _print_baselines(plan: Plan, console: Console) -> None:
    plan_step = plan.prediction.step_seconds
    columns: list[Column[Baseline]] = [
        word("baseline", lambda base: base.name),
        number("step", lambda base: base.step_seconds, format_seconds),
        number(
            "vs. this plan",
            lambda base: base.step_seconds,
            lambda step: compare_steps(step, plan_step),
            drop=1,
        ),
        text(
            "configuration / reason",
            lambda base: "; ".join(part for part in (base.reason, base.detail) if part),
            min_width=16,
        ),
    ]
    print_table(console, columns, plan.baselines, title="Baselines")


def _print_alternatives(plan: Plan, console: Console) -> None:
    trains = plan.training is not None
    columns: list[Column[PlanRow]] = [
        text("degrees\n", lambda other: other.degrees, Degrees.describe, min_width=20, visible=trains),
        word("schedule\n", lambda other: other.schedule, drop=int(trains)),
        text("for\n", _for, min_width=11, visible=not trains),
        text("balance\n", _balance, min_width=10),
        word("micro-\nbatches", lambda other: other.short_batch, drop=3),
        word("recompute\n", _recompute, drop=2),
        number("step\n", lambda other: other.step_seconds, format_seconds),
        number("most\nmemory", lambda other: max(other.memory_bytes, default=None), format_bytes, drop=1),
    ]
    other = "with other degrees and batches" if trains else "for other runtimes"
    title = f"Alternatives: the best plans found {other}"
    print_table(console, columns, plan.alternatives, title=title)


def _recompute(other: PlanRow) -> str:
    return (other.degrees or other).recompute.replace("_", "-")


def _for(other: PlanRow) -> str:
    return "; ".join(part for part in (", ".join(other.runtimes), other.reason) if part)


def _balance(other: PlanRow) -> str:
    balance = ", ".join(map(str, islice(other.balance, 16)))
    further_stages = len(other.balance) - 16
    replicas = f"; {other.replicas[0]} replicas" if other.replicas[0] > 1 else ""
    return balance + (f" and {further_stages} more" if further_stages > 0 else "") + replicas


class StageMemory(NamedTuple):
    """Bytes of one device of a stage: by term, all of them, and the limit."""

    terms: Mapping[str, int]
    bytes: int
    limit_bytes: int | None


def planned_memory(plan: Plan) -> list[StageMemory]:
    """The memory of one device of each stage of the plan."""
    return [StageMemory(stage.memory, stage.memory_bytes, stage.memory_limit_bytes) for stage in plan.stages]


def print_ledger(stages: Sequence[StageMemory], console: Console) -> None:
    """Prints the memory of every stage by term: one device of it, a column a stage."""
    every = dict.fromkeys(term for stage in stages for term in stage.terms)
    terms = [term for term in every if any(stage.terms.get(term) for stage in stages)]
    if not terms:
        return
    rows = [_LedgerRow(term.replace("_", " "), [stage.terms.get(term) for stage in stages]) for term in terms]
    totals = [_LedgerRow("all", [stage.bytes for stage in stages])]
    if any(stage.limit_bytes is not None for stage in stages):
        totals.append(_LedgerRow("limit", [stage.limit_bytes for stage in stages]))
    at_once = _columns_that_fit([*rows, *totals], console)
    names: Column[_LedgerRow] = word("", lambda row: row.name)
    for first in range(0, len(stages), at_once):
        last = min(first + at_once, len(stages)) - 1
        which = f"stages {first} to {last}" if last > first else f"stage {first}"
        columns = [names, *map(_ledger_column, range(first, last + 1))]
        print_table(console, columns, rows, totals, title=f"Memory of one device, {which}")


class _LedgerRow(NamedTuple):
    """A term and its bytes on every stage."""

    name: str
    amounts: list[int | None]


def _ledger_column(stage: int) -> Column[_LedgerRow]:
    return number(f"stage {stage}", lambda row: row.amounts[stage], format_bytes)


def _columns_that_fit(rows: Sequence[_LedgerRow], console: Console) -> int:
    names = max(len(row.name) for row in rows)
    columns = [_ledger_column(stage) for stage in range(len(rows[0].amounts))]
    widest = max(len(columns[-1].heading), *(len(column.cell(row)) for column in columns for row in rows))
    return max(1, (console.width - names) // (widest + gap(console)))
