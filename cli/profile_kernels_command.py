"""`pplan profile-kernels`: measures a transformer's products and attention on the device at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..profiler.profile_options import KernelOptions
from .output import Force, choose_target

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The config.json of a transformer.", show_default=False)
]
KernelsFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Where to write; default: kernels.csv."),
]


def profile_kernels_command(
    config: Config, *, options: KernelOptions, output: KernelsFile = None, force: Force = False
) -> None:
    """Measure the products and attention of a transformer, and write the table for solve --kernels.

    They are those that one device computes with the given degrees.
    """
    from ..cost_models.quantities import format_seconds
    from ..cost_models.transformer.configuration import load_transformer_shape
    from ..cost_models.transformer.kernel_table import TERA
    from .streams import console, counting, remark
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
