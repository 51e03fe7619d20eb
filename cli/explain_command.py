"""`pplan explain`: why a plan is as it is, and why a split in use is slower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..cost_models.errors import UsageError
from ..cost_models.schedules import SCHEDULES
from .options import whole_number, word

PlanFile = Annotated[
    Path | None,
    typer.Argument(metavar="PLAN", help="A plan; default: newest in this directory.", show_default=False),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The plan's profile, where it is not beside it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
CurrentSplit = Annotated[
    str | None,
    typer.Option(
        "--current",
        metavar="N,N,...",
        help="Layers of each stage as you split them now: why it is slower than the plan.",
        rich_help_panel="The split in use",
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="R",
        help="Devices that share each of its stages; default: 1.",
        parser=whole_number("--replicas", at_least=1),
        rich_help_panel="The split in use",
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        metavar="M",
        help="Into which it cuts the global batch; default: the best number.",
        parser=whole_number("--micro-batches", at_least=1),
        rich_help_panel="The split in use",
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Its schedule; default: the best that the plan might have.",
        parser=word("--schedule", SCHEDULES),
        rich_help_panel="The split in use",
    ),
]


def explain_command(
    plan_file: PlanFile = None,
    profile_file: ProfileFile = None,
    current: CurrentSplit = None,
    replicas: Replicas = None,
    micro_batches: MicroBatches = None,
    schedule: Schedule = None,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: what limits its step, what comes second, how far it holds, what changes would bring."""
    for option, value in (
        ("--replicas", replicas),
        ("--micro-batches", micro_batches),
        ("--schedule", schedule),
    ):
        if current is None and value is not None:
            raise UsageError(
                f"explain {option} {value}: without --current",
                "It tells of the split in use: give its balance, as in --current 12,34.",
            )
    balance = None if current is None else balance_of(current)

    from ..api.explain import explain
    from ..api.load import read_plan
    from .default_input import named_or_newest
    from .streams import console, result

    read = read_plan(named_or_newest(plan_file, ("plan",)), profile_file)
    explanation = explain(
        read.plan_file,
        read.profile_file,
        current=balance,
        replicas=replicas or 1,
        micro_batches=micro_batches,
        schedule=schedule,
    )
    if as_json:
        result(explanation.to_json())
        return
    from .explain_tables import print_explanation

    print_explanation(explanation, console())


def balance_of(text: str) -> tuple[int, ...]:
    """`12,34` as numbers in their order. Raises UsageError."""
    return tuple(whole_number("--current", at_least=1)(part.strip()) for part in text.split(","))
