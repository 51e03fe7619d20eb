"""The plan to be explained and its problem, as the file has them, and problems a little different, solved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain, Vector
from ...cost_models.quantities import LEAST_RATE, MOST_RATE
from ...cost_models.schedules import find_schedule
from ...cost_models.timeline import Timeline, simulate
from ...cost_models.topology import Topology
from ..assembly import Assembly
from ..asynchronous import assemble_candidate
from ..build_plan import build_problem
from ..candidate import SEARCHED, UNPROPOSED, PipelineConfig, Proposal, ScoredPlan
from ..joint_search import find_best_plan, joint_search
from ..plan_file import Plan
from ..plan_options import PlanOptions
from ..plan_simulation import place_plan
from ..problem import Problem
from ..scoring import fastest
from ..search.branch_and_bound import SearchResult, search
from ..search.budget import WORK_A_SECOND
from ..search.family import Family
from ..search.space import Space


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


SECONDS = 1.0
"""Time limit of the search for each answer, as `PlanOptions.time_limit`."""
OTHERS_LONGER = 4
"""Factor on the time limit if the cuts of other schedules than 1F1B and GPipe are searched."""
MANY = 12
"""Devices beyond which only plans near the seeds are searched."""
ROUNDING = 1e-12
"""Relative distance of a varied bandwidth from the ends of its range."""


def resolve(problem: Problem, seeds: Iterable[ScoredPlan], seconds: float = SECONDS) -> SearchResult:
    """Search for the best plan, which is never slower than a seed that the problem allows.

    The seeds are scored anew. On more than `MANY` devices only plans with half to twice the stages and half
    to twice the micro-batch size of a seed are searched, and nothing is proven.
    """
    limited = replace(problem, options=replace(problem.options, time_limit=seconds))
    suited = list(_suited(limited, seeds))
    if problem.usable_gpus > MANY and suited and all(name in SEARCHED for name in problem.schedules):
        near = [family for family in limited.families if _is_near(family.config, suited)]
        stages = [len(seed.ends) for seed in suited]
        counts = [count for count in limited.stage_counts if min(stages) <= 2 * count <= 4 * max(stages)]
        result = search_near(limited.space, near, counts, suited, seconds)
        return replace(result, exact=False)
    return joint_search(limited, _score_seeds(limited.space, suited))


def resolve_fully(problem: Problem, seeds: Iterable[ScoredPlan], seconds: float = SECONDS) -> SearchResult:
    """Search as `resolve` does. If that proves nothing and devices are few, solve the problem from the
    beginning too, as the seeds may lie far from its best plan, and return the faster plan."""
    result = resolve(problem, seeds, seconds)
    if result.exact or problem.usable_gpus > MANY:
        return result
    # The cuts of other schedules are searched after those of 1F1B and GPipe, and need more.
    longer = OTHERS_LONGER * seconds if problem.heuristic_schedules else seconds
    limited = replace(problem, options=replace(problem.options, time_limit=longer))
    other = find_best_plan(limited).result
    slower = other.best is None or (
        result.best is not None and result.best.step_seconds <= other.best.step_seconds
    )
    return result if slower else other


def _is_near(config: PipelineConfig, seeds: Iterable[Proposal]) -> bool:
    """Return whether the micro-batches have half to twice the size of a seed's."""
    sizes = [seed.config.micro_batch_size for seed in seeds]
    return any(size <= 2 * config.micro_batch_size <= 4 * size for size in sizes)


def search_near(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[Proposal],
    seconds: float = SECONDS,
) -> SearchResult:
    """The best plan of a part of a problem's space, no slower than the seeds, which lie in it."""
    return search(space, families, stage_counts, _score_seeds(space, seeds), seconds * WORK_A_SECOND)


def _score_seeds(space: Space, seeds: Iterable[Proposal]) -> list[ScoredPlan]:
    """Return the fastest seed under 1F1B or GPipe, and the fastest under other schedules."""
    proposals = list(seeds)
    linear = [seed for seed in proposals if seed.config.schedule in SEARCHED]
    others = [seed for seed in proposals if seed.config.schedule not in SEARCHED]
    best = (fastest(space, linear), fastest(space, others))
    return [plan for plan in best if plan is not None]


def _suited(problem: Problem, seeds: Iterable[ScoredPlan]) -> Iterator[Proposal]:
    """Yield the seeds with the ways to recompute that the problem allows."""
    for seed in seeds:
        config = seed.config
        modes = problem.modes(config.schedule)
        if problem.allows(seed.proposal) and config.mini_batch == problem.mini_batch:
            for mode in (config.recompute,) if config.recompute in modes else modes:
                yield replace(seed.proposal, config=replace(config, recompute=mode))


def with_topology(problem: Problem, topology: Topology) -> Problem:
    """Return the problem on other devices."""
    return replace(problem, topology=topology)


def with_bandwidth(topology: Topology, factor: float, *, between_nodes: bool = False) -> Topology:
    """Return the devices with `factor` times the bandwidth on all links, or only on those between nodes."""
    varied = _varied_levels(topology, between_nodes)
    levels = list(topology.levels)
    for index in varied:
        link = levels[index].link
        faster = replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * factor)
        levels[index] = replace(levels[index], link=faster)
    return replace(topology, levels=tuple(levels))


def bandwidth_range(topology: Topology, widest: float, *, between_nodes: bool = False) -> tuple[float, float]:
    """The least and the largest factor, up to `widest` and down to one over it, with which `with_bandwidth`
    makes links that a topology may have."""
    varied = _varied_levels(topology, between_nodes)
    rates = [topology.levels[index].link.bandwidth_bytes_per_second for index in varied]
    finite = [rate for rate in rates if rate != inf]
    least, most = 1 / widest, widest
    for rate in finite:
        least = max(least, LEAST_RATE / rate * (1 + ROUNDING))
        most = min(most, MOST_RATE / rate * (1 - ROUNDING))
    return min(least, 1.0), max(most, 1.0)


def _varied_levels(topology: Topology, between_nodes: bool) -> list[int]:
    """List the levels whose links are varied: all, or only those that join nodes."""
    varied, inside = [], 1
    for index, level in enumerate(topology.levels):
        inside = inside * level.size if level.size is not None else topology.gpus
        if not between_nodes or inside > topology.gpus_per_node:
            varied.append(index)
    return varied


def with_memory(problem: Problem, factor: float | None) -> Problem:
    """Return the problem with `factor` times the memory on every device; None removes the limits."""

    def more(size: float | None) -> int | None:
        return None if size is None or factor is None else round(size * factor)

    groups = tuple(
        group._replace(device=replace(group.device, memory_bytes=more(group.device.memory_bytes)))
        for group in problem.topology.groups
    )
    options = replace(problem.options, memory_limit=more(problem.options.memory_limit))
    return replace(problem, topology=replace(problem.topology, groups=groups), options=options)


def without_launches(problem: Problem) -> Problem:
    """The same where the hosts launch in no time, as with a step that is one CUDA graph."""

    def without(chain: Chain) -> Chain:
        nothing = np.zeros_like(chain.forward_host_seconds)
        return replace(chain, forward_host_seconds=nothing, backward_host_seconds=nothing)

    profiles = {name: without(own) for name, own in problem.profiles.items()}
    return replace(problem, chain=without(problem.chain), profiles=profiles)


_SECONDS_OF_LAYERS = (
    "forward_seconds",
    "backward_seconds",
    "backward_input_seconds",
    "backward_weight_seconds",
    "accumulation_seconds",
)


def with_slower_layers(problem: Problem, first: int, end: int, factor: float) -> Problem:
    """The same where layers `first` to `end` - 1 take `factor` times as long, on every kind of device."""
    profiles = {name: _slower(own, first, end, factor) for name, own in problem.profiles.items()}
    return replace(problem, chain=_slower(problem.chain, first, end, factor), profiles=profiles)


def _slower(chain: Chain, first: int, end: int, factor: float) -> Chain:
    changed: dict[str, Vector] = {}
    for name in _SECONDS_OF_LAYERS:
        values: Vector | None = getattr(chain, name)
        if values is not None:
            changed[name] = values.copy()
            changed[name][first:end] *= factor
    return replace(chain, **changed)  # type: ignore[arg-type]  # arrays only
