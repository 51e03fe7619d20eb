"""`pplan import`: costs that another tool measured become a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, Force, Output, whole_number, word
from .streams import console

if TYPE_CHECKING:
    from ..profiler.profile_file import Profile

CostsFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="PipeDream's graph.txt, or a table of costs as CSV or JSON.", show_default=False
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="pipedream|csv|json",
        help="Format of the file; default: detected from its content.",
        parser=word("--format", ("pipedream", "csv", "json")),
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="The model's name; default: the file's.")
]
MicroBatchSize = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size",
        metavar="N",
        help="Samples that the costs are for, where the file does not say it; default: 128 of a graph, 1 of "
        "a table.",
        parser=whole_number("--micro-batch-size", at_least=1),
    ),
]
Granularity = Annotated[
    str | None,
    typer.Option(
        "--granularity",
        metavar="block|fine",
        help="Layers of a graph: what lies between all places that one tensor crosses, or each operation.",
        parser=word("--granularity", ("block", "fine")),
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="float32", help="Or float16, bfloat16, float64: of the weights.")
]


def import_command(
    file: CostsFile,
    format: Format = None,
    model: ModelName = None,
    micro_batch_size: MicroBatchSize = None,
    granularity: Granularity = None,
    dtype: Dtype = "float32",
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a profile of costs from elsewhere: a PipeDream graph, or a table, CSV or JSON, one row a layer.

    Columns: name, forward_seconds, backward_seconds, activation_bytes, parameter_bytes; optional saved_bytes,
    micro_batch_size, backward_input_seconds; times also as forward_ms and so on.
    """
    from ..api.profiles import import_profile
    from ..api.provenance import made_by
    from .invocation import command_line
    from .output import chosen_target, file_stem

    profile = import_profile(
        file,
        format=format,
        model=model,
        micro_batch_size=micro_batch_size,
        granularity=granularity,
        dtype=dtype,
    )
    target = chosen_target(
        output, f"{file_stem(profile.model)}.profile.json", force=force, about={"model": profile.model}
    )
    target.check(file)
    profile = profile.model_copy(update={"made_by": made_by(profile.made_by, command=command_line())})
    target.write(profile, as_json=as_json, show=lambda: _show(profile))


def _show(profile: Profile) -> None:
    from .profile_tables import print_profile

    print_profile(profile, console())
