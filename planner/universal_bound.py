"""Lower bound on the step of every plan of any schedule, on any devices in any order.

It uses what the orders of all synchronous schedules share. Symbols, for M micro-batches; each is the least
over all devices and numbers of replicas:

    f, b, w    seconds of a micro-batch in a layer: forward, backward, all work on r devices. b is that of the
               input gradient alone if weight gradients are separate actions
    lead       sum of f over all earlier layers
    trail      sum of b over all earlier layers

Bounds without the cuts (`PlanSet.simple`), with M shared by the copies of a layer:

    M x sum of r w / capacity    all the work, shared by all devices in proportion to their speed
    sum of f + b                 one micro-batch, through all layers and back
    M x that                     `naive`, which has one micro-batch at a time
    lead + M w                   a layer: its first action is an F that came through the layers before it
    lead + M (f + b) + trail     a layer: its last B goes back through the layers before it

The first backward on each copy of a stage's weights adds to no gradients and takes less. So the work counts
the average over the micro-batches, and one micro-batch's path counts that of the first. In a straight
pipeline with whole backwards, the path counts the usual backward: if a B on the path is the first of its
stage, another micro-batch follows there and takes the same path.

Schedules with one stage a device have the bound of `search.bound` too, which respects memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf

import numpy as np

from ..cost_models.layer import LayerCosts
from ..cost_models.schedules import MOST_COPIES, SCHEDULES
from .candidate import UNPROPOSED, PipelineConfig, pipeline_configs
from .problem import Problem
from .search.bound import MemoryBound
from .search.family import Family
from .search.placements import ANY, Placement
from .search.space import Space, divide_batch
from .stage_table import Floats, layer_work, part_seconds

STRAIGHT = frozenset({"gpipe", "1f1b", "dapple"})
"""Schedules with one stage a device and whole backwards."""
STRAIGHT_SPLIT = frozenset({"zb-h1", "zb-h2"})
"""Schedules with one stage a device, in which weight gradients may be delayed."""
SLICED = frozenset({"autopipe"})
"""Schedules whose first micro-batch passes in two halves."""
UNKNOWN = ""
"""A schedule about which nothing is assumed."""
WORK = 1e9
"""Counted work of the bound on pipelines with one stage a device (`SearchBudget`)."""


def universal_bound(
    problem: Problem, schedules: Iterable[str], step: float = inf, devices: Sequence[int] | None = None
) -> float:
    """Return a bound on the step of all plans of some schedules.

    The plans have the problem's micro-batches, limits and runtime.

    Args:
        problem: The problem.
        schedules: Names of schedules.
        step: The bound is not refined above it.
        devices: Ranks that a plan may use. Defaults to all.

    Returns:
        Seconds; inf if no plan exists.
    """
    names = tuple(dict.fromkeys(schedules))
    simple = {name: _simple_bound(problem, name, devices) for name in names}
    pipelines = [name for name in names if _is_straight(problem, name)]
    low = min(simple.values(), default=inf)
    by_layer = problem.options.recompute in UNPROPOSED
    if low >= step or step == inf or not pipelines or by_layer or problem.space.is_long:
        return low
    limit = min([step, *(simple[name] for name in names if name not in pipelines)])
    return max(low, _pipeline_bound(problem, pipelines, limit, devices))


def _is_straight(problem: Problem, schedule: str) -> bool:
    """Return whether devices have one stage each, whose bytes `search.bound` counts."""
    return schedule in STRAIGHT or (schedule in STRAIGHT_SPLIT and problem.modes(schedule) == ("never",))


def _simple_bound(problem: Problem, schedule: str, devices: Sequence[int] | None) -> float:
    return min((plan_set.simple for plan_set in _plan_sets(problem, schedule, devices)), default=inf)


def _pipeline_bound(
    problem: Problem, schedules: Sequence[str], limit: float, devices: Sequence[int] | None
) -> float:
    """Return a bound on plans below `limit` seconds with one stage a device, on any of these devices."""
    ranks = tuple(range(problem.usable_gpus) if devices is None else devices)
    anywhere = Placement(ANY, ranks, (len(ranks),) * len(ranks))
    families = [
        Family(config, anywhere, counts)
        for name in schedules
        for config in pipeline_configs(problem.mini_batch, (name,), problem.modes(name), problem.sizes)
        for counts in problem.replica_choices(config.micro_batch_size)
    ]
    budget = problem.space.budget.part(WORK)
    return MemoryBound(problem.space, families, range(1, len(ranks) + 1), False, budget).least(limit)


def work_bound(problem: Problem) -> float:
    """Return a bound on the seconds between two steps of any schedule, synchronous or not.

    It is the work, with the number of replicas that makes each layer cheapest, shared by all devices.
    """
    return min((plan_set.ideal_seconds for plan_set in _plan_sets(problem, UNKNOWN)), default=inf)


def _plan_sets(problem: Problem, schedule: str, devices: Sequence[int] | None = None) -> Iterator[PlanSet]:
    """Yield plans by micro-batch size, and by the numbers of replicas that stages may have together."""
    configs = [config for config in problem.configs if config.schedule == schedule] or problem.configs
    distinct = {(config.micro_batch_size, _modes(schedule, config)): config for config in configs}
    ranks = range(problem.usable_gpus) if devices is None else devices
    for config in distinct.values():
        for allowed in problem.replica_choices(config.micro_batch_size):
            if counts := tuple(count for count in allowed if count <= len(ranks)):
                yield PlanSet(problem.space, schedule, config, ranks, counts)


def _modes(schedule: str, config: PipelineConfig) -> str:
    """Return how the stages of this schedule may recompute: always, never, first_layers, offload, or any."""
    mode = config.recompute
    return (
        mode if mode in ("always", *UNPROPOSED) or (mode, config.schedule) == ("never", schedule) else "any"
    )


@dataclass(frozen=True, eq=False)
class PlanSet:
    """Plans that share a bound: a schedule, the micro-batches of a configuration, devices and replicas.

    Attributes:
        space: Costs and limits.
        schedule: Name of the schedule.
        config: Configuration, for its micro-batches.
        ranks: Devices.
        counts: Numbers of replicas that stages may have.
    """

    space: Space
    schedule: str
    config: PipelineConfig
    ranks: Sequence[int]
    counts: tuple[int, ...]

    @property
    def modes(self) -> str:
        """How stages may recompute."""
        return _modes(self.schedule, self.config)

    @property
    def recompute(self) -> bool:
        """True if every stage recomputes."""
        return self.modes == "always"

    @property
    def first_share(self) -> float:
        """Share of a micro-batch that passes first."""
        return 0.5 if self.schedule in SLICED else 1.0

    @property
    def splits(self) -> bool:
        """True if a backward may have two parts."""
        return self.schedule not in STRAIGHT | {"naive"}

    @property
    def copies(self) -> int:
        """Copies of each stage, which share the micro-batches."""
        return SCHEDULES[self.schedule].copies if self.schedule in SCHEDULES else MOST_COPIES

    @cached_property
    def layers(self) -> list[tuple[Floats, Floats, Floats]]:
        """(layers,) figures f, b and w by number of replicas."""
        return [self._layers(divide_batch(self.config.micro_batch_size, count)) for count in self.counts]

    def _layers(self, batch: int) -> tuple[Floats, Floats, Floats]:
        work, forward = self.space.least(batch, self._work), self.space.least_forward(batch)
        if self.splits:
            return forward, self.space.least(batch, partial(_input_backward, recompute=self.recompute)), work
        share = 0.0 if self.schedule in STRAIGHT and self.config.micro_batches > 1 else 1.0
        share = self._first_backwards if self.schedule == "naive" else share
        both = self.space.least_work(batch, recompute=self.recompute, first_share=share)
        return forward, both - forward, work

    @property
    def _first_backwards(self) -> float:
        """Share of the backwards that are the first on their weights."""
        return min(1.0, self.copies / self.config.micro_batches)

    def _work(self, costs: LayerCosts) -> Floats:
        """Return the (layers,) seconds of all work on a kind of device, before its scale."""
        return layer_work(costs, self._first_backwards, recompute=self.recompute, splits=self.splits)

    @cached_property
    def simple(self) -> float:
        """The bounds that need no partition, in seconds."""
        if not self.counts:
            return inf
        path = float(np.min([forward + back for forward, back, _ in self.layers], axis=0).sum())
        times = float(self.config.micro_batches) if self.schedule == "naive" else self.first_share
        return max(self.ideal_seconds, times * path, self._launches, self._longest_layer)

    @property
    def _longest_layer(self) -> float:
        """Bound in seconds by every layer with what comes before it, and after its last B."""
        forward, back, work = (np.min(figures, axis=0) for figures in zip(*self.layers, strict=True))
        per_copy = self.config.micro_batches / self.copies
        lead = self.first_share * (np.cumsum(forward) - forward)
        trail = self.first_share * (np.cumsum(back) - back)
        passes = lead + per_copy * np.minimum(work, forward + back) + trail
        return float(np.maximum(lead + per_copy * work, passes).max())

    @cached_property
    def ideal_seconds(self) -> float:
        """Work of all micro-batches in seconds, shared by all devices."""
        if not self.counts:
            return inf
        works = [count * work for count, (_, _, work) in zip(self.counts, self.layers, strict=True)]
        return self.config.micro_batches * float(np.min(works, axis=0).sum()) / self.capacity

    @cached_property
    def capacity(self) -> float:
        """Number of devices, each weighted by the least work that it does in one second."""
        batches = {divide_batch(self.config.micro_batch_size, count) for count in self.counts}
        works = {batch: self.space.least(batch, self._work) for batch in batches}
        total = 0.0
        for kind, number in self.space.topology.count_kinds(self.ranks).items():
            paces = [
                _largest_share(work, self.space.on(kind, batch, self._work)) for batch, work in works.items()
            ]
            total += number * max(paces)
        return total

    @property
    def _launches(self) -> float:
        """Bound in seconds by the host that launches most.

        A copy of a layer has its share of the micro-batches.
        """
        busiest, longest = self.space.least_launch_seconds(
            self.config.micro_batch_size, self.counts, len(self.ranks), recompute=self.recompute
        )
        return self.config.micro_batches * max(busiest, longest / self.copies)


def _input_backward(costs: LayerCosts, *, recompute: bool) -> Floats:
    """Return the (layers,) seconds of a B that may delay the weight gradient; the input gradient's alone."""
    input_seconds: Floats = np.minimum(part_seconds(costs, "input"), costs.mean_backward(1.0))
    return input_seconds + recompute * costs.forward_seconds


def _largest_share(least: Floats, seconds: Floats) -> float:
    """Return the largest share of the least work in a device's seconds; 1 without work."""
    positive = seconds > 0
    return float((least[positive] / seconds[positive]).max(initial=0.0)) or 1.0
