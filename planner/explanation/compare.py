"""Plans side by side: those of several files, or what every named planner makes of one plan's problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, ClassVar

from ...cost_models.document import Document, Record
from ...cost_models.quantities import compare_steps, format_bytes, format_seconds, html_table
from ..candidate import SEARCHED, ScoredPlan
from ..joint_search import BEST, JointSearchResult, find_best_plan
from ..plan_file import TIE, Plan
from ..plan_options import PlanOptions
from ..plan_simulation import bubble, busy_seconds, energy_joules, plan_stages
from ..planners import PLANNERS
from .explain_context import ExplainContext
from .other_methods import OtherMethod, OtherMethodOptions, list_other_methods

Watts = Mapping[str, tuple[float, float]]


class ComparisonRow(Record):
    """A plan in a comparison; where a planner has none, `reason` says why. `gap`: of the step over the best
    bound that the searches behind the plans compared proved of its problem, less 1; None where there is none.
    `estimate_seconds`: of the step as its planner counts it. `memory_bytes`: of the device that needs most.
    `slower`: seconds a sample over those of the first plan, less 1. `energy_joules`: of a step, where the
    watts of the devices are given."""

    name: str
    step_seconds: float | None = None
    samples_per_second: float | None = None
    bubble: float | None = None
    memory_bytes: int | None = None
    devices: int | None = None
    gap: float | None = None
    balance: list[int] = []
    schedule: str = ""
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    slower: float | None = None
    estimate_seconds: float | None = None
    energy_joules: float | None = None
    reason: str = ""


class PlanComparison(Document):
    """The plans in the order in which they were given, then what the planners made, the fastest first.

    `first_slower`: the first plan's seconds a sample over those of the best of the others, less 1.
    `other_methods`: what is no plan of pplan, by its own time model.
    """

    kind: ClassVar[str] = "comparison"

    rows: list[ComparisonRow]
    first_slower: float | None
    notes: list[str] = []
    other_methods: list[OtherMethod] = []

    def __repr__(self) -> str:
        return f"<PlanComparison of {', '.join(row.name for row in self.rows[:8])}>"

    def _repr_html_(self) -> str:
        """Of a notebook."""
        rows = [
            [
                row.name,
                "-" if row.step_seconds is None else format_seconds(row.step_seconds),
                "-" if row.slower is None else compare_steps(1 + row.slower, 1),
                "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
                row.reason or row.schedule,
            ]
            for row in self.rows
        ]
        return html_table("Plans", ("plan", "step", "vs. the first", "most memory", "configuration"), rows)


def compare_plans(
    plans_by_name: Sequence[tuple[str, Plan]],
    context: ExplainContext | None = None,
    watts: Watts | None = None,
) -> PlanComparison:
    """The plans by their names; with the problem of the first, what all named planners make of it, too, and
    the energy of their steps where the `watts` are given."""
    answer = None if context is None else find_best_plan(context.problem, tuple(PLANNERS))
    bounds = [_bound(plan) for _, plan in plans_by_name]
    rows = [_of_plan(name, plan, _proven_bound(plan, bounds)) for name, plan in plans_by_name]
    if context is not None and answer is not None:
        own = [*bounds, (_problem(plans_by_name[0][1]), answer.result.bound_seconds)]
        rows[0] = _of_plan(*plans_by_name[0], _proven_bound(plans_by_name[0][1], own))
        busy = busy_seconds(plans_by_name[0][1].stages, plans_by_name[0][1].micro_batches)
        step = plans_by_name[0][1].prediction.step_seconds
        energy = energy_joules(context.problem.topology, busy, step, watts or {})
        rows[0] = rows[0].model_copy(update={"energy_joules": energy})
        rows += _of_planners(context, answer, watts or {})
    first = rows[0].samples_per_second or 0.0
    rates = [row.samples_per_second for row in rows[1:] if row.samples_per_second is not None]
    return PlanComparison(
        rows=[
            row
            if row.samples_per_second is None
            else row.model_copy(update={"slower": first / row.samples_per_second - 1})
            for row in rows
        ],
        first_slower=max(rates) / first - 1 if rates and first else None,
        notes=list(_differences(plans_by_name)),
        other_methods=[]
        if context is None
        else list_other_methods(context.problem, OtherMethodOptions(watts=watts)),
    )


Key = tuple[str, ...]


def _problem(plan: Plan) -> Key:
    """What plans have in common of whose steps one bound tells."""
    return tuple(plan.problem.values())


def _bound(plan: Plan) -> tuple[Key, float]:
    """What was proven of all plans of the problem; 0 where there was no search, or one of some of them."""
    default = PlanOptions()
    same: dict[str, Any] = {name: getattr(default, name) for name in _NOT_NARROWING}
    narrowed = replace(plan.options, **same) != default
    nothing = plan.is_fixed_partition or narrowed or plan.objective is not None
    return _problem(plan), 0.0 if nothing else plan.prediction.lower_bound_seconds


_NOT_NARROWING = (
    "mini_batch",
    "optimizer",
    "runtime",
    "time_limit",
    "planner",
    "robust",
    "slow_devices",
    "seconds_of",
)
"""Options that leave the search all plans of a problem, or are of the problem."""


def _proven_bound(plan: Plan, bounds: Sequence[tuple[Key, float]]) -> float:
    """The best bound on the plan's step, 0 where there is none: its own, or of a search for its problem among
    whose plans it is."""
    step, own = plan.prediction.step_seconds, plan.prediction.lower_bound_seconds
    key = _problem(plan)
    searched = plan.schedule in SEARCHED
    shared = max((seconds for other, seconds in bounds if other == key and searched), default=0.0)
    if 0 < shared <= step * (1 + TIE):
        return shared
    return 0.0 if plan.is_fixed_partition else own


def _of_plan(name: str, plan: Plan, bound: float) -> ComparisonRow:
    predicted = plan.prediction
    gap = max(predicted.step_seconds / bound - 1, 0.0) if bound > 0 else None
    return ComparisonRow(
        name=name,
        step_seconds=predicted.step_seconds,
        samples_per_second=plan.mini_batch / predicted.step_seconds,
        bubble=predicted.bubble,
        memory_bytes=max(stage.memory_bytes for stage in plan.stages),
        devices=plan.device_count,
        gap=gap,
        balance=plan.balance,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
    )


def _of_planners(context: ExplainContext, answer: JointSearchResult, watts: Watts) -> list[ComparisonRow]:
    """The joint search, and each named planner; those without a plan last."""
    plans: dict[str, ScoredPlan | str] = {BEST: answer.best or "no plan fits", **answer.by_planner}
    rows = [_of_planner(context, answer, name, plan, watts) for name, plan in plans.items()]
    return sorted(rows, key=lambda row: row.step_seconds or inf)


def _of_planner(
    context: ExplainContext, answer: JointSearchResult, name: str, plan: ScoredPlan | str, watts: Watts
) -> ComparisonRow:
    if isinstance(plan, str):
        return ComparisonRow(name=name, reason=plan)
    space, config, bound = context.problem.space, plan.config, answer.result.bound_seconds
    stages, topology = plan_stages(space, plan), context.problem.topology
    busy = busy_seconds(stages, config.micro_batches)
    return ComparisonRow(
        name=name,
        step_seconds=plan.step_seconds,
        samples_per_second=config.mini_batch / plan.step_seconds,
        bubble=bubble(space, plan),
        memory_bytes=max(stage.memory_bytes for stage in stages),
        devices=plan.proposal.device_count,
        # Nothing was proven of a schedule that the options exclude.
        gap=plan.step_seconds / bound - 1 if 0 < bound <= plan.step_seconds else None,
        balance=[end - first for first, end in plan.proposal.bounds],
        # That of the planner which proposed the best plan is told in its own row.
        estimate_seconds=None if name == BEST else plan.proposal.estimate_seconds,
        energy_joules=energy_joules(topology, busy, plan.step_seconds, watts),
        schedule=config.schedule,
        micro_batches=config.micro_batches,
        micro_batch_size=config.micro_batch_size,
    )


def _differences(plans_by_name: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    """Settings in which the plans differ, so that their figures cannot be compared directly."""
    (first, own), *others = plans_by_name
    for name, plan in others:
        if plan.model != own.model:
            yield f"{name} is for {plan.model}, {first} for {own.model}"
        elif plan.profile.sha256 != own.profile.sha256:
            yield f"{name} was made from another profile than {first}"
        if plan.mini_batch != own.mini_batch:
            yield f"{name} has global batch {plan.mini_batch}, {first} {own.mini_batch}: compare samples/s"
        if plan.topology != own.topology:
            yield f"{name} is for {plan.topology or 'an unknown machine'}"
        elif plan.problem["machine"] != own.problem["machine"]:
            yield f"{name} is for a machine of other figures than that of {first}"
        states = [field for field in _STATES if plan.problem[field] != own.problem[field]]
        if states:
            one, two = (", ".join(f"{key} {of.problem[key]}" for key in states) for of in (plan, own))
            yield f"{name} has {one}, {first} {two}: memory and time are not compared alike"


_STATES = ("runtime", "optimizer", "precision", "gradients", "ZeRO")
"""Of a plan's problem, what its memory and its schedules depend on."""
