"""`pplan import`: costs that another tool measured become a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..profiler.profile_options import ProfileImportOptions
from .output import AsJson, Force, Output
from .streams import console

if TYPE_CHECKING:
    from ..profiler.profile_file import Profile

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
    """Make a profile of costs from elsewhere: a PipeDream graph, or a table, CSV or JSON, one row a layer.

    Columns: name, forward_seconds, backward_seconds, activation_bytes, parameter_bytes; optional saved_bytes,
    micro_batch_size, backward_input_seconds; other units end the name, as in forward_ms or activation_mib;
    tp2_forward_ms and so on are those of one of two devices that share the layer.
    """
    from ..api.profiles import import_profile
    from ..api.provenance import made_by
    from .field_names import command_line
    from .output import choose_target, file_stem

    profile = import_profile(file, **vars(options))
    about = {"model": profile.model, "device": profile.device}
    name = f"{file_stem(profile.model)}.profile.json"
    target = choose_target(output, name, force=force, about=about, kind="profile")
    target.check(file)
    profile = profile.model_copy(update={"made_by": made_by(profile.made_by, command=command_line())})
    target.write(profile, as_json=as_json, show=lambda: _show(profile))


def _show(profile: Profile) -> None:
    from .profile_tables import print_profile

    print_profile(profile, console())
