"""The plan to explain with its problem, and solutions of slightly different problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ...cost_models.quantities import LEAST_RATE, MOST_RATE
from ...cost_models.schedules import find_schedule
from ...cost_models.timeline import Timeline, simulate
from ...cost_models.topology import Topology
from ..assembly import Assembly
from ..asynchronous import assemble_candidate
from ..build_plan import build_problem
from ..candidate import SEARCHED, UNPROPOSED, Proposal, ScoredPlan
from ..joint_search import find_best_plan, joint_search
from ..plan_file import Plan
from ..plan_options import PlanOptions
from ..plan_simulation import place_plan
from ..problem import Problem
from ..scoring import fastest
from ..search.branch_and_bound import SearchResult, search
from ..search.budget import WORK_A_SECOND, SearchBudget
from ..search.family import Family
from ..search.space import Space


@dataclass(frozen=True)
class ExplainContext:
    """A plan, its problem for the joint search, and the time left for further searches.

    Attributes:
        problem: Problem of the plan.
        present: The plan as it is.
        fits: True if the plan fits into memory.
        budget: Processor time of all searches, none of which begins when it is over.
    """

    problem: Problem
    present: ScoredPlan
    fits: bool
    budget: SearchBudget = field(default_factory=lambda: SearchBudget(seconds=MOST_SECONDS))

    def within(self, share: float) -> ExplainContext:
        """Return the same with a share of the processor time that is left."""
        return replace(self, budget=self.budget.part(share=share))

    @property
    def assembly(self) -> Assembly:
        """The plan as input of the simulator."""
        return assemble_candidate(self.problem.space, self.present)

    @property
    def timeline(self) -> Timeline:
        """The plan's simulated step."""
        return simulate_candidate(self.problem, self.present)


def make_context(
    plan: Plan, chain: Chain, topology: Topology, profiles: Mapping[str, Chain] | None = None
) -> ExplainContext:
    """Return the plan of this chain on this topology, under its own options.

    Args:
        plan: The plan.
        chain: Its layers.
        topology: Devices and links.
        profiles: The same layers as measured on the kinds of devices with their own profile, by its name in
            the topology.

    Raises:
        UsageError: The chain does not allow the plan's cuts, or its schedule is asynchronous.
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
    """Return the options of the plan for the joint search, with its global batch fixed."""
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
    """Score the plan anew.

    Raises:
        UsageError: The chain or the plan's options do not allow its cuts.
    """
    allowed = set(problem.space.table(problem.space.chain.sizes[0]).cut_points)
    for number, stage in enumerate(plan.stages):
        if stage.last_layer + 1 not in allowed:
            raise UsageError(
                f"the plan's stage {number} ends with layer {stage.last_layer}, after which its options or "
                "its profile allow no cut",
                "It was edited, it seems. Make it again: pplan solve",
            )
    proposal, modes = place_plan(plan, problem.chain)
    # Recomputation modes of the configuration that may stand for the plan: by its options, and as stated.
    requested = [mode for mode in problem.modes(plan.schedule) if mode in ("by_stage", *UNPROPOSED)]
    for mode in (*requested, proposal.config.recompute):
        candidate = replace(proposal, config=replace(proposal.config, recompute=mode))
        scored = fastest(problem.space, [candidate])
        if scored is not None and scored.recompute == modes:
            return scored
    unfit = ScoredPlan(proposal, modes, 0.0)
    return replace(unfit, step_seconds=simulate_candidate(problem, unfit).step_seconds)


def simulate_candidate(problem: Problem, plan: ScoredPlan) -> Timeline:
    """Return the simulated step of a scored plan."""
    assembly = assemble_candidate(problem.space, plan)
    return simulate(assembly.program, assembly.costs())


MOST_SECONDS = 5.0
"""Processor time of an explanation, after which no further search begins."""
SECONDS = 1.0
"""Time limit in seconds of the search for each answer, as `PlanOptions.time_limit`."""
OTHERS_LONGER = 4
"""Factor on the time limit if the cuts of schedules other than 1F1B and GPipe are searched."""
MANY = 12
"""Devices beyond which only plans near the seeds are searched."""
NEAR_SHARE = 1 / 4
"""Factor on the time limit of a search near seeds, whose counted work is too low."""
ROUNDING = 1e-12
"""Relative distance of a varied bandwidth from the ends of its range."""


def resolve(
    problem: Problem, seeds: Iterable[ScoredPlan], seconds: float = SECONDS, *, fully: bool = False
) -> SearchResult:
    """Search for the best plan, which is never slower than a seed that the problem allows.

    The seeds are scored anew. On more than `MANY` devices only plans near the fastest seed are searched, and
    nothing is proven.

    Args:
        problem: The problem.
        seeds: Known plans.
        seconds: Time limit.
        fully: Whether a search on few devices that proves nothing is followed by one from the beginning,
            because the seeds may be far from the best plan.
    """
    limited = replace(problem, options=replace(problem.options, time_limit=seconds))
    suited, is_large_machine = list(_suited(limited, seeds)), problem.usable_gpus > MANY
    if is_large_machine and suited and all(name in SEARCHED for name in problem.schedules):
        best = fastest(limited.space, suited)
        near = suited[:1] if best is None else [best.proposal]
        families, counts = list_near_families(limited, near)
        return replace(
            search_near(limited.space, families, counts, suited, seconds * NEAR_SHARE), exact=False
        )
    scored = (fastest(limited.space, same_kind) for same_kind in _split(suited))
    result = joint_search(limited, [plan for plan in scored if plan is not None])
    if result.exact or is_large_machine or not fully:
        return result
    # The cuts of other schedules are searched after those of 1F1B and GPipe, and need more time.
    longer = OTHERS_LONGER * seconds if problem.heuristic_schedules else seconds
    other = find_best_plan(replace(problem, options=replace(problem.options, time_limit=longer))).result
    return min((result, other), key=_step)


def _step(result: SearchResult) -> float:
    return inf if result.best is None else result.best.step_seconds


def list_near_families(problem: Problem, seeds: Iterable[Proposal]) -> tuple[list[Family], list[int]]:
    """Return the families and numbers of stages to search: on more than `MANY` devices those near seeds.

    Near are half to twice the stages, half to twice the micro-batch size, and half, equal or twice the
    replicas.
    """
    families, counts, seeds = list(problem.families), list(problem.stage_counts), list(seeds)
    if problem.usable_gpus <= MANY:
        return families, counts
    stages, sizes = [len(seed.ends) for seed in seeds], {seed.config.micro_batch_size for seed in seeds}
    near = {
        number for seed in seeds for count in set(seed.replicas) for number in (count // 2, count, 2 * count)
    }
    narrowed = [
        replace(family, replicas=tuple(count for count in family.replicas if count in near))
        for family in families
        if any(size <= 2 * family.config.micro_batch_size <= 4 * size for size in sizes)
    ]
    near_counts = [count for count in counts if min(stages) <= 2 * count <= 4 * max(stages)]
    return [family for family in narrowed if family.replicas], near_counts


def search_near(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[Proposal],
    seconds: float = SECONDS,
) -> SearchResult:
    """Return the best plan of a part of a problem's space, no slower than the seeds.

    Args:
        space: Costs and limits.
        families: Configurations on orders of the devices.
        stage_counts: Numbers of stages.
        seeds: Plans of that part, or of schedules that are not searched.
        seconds: Time limit.
    """
    linear, other = (fastest(space, same_kind) for same_kind in _split(seeds))
    starts = [] if linear is None else [linear]
    result = search(space, families, stage_counts, starts, seconds * WORK_A_SECOND)
    if other is not None and other.step_seconds < _step(result):
        return replace(result, best=other)
    return result


def _split(seeds: Iterable[Proposal]) -> tuple[list[Proposal], list[Proposal]]:
    """Return the seeds under 1F1B or GPipe, and those under other schedules."""
    parts: tuple[list[Proposal], list[Proposal]] = ([], [])
    for seed in seeds:
        parts[seed.config.schedule not in SEARCHED].append(seed)
    return parts


def _suited(problem: Problem, seeds: Iterable[ScoredPlan]) -> Iterator[Proposal]:
    """Yield the seeds with the recomputation modes that the problem allows."""
    for seed in seeds:
        config = seed.config
        modes = problem.modes(config.schedule)
        if problem.allows(seed.proposal) and config.mini_batch == problem.mini_batch:
            for mode in (config.recompute,) if config.recompute in modes else modes:
                yield replace(seed.proposal, config=replace(config, recompute=mode))


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
    """Return the smallest and largest valid factors for `with_bandwidth`, within 1 / `widest` to `widest`."""
    varied = _varied_levels(topology, between_nodes)
    rates = [topology.levels[index].link.bandwidth_bytes_per_second for index in varied]
    finite = [rate for rate in rates if rate != inf]
    least, most = 1 / widest, widest
    for rate in finite:
        least = max(least, LEAST_RATE / rate * (1 + ROUNDING))
        most = min(most, MOST_RATE / rate * (1 - ROUNDING))
    return min(least, 1.0), max(most, 1.0)


def _varied_levels(topology: Topology, between_nodes: bool) -> list[int]:
    """Return the levels whose links are varied: all, or only those that join nodes."""
    varied, inside = [], 1
    for index, level in enumerate(topology.levels):
        inside = inside * level.size if level.size is not None else topology.gpus
        if not between_nodes or inside > topology.gpus_per_node:
            varied.append(index)
    return varied


def with_memory(problem: Problem, factor: float | None) -> Problem:
    """Return the problem with `factor` times the memory on every device. None removes the limits."""

    def more(size: float | None) -> int | None:
        return None if size is None or factor is None else round(size * factor)

    groups = tuple(
        group._replace(device=replace(group.device, memory_bytes=more(group.device.memory_bytes)))
        for group in problem.topology.groups
    )
    options = replace(problem.options, memory_limit=more(problem.options.memory_limit))
    return replace(problem, topology=replace(problem.topology, groups=groups), options=options)


def _with_chains(problem: Problem, change: Callable[[Chain], Chain]) -> Problem:
    """Return the problem with other layers, on every kind of device."""
    profiles = {name: change(layers) for name, layers in problem.profiles.items()}
    return replace(problem, chain=change(problem.chain), profiles=profiles)


def without_launches(problem: Problem) -> Problem:
    """Return the problem with launches that take no time, as for a step in one CUDA graph."""

    def without(chain: Chain) -> Chain:
        nothing = np.zeros_like(chain.forward_host_seconds)
        return replace(chain, forward_host_seconds=nothing, backward_host_seconds=nothing)

    return _with_chains(problem, without)


_SECONDS_OF_LAYERS = (
    "forward_seconds",
    "backward_seconds",
    "backward_input_seconds",
    "backward_weight_seconds",
    "accumulation_seconds",
)


def with_slower_layers(problem: Problem, first: int, end: int, factor: float) -> Problem:
    """Return the problem in which layers `first` to `end` - 1 take `factor` times as long on every device."""

    def slower(chain: Chain) -> Chain:
        tables = {name: getattr(chain, name) for name in _SECONDS_OF_LAYERS}
        copies = {name: values.copy() for name, values in tables.items() if values is not None}
        for values in copies.values():
            values[first:end] *= factor
        return replace(chain, **copies)

    return _with_chains(problem, slower)
