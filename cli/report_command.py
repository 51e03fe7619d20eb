"""`pplan report`: a plan as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..cost_models.errors import UsageError
from .output import Force, ProfileFile, choose_input, choose_target

Plans = Annotated[
    list[Path],
    typer.Argument(
        metavar="[PLAN]...",
        help="The page's plan, and others to stand beside it; default: newest in this directory.",
        show_default=False,
    ),
]

FrontierFile = Annotated[
    Path | None,
    typer.Option(
        "--frontier", metavar="FILE", help="Of pplan solve --frontier; default: that beside the plan."
    ),
]
CheckFile = Annotated[
    Path | None,
    typer.Option("--check", metavar="FILE", help="Of pplan check; default: that of the plan, beside it."),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Compute the sensitivity and what-ifs as well; takes some seconds.")
]
Page = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Where to write; default: PLAN's name with .html."),
]


def report_command(
    plan_files: Plans = [],  # noqa: B006  typer takes a list
    profile_file: ProfileFile = None,
    frontier_file: FrontierFile = None,
    check_file: CheckFile = None,
    explain_too: Explain = False,
    output: Page = None,
    force: Force = False,
) -> None:
    """Write plans as one HTML page.

    The page has cuts to move, a timeline, memory and comparisons. It needs no other file. Several plans stand
    side by side, with their timelines on one axis.
    """
    from ..api.html_report import find_beside, report
    from ..api.load import read_plan
    from ..cost_models.text_files import REPORT
    from .streams import remark, waiting

    files: Sequence[Path | None] = plan_files or [None]
    path, *others = [choose_input(file, ("plan",)) for file in files]
    beside = find_beside(path)
    profile = profile_file or beside.profile
    if profile is not None:
        profile = read_plan(path, profile).profile_file
    elif explain_too:
        raise UsageError(
            "report --explain: the plan's profile is not beside it", "Name it: pplan report --profile FILE"
        )
    stem = path.name.removesuffix(".json").removesuffix(".plan")
    target = choose_target(output, f"{stem}.html", force=force, kind=REPORT)
    target.check(path, *others, profile, frontier_file, check_file)
    explanation = None
    with waiting("Making the page"):
        if explain_too and profile is not None:
            from ..api.explain import explain

            explanation = explain(path, profile)
        page = report(
            path,
            profile,
            others=others,
            frontier=frontier_file or beside.frontier,
            check=check_file or beside.check,
            explanation=explanation,
        )
    target.write_text(page.html)
    remark(f"Wrote {target.path}")
