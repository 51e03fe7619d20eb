"""The table of a frontier: what each step costs in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from rich.console import Console

from ..cost_models.quantities import counted, format_bytes, format_seconds
from ..planner.objectives.frontier import Frontier, Point
from ..planner.plan_file import Plan
from .number_format import three_digits
from .table_style import Column, figure, line, table_of, text, titled, word

SHOWN = 8
"""Stages of which a row tells the layers."""


def print_frontier(frontier: Frontier, console: Console) -> None:
    """Prints the points, the fastest first."""
    for warning in frontier.warnings:
        line(console, f"Warning: {warning}")
    columns: list[tuple[Column, Callable[[Point], str]]] = [
        (figure("step"), lambda point: format_seconds(point.step_seconds)),
        (
            figure("samples/s", leaves=3),
            lambda point: three_digits(point.plan.prediction.samples_per_second),
        ),
        (figure("memory"), lambda point: format_bytes(point.memory_bytes)),
        (word("", leaves=2), lambda point: "exact" if point.exact else "best found"),
        (text("stages", folds_at=20), lambda point: shape(point.plan.balance, point.plan.replicas)),
        (text("configuration", leaves=1, folds_at=24), lambda point: how(point.plan)),
    ]
    titled(console, "Step time vs. peak memory of a GPU", table_of(console, columns, frontier.points))
    console.print()
    line(console, _proof(frontier))


def shape(balance: list[int], replicas: list[int]) -> str:
    """`12x4, 34`: the layers of every stage, and its replicas where there are some."""
    own = [
        f"{layers}x{count}" if count > 1 else str(layers)
        for layers, count in zip(balance, replicas, strict=False)
    ]
    more = f" and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
    return ", ".join(islice(own, SHOWN)) + more


def how(plan: Plan) -> str:
    """Micro-batches, schedule and recomputation."""
    recompute = plan.recompute.replace("_", "-")
    return f"{plan.micro_batches} of {plan.micro_batch_size}, {plan.schedule}, recompute {recompute}"


def _proof(frontier: Frontier) -> str:
    count = counted(len(frontier.points), "plan")
    apart = "a byte" if not frontier.memory_step else f"{100 * frontier.memory_step:g} %"
    sure = "each is the fastest there is for its memory" if _exact(frontier) else "not all are proven"
    more = "smaller ones may exist: raise --points" if _exact(frontier) else "smaller ones may exist"
    end = "nothing smaller fits" if frontier.complete else more
    return f"{count}, at least {apart} of memory apart; {sure}; {end}."


def _exact(frontier: Frontier) -> bool:
    return all(point.exact for point in frontier.points)
