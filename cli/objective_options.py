"""The options of `pplan solve` that say what the plan is to be the best of, and of how many problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import whole_number


def _objective(name: str, metavar: str | None, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="The objective", **more)


def _sweep(name: str, metavar: str | None, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="Many problems", **more)


Objective = Annotated[
    str,
    _objective(
        "--objective",
        "step-time|throughput|memory[:5%]|cost",
        "The shortest step; the most samples a second, with late gradients; the least memory with a step at "
        "most 5 % longer than the fastest; the fewest dollars a sample.",
    ),
]
Price = Annotated[
    str | None,
    _objective(
        "--price", "2.5|A100=2.5,T4=0.35", "Of --objective cost: dollars per device hour, or by the kind."
    ),
]
FrontierToo = Annotated[
    bool,
    _objective("--frontier", None, "Also the plans of which none is both faster and smaller, in a file."),
]
Points = Annotated[
    int | None,
    _objective(
        "--points",
        "N",
        "Of --frontier: at most so many plans, 2 % of memory apart; default: 24.",
        parser=whole_number("--points", at_least=1),
    ),
]
Sweep = Annotated[
    list[str],
    _sweep(
        "--sweep",
        "KEY=V,V|A..B",
        "Solve for every value, A..B by powers of two; several make a grid. Keys: gpus, mini-batch, "
        "micro-batches, memory, bandwidth, runtime, schedule, planner, recompute, optimizer.",
    ),
]
Csv = Annotated[Path | None, _sweep("--csv", "FILE", "Of --sweep: the rows as CSV, too.")]
Backend = Annotated[
    str | None,
    _sweep(
        "--backend",
        "processes|dask|ray",
        "Of --sweep: where it runs, on this machine or a cluster; default: processes.",
    ),
]
Jobs = Annotated[
    int | None,
    _sweep(
        "--jobs",
        "N",
        "Of --sweep: how many run at once; default: one per core.",
        parser=whole_number("--jobs", at_least=1),
    ),
]
