"""A lower bound on the step of every plan of any schedule, on any devices in any order.

It uses what the orders of all synchronous schedules have in common. Symbols, for M micro-batches; each is the
least that any device and number of replicas gives:

    f, b, w    seconds of a micro-batch in a layer: forward, backward, all work on r devices. b is that of the
               input alone if the weights' gradient is an action of its own
    lead       f of all layers before
    trail      b of all layers before
    e          what follows a part's last backward on its devices: the all-reduce over its replicas that
               cannot run beside that backward

Bounds without the cuts (`PlanSet.simple`), with M shared by the copies of a layer:

    M x sum of r w / capacity    all the work, shared by all devices as fast as each of them is
    sum of f + b                 one micro-batch, through all layers and back
    M x that                     `naive`, which has one micro-batch at a time
    lead + M w                   a layer: its first action is an F that came through the layers before it
    lead + M (f + b) + trail     a layer: its last B goes back through the layers before it

The first backward on each copy of a stage's weights adds to no gradients and takes less: the work counts what
it takes on average over the micro-batches, and one micro-batch's path is the first's. In a straight pipeline
with whole backwards it is any other's: if a B on the way back is the first of its stage, another follows
there, and goes the same way.

The bound of schedules with one part a device is then bisected: `Partitions` tells which steps are too short
for all ways to cut the layers. A part lies between two cuts and runs on r devices. It is on no plan of T
seconds unless

    lead + M w + e <= T            its first action is an F that came through the layers before it
    lead + M (f + b) + trail <= T  its last B goes back through them
    M launches + e <= T            what its host launches
    its least bytes fit            weights, gradients, states and the activations of one micro-batch

The parts share the devices, each of which waits while others lead: sum of r (M w + lead + e) <= T capacity
(`Partitions.may_share`). And a dynamic programme on (devices used, layers done) keeps the least lead, and the
least lead and trail, of the parts before, with transfers between them (`Partitions.may_follow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf

import numpy as np
import numpy.typing as npt

from ..cost_models.layer import LayerCosts
from ..cost_models.memory import Amount, StageBytes, Training, total, with_reserve
from ..cost_models.schedules import MOST_COPIES, SCHEDULES
from ..cost_models.topology import Device
from .candidate import UNPROPOSED, PipelineConfig
from .plan_file import TIE
from .problem import Problem
from .search.least_collectives import fastest_transfer
from .search.least_exchange import LeastExchanges
from .search.space import Space, divide_batch
from .stage_table import Floats, StageTable, ledger_options, part_seconds

Mask = npt.NDArray[np.bool_]
STRAIGHT = frozenset({"gpipe", "1f1b", "dapple"})
"""Schedules with one stage a device and whole backwards."""
STRAIGHT_SPLIT = frozenset({"zb-h1", "zb-h2"})
"""The same, where weight gradients may wait."""
SLICED = frozenset({"autopipe"})
"""Schedules whose first micro-batch goes through in halves."""
UNKNOWN = ""
"""A schedule of which nothing is known."""
HALVINGS = 12
"""Halvings of what is open between the simple bound and the step."""
MOST_ENTRIES = 1e8
"""Entries of the tables of all questions."""


def universal_bound(
    problem: Problem, schedules: Iterable[str], step: float = inf, devices: Sequence[int] | None = None
) -> float:
    """Bound the step of all plans of some schedules, with the problem's micro-batches, limits and runtime.

    Args:
        problem: The problem.
        schedules: Names of schedules.
        step: The bound is not refined above it.
        devices: Ranks that a plan may use, by default all.

    Returns:
        Seconds; inf if there is no plan.
    """
    plans = [plan_set for name in dict.fromkeys(schedules) for plan_set in _plan_sets(problem, name, devices)]
    # Plans that are bounded alike stand for each other.
    distinct = sorted(
        {plan_set.key: plan_set for plan_set in plans}.values(), key=lambda plan_set: plan_set.simple
    )
    low = distinct[0].simple if distinct else inf
    if low >= step or step == inf or problem.space.is_long:
        return low
    high, entries = step * (1 - TIE), MOST_ENTRIES
    exchanges = LeastExchanges(problem.space)
    for plan_set in distinct:
        if plan_set.simple >= high:
            break
        if not plan_set.is_straight:
            return plan_set.simple
        partitions = Partitions(plan_set, exchanges)
        entries -= (HALVINGS + 1) * partitions.entries
        if entries < 0:
            return plan_set.simple
        if partitions.may_take_all(high):
            high = _bisect(partitions, plan_set.simple, high)
    return high


def work_bound(problem: Problem) -> float:
    """Bound the seconds between two steps of any schedule, even one that is never flushed.

    It is the work, as cheap as any number of replicas makes each layer, shared by all devices.
    """
    return min((plan_set.ideal_seconds for plan_set in _plan_sets(problem, UNKNOWN)), default=inf)


def _bisect(partitions: Partitions, low: float, high: float) -> float:
    """Find about the longest step that is too short for all partitions."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if partitions.may_take_all(middle) else (middle, high)
    return low


def _plan_sets(problem: Problem, schedule: str, devices: Sequence[int] | None = None) -> Iterator[PlanSet]:
    """List plans by micro-batch size, and by the numbers of replicas that stages may have together."""
    configs = [config for config in problem.configs if config.schedule == schedule] or problem.configs
    distinct = {(config.micro_batch_size, _modes(schedule, config)): config for config in configs}
    ranks = range(problem.usable_gpus) if devices is None else devices
    for config in distinct.values():
        for every in problem.replica_choices(config.micro_batch_size):
            if counts := tuple(count for count in every if count <= len(ranks)):
                yield PlanSet(problem.space, schedule, config, ranks, counts)


def _modes(schedule: str, config: PipelineConfig) -> str:
    """How the stages of this schedule may recompute: always, never, first_layers, offload, or any way."""
    mode = config.recompute
    return (
        mode if mode in ("always", *UNPROPOSED) or (mode, config.schedule) == ("never", schedule) else "any"
    )


@dataclass(frozen=True, eq=False)
class PlanSet:
    """Plans that are bounded together: of a schedule, with the micro-batches of a configuration, on devices
    of these `ranks`, whose stages have these numbers of replicas."""

    space: Space
    schedule: str
    config: PipelineConfig
    ranks: Sequence[int]
    counts: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for plans that are bounded alike."""
        kind = self.schedule == "naive", self.first_share, self.is_straight, self.splits, self.copies
        return (*kind, self.config.micro_batch_size, self.modes, self.counts)

    @property
    def modes(self) -> str:
        """How stages may recompute."""
        return _modes(self.schedule, self.config)

    @property
    def recompute(self) -> bool:
        """Whether every stage recomputes."""
        return self.modes == "always"

    @property
    def is_straight(self) -> bool:
        """Whether there is one part a device."""
        return self.schedule in STRAIGHT | STRAIGHT_SPLIT

    @property
    def first_share(self) -> float:
        """Share of a micro-batch that is first on its way."""
        return 0.5 if self.schedule in SLICED else 1.0

    @property
    def splits(self) -> bool:
        """Whether a backward may have two parts."""
        return self.schedule not in STRAIGHT | {"naive"}

    @property
    def copies(self) -> int:
        """Copies of each stage, which share the micro-batches."""
        return SCHEDULES[self.schedule].copies if self.schedule in SCHEDULES else MOST_COPIES

    @cached_property
    def layers(self) -> list[tuple[Floats, Floats, Floats]]:
        """By number of replicas, (layers,) each: f, b and w."""
        return [self._layers(divide_batch(self.config.micro_batch_size, count)) for count in self.counts]

    def _layers(self, batch: int) -> tuple[Floats, Floats, Floats]:
        work, forward = self.space.least(batch, self._work), self.space.least_forward(batch)
        if self.splits:
            return forward, self.space.least(batch, partial(_least_backward, recompute=self.recompute)), work
        share = 0.0 if self.is_straight and self.config.micro_batches > 1 else 1.0
        share = self._first_backwards if self.schedule == "naive" else share
        both = self.space.least_work(batch, recompute=self.recompute, first_share=share)
        return forward, both - forward, work

    @property
    def _first_backwards(self) -> float:
        """Share of the backwards that are the first on their weights."""
        return min(1.0, self.copies / self.config.micro_batches)

    def _work(self, costs: LayerCosts) -> Floats:
        """(layers,): all seconds of every layer on a kind of device, before its scale."""
        backward = costs.mean_backward(self._first_backwards)
        if self.splits:
            weight = part_seconds(costs, "weight")
            once = np.minimum(costs.accumulation, weight)
            parts = part_seconds(costs, "input") + weight - self._first_backwards * once
            backward = np.minimum(backward, parts)
        return (1 + self.recompute) * costs.forward_seconds + backward

    @cached_property
    def simple(self) -> float:
        """The bounds that need no partition."""
        if not self.counts:
            return inf
        path = float(np.min([forward + back for forward, back, _ in self.layers], axis=0).sum())
        times = float(self.config.micro_batches) if self.schedule == "naive" else self.first_share
        return max(self.ideal_seconds, times * path, self._launches, self._longest_layer)

    @property
    def _longest_layer(self) -> float:
        """Bound by every layer with what comes before it, and after its last B."""
        forward, back, work = (np.min(figures, axis=0) for figures in zip(*self.layers, strict=True))
        each = self.config.micro_batches / self.copies
        lead = self.first_share * (np.cumsum(forward) - forward)
        trail = self.first_share * (np.cumsum(back) - back)
        passes = lead + each * np.minimum(work, forward + back) + trail
        return float(np.maximum(lead + each * work, passes).max())

    @cached_property
    def ideal_seconds(self) -> float:
        """The work of all micro-batches, shared by all devices."""
        if not self.counts:
            return inf
        works = [count * work for count, (_, _, work) in zip(self.counts, self.layers, strict=True)]
        return self.config.micro_batches * float(np.min(works, axis=0).sum()) / self.capacity

    @cached_property
    def paces(self) -> dict[Device, float]:
        """By kind, the most that a device does in a second, in seconds of the least work."""
        batches = {divide_batch(self.config.micro_batch_size, count) for count in self.counts}
        return {
            kind: max(
                _largest_share(self.space.least(batch, self._work), self.space.on(kind, batch, self._work))
                for batch in batches
            )
            for kind in self.space.topology.kinds
        }

    @cached_property
    def capacity(self) -> float:
        """Number of devices, each counted by its pace."""
        numbers = self.space.topology.count_kinds(self.ranks)
        return sum(self.paces[kind] * count for kind, count in numbers.items())

    @property
    def _launches(self) -> float:
        """Bound by the host that launches most; a copy of a layer has its share of the micro-batches."""
        busiest, longest = self.space.least_launch_seconds(
            self.config.micro_batch_size, self.counts, len(self.ranks), recompute=self.recompute
        )
        return self.config.micro_batches * max(busiest, longest / self.copies)

    def fits(self, count: int, table: StageTable) -> Mask:
        """(cut points, cut points): whether parts with one micro-batch have room on some device."""
        stage, space = table.stage_bytes, self.space
        limits = [inf if kind.memory_bytes is None else kind.memory_bytes for kind in space.topology.kinds]
        limit = min(max(limits), inf if space.memory_limit is None else space.memory_limit)
        if limit == inf:
            return table.valid
        context = min(ledger_options(kind, space.dtype)["context_bytes"] for kind in space.topology.kinds)
        training = Training(space.optimizer, space.number_bytes, count, space.zero)
        states = total(training.states(stage))
        if not space.zero:
            states = states + training.exchange_bytes(stage)
        temporaries = training.step_temporaries(stage)
        at_work = np.maximum(self._at_work(stage), 0.0 if temporaries is None else temporaries)
        need = total(with_reserve({"bytes": states + at_work}, context))
        has_room: Mask = table.valid & (need <= limit * (1 + 1e-12))
        return has_room

    def _at_work(self, stage: StageBytes) -> Amount:
        """Bytes of one micro-batch, with the workspace of a forward or whole backward."""
        whole = stage.saved + stage.saved_input
        if self.modes in UNPROPOSED:
            return np.minimum(whole, stage.input)
        again = stage.input if self.splits else stage.input + whole
        activations = {"never": whole, "always": again}.get(self.modes, np.minimum(whole, again))
        return activations + stage.workspace


def _least_backward(costs: LayerCosts, *, recompute: bool) -> Floats:
    """(layers,): a B that may leave the weights' gradient for later; the input's alone."""
    input_seconds: Floats = np.minimum(part_seconds(costs, "input"), costs.mean_backward(1.0))
    return input_seconds + recompute * costs.forward_seconds


def _largest_share(least: Floats, seconds: Floats) -> float:
    """The largest share that the least work is of a device's seconds; 1 if there is no work."""
    positive = seconds > 0
    return float((least[positive] / seconds[positive]).max(initial=0.0)) or 1.0


@dataclass(frozen=True, eq=False)
class _Parts:
    """Parts on so many replicas, (cut points, cut points) each: f, f + b, w (inf if no part may lie there), e
    and the host seconds of a micro-batch."""

    replicas: int
    forward: Floats
    around: Floats
    work: Floats
    exposed: Floats
    launches: Floats

    def ends_by(self, seconds: float, lead: Floats, micro_batches: float) -> Mask:
        """(cut points, cut points): whether work that begins after `lead`, with launches and exchange, may be
        done by these seconds."""
        with np.errstate(invalid="ignore"):  # no micro-batch on a part that may not be
            in_time: Mask = lead + micro_batches * self.work + self.exposed <= seconds
        return in_time & (micro_batches * self.launches + self.exposed <= seconds)


@dataclass(frozen=True, eq=False)
class Partitions:
    """The partitions of the layers among straight pipelines; `exchanges`: e of any part."""

    plans: PlanSet
    exchanges: LeastExchanges

    @property
    def entries(self) -> float:
        """Entries of the tables of one question."""
        gpus, counts = len(self.plans.ranks), self.plans.counts
        return sum(gpus - count + 5 for count in counts) * (len(self._table.cut_points) ** 2 + 3_000.0)

    def may_take_all(self, seconds: float) -> bool:
        """Return whether there may be a plan of straight pipelines of so many seconds."""
        seconds *= 1 + TIE / 10
        return self.may_share(seconds) and self.may_follow(seconds)

    def may_share(self, seconds: float) -> bool:
        """Return whether there may be straight pipelines whose parts have room in the devices' time."""
        plans, costs = self.plans, []
        lead, trail = (self._before(which)[:, None] for which in (0, 1))
        slowest = min(plans.paces.values())
        for parts in self._by_count.values():
            passes = lead + plans.config.micro_batches * np.minimum(parts.work, parts.around) + trail
            fits = parts.ends_by(seconds, lead, plans.config.micro_batches) & (passes <= seconds)
            waits = lead + (parts.exposed if plans.splits else np.maximum(parts.exposed, trail))
            busy = parts.replicas * (
                plans.config.micro_batches * np.where(fits, parts.work, 0.0) + slowest * waits
            )
            costs.append(np.where(fits, busy, inf))
        if not costs:
            return False
        least, sums = np.minimum.reduce(costs), np.full(len(self._table.cut_points), inf)
        sums[0] = 0.0
        for end in range(1, len(sums)):
            sums[end] = (sums[:end] + least[:end, end]).min()
        return bool(sums[-1] <= plans.capacity * seconds * (1 + 1e-9))

    def may_follow(self, seconds: float) -> bool:
        """Return whether there may be straight pipelines whose parts have devices of their own."""
        plans, gpus = self.plans, len(self.plans.ranks)
        lead, both = (np.full((gpus + 1, len(self._table.cut_points)), inf) for _ in range(2))
        lead[0, 0] = both[0, 0] = 0.0
        for used in range(1, gpus + 1):
            for count, parts in self._by_count.items():
                if count > used or not np.isfinite(lead[used - count]).any():
                    continue
                ahead, around = lead[used - count][:, None], both[used - count][:, None]
                passes = plans.config.micro_batches * np.minimum(parts.work, parts.around)
                fits = parts.ends_by(seconds, ahead, plans.config.micro_batches) & (
                    around + passes <= seconds
                )
                ahead = np.where(fits, ahead + parts.forward, inf).min(axis=0) + self._cuts
                around = np.where(fits, around + parts.around, inf).min(axis=0) + 2 * self._cuts
                lead[used] = np.minimum(lead[used], ahead)
                both[used] = np.minimum(both[used], around)
            if np.isfinite(lead[used, -1]):
                return True
        return False

    @cached_property
    def _table(self) -> StageTable:
        return self.plans.space.table(self.plans.space.chain.sizes[0])

    def _before(self, which: int) -> Floats:
        """(cut points,): the least seconds of the first forward up to there, or of the last backward back."""
        least = np.min([figures[which] for figures in self.plans.layers], axis=0)
        sums: Floats = np.append(0.0, np.cumsum(least))[list(self._table.cut_points)]
        return sums

    @cached_property
    def _by_count(self) -> dict[int, _Parts]:
        """By number of replicas, without those with which no part fits."""
        each = zip(self.plans.counts, self.plans.layers, strict=True)
        parts = {count: self._parts(count, *figures) for count, figures in each}
        return {count: of_count for count, of_count in parts.items() if np.isfinite(of_count.work).any()}

    def _parts(self, count: int, forward: Floats, back: Floats, work: Floats) -> _Parts:
        plans, table, space = self.plans, self._table, self.plans.space
        batch = divide_batch(plans.config.micro_batch_size, count)
        per_replica = space.table(batch)
        return _Parts(
            count,
            table.stage_sums(forward),
            table.stage_sums(forward + back),
            np.where(space.usable & plans.fits(count, per_replica), table.stage_sums(work), inf),
            self.exchanges.after(count, batch) + space.least_tied(table, count),
            (1 + plans.recompute) * per_replica.forward_launch + per_replica.backward_launch,
        )

    @cached_property
    def _fastest(self) -> tuple[float, float]:
        """Bytes a second, and latency, of a transfer."""
        return fastest_transfer(self.plans.space.topology)

    @cached_property
    def _cuts(self) -> Floats:
        """(cut points,): seconds of a transfer: a replica of the smaller side sends its share."""
        plans, (bandwidth, latency) = self.plans, self._fastest
        batches = {divide_batch(plans.config.micro_batch_size, count) for count in plans.counts}
        sent = np.min([plans.space.table(batch).crossing for batch in batches], axis=0)
        cuts: Floats = sent / bandwidth + latency
        cuts[-1] = 0.0
        return cuts
