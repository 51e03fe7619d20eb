"""`pplan simulate PLAN`: the plan, the profile it was made from, and its machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..cost_models.document import as_text, read_bytes, sha256
from ..cost_models.errors import FileError
from ..cost_models.machines.measured_on import check_processor_seconds
from ..cost_models.machines.topology_options import make_topology
from ..cost_models.quantities import format_seconds
from ..cost_models.topology import Topology
from ..planner.layout import Overrides, devices_needed, read_machine
from ..planner.plan_file import TIE, Plan
from ..planner.simulated import simulate_plan
from ..profiler.profile_file import Profile
from ..profiler.profile_warnings import profiled_device
from .machine_options import MachineOptions
from .own_profiles import own_profiles
from .simulate_command import Asked, told, with_options
from .simulation import Simulation


@dataclass(frozen=True)
class Measured:
    """A plan and the profile that it was made from, as read from their files."""

    plan: Plan
    profile: Profile
    plan_file: Path
    profile_file: Path


def read_plan(path: Path, profile_file: Path | None) -> Measured:
    """The plan in a file, with the profile of its name beside it, or the one that is named.

    Raises FileError for either, and for a profile that the plan was not made from.
    """
    plan = Plan.load(path)
    beside = path.parent / Path(plan.profile.file).name
    if profile_file is None and not beside.is_file():
        raise FileError(
            f"{path}: was made from {plan.profile.file or 'a nameless profile'}, which is not beside it",
            "Put it there, or name it with --profile FILE.",
        )
    where = beside if profile_file is None else profile_file
    content = read_bytes(where, "profile")
    if sha256(content) != plan.profile.sha256:
        raise FileError(
            f"{where}: is not the profile that {path} was made from (SHA-256 {sha256(content)[:12]}…, "
            f"the plan says {plan.profile.sha256[:12]}…)",
            f"Name the right one with --profile FILE, or plan again: pplan solve {where}",
        )
    return Measured(plan, Profile.parse(as_text(content, where, "profile"), str(where)), path, where)


def simulate_read(read: Measured, asked: Asked, machine: MachineOptions) -> Simulation:
    """A step of the plan, on its machine or as the options of a machine say. Raises UsageError."""
    plan, chain = read.plan, read.profile.chain()
    overrides = Overrides(
        asked.schedule,
        asked.stages,
        asked.micro_batches,
        asked.virtual_stages,
        asked.transfers,
        asked.replicas,
    )
    topology = _topology(read, machine, devices_needed(plan, overrides))
    named = machine.topology
    profiles = own_profiles(topology, read.plan_file.parent if named is None else named.parent)
    found = with_options(lambda: simulate_plan(plan, chain, topology, overrides, profiles))
    as_it_is = overrides == Overrides()
    own = found if as_it_is else simulate_plan(plan, chain, topology, profiles=profiles)
    simulated = Simulation(
        schedule=found.schedule,
        micro_batches=asked.micro_batches or plan.micro_batches,
        virtual_stages=found.virtual_stages,
        timeline=found.timeline,
        plan=read.plan_file.name,
        mini_batch=plan.mini_batch,
        plan_seconds=None if own is found else own.timeline.step_seconds,
        layers=found.layers,
        memory=found.memory,
    )
    bare = Simulation(
        own.schedule, plan.micro_batches, own.virtual_stages, own.timeline, mini_batch=plan.mini_batch
    )
    unlike = _differences(plan, bare.mini_batch_seconds, given=machine.are_given)
    return replace(simulated, notes=(*found.notes, *told(asked.transfers), *unlike))


def _topology(read: Measured, machine: MachineOptions, gpus: int) -> Topology:
    """The machine that the plan was made for, with what the options change of it; another one where they name
    a topology or a GPU."""
    plan, profile = read.plan, read.profile
    another = machine.topology or machine.gpu
    topology = make_topology(
        gpus=gpus,
        **machine.arguments(),
        file=machine.topology if another else read_machine(plan, str(read.plan_file)),
        profiled=profiled_device(profile),
    )
    if another:
        check_processor_seconds(profiled_device(profile), topology, plan.wishes.seconds_of)
    return topology


def _differences(plan: Plan, step: float, *, given: bool) -> list[str]:
    """That the plan as it is takes `step` seconds, other than it says: it was made for another machine.
    `given`: the user named one."""
    said = plan.prediction.step_seconds
    # A difference that does not show would read as a contradiction.
    if abs(step - said) <= 1e3 * TIE * said or format_seconds(step) == format_seconds(said):
        return []
    advice = "" if given else "; name that with --topology, --gpu, --bandwidth or --latency"
    return [
        f"the plan as it is takes {format_seconds(step)} here, it says {format_seconds(said)}: it was made "
        f"for {plan.topology or 'another machine'}{advice}"
    ]
