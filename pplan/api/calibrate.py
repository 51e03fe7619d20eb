"""What a calibration is good for: a file of it, the topology with its link, and the plan solved again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..cost_models.errors import PplanError
from ..cost_models.layer import Chain
from ..cost_models.machines.topology_text import to_toml
from ..cost_models.topology import Device, Group, Topology
from ..planner.build_plan import build_problem, plan_without_comparison
from ..planner.joint_search import find_best_plan
from ..planner.plan_file import Plan
from ..runtimes.checking.calibration import Calibration
from ..runtimes.checking.check_report import Check
from ..runtimes.checking.job import Corrections
from .load import PlanAndProfile
from .machine import planned_machine


@dataclass(frozen=True)
class Calibrated:
    """`files`: what to write beside the plan. `again`: the plan solved again, or why there is none."""

    files: Mapping[Path, str]
    topology_file: Path
    again: Plan | str


def calibrate(result: Check, read: PlanAndProfile, stem: str) -> Calibrated | None:
    """What a check's corrections are good for; None where it has none. `stem` begins the files' names."""
    corrections = result.corrections
    if corrections is None:
        return None
    folder = read.plan_file.parent
    calibration = Calibration(
        backend=result.backend,
        device_name=result.device_name,
        processes=result.processes,
        corrections=corrections,
        made_by=result.made_by,
    )
    topology, profiles = planned_machine(read.plan, read.profile, folder)
    corrected = corrected_topology(topology, corrections, slower_alone(result))
    topology_file = folder / f"{stem}.topology.toml"
    described = to_toml(corrected, f"{topology.describe()}, as pplan check measured it")
    files = {folder / f"{stem}.calibration.json": calibration.to_json(), topology_file: described}
    return Calibrated(files, topology_file, _solved_again(read, corrected, profiles))


def _solved_again(read: PlanAndProfile, topology: Topology, profiles: Mapping[str, Chain]) -> Plan | str:
    try:
        plan_options = read.plan.options
        problem = build_problem(read.profile.chain(), topology, plan_options, read.plan.profile, profiles)
        answer = find_best_plan(problem)
    except PplanError as error:
        return error.what
    if answer.best is None:
        return "no plan fits"
    return plan_without_comparison(
        problem, answer.best, answer.result, model=read.plan.model, profile=read.plan.profile
    )


def slower_alone(result: Check) -> float:
    """How much longer the stages take here, alone, than the plan says: of their forwards and backwards."""
    planned = sum(own.planned.forward + own.planned.backward for own in result.of_plan.stages)
    alone = sum(own.alone.forward + own.alone.backward for own in result.of_plan.stages)
    return alone / planned if planned else 1.0


def corrected_topology(topology: Topology, corrections: Corrections, slower: float) -> Topology:
    """Its devices at the speed that they were seen at, its links as they were measured.

    What an action takes besides is not the search's to know; a transfer's latency carries it, as one goes
    with every action.
    """
    factor = corrections.slowdown * slower
    groups = tuple(Group(_slower(device, factor), number) for device, number in topology.groups)
    levels = topology.levels
    if corrections.latency is not None and corrections.bandwidth is not None:
        levels = tuple(
            replace(
                level,
                link=replace(
                    level.link,
                    latency_seconds=corrections.latency + corrections.overhead,
                    bandwidth_bytes_per_second=corrections.bandwidth,
                ),
            )
            for level in levels
        )
    return replace(topology, groups=groups, levels=levels)


def _slower(device: Device, factor: float) -> Device:
    """A kind with a profile of its own has no speed: its seconds are those of the profile."""
    return device if device.profile is not None else replace(device, speed=device.speed / factor)
