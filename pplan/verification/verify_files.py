"""Verifies a plan file: reads it and its profile, and checks line by line what it says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from ..cost_models.errors import FileError
from .comparison_checks import check_comparisons
from .documents import LARGEST_PLAN, LARGEST_PROFILE, Table, parse, read_content
from .figure_checks import check_figures
from .layer_costs import Layers, read_layers
from .report import Report, ReportBuilder
from .shape_checks import check_layout
from .stated_machine import StatedMachine, parse_machine
from .stated_plan import parse_plan
from .verification_inputs import VerificationInputs


@dataclass
class Sources:
    """The contents of a plan and of its profile, with names for errors. `is_file`: whether the profile's is
    that of its file. `folder`: where the profiles of kinds of devices lie."""

    plan: bytes
    plan_name: str
    profile: bytes | None = None
    profile_name: str = ""
    is_file: bool = True
    folder: Path = field(default_factory=Path)


def verify_sources(sources: Sources, *, shared_ports: bool = True) -> Report:
    """All lines. `shared_ports`: whether transfers and sums of gradients wait for each other at the ports
    that they share. Raises FileError for a file that cannot be read, UsageError."""
    inputs = _inputs(sources, shared_ports)
    builder = ReportBuilder()
    check_layout(builder, inputs)
    check_figures(builder, inputs)
    check_comparisons(builder, inputs)
    return Report(sources.plan_name, sources.profile_name, tuple(builder.lines))


def verify_files(plan: Path, profile: Path | None = None) -> Report:
    """The plan in a file; its profile is named, or beside it under the name that it says.

    Raises FileError.
    """
    return verify_sources(read_sources(plan, profile))


def read_sources(plan: Path, profile: Path | None) -> Sources:
    """What is read for `verify_files`. Raises FileError."""
    content = read_content(plan, "plan", LARGEST_PLAN)
    sources = Sources(content, str(plan), folder=plan.parent)
    if profile is None:
        profile_name = parse(content, str(plan), "plan", "prediction").table("profile").text("file", "")
        beside = plan.parent / Path(profile_name).name
        profile = beside if profile_name and beside.is_file() else None
    if profile is not None:
        sources.profile, sources.profile_name = (
            read_content(profile, "profile", LARGEST_PROFILE),
            str(profile),
        )
    return sources


def _inputs(sources: Sources, shared_ports: bool) -> VerificationInputs:
    plan = parse_plan(parse(sources.plan, sources.plan_name, "plan", "prediction"))
    profile = layers = None
    if sources.profile is not None:
        profile = parse(sources.profile, sources.profile_name or "profile", "profile", "layers")
        profile = _at_degree(profile, plan.profile.count("tensor_parallel", 1))
        layers = read_layers(profile)
    machine = parse_machine(plan.machine, f"{sources.plan_name}: machine") if plan.machine else None
    profile_name = plan.profile.text("file", "") or "a profile without a name"
    return VerificationInputs(
        plan=plan,
        profile=profile,
        profile_sha256="" if sources.profile is None else hashlib.sha256(sources.profile).hexdigest(),
        is_file=sources.is_file,
        no_profile=f"no profile was given, and {profile_name[:80]} is not beside the plan",
        layers=layers,
        machine=machine,
        profiles={} if layers is None else _own_profiles(machine, layers, sources.folder),
        shared_ports=shared_ports,
    )


def _at_degree(profile: Table, sharers: int) -> Table:
    """The profile with the layers that so many devices share, where it has them besides its own."""
    for own in profile.tables("shared_layers"):
        if own.count("tensor_parallel") == sharers:
            layers = {"layers": own.content.get("layers"), "tensor_parallel": sharers}
            return Table({**profile.content, **layers}, profile.where)
    return profile


def _own_profiles(machine: StatedMachine | None, layers: Layers, folder: Path) -> dict[str, Layers]:
    """Of the kinds of devices that have one, those that are there. Raises FileError for other layers."""
    profiles = {}
    for kind in () if machine is None else machine.kinds:
        if kind.profile is None or kind.profile in profiles or not _is_file(folder / kind.profile):
            continue
        path = folder / kind.profile
        own = read_layers(
            parse(read_content(path, "profile", LARGEST_PROFILE), str(path), "profile", "layers")
        )
        if own.names != layers.names:
            raise FileError(
                f"{path}: has other layers than the plan's profile", "Profile the same model on that kind."
            )
        profiles[kind.profile] = own
    return profiles


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
