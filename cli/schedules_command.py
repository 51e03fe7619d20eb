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
    from .table_style import figure, line, table, text, titled, word

    line(console, "Schedules for pplan simulate --schedule", style="bold")
    columns = [
        word("name\n"),
        text("bubble\n", folds_at=20),
        text("micro-batches\nin flight", folds_at=20),
        figure("weights\n", leaves=3),
        figure("stale by\n", leaves=2),
    ]
    console.print(table(console, columns, [_row(own) for own in SCHEDULES.values()]), crop=False)
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
    rows = [[own.name, ", ".join(own.runtimes) or "-", own.needs] for own in SCHEDULES.values()]
    heads = [word("name"), text("runs in", folds_at=22), text("needs", folds_at=24)]
    titled(console, "What runs them, and what they need", table(console, heads, rows))
    line(console, "Schedule...: a class of torch.distributed.pipelining.")
    rows = [[own.name, own.source] for own in SCHEDULES.values()]
    titled(console, "Sources", table(console, [word("name"), text("paper")], rows))


def _row(own: Schedule) -> list[str]:
    return [own.name, own.bubble, own.in_flight_formula, _weights(own), _stale(own)]


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

    made = [_record(own) for own in SCHEDULES.values()]
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


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
