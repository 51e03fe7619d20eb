"""`pplan machine measure`: a machine for the layers of a transformer; its links alone, or kernels alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.errors import PplanError, UsageError
from ..cost_models.quantities import format_bytes, format_rate, format_seconds, percent
from ..profiler.profile_options import KernelOptions, LinkOptions, MachineMeasureOptions
from .output import AsJson, Force, choose_target
from .streams import console, counting, remark, result

if TYPE_CHECKING:
    from rich.console import Console

    from ..cost_models.transformer.transformer_shape import TransformerShape
    from ..profiler.machine_file import LayerTime, MachineFile
    from ..profiler.measured_links import LevelName, MeasuredLinks, PairTimes
    from ..profiler.torchrun_env import TorchrunEnv
    from .output import Target

LinksFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Where to write; default: links.toml."),
]
LinksAsJson = Annotated[bool, typer.Option("--json", help="Print what was measured as JSON, not tables.")]
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The config.json of a transformer.", show_default=False)
]
KernelsFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Where to write; default: kernels.csv."),
]

MeasuredModel = Annotated[
    Path | None,
    typer.Option(
        "--for",
        metavar="CONFIG",
        help="The config.json whose layers are measured; default: layers of Llama 3 8B.",
    ),
]
MachineOutput = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Where to write; default: machine.json."),
]
MeasureAnew = Annotated[bool, typer.Option("--force", help="Measure anew what the file has already.")]
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


def machine_measure_command(
    config: MeasuredModel = None,
    *,
    options: MachineMeasureOptions,
    output: MachineOutput = None,
    force: MeasureAnew = False,
    as_json: AsJson = False,
) -> None:
    """Measure links, kernels and whole layers for solve --machine.

    Run again, it goes on where it stopped. With several devices torchrun starts a process for each.
    """
    from ..cost_models.transformer.configuration import load_transformer_shape, transformer_shape
    from ..profiler.torchrun_env import is_launched, read_torchrun_env

    process = read_torchrun_env(os.environ, "machine measure", 1) if is_launched(os.environ) else None
    shape = transformer_shape(LLAMA_3_8B) if config is None else load_transformer_shape(config)
    target = choose_target(output, "machine.json", force=True, kind="machine")
    rank = 0 if process is None else process.rank
    if rank == 0:
        target.check(config)
    from ..profiler.machine import measure_machine

    alone = process is None or process.world_size == 1
    try:
        with counting("Measuring") as count:
            measured = measure_machine(
                shape,
                options,
                target.path,
                process=None if alone else process,
                anew=force,
                progress=count if rank == 0 else None,
            )
    except PplanError as error:
        if rank:
            raise typer.Exit(error.exit_status) from None
        raise
    if rank == 0:
        if as_json:
            result(measured.to_json())
        else:
            _print_machine(measured, shape, console())
        remark(f"Wrote {target.path}; use it: pplan solve {config or 'config.json'} --machine {target.path}")


def _print_machine(measured: MachineFile, shape: TransformerShape, console: Console) -> None:
    from .table import Column, line, number, print_table, word

    line(
        console,
        f"{measured.devices} x {measured.device_name}, for {shape.name} in {measured.dtype}, sequence "
        f"{measured.sequence} x {measured.micro_batch_size}: {len(measured.collectives)} collectives, "
        f"{len(measured.kernels)} kernels",
    )
    columns: list[Column[LayerTime]] = [
        word("layer", lambda layer: layer.layer),
        number("TP", lambda layer: layer.tensor),
        number("CP", lambda layer: layer.context),
        number("EP", lambda layer: layer.expert),
        number("forward", lambda layer: layer.forward_seconds, format_seconds),
        number("backward", lambda layer: layer.backward_seconds, format_seconds),
        number("spread", lambda layer: layer.spread, percent, drop=1),
    ]
    print_table(console, columns, measured.whole_layers, title="Whole layers")


def machine_measure_links_command(
    *,
    options: LinkOptions,
    output: LinksFile = None,
    force: Force = False,
    as_json: LinksAsJson = False,
) -> None:
    """Measure the links between devices; writes links.toml.

    The file is for --topology. Start it by torchrun, with a process for each device.
    """
    from ..profiler.torchrun_env import read_torchrun_env

    process = read_torchrun_env(os.environ)
    target = choose_target(output, "links.toml", force=force)
    try:
        links = _measure(process, target, options)
    except PplanError as error:
        if process.rank:
            # Every process fails with the same error; the first one tells it.
            raise typer.Exit(error.exit_status) from None
        raise
    if process.rank == 0:
        _write(links, target, as_json=as_json)


def _measure(process: TorchrunEnv, target: Target, options: LinkOptions) -> MeasuredLinks:

    if process.rank == 0:
        target.check()
    from ..profiler.links import measure_links

    measured = measure_links(process, **vars(options))
    if not measured.levels:  # fits them: raises UsageError where the sizes show no bandwidth
        raise UsageError("machine measure links: no pair was measured", "Start two or more processes.")
    return measured


def _write(links: MeasuredLinks, target: Target, *, as_json: bool) -> None:
    """Prints the result even where the file cannot be written."""
    try:
        target.write_text(links.to_toml())
    finally:
        if as_json:
            result(links.to_json())
        else:
            _print(links, console())
    for remark_text in links.remarks:
        remark(f"Note: {remark_text}")
    remark(f"Wrote {target.path}")


def _print(links: MeasuredLinks, console: Console) -> None:
    from ..profiler.measured_links import LEVEL_TITLES
    from .table import line

    line(console, f"{links.topology.describe()}; measured with {links.backend}")
    _print_levels(links, LEVEL_TITLES, console)
    for level in links.levels:
        _print_transfers(links, level, f"Transfers {LEVEL_TITLES[level]}", console)
    _print_all_reduce(links, console)


def _print_levels(links: MeasuredLinks, titles: Mapping[LevelName, str], console: Console) -> None:
    """The fitted links, a row for each level."""
    from .table import Column, number, print_table, word

    fits = links.levels
    columns: list[Column[LevelName]] = [
        word("link", lambda level: titles[level]),
        number("pairs", lambda level: len(links.pairs_of(level)), drop=2),
        number("latency", lambda level: fits[level].latency_seconds, format_seconds),
        number("bandwidth", lambda level: fits[level].bandwidth_bytes_per_second, format_rate),
        number("largest difference", lambda level: fits[level].deviation, percent, drop=3),
        number("slowest pair", lambda level: _slowest(*links.slowest_pair(level)), drop=1),
    ]
    print_table(console, columns, list(fits), title="Links")


def _slowest(pair: PairTimes, rate: float) -> str:
    return f"{pair.first} and {pair.second}, {format_rate(rate)}"


def _print_transfers(links: MeasuredLinks, level: LevelName, title: str, console: Console) -> None:
    """Seconds of a level by size: both ways, and as fitted."""
    from .table import Column, number, print_table

    columns: list[Column[tuple[int, float, float]]] = [
        number("size", lambda row: row[0], format_bytes),
        number("there", lambda row: row[1], format_seconds),
        number("back", lambda row: row[2], format_seconds),
        number("fitted", lambda row: links.levels[level].seconds(row[0]), format_seconds),
    ]
    rows = list(zip(links.sizes, *links.medians(level), strict=True))
    print_table(console, columns, rows, title=title)


def _print_all_reduce(links: MeasuredLinks, console: Console) -> None:
    """Seconds by size: measured, and as the cost models predict them for the fitted links."""
    from .table import Column, number, print_table

    columns: list[Column[tuple[int, float, float]]] = [
        number("size", lambda row: row[0], format_bytes),
        number("measured", lambda row: row[1], format_seconds),
        number("predicted", lambda row: row[2], format_seconds),
        number("ratio", lambda row: row[2] / row[1], "{:.2f}".format),
    ]
    seconds = zip(links.sizes, links.all_reduce_seconds, links.predicted_all_reduce(), strict=True)
    print_table(console, columns, list(seconds), title="All-reduce over all devices")


def machine_measure_kernels_command(
    config: Config, *, options: KernelOptions, output: KernelsFile = None, force: Force = False
) -> None:
    """Measure a transformer's kernels; writes kernels.csv.

    They are the products and the attention that one device computes with the given degrees. The file is for
    solve --kernels.
    """
    from ..cost_models.transformer.configuration import load_transformer_shape
    from ..cost_models.transformer.kernel_table import TERA
    from .table import line

    shape = load_transformer_shape(config)
    if shape.note:
        remark(f"Note: {shape.note}")
    target = choose_target(output, "kernels.csv", force=force)
    target.check(config)
    from ..profiler.kernels import measure_kernels

    with counting("Measuring kernels") as count:
        table = measure_kernels(shape, options, count)
    target.write_text(table.to_csv())
    total = sum(table.seconds.values())
    flops = sum(kernel.flops for kernel in table.seconds)
    fastest = max(kernel.flops / seconds for kernel, seconds in table.seconds.items())
    line(
        console(),
        f"{len(table.seconds)} kernels of {shape.name} in {table.dtype} on {table.device}: "
        f"{format_seconds(total)} together, {flops / total / TERA:.4g} TFLOP/s, the fastest "
        f"{fastest / TERA:.4g} TFLOP/s.",
    )
    if table.peak is None:
        remark("Note: the device's peak is not known: efficiencies are of the fastest kernel")
    remark(f"Wrote {target.path}")
