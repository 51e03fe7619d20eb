"""What `pplan explain` prints: what limits the plan first, then what it stands against, then what would
change it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from rich.console import Console

from ..cost_models.quantities import (
    SAME,
    compare_percent,
    format_bytes,
    format_count,
    format_seconds,
    percent,
    ranges,
)
from ..planner.explanation.current_split import Side, SplitComparison
from ..planner.explanation.explanation import Explanation
from ..planner.explanation.rivals import WORTH, Crossover, Sensitivity
from ..planner.explanation.step_limits import KINDS, PathShare, StepLimits
from ..planner.plan_file import PlanRow
from .table import Column, line, number, print_head, print_notes, print_table, text, word

MOST_PLACES = 5
"""Rows of the critical path, the largest first."""
LEAST_SHARE = 1e-3
"""Share of the step from which on a place is a row of its own."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Prints all of it."""
    print_head(console, answer_lines(explanation))
    _print_path(explanation.limits, explanation.plan, console)
    _print_runner_ups(explanation, console)
    if explanation.holds:
        _print_sensitivity(explanation, console)
    _print_what_if(explanation, console)
    if explanation.current is not None:
        _print_current(explanation.current, console)
    print_notes(console, explanation.notes)


def answer_lines(explanation: Explanation) -> list[str]:
    """Say what limits the plan."""
    limits, plan, busiest = explanation.limits, explanation.plan, explanation.limits.busiest
    kinds = sorted(limits.kinds, key=lambda share: -share.seconds)
    waits = [f"{percent(own.share)} for {KINDS[own.kind]}" for own in kinds if own.share >= LEAST_SHARE]
    lines = [
        f"A step of {explanation.model} takes {format_seconds(plan.step_seconds)} and waits "
        f"{', '.join(waits)}.",
        f"The plan: {describe_plan(plan)}.",
        f"{_capitalized(stage_name(plan, busiest.stage))} is the busiest: it is at work for "
        f"{percent(busiest.busy)} of it.",
    ]
    unlimited = limits.without_memory_limit
    if unlimited is not None:
        lines.append(
            f"Memory forbids a faster plan: with as much as it needs, {_compare_plan(unlimited, plan)}."
        )
    elif not limits.memory_known:
        lines.append("The memory of the devices is not known: it forbids no plan here.")
    elif limits.memory_forbids_nothing:
        lines.append("Memory forbids no faster plan.")
    else:
        lines.append("Without a memory limit no faster plan was found; there may be one.")
    if explanation.better is not None:
        words = "It is not the best for its options"
        if explanation.made_for:
            words = f"It was made for {explanation.made_for}, not for the shortest step"
        lines.append(f"{words}: {_compare_plan(explanation.better, plan)}.")
    return lines


def _capitalized(words: str) -> str:
    return words[:1].upper() + words[1:]


def stage_name(plan: PlanRow, number: int) -> str:
    """A stage of the pipeline; where it has several parts of the layers, which a plan's tables number one by
    one, its devices."""
    if plan.virtual_stages == 1:
        return f"stage {number}"
    devices = plan.devices[number]
    return f"device {devices[0]}" if len(devices) == 1 else f"each of devices {ranges(devices)}"


def _compare_plan(other: PlanRow, summary: PlanRow) -> str:
    step = other.step_seconds
    return (
        f"{describe_other(other, summary)} takes {format_seconds(step)}, "
        f"{compare_percent(step, summary.step_seconds)}"
    )


def describe_plan(plan: PlanRow) -> str:
    """A plan in words."""
    balance = "-".join(map(str, islice(plan.balance, 16))) + ("-…" if len(plan.balance) > 16 else "")
    layers = "layer" if balance == "1" else "layers"
    parts = [f"{format_count(plan.pipeline_stages, 'stage')} of {balance} {layers}"]
    if plan.virtual_stages > 1:
        parts.append(f"{plan.virtual_stages} virtual stages each")
    if max(plan.replicas) > 1:
        parts.append(f"replicas {'-'.join(map(str, islice(plan.replicas, 16)))}")
    parts += [plan.batch, plan.schedule]
    if plan.recompute != "never":
        parts.append(f"recompute {plan.recompute.replace('_', '-')}")
    return ", ".join(parts)


def describe_other(other: PlanRow, plan: PlanRow) -> str:
    """Another plan than `plan` in words; its devices where nothing else tells them apart."""
    words = describe_plan(other)
    if words != describe_plan(plan):
        return words
    if other.devices != plan.devices:
        words += f", on devices {'; '.join(ranges(own) for own in islice(other.devices, 16))}"
    if other.stage_recompute != plan.stage_recompute:
        words += f" ({', '.join(islice(other.stage_recompute, 16))})"
    return words


def _print_path(limits: StepLimits, plan: PlanRow, console: Console) -> None:
    """Print the places that the step waits for longest, where there are several."""
    shares = [share for share in limits.places if share.share >= LEAST_SHARE]
    rows = [(_where(own, plan), KINDS[own.kind], own.seconds, own.share) for own in shares[:MOST_PLACES]]
    if len(rows) < 2:
        return
    if others := shares[MOST_PLACES:]:
        sums = (sum(own.seconds for own in others), sum(own.share for own in others))
        rows.append((f"{len(others)} more", "-", *sums))
    columns: list[Column[tuple[str, str, float, float]]] = [
        word("where", lambda row: row[0]),
        text("what", lambda row: row[1], min_width=12),
        number("time", lambda row: row[2], format_seconds),
        number("of the step", lambda row: row[3], percent),
    ]
    print_table(console, columns, rows, title="Critical path: what the step waits for")


def _where(share: PathShare, plan: PlanRow) -> str:
    if share.to_stage is None:
        return "-" if share.stage is None else stage_name(plan, share.stage)
    if plan.virtual_stages == 1:
        return f"stage {share.stage} to {share.to_stage}"
    own, other = (ranges(plan.devices[stage]) for stage in (share.stage or 0, share.to_stage))
    return f"device {own} to {other}" if max(plan.replicas) == 1 else f"devices {own} to {other}"


class _OtherPlan(NamedTuple):
    """A row of a table of other plans; without a plan it has the reason. `proven`: yes, no, or None."""

    name: str
    plan: PlanRow | None
    reason: str
    proven: bool | None


def _print_runner_ups(explanation: Explanation, console: Console) -> None:
    rivals = [
        _OtherPlan(rival.differs, rival.plan, rival.reason, rival.proven)
        for rival in (explanation.second_best, explanation.other_stages)
    ]
    if explanation.as_fast is not None:
        rivals.insert(0, _OtherPlan("as fast", explanation.as_fast, "", None))
    _print_others("differs in", rivals, explanation.plan, console, min_width=12, title="Runner-up plans")


def _print_what_if(explanation: Explanation, console: Console) -> None:
    changes = [_OtherPlan(row.change, row.plan, row.reason, row.proven) for row in explanation.what_if]
    summary = explanation.plan
    same = [row for row in changes if row.plan and _is_same(row.plan, summary)]
    others = [row for row in changes if row not in same]
    _print_others("change", others, summary, console, title="What-if (one change at a time)")
    if same:
        line(console, f"As fast as now: {', '.join(row.name for row in same)}.")


def _is_same(other: PlanRow, summary: PlanRow) -> bool:
    return abs(other.step_seconds - summary.step_seconds) < WORTH * summary.step_seconds


def _print_others(
    heading: str,
    rows: Sequence[_OtherPlan],
    summary: PlanRow,
    console: Console,
    *,
    title: str,
    min_width: int | None = None,
) -> None:
    """Print a table of the plans, and a line with what has none."""
    pairs = [(row, row.plan) for row in rows if row.plan is not None]
    columns: list[Column[tuple[_OtherPlan, PlanRow]]] = [
        Column(heading, lambda pair: pair[0].name, min_width=min_width),
        number("step", lambda pair: pair[1].step_seconds, format_seconds),
        text(
            "vs. this plan",
            lambda pair: compare_percent(pair[1].step_seconds, summary.step_seconds),
            min_width=10,
        ),
        text("the best plan found", lambda pair: describe_other(pair[1], summary), min_width=20),
        word("proven", lambda pair: pair[0].proven, lambda proven: "yes" if proven else "no", drop=1),
    ]
    if pairs:
        print_table(console, columns, pairs, title=title)
    if none := [f"{row.name}: {row.reason}" for row in rows if row.plan is None]:
        line(console, f"Without a plan: {'; '.join(none)}.")


def _print_sensitivity(explanation: Explanation, console: Console) -> None:
    plan = explanation.plan
    rows = [(own, turn) for own in explanation.holds for turn in (own.below, own.above) if turn is not None]
    stable = [words for own in explanation.holds if (words := _stable_range(own))]
    columns: list[Column[tuple[Sensitivity, Crossover]]] = [
        text("what", lambda row: _describe_quantity(row[0]), min_width=14),
        text("from", lambda row: _factor(row[1].factor, row[0]), min_width=10),
        text("better plan", lambda row: describe_other(row[1].rival, plan), min_width=20),
        number("its step", lambda row: row[1].rival.step_seconds, format_seconds, drop=1),
        number("the plan's", lambda row: row[1].plan_seconds, format_seconds, drop=2),
    ]
    title = f"Sensitivity: where another plan is better by more than {percent(WORTH)}"
    if rows:
        print_table(console, columns, rows, title=title)
    if stable:
        line(console, f"No better plan was found with {'; '.join(stable)}.")


def _stable_range(own: Sensitivity) -> str:
    """Describe how far the quantity was varied without finding a better plan; empty where it was not."""
    ends = [
        f"{direction} to {_factor(end, own)}"
        for direction, end, turn in (("down", own.least, own.below), ("up", own.most, own.above))
        if turn is None and abs(end - 1) > SAME
    ]
    return f"{_describe_quantity(own)} {' or '.join(ends)}" if ends else ""


def _describe_quantity(sensitivity: Sensitivity) -> str:
    first, last = sensitivity.first_layer, sensitivity.last_layer
    if first is None:
        return sensitivity.what
    return f"{sensitivity.what} ({first})" if first == last else f"{sensitivity.what} ({first} to {last})"


def _factor(factor: float, own: Sensitivity) -> str:
    """Describe a factor: an error of measured seconds, or a multiple of a bandwidth."""
    if own.first_layer is not None:
        return f"{100 * (factor - 1):+.0f} %"
    return f"x {factor:.2g}" if factor >= 1 else f"/ {1 / factor:.2g}"


def _print_current(comparison: SplitComparison, console: Console) -> None:
    """The split in use, against the plan."""
    console.print()
    summary, step = comparison.current.plan, comparison.plan.plan.step_seconds
    line(
        console,
        f"The split in use, {describe_plan(summary)}, takes {format_seconds(summary.step_seconds)}: "
        f"{compare_percent(summary.step_seconds, step)}.",
        style="bold",
    )
    for better, words in (
        (comparison.best_setting, "With its cuts and the best micro-batches, schedule and recompute"),
        (comparison.best_cuts, "With as many stages cut best"),
    ):
        if better is not None:
            line(console, f"{words}: {format_seconds(better.step_seconds)} ({describe_plan(better)}).")
    for note in comparison.notes:
        line(console, f"{note[:1].upper()}{note[1:]}.")
    _print_causes(comparison, console)
    _print_stages(comparison.current, "The stages of the split in use", console)
    _print_stages(comparison.plan, "The stages of the plan", console)


def _print_causes(comparison: SplitComparison, console: Console) -> None:
    split_step, plan_step = comparison.current.plan.step_seconds, comparison.plan.plan.step_seconds
    least = SAME * split_step  # what is not above it is left by the rounding of sums

    def seconds(value: float) -> str:
        return "-" if value <= least else format_seconds(value)

    def more(difference: float) -> str:
        sign = "+" if difference > 0 else "-"
        return "-" if abs(difference) <= least else sign + format_seconds(abs(difference))

    def busiest(side: Side) -> str:
        return stage_name(side.plan, side.busiest.stage)

    causes = [(cause.name, cause.current_seconds, cause.plan_seconds) for cause in comparison.causes]
    columns: list[Column[tuple[str, float, float]]] = [
        text("what", lambda row: row[0], min_width=12),
        number(f"split:\n{busiest(comparison.current)}", lambda row: row[1], seconds),
        number(f"plan:\n{busiest(comparison.plan)}", lambda row: row[2], seconds),
        number("more\n", lambda row: row[1] - row[2], more),
    ]
    title = "Where the difference comes from: the step of the busiest stage of each"
    print_table(console, columns, causes, [("step", split_step, plan_step)], title=title)


def _print_stages(side: Side, title: str, console: Console) -> None:
    stages = side.stages
    columns: list[Column[int]] = [
        number("stage", lambda row: row),
        text("devices", lambda row: stages[row].devices, ranges, drop=2, min_width=8),
        text(
            "layers",
            lambda row: range(stages[row].first_layer, stages[row].last_layer + 1),
            ranges,
            min_width=8,
        ),
        number("forward", lambda row: stages[row].forward_seconds, format_seconds),
        number("backward", lambda row: stages[row].backward_seconds, format_seconds),
        number("memory", lambda row: stages[row].memory_bytes, format_bytes),
        number(
            "limit",
            lambda row: stages[row].memory_limit_bytes,
            format_bytes,
            drop=1,
            visible=any(stage.memory_limit_bytes is not None for stage in stages),
        ),
    ]
    print_table(console, columns, range(len(stages)), title=title)
