"""What `pplan explain` prints: what limits the plan first, then what it stands against, then what would
change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import counted, format_bytes, format_seconds
from ..planner.explanation.current_split import Side, SplitComparison
from ..planner.explanation.explanation import Explanation
from ..planner.explanation.plan_summary import PlanSummary
from ..planner.explanation.runner_up import RunnerUp
from ..planner.explanation.sensitivity import WORTH, Sensitivity, Turn
from ..planner.explanation.step_limits import PathShare, StepLimits
from ..planner.explanation.what_if import WhatIf
from ..planner.plan_file import PlannedStage
from .number_format import SAME, compared_percent, percent, ranges
from .table_style import figure, line, table, text, titled, word

MOST_PLACES = 10
"""Rows of the critical path, the largest first."""
SHOWN = 1e-3
"""Share of the step from which on a place is a row of its own."""
KINDS = {
    "compute": "computing",
    "recompute": "running forward again",
    "transfer": "transfers",
    "host": "launches by the host",
    "all_reduce": "all-reduce",
    "optimizer": "the optimizer",
}


def print_explanation(found: Explanation, console: Console) -> None:
    """Prints all of it."""
    answer, *more = answer_lines(found)
    line(console, answer, style="bold")
    for further in more:
        line(console, further)
    titled(console, "Critical path: what the step waits for", _path(found.limits, console))
    titled(console, "Runner-up plans", _rivals(found, console))
    if found.holds:
        title = f"Sensitivity: where another plan is better by more than {percent(WORTH)}"
        titled(console, title, _holds(found.holds, console))
    titled(console, "What-if (one change at a time)", _what_if(found, console))
    if found.current is not None:
        _print_current(found.current, console)
    if found.notes:
        console.print()
    for note in found.notes:
        line(console, f"Note: {note}")


def answer_lines(found: Explanation) -> list[str]:
    """What limits the plan, in words."""
    limits, plan = found.limits, found.plan
    main = max(limits.kinds, key=lambda share: share.seconds)
    lines = [
        f"A step of {found.model} takes {format_seconds(plan.step_seconds)}: "
        f"{percent(main.share)} of it waits for {KINDS[main.kind]}.",
        f"The plan: {described(plan)}.",
        f"Stage {limits.busiest.stage} is the busiest: it computes for {percent(limits.busiest.busy)} of it.",
    ]
    unlimited = limits.without_memory_limit
    if unlimited is not None:
        lines.append(f"Memory forbids a faster plan: with as much as it needs, {_takes(unlimited, plan)}.")
    else:
        lines.append("Memory forbids no faster plan.")
    if found.better is not None:
        lines.append(f"It is not the best for its options: {_takes(found.better, plan)}.")
    return lines


def _takes(other: PlanSummary, own: PlanSummary) -> str:
    step = other.step_seconds
    return f"{described(other)} takes {format_seconds(step)}, {compared_percent(step, own.step_seconds)}"


def described(plan: PlanSummary) -> str:
    """A plan in words."""
    balance = "-".join(map(str, islice(plan.balance, 16))) + ("-…" if len(plan.balance) > 16 else "")
    parts = [f"{counted(plan.stages, 'stage')} of {balance} layers"]
    if plan.virtual_stages > 1:
        parts.append(f"{plan.virtual_stages} virtual stages each")
    if max(plan.replicas) > 1:
        parts.append(f"replicas {'-'.join(map(str, islice(plan.replicas, 16)))}")
    parts += [f"{plan.micro_batches} x {plan.micro_batch_size}", plan.schedule]
    if plan.recompute != "never":
        parts.append(f"recompute {plan.recompute.replace('_', '-')}")
    return ", ".join(parts)


def _path(limits: StepLimits, console: Console) -> Table:
    columns = [word("where"), text("what", folds_at=12), figure("time"), figure("of the step")]
    shown = [share for share in limits.places[:MOST_PLACES] if share.share >= SHOWN]
    rest = limits.places[len(shown) :]
    rows = [
        [_where(share), KINDS[share.kind], format_seconds(share.seconds), percent(share.share)]
        for share in shown
    ]
    if rest:
        seconds, part = sum(share.seconds for share in rest), sum(share.share for share in rest)
        rows.append([f"{len(rest)} more", "", format_seconds(seconds), percent(part)])
    kinds = [["all", KINDS[k.kind], format_seconds(k.seconds), percent(k.share)] for k in limits.kinds]
    return table(console, columns, [*rows, *kinds], rule_before=len(rows))


def _where(share: PathShare) -> str:
    if share.to_stage is not None:
        return f"stage {share.stage} to {share.to_stage}"
    return f"stage {share.stage}"


def _rivals(found: Explanation, console: Console) -> Table:
    columns = [
        text("differs in", folds_at=12),
        figure("step"),
        text("vs. this plan", folds_at=10),
        text("the best plan found", folds_at=20),
        word("proven", leaves=1),
    ]
    rows = [_rival_row(rival, found.plan) for rival in (found.second_best, found.other_stages)]
    tie = found.as_fast
    if tie is not None:
        same = compared_percent(tie.step_seconds, found.plan.step_seconds)
        rows.insert(0, ["as fast", format_seconds(tie.step_seconds), same, described(tie), "-"])
    return table(console, columns, rows)


def _rival_row(rival: RunnerUp, own: PlanSummary) -> list[str]:
    if rival.plan is None:
        return [rival.differs, "-", "-", "none fits", _yes(rival.proven)]
    step = rival.plan.step_seconds
    against = compared_percent(step, own.step_seconds)
    return [rival.differs, format_seconds(step), against, described(rival.plan), _yes(rival.proven)]


def _yes(proven: bool) -> str:
    return "yes" if proven else "no"


def _holds(reaches: Sequence[Sensitivity], console: Console) -> Table:
    columns = [
        text("what", folds_at=14),
        text("from", folds_at=10),
        text("better plan", folds_at=20),
        figure("its step", leaves=1),
        figure("the plan's", leaves=2),
    ]
    return table(console, columns, [row for reach in reaches for row in _reach_rows(reach)])


def _reach_rows(reach: Sensitivity) -> Iterator[list[str]]:
    of_layers = reach.first_layer is not None
    what = f"{reach.what} ({reach.first_layer} to {reach.last_layer})" if of_layers else reach.what
    for turn, end, way in ((reach.below, reach.least, "down"), (reach.above, reach.most, "up")):
        if turn is None:
            yield [what, f"not {way} to {_factor(end, of_layers)}", "-", "-", "-"]
        else:
            yield [what, _factor(turn.factor, of_layers), described(turn.rival), *_turn_steps(turn)]


def _turn_steps(turn: Turn) -> list[str]:
    return [format_seconds(turn.rival.step_seconds), format_seconds(turn.plan_seconds)]


def _factor(factor: float, of_layers: bool) -> str:
    """As an error of seconds, or as a factor of a bandwidth."""
    if of_layers:
        return f"{100 * (factor - 1):+.0f} %"
    return f"x {factor:.2g}" if factor >= 1 else f"/ {1 / factor:.2g}"


def _what_if(found: Explanation, console: Console) -> Table:
    columns = [
        word("change"),
        figure("step"),
        text("vs. this plan", folds_at=10),
        text("the best plan found", folds_at=20),
        word("proven", leaves=1),
    ]
    return table(console, columns, [_what_if_row(row, found.plan) for row in found.what_if])


def _what_if_row(row: WhatIf, own: PlanSummary) -> list[str]:
    if row.plan is None:
        return [row.change, "-", "-", row.reason, "-"]
    step = row.plan.step_seconds
    against = compared_percent(step, own.step_seconds)
    return [row.change, format_seconds(step), against, described(row.plan), _yes(row.proven)]


def _print_current(found: SplitComparison, console: Console) -> None:
    """The split in use, against the plan."""
    console.print()
    own, step = found.current.plan, found.plan.plan.step_seconds
    line(
        console,
        f"The split in use, {described(own)}, takes {format_seconds(own.step_seconds)}: "
        f"{compared_percent(own.step_seconds, step)}.",
        style="bold",
    )
    for better, words in (
        (found.best_setting, "With its cuts and the best micro-batches, schedule and recompute"),
        (found.best_cuts, "With as many stages cut best"),
    ):
        if better is not None:
            line(console, f"{words}: {format_seconds(better.step_seconds)} ({described(better)}).")
    for note in found.notes:
        line(console, f"{note[:1].upper()}{note[1:]}.")
    title = "Where the difference comes from: the step of the busiest stage of each"
    titled(console, title, _causes(found, console))
    titled(console, "The stages of the split in use", _stages(found.current, console))
    titled(console, "The stages of the plan", _stages(found.plan, console))


def _causes(found: SplitComparison, console: Console) -> Table:
    own, step = found.current.plan.step_seconds, found.plan.plan.step_seconds
    least = SAME * own
    columns = [
        text("what", folds_at=12),
        figure(f"split:\nstage {found.current.busiest.stage}"),
        figure(f"plan:\nstage {found.plan.busiest.stage}"),
        figure("more\n"),
    ]
    rows = [
        [cause.name, *_difference(cause.current_seconds, cause.plan_seconds, least)] for cause in found.causes
    ]
    rows.append(["step", *_difference(own, step, least)])
    return table(console, columns, rows, rule_before=len(rows) - 1)


def _difference(current: float, plan: float, least: float) -> list[str]:
    """Both and how much more the first is; what is not above `least` is left by the rounding of sums."""
    more = current - plan
    sign = "+" if more > 0 else "-"
    shown = ["-" if seconds <= least else format_seconds(seconds) for seconds in (current, plan, abs(more))]
    return [*shown[:2], shown[2] if shown[2] == "-" else sign + shown[2]]


def _stages(side: Side, console: Console) -> Table:
    columns = [
        figure("stage"),
        text("devices", leaves=2, folds_at=8),
        text("layers", folds_at=8),
        figure("forward"),
        figure("backward"),
        figure("memory"),
    ]
    if any(stage.memory_limit_bytes is not None for stage in side.stages):
        columns.append(figure("limit", leaves=1))
    rows = [_stage_row(number, stage)[: len(columns)] for number, stage in enumerate(side.stages)]
    return table(console, columns, rows)


def _stage_row(number: int, stage: PlannedStage) -> list[str]:
    limit = stage.memory_limit_bytes
    return [
        str(number),
        ranges(stage.devices),
        ranges(range(stage.first_layer, stage.last_layer + 1)),
        format_seconds(stage.forward_seconds),
        format_seconds(stage.backward_seconds),
        format_bytes(stage.memory_bytes),
        "-" if limit is None else format_bytes(limit),
    ]
