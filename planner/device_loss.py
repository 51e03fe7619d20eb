"""The plan for the devices that are left of another plan's, which moves few weights.

Let T be the shortest step in seconds of the plans that are scored, `step(p)` the step of plan p, and
`moved(p)` the bytes of weights and buffers that its devices must receive. The answer minimises

    moved(p)    subject to    step(p) <= (1 + within) T

and, among equals, the step. With `within` = 0 it is the fastest plan, whatever it moves. Plans keep the
schedule and the global batch. Where there are few, all cuts, replicas and micro-batches are scored. Else the
search solves the problem on the devices that are left, and plans near the old one and near the fastest so far
are scored: a cut or a device moves, stages are joined or parted. Stages take the devices that are left in
rank order, the faster ones first, or those that have most of their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, groupby, pairwise, product
from math import comb, inf
from typing import Generic, TypeVar

import numpy as np

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.quantities import format_count
from ..cost_models.topology import Group
from .candidate import SEARCHED, PipelineConfig, Proposal, ScoredPlan, Shape, near_shapes
from .joint_search import find_best_plan
from .plan_file import Plan
from .problem import Problem
from .scoring import fastest
from .search.device_classes import is_uniform
from .search.pipelines import build_pipelines
from .search.stage_recompute import choose_modes
from .stage_table import Floats
from .weight_moves import Layers, WeightMove, assign_devices, count_moved_bytes, layers_by_device, list_moves

MOST_SHAPES = 800
"""All plans are looked at where there are so many, times configurations; else about so many."""
LEADING = 4
"""Plans that are varied at a time: the fastest so far."""
SECONDS = 2.0
"""Time limit of the search."""
MOST_NEAR = 200
"""Plans that are near the fastest whose devices are chosen by what they have."""


AnyPlan = TypeVar("AnyPlan", ScoredPlan, Plan)


@dataclass(frozen=True)
class Replan(Generic[AnyPlan]):
    """The new `plan`, on the ranks of the old one, with the weights that it moves.

    `move_seconds` leaves out what comes from a checkpoint. `fastest_seconds`: the step of the fastest plan
    that was looked at. `complete`: all cuts, replicas and micro-batches were; `any_devices`: on any devices.
    """

    plan: AnyPlan
    moves: tuple[WeightMove, ...]
    move_seconds: float
    fastest_seconds: float
    complete: bool
    any_devices: bool
    ranks: tuple[int, ...] = ()
    """Of the devices that are left."""

    @property
    def moved_bytes(self) -> int:
        """That go from device to device, or come from a checkpoint."""
        return sum(move.bytes for move in self.moves)

    @property
    def checkpoint_bytes(self) -> int:
        """That no device which is left has."""
        return sum(move.bytes for move in self.moves if move.sender is None)


def replan_problem(
    problem: Problem, present: ScoredPlan, lost: Iterable[int], within: float = 0.05
) -> Replan[ScoredPlan]:
    """The plan for the devices that are left without the `lost` ones. Raises UsageError for devices that
    there are not, or where none is left, and InfeasibleError where no plan that was looked at fits."""
    ranks = _ranks_left(problem, present, lost)
    shapes = _Shapes(problem, present, ranks, within)
    shapes.look(lambda: _solve_left(problem, present.config.schedule, ranks))
    if not shapes.steps:
        raise InfeasibleError(
            f"no plan fits on what is left, {format_count(len(ranks), 'device')}",
            "Solve for a machine of as many devices: it says what would fit.",
        )
    longest = shapes.longest
    near = sorted(
        (plan for plan in shapes.steps.values() if plan.step_seconds <= longest),
        key=lambda plan: plan.step_seconds,
    )
    before = layers_by_device(present.proposal)
    before = {rank: before[rank] for rank in ranks if rank in before}
    weights = np.asarray(problem.chain.parameter_bytes + problem.chain.buffer_bytes, dtype=np.float64)
    best, fastest_seconds = shapes.move_least(near, before, weights)
    moves, seconds = list_moves(problem.topology, before, ranks, best.proposal, weights)
    alike = is_uniform(problem.topology)
    return Replan(best, moves, seconds, fastest_seconds, shapes.complete, alike, ranks)


def _solve_left(problem: Problem, schedule: str, ranks: Sequence[int]) -> ScoredPlan | None:
    """Find the fastest plan for the devices of these ranks; None where none fits."""
    topology, options = problem.topology, problem.options
    kinds = [topology.device(rank) for rank in ranks]
    groups = tuple(Group(kind, len(list(alike))) for kind, alike in groupby(kinds))
    seconds = min(options.time_limit, SECONDS)
    options = replace(options, mini_batch=problem.mini_batch, schedule=schedule, time_limit=seconds)
    left = replace(problem, topology=replace(topology, groups=groups), options=options)
    left = left.with_time_limit()
    best = find_best_plan(left, planners=()).best
    if best is None:
        return None
    devices = tuple(tuple(ranks[device] for device in stage) for stage in best.proposal.devices)
    return fastest(problem.space, [replace(best.proposal, devices=devices)])


def _ranks_left(problem: Problem, present: ScoredPlan, lost: Iterable[int]) -> tuple[int, ...]:
    missing = sorted(set(lost))
    if not missing:
        raise UsageError("`lost`: names no device", "Give the ranks of those that are gone: lost=(3, 7).")
    strange = [rank for rank in missing if not 0 <= rank < problem.gpus]
    if strange:
        there = "there is" if problem.gpus == 1 else "there are"
        raise UsageError(
            f"lost={strange[0]}: {there} {format_count(problem.gpus, 'device')}",
            "Its only rank is 0." if problem.gpus == 1 else f"Ranks are 0 to {problem.gpus - 1}.",
        )
    ranks = tuple(rank for rank in range(problem.gpus) if rank not in set(missing))
    if not ranks:
        raise UsageError(f"`lost`: no device is left of {problem.gpus}", "Name fewer.")
    config = present.config
    if config.schedule not in SEARCHED or config.virtual_stages > 1:
        raise UsageError(
            f"the plan's schedule, {config.schedule}: only plans of {' and '.join(SEARCHED)} are made anew",
            "Solve again for the devices that are left.",
        )
    return ranks


@dataclass
class _Shapes:
    """The plans that were looked at, the fastest of each shape; of those that are not near the fastest, steps
    without waiting for ports that stages share."""

    problem: Problem
    present: ScoredPlan
    ranks: tuple[int, ...]
    within: float
    steps: dict[Shape, ScoredPlan] = field(default_factory=dict)
    complete: bool = False
    _scored: set[tuple[Shape, PipelineConfig]] = field(default_factory=set)

    def look(self, solve: Callable[[], ScoredPlan | None] = lambda: None) -> None:
        """Score all plans, where there are few; else those near the present one and the one of `solve`."""
        configs = [own for own in self.problem.configs if own.schedule == self.present.config.schedule]
        if self._count() * len(configs) <= MOST_SHAPES:
            self.complete = True
            self._score((shape, config) for config in configs for shape in self._every())
            return
        left = [len(set(own) & set(self.ranks)) for own in self.present.proposal.devices]
        starts = list(self._starts(self.present.proposal.ends, left))
        if (best := solve()) is not None and self._allows(best.proposal):
            self.steps[_shape(best)] = best
        self._score((shape, self.present.config) for shape in starts)
        if not self.steps:  # fewer replicas have larger shares of a micro-batch, which may be too large
            self._score((shape, config) for shape in starts for config in configs)
        varied = set[Shape]()
        while len(self._scored) < MOST_SHAPES:
            ranked = sorted(self.steps.values(), key=lambda plan: plan.step_seconds)
            leading = [plan for plan in ranked if _shape(plan) not in varied][:LEADING]
            if not leading or (varied and _shape(ranked[0]) in varied and len(varied) > 8 * LEADING):
                break
            varied |= set(map(_shape, leading))
            points, devices = self._cut_points, len(self.ranks)
            self._score(
                (shape, plan.config)
                for plan in leading
                for shape in near_shapes(points, *_shape(plan), devices)
            )
            first = min(self.steps.values(), key=lambda plan: plan.step_seconds)
            self._score((_shape(first), config) for config in configs)

    @property
    def longest(self) -> float:
        """Seconds of the longest step that a plan near the fastest may have."""
        least = min((plan.step_seconds for plan in self.steps.values()), default=inf)
        return least * (1 + self.within)

    @property
    def _cut_points(self) -> tuple[int, ...]:
        return self.problem.space.table(self.problem.chain.sizes[0]).cut_points

    def _count(self) -> int:
        """Of all shapes."""
        inner, devices = len(self._cut_points) - 2, len(self.ranks)
        return sum(
            comb(inner, stages - 1) * comb(devices, stages)
            for stages in self.problem.stage_counts
            if stages <= devices
        )

    def _every(self) -> Iterator[Shape]:
        devices, last = len(self.ranks), self._cut_points[-1]
        for stages in self.problem.stage_counts:
            counts = [own for own in product(range(1, devices + 1), repeat=stages) if sum(own) <= devices]
            for cuts in combinations(self._cut_points[1:-1], stages - 1):
                yield from (((*cuts, last), own) for own in counts)

    def _starts(self, ends: tuple[int, ...], left: list[int]) -> Iterator[Shape]:
        """The plan's stages with the replicas that are left; a stage that lost all takes one of the stage
        with most, or is joined to the one beside it. And as many on each, and one stage."""
        joined_ends, joined = list(ends), list(left)
        while 0 in joined and len(joined) > 1:
            at = joined.index(0)
            other = at - 1 if at else 1
            joined_ends.pop(min(at, other))
            joined[other] += joined[at]
            joined.pop(at)
        yield tuple(joined_ends), tuple(joined)
        own = list(left)
        while 0 in own and max(own) > 1:
            own[own.index(max(own))] -= 1
            own[own.index(0)] += 1
        yield ends, tuple(own)
        equal = len(self.ranks) // len(ends)
        yield ends, (equal,) * len(ends)
        yield (self._cut_points[-1],), (len(self.ranks),)

    def _score(self, rows: Iterable[tuple[Shape, PipelineConfig]]) -> None:
        """The new ones, those of one configuration and number of stages side by side."""
        alike: dict[tuple[PipelineConfig, int], list[Proposal]] = {}
        for shape, config in rows:
            ends, replicas = shape
            if (shape, config) in self._scored or min(replicas) < 1 or sum(replicas) > len(self.ranks):
                continue
            self._scored.add((shape, config))
            first = np.append(0, np.cumsum(replicas))
            for ranks in self._orders:
                proposal = Proposal(config, ends, tuple(ranks[a:b] for a, b in pairwise(first)))
                if self._allows(proposal):
                    alike.setdefault((config, len(ends)), []).append(proposal)
        for proposals in alike.values():
            for plan in self._score_alike(proposals):
                other = self.steps.get(_shape(plan))
                if other is None or plan.step_seconds < other.step_seconds:
                    self.steps[_shape(plan)] = plan

    @cached_property
    def _orders(self) -> tuple[tuple[int, ...], ...]:
        """The devices that are left by rank and, where they differ, those first that are faster."""
        topology = self.problem.topology
        by_speed = tuple(sorted(self.ranks, key=lambda rank: -topology.device(rank).speed))
        return tuple(dict.fromkeys((self.ranks, by_speed)))

    def _score_alike(self, proposals: Sequence[Proposal]) -> Iterator[ScoredPlan]:
        """Those of one configuration and number of stages that fit."""
        space = self.problem.space
        pairs = [(proposal, modes) for proposal in proposals if (modes := choose_modes(space, proposal))]
        if not pairs:
            return
        pipelines = build_pipelines(space, [own for own, _ in pairs], [modes for _, modes in pairs])
        steps = pipelines.without_sharing().step_seconds()
        near = np.flatnonzero(steps <= self.longest)
        if len(near):
            steps[near] = pipelines.select(near).step_seconds()
        for (proposal, modes), step in zip(pairs, steps.tolist(), strict=True):
            yield ScoredPlan(proposal, modes, step)

    def _allows(self, proposal: Proposal) -> bool:
        """As the options do, but for `use_all`, which is of the devices that are left."""
        if self.problem.options.use_all and proposal.device_count < len(self.ranks):
            return False
        return len(proposal.ends) in self.problem.stage_counts and self._without_all.allows(proposal)

    @cached_property
    def _without_all(self) -> Problem:
        return replace(self.problem, options=replace(self.problem.options, use_all=False))

    def move_least(
        self, near: Sequence[ScoredPlan], before: dict[int, Layers], weights: Floats
    ) -> tuple[ScoredPlan, float]:
        """Of these plans, the fastest first, as they are or on the devices that have most of their layers,
        the one near the fastest that moves the fewest bytes; and the step of the fastest. A runtime numbers
        its devices."""
        plans = list(near)
        if self.problem.runtime is None:
            others = [self._on_owners(plan, before, weights) for plan in near[:MOST_NEAR]]
            if not is_uniform(self.problem.topology):
                scored = [fastest(self.problem.space, [other.proposal]) for other in others]
                others = [plan for plan in scored if plan is not None]
            plans += others
        least = min(plan.step_seconds for plan in plans)
        plans = [plan for plan in plans if plan.step_seconds <= least * (1 + self.within)]
        best = min(
            plans, key=lambda plan: (count_moved_bytes(before, plan.proposal, weights), plan.step_seconds)
        )
        return best, least

    def _on_owners(self, plan: ScoredPlan, before: dict[int, Layers], weights: Floats) -> ScoredPlan:
        """The plan on the devices that have most of its layers; its step is of its own devices."""
        own = plan.proposal
        devices = assign_devices(before, self.ranks, own.bounds, own.replicas, weights)
        return replace(plan, proposal=replace(own, devices=devices))


def _shape(plan: ScoredPlan) -> Shape:
    return plan.proposal.ends, plan.proposal.replicas
