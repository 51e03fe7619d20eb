"""The files of a command: which it reads where none is named, where it writes, and as what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..cost_models.errors import FileError
from .streams import remark

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

MAKES = {"profile": "pplan profile vgg19", "plan": "pplan solve --gpus 8"}


def named_or_newest(named: Path | None, kinds: Sequence[str]) -> Path:
    """`named`, or the newest `*.KIND.json` of the working directory, which is said on standard error.

    Raises FileError where there is none, with the command that makes one.
    """
    if named is not None:
        return named
    found = [path for kind in kinds for path in Path().glob(f"*.{kind}.json") if path.is_file()]
    if not found:
        files = " or ".join(f"*.{kind}.json" for kind in kinds)
        raise FileError(
            f"no {' or '.join(kinds)} named, and no {files} in this directory",
            f"Name one, or make one first, as in: {MAKES[kinds[0]]}",
        )
    newest = max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    remark(f"Using {newest} (newest {' or '.join(kinds)} in this directory)")
    return newest
