"""The machine that a plan was made for, as costs take it."""

from __future__ import annotations

from pathlib import Path

from ..cost_models.layer import Chain
from ..cost_models.machines.topology_options import ProfiledDevice, make_topology
from ..cost_models.topology import Topology
from ..planner.layout import Overrides, devices_needed, read_machine
from ..planner.plan_file import Plan
from ..profiler.profile_file import Profile
from .own_profiles import own_profiles


def planned_machine(plan: Plan, profile: Profile, folder: Path) -> tuple[Topology, dict[str, Chain]]:
    """The topology, and the profiles of the kinds of devices that have their own, in `folder`.

    Raises FileError.
    """
    topology = make_topology(
        gpus=devices_needed(plan, Overrides()),
        file=read_machine(plan, "plan"),
        profiled=ProfiledDevice(profile.device, profile.device_name, profile.device_memory_bytes),
    )
    return topology, own_profiles(topology, folder)
