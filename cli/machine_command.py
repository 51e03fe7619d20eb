"""`pplan machine`: the known machines, one of them or a topology file, and what works on this computer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, options_class
from ..cost_models.errors import UsageError
from .output import AsJson
from .streams import console, remark, result

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.doctor import Diagnosis, Finding

LACKING = 2
"""Exit status: something is missing that pplan needs."""
WORDS = {"ok": "ok", "missing": "MISSING", "optional": "not here", "note": "note"}


@options_class
class MachineSize(Options):
    """The size of the machine to show."""

    gpus: int | None = option(
        None,
        arguments.optional_whole,
        "Number of GPUs; default: those of the file, or of two machines.",
        "N",
        least=1,
    )


def machine_list_command(as_json: AsJson = False) -> None:
    """List the machines that --topology knows."""
    from .machine_tables import machines_json, print_machines

    if as_json:
        result(machines_json())
    else:
        print_machines(console())


def machine_show_command(
    name: Annotated[
        Path,
        typer.Argument(metavar="NAME|FILE.toml", help="A machine or a topology file.", show_default=False),
    ],
    *,
    size: MachineSize,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print a topology file to start your own from.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show devices, links and transfer times of a machine.

    NAME is one of pplan machine list.
    """
    from ..cost_models.machines import find_machine
    from ..cost_models.topology_file import described_topology, to_toml
    from .machine_tables import print_topology, topology_json

    if as_toml and as_json:
        raise UsageError("machine show: both --toml and --json", "Give one of them.")
    machine, gpus = find_machine(str(name)), size.gpus
    title = str(name) if machine is None else machine.title
    if as_toml:
        result(to_toml(described_topology(name, gpus), title))
        return
    if gpus is None and machine is not None:
        gpus = 2 * int(machine.gpus.value)
        remark(f"Two machines, {gpus} GPUs; --gpus N shows another number")
    topology = described_topology(name, gpus)
    if as_json:
        result(topology_json(topology, title))
    else:
        print_topology(topology, title, console())


def machine_doctor_command(as_json: AsJson = False) -> None:
    """Tell what works on this computer, and what to install.

    It looks at versions, devices, links and runtimes.
    """
    from ..api.doctor import examine_machine

    diagnosis = examine_machine()
    if as_json:
        result(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis, console())
    if not diagnosis.works:
        raise typer.Exit(LACKING)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a row for each finding, and the commands that add what is missing."""
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
