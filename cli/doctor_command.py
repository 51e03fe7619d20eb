"""`pplan doctor`: what works on this machine, and what to install for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .output import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.doctor import Diagnosis, Finding

LACKING = 2
"""Exit status: something is missing that pplan needs."""
WORDS = {"ok": "ok", "missing": "MISSING", "optional": "not here", "note": "note"}


def doctor_command(as_json: AsJson = False) -> None:
    """Tell versions, devices, links and runtimes of this machine, and what to install for what is missing."""
    from ..api.doctor import examine_machine
    from .streams import console, result

    diagnosis = examine_machine()
    if as_json:
        result(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis, console())
    if not diagnosis.works:
        raise typer.Exit(LACKING)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints a row for everything that was looked at, and the commands that add what is not here."""
    from .table import Column, line, print_table, text, word

    columns: list[Column[Finding]] = [
        word("what", lambda finding: finding.subject),
        word("", lambda finding: finding.state, lambda state: WORDS[state]),
        text("found", lambda finding: finding.text, min_width=30),
    ]
    print_table(console, columns, diagnosis.findings)
    advised = [finding for finding in diagnosis.findings if finding.advice]
    if advised:
        console.print()
        line(console, "To change that:", style="bold")
    for finding in advised:
        line(console, f"  {finding.subject}: {finding.advice}")
