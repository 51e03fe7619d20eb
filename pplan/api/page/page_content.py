"""All that the report's page says of a plan: sentences, tables, and the data of its drawings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...cost_models.document import MadeBy
from ...cost_models.errors import PplanError, UsageError
from ...cost_models.layer import Chain
from ...cost_models.quantities import format_count
from ...cost_models.schedules import SCHEDULES
from ...cost_models.timeline import simulate
from ...cost_models.topology import UNKNOWN_DEVICE, Topology
from ...planner.assembly import Assembly
from ...planner.plan_file import Plan, ProfileReference
from ...planner.plan_options import Overrides
from ...planner.plan_simulation import (
    Simulation,
    describe_lack,
    device_memory,
    keeps_stages,
    place_plan,
    plan_space,
    simulate_plan,
    simulate_stage_seconds,
)
from ...planner.scoring import assemble
from ...profiler.profile_file import Profile
from ...runtimes.checking.records import Check
from ..plan_summary import answer_lines, summary_lines
from . import page_extras as extras
from . import page_tables as tables
from .cut_problem import EDITED, cut_problem, refuse_cuts
from .page_timeline import timeline_data

if TYPE_CHECKING:
    from ...planner.explanation.explanation import Explanation
    from ...planner.objectives.frontier import Frontier

MOST_SIMULATED = 20_000
"""Actions of a step up to which every other schedule is simulated as well."""


@dataclass(frozen=True)
class PageSources:
    """What a report is made from. Without the profile there is no machine either.

    `others`: plans that stand beside this one, with their profiles.
    """

    plan: Plan
    plan_file: str = ""
    profile: Profile | None = None
    machine: Topology | None = None
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    explanation: Explanation | None = None
    frontier: Frontier | None = None
    check: Check | None = None
    others: Sequence[PageSources] = ()

    def simulate(self) -> Simulation | None:
        """Simulate the step; None for a plan of a profile that is not here."""
        if self.profile is not None and self.machine is not None:
            return simulate_plan(self.plan, self.profile.chain(), self.machine, profiles=self.profiles)
        return simulate_stage_seconds(self.plan) if self.plan.training is not None else None


@dataclass(frozen=True)
class PageContent:
    """What the template prints. `data`: what the scripts read; `absent`: what is not in the page, and why."""

    title: str
    answer: Sequence[str]
    warnings: Sequence[str]
    figures: Sequence[tuple[str, str]]
    summary: Sequence[str]
    stages: tables.PageTable
    compared: tables.PageTable | None
    times: tables.PageTable | None
    bars: Sequence[tables.MemoryBar]
    ledger: tables.PageTable
    baselines: tables.PageTable
    schedules: tables.PageTable | None
    layers: tables.PageTable | None
    explained: Sequence[tables.PageTable]
    frontier: tables.PageTable | None
    dots: Sequence[extras.Dot]
    check: Sequence[tables.PageTable]
    check_sentence: str
    origin: Sequence[tuple[str, str]]
    notes: Sequence[str]
    absent: Sequence[str]
    data: dict[str, Any]


def page_content(sources: PageSources) -> PageContent:
    """All of the page. Raises UsageError where the profile is of other layers."""
    plan, profile, simulation = sources.plan, sources.profile, sources.simulate()
    return PageContent(
        title=f"{plan.model}: {count_plans(sources)}",
        answer=answer_lines(plan, plan_first=True),
        warnings=plan.warnings,
        figures=list(tables.figure_list(plan)),
        summary=summary_lines(plan),
        compared=compared_table(sources) if sources.others else None,
        stages=tables.stage_table(plan),
        times=None if simulation is None else tables.time_table(simulation),
        bars=tables.memory_bars(plan.stages),
        ledger=tables.ledger_table(plan.stages),
        baselines=tables.baseline_table(plan),
        schedules=None if simulation is None or profile is None else _schedules(sources, simulation),
        layers=None if profile is None else tables.layer_table(profile, plan),
        explained=[] if sources.explanation is None else list(extras.explanation_tables(sources.explanation)),
        frontier=None if sources.frontier is None else extras.frontier_table(sources.frontier),
        dots=[] if sources.frontier is None else extras.frontier_dots(sources.frontier),
        check=[] if sources.check is None else list(extras.check_tables(sources.check)),
        check_sentence="" if sources.check is None else extras.check_sentence(sources.check),
        origin=list(_origin(sources)),
        notes=list(dict.fromkeys([*plan.notes, *(() if simulation is None else simulation.notes)])),
        absent=list(_absent(sources)),
        data=_data(sources, simulation),
    )


def count_plans(sources: PageSources) -> str:
    """Return `pipeline plan` or `3 plans`."""
    return f"{1 + len(sources.others)} plans" if sources.others else "pipeline plan"


def compared_table(sources: PageSources) -> tables.PageTable:
    """Tabulate the plans, schedules and machines side by side, the page's own plan first."""
    from ...planner.explanation.compare import compare_plans  # the planners stand behind it

    every = [sources, *sources.others]
    rows = compare_plans([(own.plan_file or f"plan {number}", own.plan) for number, own in enumerate(every)])
    return tables.comparison_table(list(zip(rows.rows, [own.plan for own in every], strict=True)), rows.notes)


def _schedules(sources: PageSources, simulation: Simulation) -> tables.PageTable:
    """The step of every schedule that the plan's cuts and micro-batches allow, and where it does not fit."""
    plan, own = sources.plan, simulation.mini_batch_seconds
    steps: list[tuple[str, float | None, str]] = [(plan.schedule, own, "the plan's")]
    few = len(simulation.timeline.order) <= MOST_SIMULATED
    for name, schedule in SCHEDULES.items():
        alike = schedule.synchronous and schedule.default_virtual_stages == plan.virtual_stages
        if name != plan.schedule and alike and (few or name in EDITED):
            steps.append(_schedule_step(sources, name))
    return tables.schedule_table(sorted(steps, key=lambda row: (row[1] is None, row[1] or 0.0)), own)


def _schedule_step(sources: PageSources, name: str) -> tuple[str, float | None, str]:
    try:
        assembly = _assembly(sources, name)
        timeline = simulate(assembly.program, assembly.costs())
        memory = [device_memory(assembly, device, timeline) for device in range(assembly.program.devices)]
        return name, timeline.step_seconds, "".join(describe_lack(memory))
    except PplanError as error:
        return name, None, error.what


def _assembly(sources: PageSources, schedule: str) -> Assembly:
    """The plan's pipeline under a schedule. Raises UsageError where its cuts or micro-batches allow none."""
    assert sources.profile is not None
    assert sources.machine is not None
    plan, chain = sources.plan, sources.profile.chain()
    proposal, modes = place_plan(plan, chain, Overrides(schedule=schedule))
    if not keeps_stages(plan, proposal):
        raise UsageError(f"{schedule} has other parts of the layers", "Name another schedule.")
    return assemble(plan_space(plan, schedule, chain, sources.machine, sources.profiles), proposal, modes)


def _data(sources: PageSources, simulation: Simulation | None) -> dict[str, Any]:
    """What the scripts draw."""
    plan = sources.plan
    data: dict[str, Any] = {
        "model": plan.model,
        "balance": plan.balance,
        "schedule": plan.schedule,
        "virtualStages": plan.virtual_stages,
        "limits": [stage.memory_limit_bytes for stage in plan.stages],
        "names": plan.layer_names[: tables.MOST_LAYERS],
        "timeline": None,
        "plans": [],
        "memory": [],
        "weights": [],
        "cuts": None,
        "cutsReason": "the plan is from a configuration"
        if plan.training
        else "the plan's profile, which has the costs of the layers, is not in this page",
    }
    if sources.others:
        steps = [(own.plan_file or own.plan.model, own.simulate()) for own in sources.others]
        every = [(sources.plan_file or plan.model, simulation), *steps]
        data["plans"] = [{"name": name, "timeline": timeline_data(own)} for name, own in every if own]
    if simulation is not None:
        data["timeline"] = timeline_data(simulation)
    if simulation is None or sources.profile is None:
        return data
    problem, reason = _cuts(sources)
    costs = sources.profile.chain().at(-(-plan.micro_batch_size // max(plan.replicas)), past_largest=True)
    seconds = costs.forward_seconds + costs.backward_seconds
    return data | {
        "memory": [
            [
                round(own.resident_bytes),
                [round(each) for each in own.bytes_in_flight],
                own.limit_bytes,
                [[round(begins), round(ends)] for begins, ends in own.first_part],
            ]
            for own in simulation.memory
        ],
        "weights": [float(f"{value:.6g}") for value in seconds[: tables.MOST_LAYERS]],
        "cuts": problem,
        "cutsReason": reason,
    }


def _cuts(sources: PageSources) -> tuple[dict[str, Any] | None, str]:
    """The problem of the cut editor; None, and why, where the page cannot move the cuts."""
    if sources.plan.virtual_stages > 1:
        return None, "each device has several parts of the layers"
    try:
        assemblies = {}
        for name in EDITED:
            assemblies[name] = _assembly(sources, name)
            if reason := refuse_cuts(assemblies[name]):
                return None, reason
        return cut_problem(assemblies), ""
    except PplanError as error:
        return None, error.what


def _origin(sources: PageSources) -> Iterator[tuple[str, str]]:
    """How the numbers were made."""
    plan, profile = sources.plan, sources.profile
    yield "plan", sources.plan_file or "not from a file"
    yield from _made_by("plan", plan.made_by)
    yield "costs of the layers", _costs_origin(plan.profile)
    yield (
        "profile",
        f"{plan.profile.file or 'without a name'}, SHA-256 {plan.profile.sha256[:16] or 'unknown'}",
    )
    if profile is not None:
        yield from _made_by("profile", profile.made_by)
        for whole in profile.whole:
            ratio = f"{100 * (whole.closing_ratio - 1):+.1f} %"
            yield f"layers against the whole model, {format_count(whole.micro_batch_size, 'sample')}", ratio
    yield "devices", plan.topology
    yield "searched", plan.searched
    yield "the bound holds for", plan.prediction.bound_covers


def _costs_origin(profile: ProfileReference) -> str:
    """Whether they were measured, and on which device."""
    if profile.device == UNKNOWN_DEVICE:
        return f"from a file that pplan did not measure, {profile.dtype}, on a device that it does not say"
    estimated = "estimated, not measured" if profile.estimated else "measured"
    return f"{estimated}, {profile.dtype}, on {profile.device_name or profile.device or 'an unknown device'}"


def _made_by(what: str, origin: MadeBy) -> Iterator[tuple[str, str]]:
    versions = {"pplan": origin.pplan, "Python": origin.python, "PyTorch": origin.torch, "CUDA": origin.cuda}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield f"{what} made by", text
    yield f"{what}: time", origin.time


def _absent(sources: PageSources) -> Iterator[str]:
    if sources.profile is None and sources.plan.training is None:
        yield (
            f"The costs of the layers are in the plan's profile, {sources.plan.profile.file or 'a file'}, "
            "and not in the plan: it was not at hand, so that there is no timeline, no table of layers, and "
            "no cuts to move. Make the report again with the profile beside the plan."
        )
    if sources.explanation is None:
        yield "Sensitivity and what-ifs were not computed (`explain`)."
    if sources.frontier is None:
        yield "No frontier of step time against memory was computed (`frontier`)."
    if sources.check is None:
        yield "The plan was not checked: nothing of this page was measured by running it (`check`)."
