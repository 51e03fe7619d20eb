"""`pplan topology`: the machines that are known, and what a machine or a topology file holds and costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, options_class
from ..cost_models.errors import UsageError
from .option_parameters import action_parser
from .streams import console, remark, result

ACTIONS = ("show", "list")


@options_class
class TopologyOptions(Options):
    """The size of the machine to show."""

    gpus: int | None = option(
        None,
        arguments.optional_whole,
        "How many GPUs; default: those of the file, or of two machines.",
        "N",
        least=1,
    )


def _list_names() -> Iterable[str]:
    from ..cost_models.machines import MACHINES

    return MACHINES


def topology_command(
    action: Annotated[
        str,
        typer.Argument(
            metavar="[show|list]",
            help="Show one, or list the machines.",
            parser=action_parser("topology", ACTIONS, _list_names),
        ),
    ] = "list",
    name: Annotated[
        Path | None,
        typer.Argument(metavar="NAME|FILE.toml", help="A machine or a topology file.", show_default=False),
    ] = None,
    *,
    options: TopologyOptions,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print a topology file to start your own from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show devices, links and what transfers take, of a machine or a topology file; or list the machines."""
    if as_toml and as_json:
        raise UsageError("topology: both --toml and --json", "Give one of them.")
    if action == "list" or name is None:
        _check_list(action, name, options.gpus, as_toml=as_toml)
        _list(as_json=as_json)
    else:
        _show(name, options.gpus, as_toml=as_toml, as_json=as_json)


def _check_list(action: str, name: Path | None, gpus: int | None, *, as_toml: bool) -> None:
    if name is not None:
        raise UsageError(
            f"topology {action} {name}: the list takes no name", f"To see it: pplan topology show {name}"
        )
    if gpus is not None or as_toml:
        option = "--toml" if as_toml else f"--gpus {gpus}"
        raise UsageError(f"topology {option}: of which?", f"Name it: pplan topology show dgx-a100 {option}")


def _list(*, as_json: bool) -> None:
    from .topology_tables import machines_json, print_machines

    if as_json:
        result(machines_json())
    else:
        print_machines(console())


def _show(name: Path, gpus: int | None, *, as_toml: bool, as_json: bool) -> None:
    from ..cost_models.machines import find_machine
    from ..cost_models.topology_file import described_topology
    from .topology_tables import print_topology, topology_json

    machine = find_machine(str(name))
    title = str(name) if machine is None else machine.title
    if as_toml:
        from ..cost_models.topology_file import to_toml

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
