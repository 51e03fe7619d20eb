"""Options that several verbs have, and that no field declares: they say what becomes of the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write; default: named after the model, as MODEL.plan.json.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file, whatever it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the file's JSON instead of tables.")]
