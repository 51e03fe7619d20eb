"""The table of a frontier: what each step costs in memory."""

from __future__ import annotations

from itertools import islice

from rich.console import Console

from ..cost_models.quantities import format_bytes, format_count, format_seconds, three_digits
from ..planner.objectives.frontier import Frontier, Point
from ..planner.plan_file import Plan
from .table import Column, line, number, print_table, text, word

MOST_STAGES = 8
"""Stages of which a row tells the layers."""


def print_frontier(frontier: Frontier, console: Console) -> None:
    """Prints the points, the fastest first."""
    for warning in frontier.warnings:
        line(console, f"Warning: {warning}")
    columns: list[Column[Point]] = [
        number("step", lambda point: point.step_seconds, format_seconds),
        number("samples/s", lambda point: point.plan.prediction.samples_per_second, three_digits, drop=3),
        number("memory", lambda point: point.memory_bytes, format_bytes),
        word("", lambda point: "exact" if point.exact else "best found", drop=2),
        text("stages", lambda point: shape(point.plan.balance, point.plan.replicas), min_width=20),
        text("configuration", lambda point: _configuration(point.plan), drop=1),
    ]
    print_table(console, columns, frontier.points, title="Step time vs. peak memory of a device")
    console.print()
    line(console, _proof(frontier))


def shape(balance: list[int], replicas: list[int]) -> str:
    """`12x4, 34`: the layers of every stage, and its replicas where there are some."""
    stages = [
        f"{layers}x{count}" if count > 1 else str(layers)
        for layers, count in zip(balance, replicas, strict=False)
    ]
    rest = f" and {len(stages) - MOST_STAGES} more" if len(stages) > MOST_STAGES else ""
    return ", ".join(islice(stages, MOST_STAGES)) + rest


def _configuration(plan: Plan) -> str:
    """Micro-batches, schedule and recomputation."""
    recompute = plan.recompute.replace("_", "-")
    return f"{plan.short_batch}, {plan.schedule}, recompute {recompute}"


def _proof(frontier: Frontier) -> str:
    count = format_count(len(frontier.points), "plan")
    distance = "a byte" if not frontier.memory_step else f"{100 * frontier.memory_step:g} %"
    proof = "each is the fastest there is for its memory" if _exact(frontier) else "not all are proven"
    hint = "smaller ones may exist (--points, --time-limit)" if _exact(frontier) else "smaller ones may exist"
    end = f"nothing fits that needs {distance} less" if frontier.complete else hint
    return f"{count}, at least {distance} of memory apart; {proof}; {end}."


def _exact(frontier: Frontier) -> bool:
    return all(point.exact for point in frontier.points)
