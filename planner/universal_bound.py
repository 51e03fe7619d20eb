"""A lower bound on the step of every plan of any schedule, on any devices in any order.

It uses only what the orders of all synchronous schedules have in common. M micro-batches; of a layer and a
micro-batch f forward, b backward (of the input alone where the weights' gradient is an action of its own), w
all of its work on r devices, all the least that any device and number of replicas gives:

    M x sum of r w / capacity    all the work, shared by all devices as fast as each of them is
    sum of f + b                 one micro-batch, through all layers and back
    M x that                     `naive`, which has one micro-batch at a time
    lead + M w                   a layer: its first action is an F that came through the layers before it;
                                 also lead + M (f + b) + trail, as its last B goes back through them; M
                                 shared by the layer's copies

The first backward on each copy of a stage's weights adds to no gradients and takes less: the work counts what
it takes on average over the micro-batches, and one micro-batch's path is the first's. Of a straight pipeline
with whole backwards it is any other's: where a B on the way back is the first of its stage, another follows
there, and goes the same way.

The step is bisected: a shorter one is asked of all partitions of the layers (`partition_bound`), with their
all-reduces and what memory each part needs. What else a device holds is ignored, so that recomputation counts
only where every stage must recompute.
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
from .partition_bound import Partitions
from .pipeline_config import UNPROPOSED
from .plan_records import TIE
from .plan_settings import PlanSettings
from .search.least_exchange import LeastExchanges
from .search.space import Space, divide_batch
from .stage_table import Floats, part_seconds

if TYPE_CHECKING:
    from .pipeline_config import PipelineConfig
    from .problem import Problem

LINEAR = frozenset({"naive", "gpipe", "1f1b", "dapple"})
"""One stage a device, whole backwards."""
LINEAR_SPLIT = frozenset({"zb-h1", "zb-h2"})
"""The same, where weight gradients may wait."""
SLICED_SCHEDULES = frozenset({"autopipe"})
"""Whose first micro-batch goes through in halves."""
TURNS = {
    **dict.fromkeys((*LINEAR, *LINEAR_SPLIT, *SLICED_SCHEDULES, "chimera", "interleaved", "looped-bfs"), 0),
    **dict.fromkeys(("zb-v", "dualpipe-v"), 1),
}
"""Cuts with the same devices on both sides, in pipelines of several stages."""
UNKNOWN = ("",)
"""A schedule of which nothing is known."""
HALVINGS = 12
"""Of what is open between the simple bound and the step."""
MOST_ENTRIES = 1e8
"""Of the tables of all questions."""


def universal_bound(
    problem: Problem, schedules: Iterable[str], step: float = inf, devices: Sequence[int] | None = None
) -> float:
    """Seconds that no plan of these schedules is below, with the problem's micro-batches, limits and runtime;
    it is not refined above `step`. inf where there is no plan. `devices`: ranks of those that a plan may use,
    where these are not all."""
    cases = [case for name in dict.fromkeys(schedules) for case in _cases(problem, name, devices)]
    # Cases that bound alike stand for each other.
    distinct = sorted({case.key: case for case in cases}.values(), key=lambda case: case.simple)
    low = distinct[0].simple if distinct else inf
    if low >= step or step == inf or problem.space.is_long:
        return low
    return _Questions(problem.space).least(distinct, step * (1 - TIE))


def work_bound(problem: Problem) -> float:
    """A bound on the seconds between two steps of any schedule, also of one that is never flushed: the work,
    as cheap as any number of replicas makes each layer, shared by all devices."""
    cases = (case for name in UNKNOWN for case in _cases(problem, name))
    return min((case.ideal_seconds for case in cases), default=inf)


def work_and_path_bound(
    problem: Problem, config: PipelineConfig, ranks: Sequence[int], counts: tuple[int, ...]
) -> float:
    """Seconds that no plan of a configuration is below with these numbers of replicas on these devices."""
    return _case(problem, config.schedule, config, ranks, counts).simple


def make_partitions(problem: Problem, config: PipelineConfig, exchanges: LeastExchanges) -> Partitions:
    """The partitions of the layers among the plans of a configuration."""
    counts = {count for own in problem.replica_choices(config.micro_batch_size) for count in own}
    ranks = range(problem.usable_gpus)
    settings = _case(problem, config.schedule, config, ranks, tuple(sorted(counts))).settings
    return Partitions(settings, exchanges)


class _Questions:
    """What steps are too short for cases: as many questions as `MOST_ENTRIES` allows."""

    def __init__(self, space: Space) -> None:
        self.left = MOST_ENTRIES
        self.last: tuple[_Case, Partitions] | None = None
        self.exchanges = LeastExchanges(space)

    def least(self, cases: Sequence[_Case], high: float) -> float:
        """The largest step up to `high` known to be too short for all, the lowest simple bounds first."""
        for case in cases:
            if case.simple >= high:
                break
            if self._allows(case, high):
                high = self._bisect(case, high)
        return high

    def _bisect(self, case: _Case, high: float) -> float:
        low = case.simple
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._allows(case, middle) else (middle, high)
        return low

    def _allows(self, case: _Case, seconds: float) -> bool:
        """Whether there may be a plan of so many seconds."""
        seconds, partitions = seconds * (1 + TIE / 10), self._partitions(case)
        if not self._spend(partitions.entries):
            return True
        if not partitions.may_share(seconds):
            return False
        is_closer = case.kind == "straight" and self._spend(partitions.close_entries)
        return not is_closer or partitions.may_follow(seconds)

    def _partitions(self, case: _Case) -> Partitions:
        if self.last is None or self.last[0] is not case:
            self.last = case, Partitions(case.settings, self.exchanges)
        return self.last[1]

    def _spend(self, entries: float) -> bool:
        """Whether so many are left; then they are spent."""
        is_left = self.left >= entries
        self.left -= entries if is_left else 0.0
        return is_left


def _cases(problem: Problem, schedule: str, devices: Sequence[int] | None = None) -> Iterator[_Case]:
    """By micro-batch size, and by the numbers of replicas that stages may have together."""
    own = [config for config in problem.configs if config.schedule == schedule] or problem.configs
    distinct = {(config.micro_batch_size, _modes(schedule, config)): config for config in own}
    ranks = range(problem.usable_gpus) if devices is None else devices
    for (size, _), config in distinct.items():
        for every in problem.replica_choices(size):
            if counts := tuple(count for count in every if count <= len(ranks)):
                yield _case(problem, schedule, config, ranks, counts)


def _case(
    problem: Problem, schedule: str, config: PipelineConfig, ranks: Sequence[int], counts: tuple[int, ...]
) -> _Case:
    kind = {"naive": "naive", **dict.fromkeys(SLICED_SCHEDULES, "sliced")}.get(schedule, "any")
    if kind == "any" and schedule in LINEAR | LINEAR_SPLIT:
        kind = "straight"
    return _Case(
        space=problem.space,
        ranks=ranks,
        kind=kind,
        splits=schedule not in LINEAR,
        copies=SCHEDULES[schedule].copies if schedule in SCHEDULES else MOST_COPIES,
        one_model=schedule in SCHEDULES and SCHEDULES[schedule].trains_one_model,
        turns=TURNS.get(schedule),
        together=schedule not in TURNS or SCHEDULES[schedule].default_virtual_stages > 1,
        size=config.micro_batch_size,
        micro_batches=problem.mini_batch // config.micro_batch_size,
        modes=_modes(schedule, config),
        counts=counts,
    )


def _modes(schedule: str, config: PipelineConfig) -> str:
    """How the stages of this schedule may recompute: always, never, first_layers, offload, or any way."""
    own = config.recompute
    return own if own in ("always", *UNPROPOSED) or (own, config.schedule) == ("never", schedule) else "any"


@dataclass(frozen=True, eq=False)
class _Case:
    """Plans of a kind of schedule with `micro_batches` of `size` samples, on devices of these `ranks`, whose
    stages have these numbers of replicas; `modes`: of recomputation."""

    space: Space
    ranks: Sequence[int]
    kind: str
    splits: bool
    copies: int
    one_model: bool
    turns: int | None
    together: bool
    size: int
    micro_batches: int
    modes: str
    counts: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What the bound depends on."""
        kind = self.kind, self.splits, self.copies, self.one_model, self.turns, self.together
        return (*kind, self.size, self.modes, self.counts)

    @property
    def recompute(self) -> bool:
        """Whether every stage recomputes."""
        return self.modes == "always"

    @property
    def settings(self) -> PlanSettings:
        """What its plans have in common."""
        return PlanSettings(
            space=self.space,
            gpus=len(self.ranks),
            capacity=self._capacity,
            slowest=min(self._paces.values()),
            counts=self.counts,
            size=self.size,
            micro_batches=self.micro_batches,
            copies=self.copies,
            one_model=self.one_model,
            splits=self.splits,
            modes=self.modes,
            straight=self.kind == "straight",
            first=0.5 if self.kind == "sliced" else 1.0,
            turns=self.turns,
            together=self.together,
            layers=self._layers,
        )

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
    def _paces(self) -> dict[Device, float]:
        """By kind, what a device does in a second, at the most, of a second of the least work."""
        per_replica_batches = {divide_batch(self.size, count) for count in self.counts}
        return {
            kind: max(
                _most_of_stage(
                    self.space.least(per_replica_batch, self._work),
                    self.space.on(kind, per_replica_batch, self._work),
                )
                for per_replica_batch in per_replica_batches
            )
            for kind in self.space.topology.kinds
        }

    @cached_property
    def _capacity(self) -> float:
        """Devices, each counted by its pace."""
        numbers = self.space.topology.count_kinds(self.ranks)
        return sum(self._paces[kind] * count for kind, count in numbers.items())

    @property
    def _launches(self) -> float:
        """Of the host that launches most; a copy of a layer has its share of the micro-batches."""
        busiest, longest = self.space.least_launch_seconds(
            self.size, self.counts, len(self.ranks), recompute=self.recompute
        )
        return self.micro_batches * max(busiest, longest / self.copies)


def _least_backward(costs: LayerCosts, *, recompute: bool) -> Floats:
    """(layers,): of a B that may leave the weights' gradient for later; the input's alone."""
    own: Floats = np.minimum(part_seconds(costs, "input"), costs.mean_backward(1.0))
    return own + recompute * costs.forward_seconds


def _most_of_stage(least: Floats, own: Floats) -> float:
    """The largest share that the least work is of a device's own; 1 where there is no work."""
    positive = own > 0
    return float((least[positive] / own[positive]).max(initial=0.0)) or 1.0
