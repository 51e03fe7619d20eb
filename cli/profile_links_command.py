"""`pplan profile-links`: measures the links between the devices of torchrun's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..api.options import LinkOptions
from .options import Force
from .streams import console, remark, result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..profiler.measured_links import LevelName, MeasuredLinks
    from ..profiler.torchrun_env import TorchrunEnv
    from .output import Target

LinksFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Where to write; default: links.toml."),
]
LinksAsJson = Annotated[bool, typer.Option("--json", help="Print what was measured as JSON, not tables.")]


def profile_links_command(
    *,
    options: LinkOptions,
    output: LinksFile = None,
    force: Force = False,
    as_json: LinksAsJson = False,
) -> None:
    """Measure the links between devices, started by torchrun, and write the file for solve --topology.

    torchrun --no-python --nproc-per-node 2 pplan profile-links
    """
    from ..cost_models.errors import PplanError
    from ..profiler.torchrun_env import read_torchrun_env
    from .output import chosen_target

    process = read_torchrun_env(os.environ)
    target = chosen_target(output, "links.toml", force=force)
    try:
        measured = _measure(process, target, options)
    except PplanError as error:
        if process.rank:
            # Every process fails with the same error; the first one tells it.
            raise typer.Exit(error.exit_status) from None
        raise
    if process.rank == 0:
        _write(measured, target, as_json=as_json)


def _measure(process: TorchrunEnv, target: Target, options: LinkOptions) -> MeasuredLinks:
    from ..cost_models.errors import UsageError

    if process.rank == 0:
        target.check()
    from ..profiler.links import measure_links

    measured = measure_links(process, **vars(options))
    if not measured.levels:  # fits them: raises UsageError where the sizes show no bandwidth
        raise UsageError("profile-links: no pair was measured", "Start two or more processes.")
    return measured


def _write(measured: MeasuredLinks, target: Target, *, as_json: bool) -> None:
    """What was found is printed even where the file cannot be written."""
    try:
        target.put(measured.to_toml())
    finally:
        if as_json:
            result(measured.to_json())
        else:
            _print(measured, console())
    for each in measured.remarks:
        remark(f"Note: {each}")
    remark(f"Wrote {target.path}")


def _print(measured: MeasuredLinks, console: Console) -> None:
    from ..profiler.measured_links import LEVEL_TITLES
    from .table_style import line, titled

    line(console, f"{measured.topology.describe()}; measured with {measured.backend}")
    titled(console, "Links", _levels(measured, console))
    for level in measured.levels:
        titled(console, f"Transfers {LEVEL_TITLES[level]}", _transfers(measured, level, console))
    titled(console, "All-reduce over all devices", _all_reduce(measured, console))


def _levels(measured: MeasuredLinks, console: Console) -> Table:
    """The fitted links, a row for each level."""
    from ..cost_models.quantities import format_rate, format_seconds
    from ..profiler.measured_links import LEVEL_TITLES
    from .number_format import percent
    from .table_style import figure, table, word

    columns = [
        word("link"),
        figure("pairs", leaves=2),
        figure("latency"),
        figure("bandwidth"),
        figure("largest difference", leaves=3),
        figure("slowest pair", leaves=1),
    ]
    rows = []
    for level, fit in measured.levels.items():
        pair, rate = measured.slowest_pair(level)
        rows.append(
            [
                LEVEL_TITLES[level],
                str(len(measured.pairs_of(level))),
                format_seconds(fit.latency_seconds),
                format_rate(fit.bandwidth_bytes_per_second),
                percent(fit.deviation),
                f"{pair.first} and {pair.second}, {format_rate(rate)}",
            ]
        )
    return table(console, columns, rows)


def _transfers(measured: MeasuredLinks, level: LevelName, console: Console) -> Table:
    """Seconds of a level by size: both ways, and as fitted."""
    from ..cost_models.quantities import format_bytes, format_seconds
    from .table_style import figure, table

    fit = measured.levels[level]
    there, back = measured.medians(level)
    rows = [
        [format_bytes(size), *map(format_seconds, (one, other, fit.seconds(size)))]
        for size, one, other in zip(measured.sizes, there, back, strict=True)
    ]
    return table(console, [figure(head) for head in ("size", "there", "back", "fitted")], rows)


def _all_reduce(measured: MeasuredLinks, console: Console) -> Table:
    """Seconds by size: measured, and as the cost models predict them for the fitted links."""
    from ..cost_models.quantities import format_bytes, format_seconds
    from .table_style import figure, table

    figures = zip(measured.sizes, measured.all_reduce_seconds, measured.predicted_all_reduce(), strict=True)
    rows = [
        [format_bytes(size), format_seconds(one), format_seconds(other), f"{other / one:.2f}"]
        for size, one, other in figures
    ]
    return table(console, [figure(head) for head in ("size", "measured", "predicted", "ratio")], rows)
