"""`pplan schedules`: the schedules that `pplan simulate` knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..cost_models.schedules import Schedule


def schedules_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the schedules: their bubble, memory and weights, what they need, what runs them, their source."""
    from .streams import console, result

    if as_json:
        result(_json())
    else:
        _print(console())


def _print(console: Console) -> None:
    from ..cost_models.schedules import SCHEDULES
    from .table import Column, line, number, print_table, text, word

    name: Column[Schedule] = word("name", lambda own: own.name)
    columns: list[Column[Schedule]] = [
        word("name\n", lambda own: own.name),
        text("bubble\n", lambda own: own.bubble, min_width=20),
        text("micro-batches\nin flight", lambda own: own.in_flight_formula, min_width=20),
        number("weights\n", _weights, drop=3),
        number("stale by\n", _stale, drop=2),
    ]
    schedules = list(SCHEDULES.values())
    line(console, "Schedules for pplan simulate --schedule", style="bold")
    print_table(console, columns, schedules)
    line(
        console,
        "Stage i of p (0-based), m micro-batches, v virtual stages a device; F, B, W: seconds of a forward, "
        "a backward (of the input, where there is W) and a weight gradient.",
    )
    line(
        console,
        "Bubble: idle share of equal stages without transfers. Weights: versions, or copies, that a device "
        "keeps. Stale by: updates.",
    )
    needs: list[Column[Schedule]] = [
        name,
        text("runs in", lambda own: ", ".join(own.runtimes) or None, min_width=22),
        text("needs", lambda own: own.needs),
    ]
    print_table(console, needs, schedules, title="What runs them, and what they need")
    line(console, "Schedule...: a class of torch.distributed.pipelining.")
    sources: list[Column[Schedule]] = [name, text("paper", lambda own: own.source)]
    print_table(console, sources, schedules, title="Sources")


EXAMPLE = (4, 8)
"""Stages and micro-batches at which versions and staleness are told from their functions."""
FORMULAS = {(4, 3, 2, 1): "p-i", (3, 2, 1, 0): "p-1-i"}


def _weights(own: Schedule) -> str:
    return f"{own.copies} copies" if own.copies > 1 else _versions(own)


def _versions(own: Schedule) -> str:
    return _by_stage([own.weight_versions(stage, *EXAMPLE) for stage in range(EXAMPLE[0])])


def _stale(own: Schedule) -> str:
    return _by_stage([own.staleness(stage, *EXAMPLE) for stage in range(EXAMPLE[0])])


def _by_stage(values: list[Any]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]:g}"
    return FORMULAS.get(tuple(values), f"{min(values):g} to {max(values):g}")


def _json() -> str:
    import json

    from ..cost_models.schedules import SCHEDULES

    records = [_record(own) for own in SCHEDULES.values()]
    return json.dumps(records, indent=1, ensure_ascii=False) + "\n"


def _record(own: Schedule) -> dict[str, Any]:
    return {
        "name": own.name,
        "bubble": own.bubble,
        "in_flight": own.in_flight_formula,
        "weight_versions": _versions(own),
        "staleness": _stale(own),
        "synchronous": own.synchronous,
        "virtual_stages": own.default_virtual_stages,
        "copies": own.copies,
        "needs": own.needs,
        "runtimes": list(own.runtimes),
        "source": own.source,
    }
