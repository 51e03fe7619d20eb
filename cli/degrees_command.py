"""`pplan degrees`: tensor, context, expert, pipeline and data parallelism of a transformer, from its
configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..cost_models.machines import MachineOptions
from ..planner.degrees.degree_options import DegreeOptions
from .output import AsJson, Force

Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="The config.json of a decoder-only transformer.", show_default=False
    ),
]
Kernels = Annotated[
    Path | None,
    typer.Option(
        "--kernels", metavar="FILE", help="A CSV file of measured kernels; default: the GPU's limits."
    ),
]
DegreesOutput = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Write the answer to a file, which pplan show prints again."
    ),
]


def degrees_command(
    config: Config,
    *,
    options: DegreeOptions,
    machine: MachineOptions,
    kernels: Kernels = None,
    output: DegreesOutput = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Find the degrees of tensor, context, expert, pipeline and data parallelism with the shortest step."""
    from ..api.degrees import build_degrees_file, find_degrees
    from ..api.provenance import made_by
    from ..cost_models.document import MadeBy
    from ..cost_models.transformer.configuration import load_transformer_shape
    from .degrees_tables import print_degrees
    from .field_names import command_line
    from .output import Target
    from .streams import console, result, waiting

    target = None if output is None else Target(output, force, kind="degrees")
    if target is not None:
        target.check(config, kernels)
    shape = load_transformer_shape(config)
    with waiting("Searching"):
        answer = find_degrees(shape, machine, options, kernels)
    document = build_degrees_file(answer, made_by(MadeBy(), command=command_line()))
    if target is not None:
        target.write(document, as_json=as_json, show=lambda: print_degrees(document, console()))
    elif as_json:
        result(document.to_json())
    else:
        print_degrees(document, console())
