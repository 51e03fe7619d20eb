"""The machine that a plan is for: its topology, and the profiles that kinds of devices have of their own."""

from __future__ import annotations

from pathlib import Path

from ..cost_models import arguments
from ..cost_models.errors import FileError, UsageError
from ..cost_models.layer import Chain
from ..cost_models.machines import MachineOptions
from ..cost_models.topology import Topology
from ..cost_models.topology_file import (
    PROCESSOR,
    check_seconds_on_kind,
    described_topology,
    make_topology,
    named_topology,
)
from ..planner.plan_file import Plan
from ..profiler.profile_file import Profile, profiled_device


def topology(name: str | Path, *, gpus: int | None = None) -> Topology:
    """The devices and links of a machine, such as "dgx-a100", or of a TOML file, on `gpus` devices.

    `gpus` defaults to those of one machine, or of the file; more are several machines. `.device(rank)` and
    `.link(a, b)` are what costs are made of.

    >>> import pplan
    >>> machine = pplan.topology("dgx-h100", gpus=16)
    >>> machine.device(0).name, machine.link(0, 8).bandwidth_bytes_per_second / 1e9
    ('H100', 50.0)

    Raises UsageError, FileError.
    """
    return described_topology(arguments.path("name", name), arguments.optional_whole("gpus", gpus))


def count_gpus(machine: MachineOptions) -> int:
    """The number of devices that the options give, else their topology. Raises UsageError, FileError."""
    gpus = machine.gpus
    if gpus is None and machine.topology is not None:
        gpus = named_topology(machine.topology).gpus
    if gpus is None:
        raise UsageError(
            "`gpus`: how many devices there are is not given",
            "Give their number, as in gpus=8, or a `topology` that has it.",
        )
    return gpus


def planned_machine(plan: Plan, profile: Profile, folder: Path) -> tuple[Topology, dict[str, Chain]]:
    """The topology, and the profiles of the kinds of devices that have their own, in `folder`.

    Raises FileError.
    """
    from ..planner.plan_options import Overrides
    from ..planner.plan_simulation import count_devices, read_machine  # of a plan alone

    topology = make_topology(
        gpus=count_devices(plan, Overrides()),
        file=read_machine(plan, "plan"),
        profiled=profiled_device(profile),
    )
    return topology, own_profiles(topology, folder)


def own_profiles(topology: Topology, folder: Path, seconds_of: str | None = PROCESSOR) -> dict[str, Chain]:
    """The layers as measured on them, by the name that the topology gives the file; names are relative to
    `folder`.

    Raises FileError, and UsageError where one of a GPU was measured on a processor and `seconds_of` does not
    say that it is meant.
    """
    profiles = {}
    for kind in topology.kinds:
        if kind.profile is not None:
            profile = _profile(folder / kind.profile, kind.name)
            if seconds_of is None:
                check_seconds_on_kind(profiled_device(profile), kind)
            profiles[kind.profile] = profile.chain()
    return profiles


def _profile(path: Path, kind: str) -> Profile:
    if not path.is_file():  # a device, say, of which there is no end
        raise FileError(
            f"{path}: no such file; the topology says that it is the profile of {kind}",
            "Put it beside the topology or plan that names it, or give the `topology` that it is beside.",
        )
    return Profile.load(path)
