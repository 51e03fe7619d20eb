"""The plan to be explained, and its problem, read back from the plan's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ...cost_models.schedules import find_schedule
from ...cost_models.timeline import Timeline, simulate
from ...cost_models.topology import Topology
from ..assembly import Assembly
from ..asynchronous import assemble_candidate
from ..build_plan import build_problem
from ..candidate import UNPROPOSED, ScoredPlan
from ..plan_file import Plan
from ..plan_options import PlanOptions
from ..plan_simulation import place_plan
from ..problem import Problem
from ..scoring import fastest


@dataclass(frozen=True)
class ExplainContext:
    """A plan as it stands (`present`), and its problem, for the joint search. `fits`: into the memory."""

    problem: Problem
    present: ScoredPlan
    fits: bool

    @property
    def assembly(self) -> Assembly:
        """The plan for the simulator."""
        return assemble_candidate(self.problem.space, self.present)

    @property
    def timeline(self) -> Timeline:
        """The plan's simulated step."""
        return simulate_candidate(self.problem, self.present)


def make_context(
    plan: Plan, chain: Chain, topology: Topology, profiles: Mapping[str, Chain] | None = None
) -> ExplainContext:
    """The plan of this chain on this topology, under its own options.

    `profiles`: the same layers as measured on the kinds of devices that have a profile of their own, by its
    name in the topology. Raises UsageError for a plan whose cuts the chain does not allow, and for one of an
    asynchronous schedule.
    """
    if not find_schedule(plan.schedule).synchronous:
        raise UsageError(
            f"the plan's schedule, {plan.schedule}, is asynchronous: it has no step that others compare with",
            "Name a plan of a synchronous schedule; pplan simulate tells where the time of this one goes.",
        )
    problem = build_problem(chain, topology, plan_options(plan), plan.profile, profiles or {})
    present = score_plan(problem, plan)
    return ExplainContext(problem, present, fastest(problem.space, [present.proposal]) is not None)


def plan_options(plan: Plan) -> PlanOptions:
    """The options of the plan for the joint search, with its global batch fixed."""
    return replace(
        plan.options,
        mini_batch=plan.mini_batch,
        optimizer=plan.optimizer,
        precision=plan.training_precision.name,
        gradient_dtype=plan.training_precision.gradient_dtype,
        zero=plan.zero,
        runtime=plan.runtime,
        planner="best",
    )


def score_plan(problem: Problem, plan: Plan) -> ScoredPlan:
    """The plan, scored again. Raises UsageError for cuts that the chain or its options do not allow."""
    allowed = set(problem.space.table(problem.space.chain.sizes[0]).cut_points)
    for number, stage in enumerate(plan.stages):
        if stage.last_layer + 1 not in allowed:
            raise UsageError(
                f"the plan's stage {number} ends with layer {stage.last_layer}, after which its options or "
                "its profile allow no cut",
                "It was edited, it seems. Make it again: pplan solve",
            )
    proposal, modes = place_plan(plan, problem.chain)
    # The ways to recompute that the plan may stand for: as its options say, and to the letter.
    requested = [mode for mode in problem.modes(plan.schedule) if mode in ("by_stage", *UNPROPOSED)]
    for mode in (*requested, proposal.config.recompute):
        candidate = replace(proposal, config=replace(proposal.config, recompute=mode))
        scored = fastest(problem.space, [candidate])
        if scored is not None and scored.recompute == modes:
            return scored
    unfit = ScoredPlan(proposal, modes, 0.0)
    return replace(unfit, step_seconds=simulate_candidate(problem, unfit).step_seconds)


def simulate_candidate(problem: Problem, plan: ScoredPlan) -> Timeline:
    """The simulated step of a scored plan."""
    assembly = assemble_candidate(problem.space, plan)
    return simulate(assembly.program, assembly.costs())
