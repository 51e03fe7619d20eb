"""Cut search for schedules other than 1F1B and GPipe.

A shape is a configuration, a number of devices and of parts on each, and the devices of every stage
(`device_choices`). All shapes get a bound and first cuts, then the fastest ones are improved. Finally all
cuts of the shapes with the lowest bounds are enumerated (`shape_search`) until the work is done, and what
remains bounds the rest. The bound holds for any devices in any order. If every choice of devices is a shape,
each is bounded with its devices. Otherwise the first choice stands for all: its plans are scored on its
devices, and bounded by the least that any devices take.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import inf

from ...cost_models.errors import UsageError
from ...cost_models.program import Program
from ...cost_models.schedules import find_schedule
from ..candidate import SEVERAL_PARTS, VIRTUAL_STAGES, PipelineConfig, ScoredPlan
from ..problem import Problem
from ..search.budget import WORK_A_SECOND
from ..search.device_classes import Shape, is_uniform
from ..search.least_exchange import LeastExchanges
from ..smallest_plan import least_on_stages, list_rooms
from ..universal_bound import universal_bound
from .device_choices import DeviceChooser
from .part_tables import PipelineShape
from .shape_search import Record, ShapeSearch, search_shapes

EVERY_COUNT = 64
"""Most devices for which every number of replicas is tried."""
MOST_SHAPES = 3_000
"""Most shapes that are bounded one by one."""
MOST_COMPOSED = 8
"""Most devices for which every number of replicas of every stage is tried."""
MOST_ACTIONS = 30_000
"""Most actions of a program whose cuts are searched."""
MOST_NEAR_CHOICES = 4
"""Choices of devices for the shape of a good plan that are tried first."""
SHARE = 0.45
"""Share of the time limit's work."""


@dataclass(frozen=True)
class ScheduleResult:
    """Result of a cut search.

    Attributes:
        best: The best plan; None if none fits.
        bound_seconds: Bound on all plans of the schedules.
        plans: The best plans of different shapes, fastest first.
    """

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
    """Search plans of these schedules that take less than `limit` seconds.

    Args:
        problem: What is asked.
        schedules: Names of schedules.
        limit: Seconds that a plan must be faster than.
        work: Counted work. Defaults to a share of the time limit.
        near: Good plans, whose shapes are tried first.

    Returns:
        The best plan, and a bound on all plans that were not scored. A bound equal to the limit only means
        that no plan is below the limit.
    """
    names = tuple(dict.fromkeys(schedules))
    if not names:
        return ScheduleResult(None, inf)
    low = universal_bound(problem, names, limit)
    if problem.space.is_long or low >= limit:
        return ScheduleResult(None, low)
    amount = SHARE * problem.options.time_limit * WORK_A_SECOND if work is None else work
    record = Record(problem, problem.budget.part(amount), LeastExchanges(problem.space), limit)
    return _ScheduleSearch(problem, names, low, record).run(near)


class _ScheduleSearch:
    """Search over the shapes of some schedules."""

    def __init__(self, problem: Problem, names: tuple[str, ...], low: float, record: Record) -> None:
        self.problem, self.names, self.low, self.record = problem, names, low, record
        self.devices = DeviceChooser(problem)
        self.programs: dict[tuple[str, int, int, int], Program | None] = {}
        most = min(problem.usable_gpus, problem.space.chain.max_stages)
        reaches = problem.stage_counts[-1] == most or not problem.may_be_deeper
        self.is_complete = reaches and problem.usable_gpus <= EVERY_COUNT

    def run(self, near: Iterable[ScoredPlan] = ()) -> ScheduleResult:
        """Search the shapes of the plans `near`, then all shapes."""
        record = self.record
        nearest = [ShapeSearch(record, shape, self.low) for shape in self._shapes_near(near)]
        for search in nearest:
            if not record.budget.spent:
                search.begin()
                search.descend()
        skip = {(search.shape.config, search.shape.ranks) for search in nearest}
        searches, proven = search_shapes(record, chain(nearest, self._shapes(skip)))
        proven = proven if self.is_complete else min(proven, self.low)
        plans = sorted(
            (search.best for search in searches if search.best is not None),
            key=lambda plan: plan.step_seconds,
        )
        return ScheduleResult(record.best, max(self.low, proven), tuple(plans))

    def _shapes(self, skip: Container[tuple[PipelineConfig, Shape]]) -> Iterator[ShapeSearch]:
        """Yield the searches of all shapes except those to skip."""
        count, record = 0, self.record
        for shape in self._all_shapes():
            if record.budget.over:
                self.is_complete = False
                return
            if (shape.config, shape.ranks) in skip and not shape.stands_for_all:
                continue
            if count >= MOST_SHAPES or record.budget.spent:
                if shape.stands_for_all or self._lists_every_choice:  # the proof needs it
                    self.is_complete = False
                    return
                continue
            count += 1
            record.budget.spend(100_000)
            yield ShapeSearch(record, shape, self.low)

    def _shapes_near(self, plans: Iterable[ScoredPlan]) -> Iterator[PipelineShape]:
        """Yield shapes of plans with searched schedules, on their devices and on the best choices."""
        for plan in plans:
            config, proposal = plan.config, plan.proposal
            stages = len(proposal.ends) // config.virtual_stages
            program = self._program(config, stages) if config.schedule in self.names else None
            if program is not None:
                slots = zip(program.pipes[0], proposal.devices, strict=True)
                ranks = {slot.device: devices for slot, devices in slots}
                planned = tuple(ranks[device] for device in range(stages))
                choices = self.devices.choices(tuple(map(len, planned))).shapes[:MOST_NEAR_CHOICES]
                further = choices if len(self.problem.topology.kinds) > 1 else ()
                for devices in dict.fromkeys((planned, *further)):
                    yield PipelineShape(config, program, devices)

    def _all_shapes(self) -> Iterator[PipelineShape]:
        """Yield every pipeline with its first choice of devices, then with the others."""
        for config, program, counts in self._pipelines():
            first = self.devices.choices(counts).shapes[0]
            yield PipelineShape(config, program, first, not self._lists_every_choice)
        for config, program, counts in self._pipelines():
            for devices in self.devices.choices(counts).shapes[1:]:
                yield PipelineShape(config, program, devices)

    @cached_property
    def _lists_every_choice(self) -> bool:
        """True if every choice of devices for every pipeline is a shape."""
        if self.devices.is_single:
            return is_uniform(self.problem.topology)
        number = 0
        for _, _, counts in self._pipelines():
            choices = self.devices.choices(counts)
            number += len(choices.shapes)
            is_only = len(choices.shapes) == 1
            if not choices.complete or (number > MOST_SHAPES and not is_only):
                return False
        return True

    def _pipelines(self) -> Iterator[tuple[PipelineConfig, Program, tuple[int, ...]]]:
        """Yield configurations, programs and numbers of replicas by device of the program."""
        problem, room = self.problem, list_rooms(self.problem)[-1].bytes
        numbers = [number for number in problem.stage_counts if least_on_stages(problem, number) <= room]
        for config, stages in product(problem.configs, reversed(numbers)):
            if config.schedule not in self.names:
                continue
            for chunks in _virtual_stages(config):
                virtual = config if chunks == 1 else replace(config, virtual_stages=chunks)
                program = self._program(virtual, stages)
                if program is None:
                    continue
                for counts in self._replicas(config, stages):
                    yield virtual, program, counts

    def _program(self, config: PipelineConfig, stages: int) -> Program | None:
        """Return the program; None if the schedule does not run with these numbers, or if it is too long."""
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
        """Return the numbers of replicas by device that stages may have together."""
        problem, usable = self.problem, self.problem.usable_gpus
        choices = []
        for counts in problem.replica_choices(config.micro_batch_size):
            if len(counts) == 1 or problem.runtime is not None:
                combinations = [(count,) * stages for count in counts]
            elif len(counts) ** stages <= 10 * MOST_SHAPES or usable <= MOST_COMPOSED:
                combinations = list(_compositions(counts, stages, usable))
            else:
                self.is_complete = False
                combinations = [(count,) * stages for count in counts]
            choices += [counts for counts in combinations if sum(counts) <= usable]
        if problem.options.use_all:
            return [chosen_counts for chosen_counts in choices if sum(chosen_counts) == usable]
        return choices


def _compositions(counts: tuple[int, ...], stages: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of replicas for `stages` stages that use at most `most` devices."""
    if not stages:
        yield ()
        return
    for count in counts:
        if count + stages - 1 <= most:
            for rest in _compositions(counts, stages - 1, most - count):
                yield (count, *rest)


def _virtual_stages(config: PipelineConfig) -> tuple[int, ...]:
    """Return the numbers of parts per device to search."""
    if config.virtual_stages > 1:
        return (config.virtual_stages,)
    if config.schedule in SEVERAL_PARTS:
        return VIRTUAL_STAGES
    return (find_schedule(config.schedule).default_virtual_stages,)
