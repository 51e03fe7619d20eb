"""`pplan show`: a profile or a plan in tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..planner.plan_file import Plan
    from ..profiler.profile_file import Profile


def show_command(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A profile or a plan; default: the newest here.",
            show_default=False,
        ),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all", help="Of a profile: every layer, not only the heaviest.")
    ] = False,
    provenance: Annotated[
        bool,
        typer.Option("--provenance", help="Print what any file discloses: versions, devices, names, paths."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's JSON.")] = False,
) -> None:
    """Show a profile or a plan in tables."""
    from ..cost_models.text_files import escape_text, read_text
    from ..profiler.profile_file import Profile
    from .output import choose_input
    from .streams import console, result

    path = choose_input(file, ("profile", "plan"))
    text = read_text(path, "profile or plan")
    if provenance:
        _print_provenance(path, text, as_json=as_json)
        return
    document = _parse_either(text, path)
    if as_json:
        result(escape_text(text))
    elif isinstance(document, Profile):
        from .profile_tables import print_profile

        print_profile(document, console(), all_layers=all_layers)
    else:
        from .plan_tables import planned_memory, print_ledger, print_plan

        screen = console()
        print_plan(document, screen)
        print_ledger(planned_memory(document), screen)


def _print_provenance(path: Path, text: str, *, as_json: bool) -> None:
    """Print what a file discloses."""
    import json
    from dataclasses import asdict

    from ..api.provenance import disclose
    from .streams import console, result
    from .table import Column, line, print_table
    from .table import text as words

    disclosure = disclose(text)
    if as_json:
        result(json.dumps({"file": str(path), **asdict(disclosure)}, indent=1) + "\n")
        return
    columns: list[Column[tuple[str, str]]] = [
        words("key", lambda row: row[0], min_width=20),
        words("value", lambda row: row[1], min_width=30),
    ]
    if disclosure.origin:
        print_table(console(), columns, list(disclosure.origin.items()))
    if disclosure.private:
        line(console(), f"Paths, addresses and names in it: {', '.join(disclosure.private)}.")
    else:
        line(console(), "It holds no absolute path, no e-mail address, and no name of this user or computer.")


_OTHERS = {
    "degrees": "It is an answer of pplan 0.1; make a plan: pplan solve config.json --gpus N --gpu NAME",
    "file for a runtime": "It is for your training script; name the plan it was made from.",
    "simulation": "It is for other programs; pplan simulate prints it as tables, of the same plan or costs.",
}
"""What to do about files of pplan that are not shown."""


def _parse_either(text: str, path: Path) -> Profile | Plan:
    """The document of its kind, told by the keys (by the name where the keys do not tell)."""
    from ..cost_models.errors import FileError
    from ..cost_models.text_files import detect_kind
    from ..planner.plan_file import Plan
    from ..profiler.profile_file import Profile

    kind = detect_kind(text)
    if kind in _OTHERS:
        raise FileError(f"{path}: this is a {kind}, show takes profiles and plans", _OTHERS[kind])
    if kind == "plan" or (kind is None and path.name.endswith(".plan.json")):
        return Plan.parse(text, str(path))
    return Profile.parse(text, str(path))
