"""`pplan import`: costs that another tool measured become a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..profiler.profile_options import ProfileImportOptions
from .output import AsJson, Force, Output, choose_target, file_stem
from .streams import console

CostsFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="PipeDream's graph.txt, or a table of costs as CSV or JSON.", show_default=False
    ),
]


def import_command(
    file: CostsFile,
    *,
    options: ProfileImportOptions,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a profile of costs that another tool measured.

    It reads a PipeDream graph, or a table, CSV or JSON, one row a layer.

    Columns: name, forward_seconds, backward_seconds, activation_bytes, parameter_bytes; optional saved_bytes,
    micro_batch_size, backward_input_seconds; other units end the name, as in forward_ms or activation_mib;
    tp2_forward_ms and so on are those of one of two devices that share the layer.
    """
    from ..api.profiles import import_profile
    from .profile_tables import print_profile

    profile = import_profile(file, **vars(options))
    about = {"model": profile.model, "device": profile.device}
    name = f"{file_stem(profile.model)}.profile.json"
    target = choose_target(output, name, force=force, about=about, kind="profile")
    target.check(file)
    target.write(profile, as_json=as_json, show=lambda: print_profile(profile, console()))
