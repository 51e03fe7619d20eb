"""The plans of schedules that the branch and bound of 1F1B and GPipe does not know, with their own cuts.

A shape is a configuration, a number of devices and of parts on each, and the replicas of every device
(`device_choices`). Shapes are looked at in stages (`shape_search`), the one with the lowest bound first, so
that what is left when the work is done bounds what was not looked at. The bound holds for any devices in any
order. Where every choice of devices is a shape, each is bounded with its devices. Otherwise the first choice
stands for all: its plans are scored on its devices and bounded by the least that any devices take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from math import inf
from typing import TYPE_CHECKING

from ...cost_models.errors import UsageError
from ...cost_models.schedules import Program, find_schedule
from ..candidate import ScoredPlan
from ..partition_bound import Partitions
from ..pipeline_config import SEVERAL_PARTS, VIRTUAL_STAGES, PipelineConfig
from ..plan_records import TIE
from ..search.budget import WORK_A_SECOND
from ..search.least_exchange import LeastExchanges
from ..universal_bound import make_partitions, universal_bound, work_and_path_bound
from .device_choices import DeviceChooser
from .part_tables import PipelineShape
from .shape_search import SearchStage, ShapeSearch

if TYPE_CHECKING:
    from ..problem import Problem

EVERY_COUNT = 64
"""Up to so many devices every number of replicas is looked at."""
MOST_SHAPES = 3_000
"""That are bounded each by itself."""
MOST_ACTIONS = 30_000
"""Of a program whose cuts are searched."""
MOST_NEAR_CHOICES = 4
"""Choices of devices for the shape of a good plan that are looked at first."""
SHARE = 0.15
"""Of the time limit's work."""


@dataclass(frozen=True)
class ScheduleResult:
    """The best plan, None where none fits, and a bound on all plans of the schedules; the best plans of
    different shapes, the fastest first."""

    best: ScoredPlan | None
    bound_seconds: float
    plans: tuple[ScoredPlan, ...] = ()


def search_schedules(
    problem: Problem,
    schedules: Iterable[str],
    limit: float = inf,
    work: float | None = None,
    near: Iterable[ScoredPlan] = (),
) -> ScheduleResult:
    """Plans of these schedules that take less than `limit` seconds, with a bound on all that do not; a bound
    at the limit says no more than that. The shapes of the plans `near` the fastest are looked at first."""
    names = tuple(dict.fromkeys(schedules))
    if not names:
        return ScheduleResult(None, inf)
    low = universal_bound(problem, names, limit)
    if problem.space.is_long or low >= limit:
        return ScheduleResult(None, low)
    amount = SHARE * problem.options.time_limit * WORK_A_SECOND if work is None else work
    return _ScheduleSearch(problem, names, limit, low, amount).run(near)


class _ScheduleSearch:
    def __init__(
        self, problem: Problem, names: tuple[str, ...], limit: float, low: float, work: float
    ) -> None:
        self.problem, self.names, self.low = problem, names, low
        self.limit = limit
        self.budget = problem.budget.part(work)
        self.devices = DeviceChooser(problem)
        self.programs: dict[tuple[str, int, int, int], Program | None] = {}
        most = min(problem.usable_gpus, problem.space.chain.max_stages)
        reaches = problem.stage_counts[-1] == most or not problem.may_be_deeper
        self.is_complete = reaches and problem.usable_gpus <= EVERY_COUNT
        self.bounds: dict[object, float] = {}
        self.exchanges = LeastExchanges(problem.space)
        self.partitions: dict[tuple[str, int, str], Partitions] = {}

    def run(self, near: Iterable[ScoredPlan] = ()) -> ScheduleResult:
        """The answer."""
        best: ScoredPlan | None = None
        first = [self._search(shape, self._simple_bound(shape)) for shape in self._shapes_near(near)]
        for own in first:
            while own.stage < SearchStage.IMPROVED and not self.budget.spent:
                self.limit = own.advance(self.limit)
            best = _faster(best, own.best)
        shapes = [*first, *sorted(self._shapes(), key=lambda own: own.bound)]
        for stage in (SearchStage.QUICK, SearchStage.IMPROVED):
            for own in sorted(shapes, key=lambda own: own.step):
                if own.bound < self.limit * (1 - TIE) and not self.budget.spent and own.stage < stage:
                    self.limit = own.advance(self.limit)
                    best = _faster(best, own.best)
        heap = [(own.bound, index, own) for index, own in enumerate(shapes)]
        heapify(heap)
        proven = inf if self.is_complete else self.low
        while heap:
            bound, index, own = heappop(heap)
            if bound >= self.limit * (1 - TIE):
                break
            if self.budget.spent or own.stage == SearchStage.DONE:
                proven = min(proven, bound)
                continue
            self.limit = own.advance(self.limit)
            best = _faster(best, own.best)
            heappush(heap, (own.bound, index, own))
        step = self.limit if best is None else min(self.limit, best.step_seconds)
        plans = sorted((own.best for own in shapes if own.best is not None), key=lambda own: own.step_seconds)
        return ScheduleResult(best, max(self.low, min(proven, step)), tuple(plans))

    def _shapes(self) -> Iterator[ShapeSearch]:
        count = 0
        for shape in self._all_shapes():
            bound = self._simple_bound(shape)
            if bound >= self.limit * (1 - TIE):
                continue
            if count >= MOST_SHAPES or self.budget.spent:
                if self._is_needed(shape):
                    self.is_complete = False
                    return
                continue
            if not self._may_fit(shape):
                continue
            count += 1
            self.budget.spend(100_000)
            yield self._search(shape, bound)

    def _search(self, shape: PipelineShape, bound: float) -> ShapeSearch:
        problem = self.problem
        return ShapeSearch(
            problem.space, shape, bound, not shape.stands_for_all, problem.allows, self.budget, self.exchanges
        )

    def _shapes_near(self, plans: Iterable[ScoredPlan]) -> Iterator[PipelineShape]:
        """Shapes of plans with searched schedules, on their devices and on the best choices."""
        for plan in plans:
            config, proposal = plan.config, plan.proposal
            stages = len(proposal.ends) // config.virtual_stages
            program = self._program(config, stages) if config.schedule in self.names else None
            if program is not None:
                slots = zip(program.pipes[0], proposal.devices, strict=True)
                ranks = {slot.device: own for slot, own in slots}
                planned = tuple(ranks[device] for device in range(stages))
                choices = self.devices.choices(tuple(map(len, planned))).shapes[:MOST_NEAR_CHOICES]
                further = choices if len(self.problem.topology.kinds) > 1 else ()
                for devices in dict.fromkeys((planned, *further)):
                    yield PipelineShape(config, program, devices)

    def _simple_bound(self, shape: PipelineShape) -> float:
        config, counts = shape.config, tuple(sorted({len(own) for own in shape.ranks}))
        ranks = [rank for own in shape.ranks for rank in own]
        if shape.stands_for_all:
            ranks = list(range(self.problem.usable_gpus))
        kinds = self.problem.topology.count_kinds(ranks)
        key = config, counts, frozenset(kinds.items())
        if key not in self.bounds:
            self.bounds[key] = work_and_path_bound(self.problem, config, ranks, counts)
        return self.bounds[key]

    def _may_fit(self, shape: PipelineShape) -> bool:
        """Whether some cuts may take less than the limit, as far as each part shows by itself."""
        config, slots = shape.config, shape.program.pipes[0]
        key = config.schedule, config.micro_batch_size, config.recompute
        if key not in self.partitions:
            self.partitions[key] = make_partitions(self.problem, config, self.exchanges)
        own = self.partitions[key]
        self.budget.spend(len(slots) * (20_000 + 5 * own.part_entries))
        replicas = [len(shape.ranks[slot.device]) for slot in slots]
        is_sent = [here.device != there.device for here, there in pairwise(slots)]
        return own.may_take(replicas, is_sent, self.limit)

    def _all_shapes(self) -> Iterator[PipelineShape]:
        """Every pipeline with its first choice of devices, and then with the others."""
        for config, program, counts in self._pipelines():
            first = self.devices.choices(counts).shapes[0]
            yield PipelineShape(config, program, first, not self._lists_every_choice)
        for config, program, counts in self._pipelines():
            for devices in self.devices.choices(counts).shapes[1:]:
                yield PipelineShape(config, program, devices)

    @cached_property
    def _lists_every_choice(self) -> bool:
        """Return whether every choice of devices for every pipeline is a shape."""
        number = 0
        for _, _, counts in self._pipelines():
            choices = self.devices.choices(counts)
            number += len(choices.shapes)
            is_only = len(choices.shapes) == 1
            if not choices.complete or (number > MOST_SHAPES and not is_only):
                return False
        return True

    def _is_needed(self, shape: PipelineShape) -> bool:
        """Return whether the proof needs this shape, as no other one stands for its plans."""
        return shape.stands_for_all or self._lists_every_choice

    def _pipelines(self) -> Iterator[tuple[PipelineConfig, Program, tuple[int, ...]]]:
        """Configurations, programs and, by device of the program, numbers of replicas."""
        problem = self.problem
        for config, stages in product(problem.configs, reversed(problem.stage_counts)):
            if config.schedule not in self.names:
                continue
            for chunks in _virtual_stages(config):
                own = config if chunks == 1 else replace(config, virtual_stages=chunks)
                program = self._program(own, stages)
                if program is None:
                    continue
                for counts in self._replicas(config, stages):
                    yield own, program, counts

    def _program(self, config: PipelineConfig, stages: int) -> Program | None:
        """None where the schedule does not run with these numbers, or is not searched with so many."""
        parts = config.virtual_stages
        if stages * parts > self.problem.space.chain.max_stages or stages == 1 < parts:
            return None
        if 3 * stages * parts * config.micro_batches > MOST_ACTIONS:
            self.is_complete = False
            return None
        key = config.schedule, stages, config.micro_batches, parts
        if key not in self.programs:
            self.programs[key] = None
            with suppress(UsageError):
                self.programs[key] = find_schedule(config.schedule).program(
                    stages, config.micro_batches, parts
                )
        return self.programs[key]

    def _replicas(self, config: PipelineConfig, stages: int) -> list[tuple[int, ...]]:
        """By device, the numbers of replicas that there may be together."""
        problem, usable = self.problem, self.problem.usable_gpus
        choices = []
        for counts in problem.replica_choices(config.micro_batch_size):
            if len(counts) == 1 or problem.runtime is not None:
                own = [(count,) * stages for count in counts]
            elif len(counts) ** stages <= 10 * MOST_SHAPES or usable <= MOST_COMPOSED:
                own = list(_compositions(counts, stages, usable))
            else:
                self.is_complete = False
                own = [(count,) * stages for count in counts]
            choices += [one for one in own if sum(one) <= usable]
        if problem.options.use_all:
            return [one for one in choices if sum(one) == usable]
        return choices


MOST_COMPOSED = 8
"""Up to so many devices every number of replicas of every stage is looked at."""


def _compositions(counts: tuple[int, ...], stages: int, most: int) -> Iterator[tuple[int, ...]]:
    """Of so many stages, with no more than `most` devices."""
    if not stages:
        yield ()
        return
    for count in counts:
        if count + stages - 1 <= most:
            for others in _compositions(counts, stages - 1, most - count):
                yield (count, *others)


def _virtual_stages(config: PipelineConfig) -> tuple[int, ...]:
    """Parts of the layers on each device."""
    if config.virtual_stages > 1:
        return (config.virtual_stages,)
    if config.schedule in SEVERAL_PARTS:
        return VIRTUAL_STAGES
    return (find_schedule(config.schedule).default_virtual_stages,)


def _faster(best: ScoredPlan | None, other: ScoredPlan | None) -> ScoredPlan | None:
    if other is None or (best is not None and best.step_seconds <= other.step_seconds):
        return best
    return other
