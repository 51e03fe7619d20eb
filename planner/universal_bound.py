"""A lower bound on the step of every plan of any schedule, on any devices in any order.

It uses only what the orders of all synchronous schedules have in common. M micro-batches;
of a stage and a micro-batch f forward, b backward (of the input alone where the weights' gradient is an
action of its own), w all of its work; c a transfer between stages; D devices, of which a stage takes r. All
are the least that any device, number of replicas and link gives:

    M x sum of r w / capacity    all the work, shared by all devices as fast as each of them is
    sum of f + b                 one micro-batch, through all layers and back
    M x that                     `naive`, which has one micro-batch at a time
    lead + M w                   a layer, also lead + M (f + b) + trail; M shared by the layer's copies
    lead + M w + e               a stage of a straight pipeline (one stage a device): its first action is an F
                                 that came through the stages before it; e: of the all-reduce over its
                                 replicas what cannot run beside its last backward, and
                                 sums of tied weights
    lead + M (f + b) + trail     its last B goes back through the stages before it

The first backward on each copy of a stage's weights adds to no gradients and takes less: the work counts what
it takes on average over the micro-batches, and one micro-batch's path is the first's. Of a straight pipeline
with whole backwards it is any other's: where a B on the way back is the first of its stage, another follows
there, and goes the same way.

The last two are minimised over all partitions by a dynamic programme on (devices used, layers done) that
keeps the least lead and the least lead and trail, each by itself, for stages that meet a step; the step is
bisected. Memory is ignored, so that recomputation counts only where every stage must recompute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ..cost_models.hardware import Device
from ..cost_models.layer import LayerCosts
from ..cost_models.schedules import MOST_COPIES, SCHEDULES
from .plan_records import TIE
from .search.space import Space, divide_batch
from .stage_table import Floats, part_seconds

if TYPE_CHECKING:
    from .pipeline_config import PipelineConfig
    from .problem import Problem

LINEAR = frozenset({"naive", "gpipe", "1f1b", "dapple"})
"""One stage a device, whole backwards."""
LINEAR_SPLIT = frozenset({"zb-h1", "zb-h2"})
"""One stage a device; weight gradients may wait."""
SLICED_SCHEDULES = frozenset({"autopipe"})
"""Whose first micro-batch goes through in halves."""
UNKNOWN = ("",)
"""A schedule of which nothing is known."""
HALVINGS = 12
"""Of what is open between the simple bound and the step."""
MOST_ENTRIES = 1e8
"""Of the dynamic programme's tables in all: of more the simple bounds are left."""


def universal_bound(problem: Problem, schedules: Iterable[str], step: float = inf) -> float:
    """Seconds that no plan of these schedules is below, with the problem's micro-batches, limits and runtime;
    it is not refined above `step`. inf where there is no plan."""
    cases = [case for name in dict.fromkeys(schedules) for case in _cases(problem, name)]
    # Cases that bound alike stand for each other.
    distinct = sorted({case.key: case for case in cases}.values(), key=lambda case: case.simple)
    low = min((case.simple for case in distinct), default=inf)
    if low >= step:
        return low
    cost = (HALVINGS + 2) * sum(case.entries for case in distinct)
    if step == inf or cost > MOST_ENTRIES or problem.space.is_long:
        return low
    return _bisect(distinct, low, step)


def work_bound(problem: Problem) -> float:
    """A bound on the seconds between two steps of any schedule, also of one that is never flushed: the work,
    as cheap as any number of replicas makes each layer, shared by all devices."""
    cases = (case for name in UNKNOWN for case in _cases(problem, name))
    return min((case.ideal_seconds for case in cases), default=inf)


def work_and_path_bound(
    problem: Problem, config: PipelineConfig, gpus: int, counts: tuple[int, ...]
) -> float:
    """Seconds that no plan of a configuration is below whose stages have these numbers of replicas, on so
    many devices in all (on the first ones, where they are not alike)."""
    return _case(problem, config.schedule, config, gpus, counts).simple


def _bisect(cases: Sequence[_Case], low: float, step: float) -> float:
    """The largest step from `low` on that is known to be too short for every case."""

    def too_short(seconds: float) -> bool:
        return not any(case.allows(seconds) for case in cases)

    if too_short(step * (1 - TIE)):
        return step * (1 - TIE)
    high = step
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if too_short(middle):
            low = middle
        else:
            high = middle
    return low


def _cases(problem: Problem, schedule: str) -> Iterator[_Case]:
    """By micro-batch size, and by the numbers of replicas that stages may have together."""
    own = [config for config in problem.configs if config.schedule == schedule] or problem.configs
    distinct = {(config.micro_batch_size, config.recompute == "always"): config for config in own}
    for (size, _), config in distinct.items():
        for counts in problem.replica_choices(size):
            yield _case(problem, schedule, config, problem.usable_gpus, counts)


def _case(
    problem: Problem, schedule: str, config: PipelineConfig, gpus: int, counts: tuple[int, ...]
) -> _Case:
    kind = {"naive": "naive", **dict.fromkeys(SLICED_SCHEDULES, "sliced")}.get(schedule, "any")
    if kind == "any" and schedule in LINEAR | LINEAR_SPLIT:
        kind = "straight"
    return _Case(
        space=problem.space,
        usable_gpus=gpus,
        kind=kind,
        splits=schedule not in LINEAR,
        copies=SCHEDULES[schedule].copies if schedule in SCHEDULES else MOST_COPIES,
        size=config.micro_batch_size,
        micro_batches=problem.mini_batch // config.micro_batch_size,
        recompute=config.recompute == "always",
        counts=counts,
    )


@dataclass(frozen=True, eq=False)
class _Case:
    """Plans of a kind of schedule with `micro_batches` of `size` samples, whose stages have these numbers of
    replicas; `recompute`: every stage recomputes."""

    space: Space
    usable_gpus: int
    kind: str
    splits: bool
    copies: int
    size: int
    micro_batches: int
    recompute: bool
    counts: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What the bound depends on."""
        return self.kind, self.splits, self.copies, self.size, self.recompute, self.counts

    @property
    def entries(self) -> float:
        """Of the tables of one question."""
        if self.kind != "straight":
            return 0.0
        rows = sum(self.usable_gpus - count + 1 for count in self.counts)
        return rows * (len(self._cut_points) ** 2 + 3_000.0)

    @cached_property
    def _layers(self) -> list[tuple[Floats, Floats, Floats]]:
        """By number of replicas, (layers,) each, seconds of a micro-batch: f, b and w."""
        return [self._of_batch(divide_batch(self.size, count)) for count in self.counts]

    def _of_batch(self, per_replica_batch: int) -> tuple[Floats, Floats, Floats]:
        work = self.space.least(per_replica_batch, self._work)
        forward = self.space.least_forward(per_replica_batch)
        if self.splits:
            back = self.space.least(per_replica_batch, partial(_least_backward, recompute=self.recompute))
        else:
            both = self.space.least_work(
                per_replica_batch, recompute=self.recompute, first_share=self._path_share
            )
            back = both - forward
        return forward, back, work

    @property
    def _path_share(self) -> float:
        """`_first_share` of the micro-batch that a path follows; `naive` follows all."""
        if self.kind == "naive":
            return self._first_share
        return 0.0 if self.kind == "straight" and self.micro_batches > 1 else 1.0

    @property
    def _first_share(self) -> float:
        """Of the backwards, those that are the first on their weights."""
        return min(1.0, self.copies / self.micro_batches)

    def _work(self, costs: LayerCosts) -> Floats:
        """(layers,): all seconds of every layer on a kind of device, before its scale."""
        backward = costs.mean_backward(self._first_share)
        if self.splits:
            weight = part_seconds(costs, "weight")
            once = np.minimum(costs.accumulation, weight)
            parts = part_seconds(costs, "input") + weight - self._first_share * once
            backward = np.minimum(backward, parts)
        return (1 + self.recompute) * costs.forward_seconds + backward

    @cached_property
    def simple(self) -> float:
        """The bounds that need no partition."""
        if not self.counts:
            return inf
        path = float(np.min([forward + back for forward, back, _ in self._layers], axis=0).sum())
        times = {"naive": float(self.micro_batches), "sliced": 0.5}.get(self.kind, 1.0)
        return max(self.ideal_seconds, times * path, self._launches, self._longest_layer)

    @property
    def _longest_layer(self) -> float:
        """Of every layer with what comes before it, and after its last B; a copy has its share of them."""
        forward, back, work = (np.min(own, axis=0) for own in zip(*self._layers, strict=True))
        first = 0.5 if self.kind == "sliced" else 1.0
        each = self.micro_batches / self.copies
        ahead = first * (np.cumsum(forward) - forward)
        behind = first * (np.cumsum(back) - back)
        passes = ahead + each * np.minimum(work, forward + back) + behind
        return float(np.maximum(ahead + each * work, passes).max())

    @cached_property
    def ideal_seconds(self) -> float:
        """The work of all micro-batches, shared by all devices."""
        if not self.counts:
            return inf
        works = [count * work for count, (_, _, work) in zip(self.counts, self._layers, strict=True)]
        return self.micro_batches * float(np.min(works, axis=0).sum()) / self._capacity

    @cached_property
    def _capacity(self) -> float:
        """Devices, each counted as what it does in a second, at the most, of a second of the least work."""
        topology, paces = self.space.topology, dict[Device, float]()
        for kind in topology.kinds:
            paces[kind] = max(
                _most_of_stage(
                    self.space.least(per_replica_batch, self._work),
                    self.space.on(kind, per_replica_batch, self._work),
                )
                for per_replica_batch in {divide_batch(self.size, count) for count in self.counts}
            )
        numbers = topology.count_kinds(range(self.usable_gpus))
        return sum(paces[kind] * count for kind, count in numbers.items())

    @property
    def _launches(self) -> float:
        """Of the host that launches most; a copy of a layer has its share of the micro-batches."""
        busiest, longest = self.space.least_launch_seconds(
            self.size, self.counts, self.usable_gpus, recompute=self.recompute
        )
        return self.micro_batches * max(busiest, longest / self.copies)

    def allows(self, seconds: float) -> bool:
        """Whether there may be a plan of so many seconds."""
        if seconds < self.simple:
            return False
        return self.kind != "straight" or self._reaches(seconds * (1 + TIE / 10))

    def _reaches(self, seconds: float) -> bool:
        last = len(self._cut_points) - 1
        lead, both = (np.full((self.usable_gpus + 1, last + 1), inf) for _ in range(2))
        lead[0, 0] = both[0, 0] = 0.0
        for used in range(1, self.usable_gpus + 1):
            for index, count in enumerate(self.counts):
                if count > used or not np.isfinite(lead[used - count]).any():
                    continue
                forward, around, work, exposed_allreduce, launches = self._stages[index]
                before, both_before = lead[used - count][:, None], both[used - count][:, None]
                fits = (before + self.micro_batches * work + exposed_allreduce <= seconds) & (
                    both_before + self.micro_batches * np.minimum(work, around) <= seconds
                )
                fits &= self.micro_batches * launches + exposed_allreduce <= seconds
                ahead = np.where(fits, before + forward, inf).min(axis=0) + self._cuts
                there_and_back = np.where(fits, both_before + around, inf).min(axis=0) + 2 * self._cuts
                lead[used] = np.minimum(lead[used], ahead)
                both[used] = np.minimum(both[used], there_and_back)
            if np.isfinite(lead[used, last]):
                return True
        return False

    @cached_property
    def _cut_points(self) -> tuple[int, ...]:
        return self.space.table(self.space.chain.sizes[0]).cut_points

    @cached_property
    def _stages(self) -> list[tuple[Floats, Floats, Floats, Floats, Floats]]:
        """By number of replicas, (cut points, cut points) each, inf where there is no stage: f, f + b, w,
        what of the all-reduce follows, and the host seconds of a micro-batch."""
        table, stages = self.space.table(self.space.chain.sizes[0]), []
        gradients = self.space.bytes_at_end(table.stage_sums(table.costs.trainable_bytes))
        for count, (forward, back, work) in zip(self.counts, self._layers, strict=True):
            exposed_allreduce = np.zeros_like(gradients)
            if count > 1 and not self.splits:
                reduced = 2 * (count - 1) / count * gradients / self._fastest
                longest = table.stage_sums(self._longest_backward(count))
                exposed_allreduce = np.maximum(reduced - longest, 0.0)
            whole = np.where(table.valid, table.stage_sums(work), inf)
            after = exposed_allreduce + self.space.least_tied(table, count)
            own = self.space.table(divide_batch(self.size, count))
            launches = (1 + self.recompute) * own.forward_launch + own.backward_launch
            sums = (table.stage_sums(forward), table.stage_sums(forward + back))
            stages.append((*sums, whole, after, launches))
        return stages

    def _longest_backward(self, replicas: int) -> Floats:
        """(layers,): seconds on the slowest device for each layer."""
        size, kinds = divide_batch(self.size, replicas), self.space.topology.kinds
        each = [self.space.on(kind, size, lambda own: own.backward_seconds) for kind in kinds]
        longest: Floats = np.maximum.reduce(each)
        return longest

    @property
    def _fastest(self) -> float:
        """Bytes a second of the fastest link."""
        return max(level.link.bandwidth_bytes_per_second for level in self.space.topology.levels)

    @cached_property
    def _cuts(self) -> Floats:
        """(cut points,): seconds of a transfer: a replica of the smaller side sends its share, through no
        more than a port of every level."""
        levels = self.space.topology.levels
        together = sum(level.link.bandwidth_bytes_per_second for level in levels)
        latency = min(level.link.latency_seconds for level in levels)
        per_replica_batches = {divide_batch(self.size, count) for count in self.counts}
        sent = np.min(
            [self.space.table(per_replica_batch).crossing for per_replica_batch in per_replica_batches],
            axis=0,
        )
        cuts: Floats = sent / together + latency
        cuts[-1] = 0.0
        return cuts


def _least_backward(costs: LayerCosts, *, recompute: bool) -> Floats:
    """(layers,): of a B that may leave the weights' gradient for later; the input's alone."""
    own: Floats = np.minimum(part_seconds(costs, "input"), costs.mean_backward(1.0))
    return own + recompute * costs.forward_seconds


def _most_of_stage(least: Floats, own: Floats) -> float:
    """The largest share that the least work is of a device's own; 1 where there is no work."""
    positive = own > 0
    return float((least[positive] / own[positive]).max(initial=0.0)) or 1.0
