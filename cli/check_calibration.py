"""What a calibration is good for: a file of it, the topology with its link, and the plan solved again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..cost_models.errors import PplanError
from ..cost_models.machines.topology_text import to_toml
from ..cost_models.quantities import format_seconds
from ..cost_models.topology import Device, Group, Topology
from ..planner.find import find
from ..planner.plan_file import Plan
from ..planner.solve import bare_plan, problem_of
from ..planner.wishes import Wishes
from ..runtimes.checking.calibration import Calibration
from ..runtimes.checking.check_report import Check
from ..runtimes.checking.job import Corrections
from .output import Target
from .planned_machine import planned_machine
from .simulated_plan import Measured
from .streams import remark


def write_and_solve(found: Check, read: Measured, stem: str) -> None:
    """Writes the calibration and the topology beside the plan, and says what solving again finds."""
    corrections = found.corrections
    if corrections is None:
        return
    folder = read.plan_file.parent
    calibration = Calibration(
        backend=found.backend,
        device_name=found.device_name,
        processes=found.processes,
        corrections=corrections,
        made_by=found.made_by,
    )
    topology, profiles = planned_machine(read.plan, read.profile, folder)
    corrected = corrected_topology(topology, corrections, slower_alone(found))
    files = {
        folder / f"{stem}.calibration.json": calibration.to_json(),
        folder / f"{stem}.topology.toml": to_toml(
            corrected, f"{topology.describe()}, as pplan check measured it"
        ),
    }
    for path, content in files.items():
        Target(path, replace=False, own=True).put(content)
    remark(f"Wrote {' and '.join(map(str, files))}")
    try:
        wishes = Wishes(**read.plan.wishes.model_dump())
        problem = problem_of(read.profile.chain(), corrected, wishes, read.plan.profile, profiles)
        answer = find(problem)
    except PplanError as error:
        remark(f"Solved again: {error.what}")
        return
    if answer.best is None:
        remark("Solved again: no plan fits")
        return
    again = bare_plan(problem, answer.best, answer.found, model=read.plan.model, profile=read.plan.profile)
    _say(again, read.plan, folder / f"{stem}.topology.toml")


def _say(again: Plan, plan: Plan, topology: Path) -> None:
    step = format_seconds(again.prediction.step_seconds)
    same = (again.balance, again.schedule, again.micro_batches, again.replicas) == (
        plan.balance,
        plan.schedule,
        plan.micro_batches,
        plan.replicas,
    )
    if same:
        remark(f"Solved again with it: the plan stays, its step is {step}")
        return
    remark(
        f"Solved again with it: {', '.join(map(str, again.balance))}, {again.micro_batches} x "
        f"{again.micro_batch_size}, {again.schedule}: {step}; pplan solve --topology {topology} writes it"
    )


def slower_alone(found: Check) -> float:
    """How much longer the stages take here, alone, than the plan says: of their forwards and backwards."""
    planned = sum(own.planned.forward + own.planned.backward for own in found.of_plan.stages)
    alone = sum(own.alone.forward + own.alone.backward for own in found.of_plan.stages)
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
