"""What a calibration is good for: a file of it, the topology with its link, and the plan solved again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..cost_models.errors import PplanError
from ..cost_models.layer import Chain
from ..cost_models.machines.topology_text import to_toml
from ..cost_models.topology import Device, Group, Link, Topology
from ..planner.build_plan import build_problem
from ..planner.joint_search import find_best_plan
from ..planner.plan_document import plan_without_comparison
from ..planner.plan_file import Plan
from ..runtimes.checking.prediction import Calibration
from ..runtimes.checking.records import Check, Corrections
from .load import PlanAndProfile
from .machine import planned_machine


@dataclass(frozen=True)
class CalibrationFiles:
    """`files`: what to write beside the plan. `new_plan`: the plan solved again, or why there is none."""

    files: Mapping[Path, str]
    topology_file: Path
    new_plan: Plan | str


def calibrate(result: Check, files: PlanAndProfile, stem: str) -> CalibrationFiles | None:
    """Files of a check's corrections; None if the check has none, or did not keep them.

    `stem` begins the files' names.
    """
    corrections = result.corrections
    if corrections is None:
        return None
    folder = files.plan_file.parent
    calibration = Calibration(
        backend=result.backend,
        device_name=result.device_name,
        processes=result.processes,
        corrections=corrections,
        made_by=result.made_by,
    )
    topology, profiles = planned_machine(files.plan, files.profile, folder)
    # The seconds of stages that wait are not the device's.
    slower = 1.0 if result.emulated else corrections.slowdown * slower_alone(result)
    new_topology = corrected_topology(topology, corrections, slower)
    topology_file = folder / f"{stem}.topology.toml"
    description = to_toml(new_topology, f"{topology.describe()}, as pplan check measured it")
    texts = {folder / f"{stem}.calibration.json": calibration.to_json(), topology_file: description}
    return CalibrationFiles(texts, topology_file, _solve_again(files, new_topology, profiles))


def _solve_again(files: PlanAndProfile, topology: Topology, profiles: Mapping[str, Chain]) -> Plan | str:
    try:
        plan_options = files.plan.options
        problem = build_problem(files.profile.chain(), topology, plan_options, files.plan.profile, profiles)
        answer = find_best_plan(problem)
    except PplanError as error:
        return error.what
    if answer.best is None:
        return "no plan fits"
    return plan_without_comparison(
        problem, answer.best, answer.result, model=files.plan.model, profile=files.plan.profile
    )


def slower_alone(result: Check) -> float:
    """The stages' forwards and backwards as measured alone, over those of the plan."""
    planned_seconds = sum(stage.planned.forward + stage.planned.backward for stage in result.of_plan.stages)
    measured_seconds = sum(stage.alone.forward + stage.alone.backward for stage in result.of_plan.stages)
    return measured_seconds / planned_seconds if planned_seconds else 1.0


def corrected_topology(topology: Topology, corrections: Corrections, slower: float) -> Topology:
    """The topology with devices that are `slower` by a factor, and links as the check measured them.

    The search knows no overhead of an action. A transfer's latency carries it, because one transfer goes with
    every action.
    """
    groups = tuple(Group(_slower(device, slower), number) for device, number in topology.groups)
    levels = tuple(replace(level, link=_corrected_link(level.link, corrections)) for level in topology.levels)
    return replace(topology, groups=groups, levels=levels)


def _corrected_link(link: Link, corrections: Corrections) -> Link:
    latency, bandwidth = corrections.latency, corrections.bandwidth
    return replace(
        link,
        latency_seconds=(link.latency_seconds if latency is None else latency) + corrections.overhead,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second if bandwidth is None else bandwidth,
    )


def _slower(device: Device, factor: float) -> Device:
    """A kind with a profile of its own has no speed: its seconds are those of the profile."""
    return device if device.profile is not None else replace(device, speed=device.speed / factor)
