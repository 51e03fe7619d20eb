"""Replanning after the loss of devices, with few weights to move.

Let T be the shortest step in seconds of the scored plans, `step(p)` the step of plan p, and `moved(p)` the
bytes of weights and buffers that its devices must receive. The answer minimises

    moved(p)    subject to    step(p) <= (1 + within) T

and, among equals, the step. With `within` = 0 it is the fastest plan, whatever it moves. Plans keep the
schedule and the global batch. If there are few, all cuts, replicas and micro-batches are scored. Otherwise
the search solves the problem on the remaining devices, and neighbours of the old plan and of the fastest
plans so far are scored: a cut or a device moves, stages are joined or split. Stages take the remaining
devices in rank order, or fastest first, or those that hold most of their layers.
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
"""Most (shape, configuration) pairs for which all plans are scored. Otherwise about as many are scored."""
LEADING = 4
"""Number of fastest plans whose neighbours are scored at a time."""
SECONDS = 2.0
"""Time limit of the search in seconds."""
MOST_NEAR = 200
"""Most plans near the fastest for which devices are chosen by the layers that they hold."""


AnyPlan = TypeVar("AnyPlan", ScoredPlan, Plan)


@dataclass(frozen=True)
class Replan(Generic[AnyPlan]):
    """The new plan on the ranks of the old one, with the weights that it moves.

    Attributes:
        plan: The plan.
        moves: Weights that move between devices or come from a checkpoint.
        move_seconds: Seconds of the moves between devices.
        fastest_seconds: Step of the fastest plan that was scored.
        complete: Whether all cuts, replicas and micro-batches were scored.
        any_devices: Whether the answer is independent of the devices' order, because all are alike.
    """

    plan: AnyPlan
    moves: tuple[WeightMove, ...]
    move_seconds: float
    fastest_seconds: float
    complete: bool
    any_devices: bool
    ranks: tuple[int, ...] = ()
    """Ranks of the remaining devices."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that go from device to device or come from a checkpoint."""
        return sum(move.bytes for move in self.moves)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that no remaining device holds."""
        return sum(move.bytes for move in self.moves if move.sender is None)


def replan_problem(
    problem: Problem, present: ScoredPlan, lost: Iterable[int], within: float = 0.05
) -> Replan[ScoredPlan]:
    """Find the plan for the remaining devices.

    Args:
        problem: The problem of the old plan.
        present: The old plan.
        lost: Ranks of the lost devices.
        within: Share by which the step may exceed that of the fastest plan.

    Raises:
        UsageError: A rank does not exist, or no device is left.
        InfeasibleError: No scored plan fits.
    """
    ranks = _ranks_left(problem, present, lost)
    shapes = _Shapes(problem, present, ranks, within)
    shapes.look(lambda: _solve_left(problem, present.config.schedule, ranks))
    if not shapes.steps:
        raise InfeasibleError(
            f"no plan fits on the remaining {format_count(len(ranks), 'device')}",
            "Solve for a machine with this many devices. The answer says what would fit.",
        )
    longest = shapes.longest
    near = sorted(
        (plan for plan in shapes.steps.values() if plan.step_seconds <= longest),
        key=lambda plan: plan.step_seconds,
    )
    held_layers = layers_by_device(present.proposal)
    held_layers = {rank: held_layers[rank] for rank in ranks if rank in held_layers}
    weights = np.asarray(problem.chain.parameter_bytes + problem.chain.buffer_bytes, dtype=np.float64)
    best, fastest_seconds = shapes.move_least(near, held_layers, weights)
    moves, seconds = list_moves(problem.topology, held_layers, ranks, best.proposal, weights)
    alike = is_uniform(problem.topology)
    return Replan(best, moves, seconds, fastest_seconds, shapes.complete, alike, ranks)


def _solve_left(problem: Problem, schedule: str, ranks: Sequence[int]) -> ScoredPlan | None:
    """Return the fastest plan for the devices of these ranks; None if none fits."""
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
        raise UsageError("`lost` names no device", "Give the ranks of the lost devices: lost=(3, 7).")
    strange = [rank for rank in missing if not 0 <= rank < problem.gpus]
    if strange:
        there = "there is" if problem.gpus == 1 else "there are"
        raise UsageError(
            f"lost={strange[0]}: {there} {format_count(problem.gpus, 'device')}",
            "Its only rank is 0." if problem.gpus == 1 else f"Ranks are 0 to {problem.gpus - 1}.",
        )
    ranks = tuple(rank for rank in range(problem.gpus) if rank not in set(missing))
    if not ranks:
        raise UsageError(f"`lost` names all {format_count(problem.gpus, 'device')}", "Name fewer.")
    config = present.config
    if config.schedule not in SEARCHED or config.virtual_stages > 1:
        raise UsageError(
            f"a plan of {config.schedule} cannot be replanned, only plans of {' and '.join(SEARCHED)}",
            "Solve again for the remaining devices.",
        )
    return ranks


@dataclass
class _Shapes:
    """Scored plans, the fastest of each shape.

    The steps of plans that are not near the fastest leave out waiting for shared ports.
    """

    problem: Problem
    present: ScoredPlan
    ranks: tuple[int, ...]
    within: float
    steps: dict[Shape, ScoredPlan] = field(default_factory=dict)
    complete: bool = False
    _scored: set[tuple[Shape, PipelineConfig]] = field(default_factory=set)

    def look(self, solve: Callable[[], ScoredPlan | None] = lambda: None) -> None:
        """Score all plans if there are few, else neighbours of the present plan and of that of `solve`."""
        configs = [
            config for config in self.problem.configs if config.schedule == self.present.config.schedule
        ]
        if self._count() * len(configs) <= MOST_SHAPES:
            self.complete = True
            self._score((shape, config) for config in configs for shape in self._every())
            return
        left = [len(set(stage) & set(self.ranks)) for stage in self.present.proposal.devices]
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
        """Most seconds of a step near the fastest."""
        least = min((plan.step_seconds for plan in self.steps.values()), default=inf)
        return least * (1 + self.within)

    @property
    def _cut_points(self) -> tuple[int, ...]:
        return self.problem.space.table(self.problem.chain.sizes[0]).cut_points

    def _count(self) -> int:
        """Return the number of all shapes."""
        inner, devices = len(self._cut_points) - 2, len(self.ranks)
        return sum(
            comb(inner, stages - 1) * comb(devices, stages)
            for stages in self.problem.stage_counts
            if stages <= devices
        )

    def _every(self) -> Iterator[Shape]:
        """Yield all shapes."""
        devices, last = len(self.ranks), self._cut_points[-1]
        for stages in self.problem.stage_counts:
            counts = [
                replicas
                for replicas in product(range(1, devices + 1), repeat=stages)
                if sum(replicas) <= devices
            ]
            for cuts in combinations(self._cut_points[1:-1], stages - 1):
                yield from (((*cuts, last), replicas) for replicas in counts)

    def _starts(self, ends: tuple[int, ...], left: list[int]) -> Iterator[Shape]:
        """Yield shapes with the plan's stages and the remaining replicas.

        A stage that lost all replicas takes one of the largest stage, or is joined with a neighbour. Equal
        replicas and a single stage follow.
        """
        joined_ends, joined = list(ends), list(left)
        while 0 in joined and len(joined) > 1:
            at = joined.index(0)
            other = at - 1 if at else 1
            joined_ends.pop(min(at, other))
            joined[other] += joined[at]
            joined.pop(at)
        yield tuple(joined_ends), tuple(joined)
        moved = list(left)
        while 0 in moved and max(moved) > 1:
            moved[moved.index(max(moved))] -= 1
            moved[moved.index(0)] += 1
        yield ends, tuple(moved)
        equal = len(self.ranks) // len(ends)
        yield ends, (equal,) * len(ends)
        yield (self._cut_points[-1],), (len(self.ranks),)

    def _score(self, rows: Iterable[tuple[Shape, PipelineConfig]]) -> None:
        """Score new shapes, those of one configuration and number of stages together."""
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
                fastest = self.steps.get(_shape(plan))
                if fastest is None or plan.step_seconds < fastest.step_seconds:
                    self.steps[_shape(plan)] = plan

    @cached_property
    def _orders(self) -> tuple[tuple[int, ...], ...]:
        """Remaining devices by rank and, if they differ, fastest first."""
        topology = self.problem.topology
        by_speed = tuple(sorted(self.ranks, key=lambda rank: -topology.device(rank).speed))
        return tuple(dict.fromkeys((self.ranks, by_speed)))

    def _score_alike(self, proposals: Sequence[Proposal]) -> Iterator[ScoredPlan]:
        """Yield the plans that fit, of one configuration and number of stages."""
        space = self.problem.space
        pairs = [(proposal, modes) for proposal in proposals if (modes := choose_modes(space, proposal))]
        if not pairs:
            return
        pipelines = build_pipelines(
            space, [proposal_ for proposal_, _ in pairs], [modes for _, modes in pairs]
        )
        steps = pipelines.without_sharing().step_seconds()
        near = np.flatnonzero(steps <= self.longest)
        if len(near):
            steps[near] = pipelines.select(near).step_seconds()
        for (proposal, modes), step in zip(pairs, steps.tolist(), strict=True):
            yield ScoredPlan(proposal, modes, step)

    def _allows(self, proposal: Proposal) -> bool:
        """Return whether the options allow a plan; `use_all` refers to the remaining devices."""
        if self.problem.options.use_all and proposal.device_count < len(self.ranks):
            return False
        return len(proposal.ends) in self.problem.stage_counts and self._without_all.allows(proposal)

    @cached_property
    def _without_all(self) -> Problem:
        return replace(self.problem, options=replace(self.problem.options, use_all=False))

    def move_least(
        self, near: Sequence[ScoredPlan], before: dict[int, Layers], weights: Floats
    ) -> tuple[ScoredPlan, float]:
        """Return the plan near the fastest that moves the fewest bytes, and the step of the fastest.

        Each plan is tried on its devices and on those that hold most of its layers, unless a runtime fixes
        the ranks.

        Args:
            near: Plans near the fastest, fastest first.
            before: Layers that each device holds.
            weights: (layers,) bytes of weights and buffers.
        """
        plans = list(near)
        if self.problem.runtime is None:
            moved_plans = [self._on_owners(plan, before, weights) for plan in near[:MOST_NEAR]]
            if not is_uniform(self.problem.topology):
                scored = [fastest(self.problem.space, [moved_plan.proposal]) for moved_plan in moved_plans]
                moved_plans = [plan for plan in scored if plan is not None]
            plans += moved_plans
        least = min(plan.step_seconds for plan in plans)
        plans = [plan for plan in plans if plan.step_seconds <= least * (1 + self.within)]
        best = min(
            plans, key=lambda plan: (count_moved_bytes(before, plan.proposal, weights), plan.step_seconds)
        )
        return best, least

    def _on_owners(self, plan: ScoredPlan, before: dict[int, Layers], weights: Floats) -> ScoredPlan:
        """Return the plan on the devices that hold most of its layers, with its step unchanged."""
        proposal = plan.proposal
        devices = assign_devices(before, self.ranks, proposal.bounds, proposal.replicas, weights)
        return replace(plan, proposal=replace(proposal, devices=devices))


def _shape(plan: ScoredPlan) -> Shape:
    return plan.proposal.ends, plan.proposal.replicas
