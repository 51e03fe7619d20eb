"""DAPPLE: synchronous pipelines with replicated stages, the least estimated latency, on real machines.

Fan et al., "DAPPLE: A pipelined data parallel approach for training large models", PPoPP 2021, section 4. T =
T_w + T_s + T_e of stages, and of transfers, which are stages whose forward and backward take their seconds,
without an all-reduce. With M micro-batches, the pivot Q, and F, B, AR of the stages:

    T_w = sum of F_s up to Q                 T_s = (M - 1) (F_Q + B_Q)
    T_e = max over s of AR_s + (sum of B_a for a = s..Q)         for s <= Q
                        AR_s - (sum of B_a for a = Q+1..s-1)     for s > Q

The all-reduce of a stage is so hidden by the backwards that follow it on the earlier stages. Q is the last
stage, or from there backwards each stage whose (M - 1)(F + B) is above that of Q plus F + B of the stages
between. Both cases of T_e are AR_s + (backwards up to Q) - (backwards before s), so that

    T = (F + B of the stages before Q) + M (F_Q + B_Q) + max over s of (AR_s - backwards before s)

The paper's recursion: for the layers planned so far and the devices taken of each machine it keeps the plan
whose latency is least when all other layers are one stage on all other devices; from each, the next stage
takes more layers, a number of devices, and one of three placements. Here plans grow from the last stage to
the first, on the same placements, as Q is found in this order and the micro-batches in flight on a stage are
then known.

Beyond the paper: the plan may leave devices unused; states are kept apart by their number of stages, and
may keep several plans (`BeamLimits`), since the least latency now is not always the start of the best plan; a
stage has to fit with the micro-batches in flight there, recomputing where it must. States whose every
continuation is slower than the best plan known are dropped.

Placements (section 4.2): three ways to give the next stage its devices, on real machine boundaries. Devices
of a machine are used in the order of their ranks, so that their number says which are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..candidate import Proposal
from ..search.space import Space
from ..stage_table import Floats, Indices
from .base import Planner
from .replica_groups import (
    MOST_GROUPS,
    CutPlan,
    MicroBatchChoice,
    ReplicaWork,
    cost_replicas,
    group_devices,
    propose_promising,
    size_choices,
)

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS, QUICK_BLOCKS = 100, 24
"""Blocks of layers between which a search may cut, and a quick search of each micro-batch size."""


ENTRIES = 400_000
"""Plans that are costed side by side."""


@dataclass(frozen=True)
class BeamLimits:
    """What a search may do. More devices than `groups` stay together with their neighbours; of each number of
    stages `width` plans times cut points are kept, and `plans_per_state` of each state."""

    groups: int = MOST_GROUPS
    width: int = 600_000
    plans_per_state: int = 4


FULL, QUICK = BeamLimits(), BeamLimits(groups=8, width=13_000, plans_per_state=2)


def _propose(problem: Problem) -> Iterator[Proposal]:
    """The plan of least estimated latency for the most promising micro-batch sizes."""
    most, use_all = problem.stage_counts[-1], problem.options.use_all

    def find(space: Space, choice: MicroBatchChoice, is_quick: bool) -> CutPlan | None:
        beam = QUICK if is_quick else FULL
        return find_dapple_plan(space, choice, problem.usable_gpus, most, use_all=use_all, beam=beam)

    return propose_promising(problem, BLOCKS, QUICK_BLOCKS, find)


PLANNERS = (Planner("dapple", _propose),)


def find_dapple_plan(
    space: Space,
    choice: MicroBatchChoice,
    gpus: int,
    most_stages: int | None = None,
    *,
    use_all: bool = False,
    beam: BeamLimits = FULL,
) -> CutPlan | None:
    """Find the plan for one micro-batch size.

    Args:
        space: The plans to search.
        choice: Size of the micro-batches.
        gpus: How many of the first devices may be used.
        most_stages: Most stages of the plan; None for any number.
        use_all: Whether no device may stay free.
        beam: What the search may do.

    Returns:
        The plan, None where none fits.
    """
    has_replicas = space.runtime is None or space.runtime.replicas != "none"
    machines = split_machines(
        gpus, min(gpus, space.topology.gpus_per_node), beam.groups if has_replicas else gpus
    )
    best: CutPlan | None = None
    for own in size_choices(space, range(1, sum(machines.rooms) + 1)):
        best = _DappleSearch(Moves(space, choice, machines, own), use_all, beam).run(
            best, most_stages or gpus
        )
    return best


TIE = 1e-12
"""Equal stages leave the pivot where it is, whatever the rounding."""


Counts = tuple[int, ...]
"""By machine, a number of its devices."""


def fresh_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Devices of unused machines first: keeps the replicas of a stage on the fast links of one machine."""
    return _in_order(machines, used, count, sorted(range(len(used)), key=lambda machine: used[machine] > 0))


def append_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Free devices of used machines first: leaves no machine half empty."""
    return _in_order(machines, used, count, sorted(range(len(used)), key=lambda machine: used[machine] == 0))


def scatter_first(machines: Counts, used: Counts, count: int) -> Counts:
    """One device in turn of each used machine, where there are several with enough left, else of each machine
    that has any left: transfers from stage to stage then stay inside the machines."""
    free = [room - count_used for room, count_used in zip(machines, used, strict=True)]
    begun = [machine for machine, room in enumerate(free) if room and used[machine]]
    enough = len(begun) > 1 and sum(free[machine] for machine in begun) >= count
    pool = begun if enough else range(len(machines))
    counts = [0] * len(machines)
    while count:
        for machine in pool:
            if count and counts[machine] < free[machine]:
                counts[machine] += 1
                count -= 1
    return tuple(counts)


POLICIES = (fresh_first, append_first, scatter_first)


def _in_order(machines: Counts, used: Counts, count: int, order: Sequence[int]) -> Counts:
    counts = [0] * len(machines)
    for machine in order:
        counts[machine] = min(count, machines[machine] - used[machine])
        count -= counts[machine]
    return tuple(counts)


@dataclass(frozen=True)
class Machines:
    """The nodes of a topology, in groups of `each` neighbouring devices that stay together."""

    rooms: Counts
    starts: tuple[int, ...]
    each: int

    def ranks(self, used: Counts, counts: Counts) -> tuple[int, ...]:
        """The ranks of so many groups after the used ones."""
        first = [start + count for start, count in zip(self.starts, used, strict=True)]
        groups = [at + index for at, count in zip(first, counts, strict=True) for index in range(count)]
        return tuple(group * self.each + index for group in groups for index in range(self.each))


def split_machines(gpus: int, gpus_per_node: int, most_groups: int = MOST_GROUPS) -> Machines:
    """The nodes of so many devices; those that are left over by the groups stay unused."""
    each = group_devices(gpus, gpus_per_node, most_groups)
    room = max(gpus_per_node // each, 1)
    starts = range(0, gpus // each, room)
    return Machines(tuple(min(room, gpus // each - start) for start in starts), tuple(starts), each)


class Moves:
    """Ways to give a stage its devices, with what stages cost on them.

    A *state* is a number for what is taken of each machine; state 0 is nothing. A *move* is a number for the
    devices of a stage that lead from one state to another. The last moves, one for each state but 0, have as
    many of the devices that are taken in it as a stage may have.

    Attributes:
        ranks: By move, its devices.
        source: By move but the last ones, the state before it.
        devices: (states,): how many devices are taken.
        into: By state, the moves that lead to it.
        whole: (states,): the last moves.
        group: (moves,): where their costs are.
        least_work: (cut points,): device seconds of a micro-batch up to each place, however it is shared.
    """

    def __init__(
        self, space: Space, choice: MicroBatchChoice, machines: Machines, counts: Sequence[int]
    ) -> None:
        self.space, self.choice, self.costs = space, choice, dict[int, ReplicaWork]()
        self.ranks, self.into, source = list[tuple[int, ...]](), [list[int]()], list[int]()
        most = choice.size // machines.each
        fitting = [n for n in counts if n <= most and space.fits_someone(choice.size, n * machines.each)]
        nothing = (0,) * len(machines.rooms)
        numbers, states = {nothing: 0}, [nothing]
        for number, state in enumerate(states):
            choices = (
                policy(machines.rooms, state, count)
                for count in fitting
                if count <= sum(machines.rooms) - sum(state)
                for policy in (POLICIES if len(machines.rooms) > 1 else POLICIES[:1])
            )
            for devices in dict.fromkeys(choices):
                following = tuple(a + b for a, b in zip(state, devices, strict=True))
                if following not in numbers:
                    numbers[following] = len(states)
                    states.append(following)
                    self.into.append([])
                self.into[numbers[following]].append(len(self.ranks))
                self.ranks.append(machines.ranks(state, devices))
                source.append(number)
        self.source = np.array(source, dtype=np.int64)
        self.devices = machines.each * np.array([sum(state) for state in states])
        self.whole = np.arange(len(states)) + len(self.ranks) - 1
        for state in states[1:]:
            count = max(n for n in fitting if n <= sum(state))
            self.ranks.append(machines.ranks(nothing, state)[: count * machines.each])
        groups = [id(space.replica_group(choice.size, ranks)) for ranks in self.ranks]
        for group, ranks in zip(groups, self.ranks, strict=True):
            if group not in self.costs:
                self.costs[group] = cost_replicas(space, choice, ranks)
        self.group = np.array([list(self.costs).index(group) for group in groups], dtype=np.int64)
        self.table = cache(lambda name: np.array([getattr(own, name) for own in self.costs.values()]))
        work = space.cheapest_work(choice.size, range(1, space.topology.gpus + 1), first_share=0.0)
        until = np.append(0.0, np.cumsum(np.zeros(len(space.chain)) if work is None else work))
        self.least_work = until[list(space.table(space.chain.sizes[0]).cut_points)]
        self._pace = cache(
            lambda pair: space.pace(*(self.ranks[move] for move in divmod(pair, len(self.ranks))))
        )

    def transfer(self, senders: Indices, receivers: Indices, cut_points: Indices) -> Floats:
        """Seconds of a micro-batch from a stage to the next, cut at a place. Arrays of one length."""
        pairs, inverse = np.unique(senders * len(self.ranks) + receivers, return_inverse=True)
        latency, pace = np.array([self._pace(pair) for pair in pairs.tolist()]).reshape(-1, 2)[inverse].T
        crossing = self.table("crossing")
        bytes = np.maximum(
            crossing[self.group[senders], cut_points], crossing[self.group[receivers], cut_points]
        )
        seconds: Floats = latency + bytes * pace
        return seconds


class LastStages(NamedTuple):
    """The last stages of plans, arrays of one length.

    Attributes:
        begin: Cut point that they start at.
        state: State that they start at.
        move: Devices of the first of them.
        parent: Number of the last stages but this one, of those that these come from.
        recomputes: Whether a stage recomputes.
        aligned: Terms of T: seconds up to the pivot's last backward.
        hidden: The same without one micro-batch of the pivot.
        exposed: Longest all-reduce after it.
        least: Seconds that T is not below, whatever comes in front.
    """

    begin: Indices
    state: Indices
    move: Indices
    parent: Indices
    recomputes: npt.NDArray[np.bool_]
    aligned: Floats
    hidden: Floats
    exposed: Floats
    least: Floats

    def take(self, which: Indices) -> LastStages:
        """Return some of the plans."""
        arrays: tuple[Any, ...] = self
        return LastStages(*(own[which] for own in arrays))

    def after(
        self, forward: Floats, backward: Floats, reduced: Floats | float, micro_batches: int
    ) -> LastStages:
        """Return the plans with the terms that they have with a stage, or a transfer, in front."""
        work = forward + backward
        is_pivot = micro_batches * work > (self.hidden + work) * (1 + TIE)
        return self._replace(
            aligned=np.where(is_pivot, micro_batches * work, self.aligned + work),
            hidden=np.where(is_pivot, (micro_batches - 1) * work, self.hidden + work),
            exposed=np.maximum(reduced, self.exposed - backward),
            least=np.maximum((micro_batches - 1) * work, self.least + work),
        )

    @property
    def seconds(self) -> Floats:
        """T, where these are all stages."""
        return self.aligned + self.exposed


class _DappleSearch:
    """One search: a level for every number of stages, the last stages first."""

    def __init__(self, moves: Moves, use_all: bool, beam: BeamLimits) -> None:
        self.moves, self.beam, self.choice = moves, beam, moves.choice
        self.last = len(moves.space.usable) - 1
        states = np.arange(1, len(moves.devices))
        states = states[moves.devices[1:] == moves.space.topology.gpus] if use_all else states
        none = np.zeros_like(states)
        terms = np.full((4, len(states)), -np.inf)
        self.levels = [LastStages(none + self.last, states, none, none, none > 0, *terms)]

    def run(self, best: CutPlan | None, most_stages: int) -> CutPlan | None:
        """The best plan, where one is faster than the known one; else that."""
        for to_last in range(1, most_stages + 1):
            self.moves.space.budget.check()
            into = [self.moves.into[state] for state in self.levels[-1].state.tolist()]
            which = np.repeat(np.arange(len(into)), [len(moves) for moves in into])
            moves = np.array([move for moves in into for move in moves], dtype=np.int64)
            if not len(moves):
                break
            is_first = self.moves.source[moves] == 0
            best = self._finish(which[is_first], moves[is_first], to_last, best)
            limit = np.inf if best is None else best.seconds
            self.levels.append(self._extend(which[~is_first], moves[~is_first], to_last, limit))
        return best

    def _sent(self, plans: LastStages, moves: Indices, to_last: int) -> LastStages:
        """The plans with the transfer from a stage in front of each, on the devices of a move."""
        if to_last == 1:
            return plans
        seconds = self.moves.transfer(moves, plans.move, plans.begin)
        return plans.after(seconds, seconds, 0.0, self.choice.micro_batches)

    def _in_front(
        self, plans: LastStages, moves: Indices, begin: Indices | int, to_last: int
    ) -> tuple[LastStages, Indices]:
        """The plans with a stage in front of each, and which of these stages fit."""
        in_flight, group = self.choice.in_flight(to_last), self.moves.group[moves]
        names = ("forward", "backward", "all_reduce", "never", "always")
        tables = (self.moves.table(name)[group, begin, plans.begin] for name in names)
        forward, backward, reduced, never, always = tables
        again = in_flight > never
        begins, recomputes = np.broadcast_to(begin, moves.shape), plans.recomputes | again
        longer = plans.after(forward, backward + again * forward, reduced, self.choice.micro_batches)
        longer = longer._replace(begin=begins, move=moves, recomputes=recomputes)
        return longer, ~again | (in_flight <= always)

    def _finish(self, which: Indices, moves: Indices, to_last: int, best: CutPlan | None) -> CutPlan | None:
        """The best plan, with the layers that are left in one stage on the devices of a move each."""
        sent = self._sent(self.levels[-1].take(which), moves, to_last)
        plans, fits = self._in_front(sent, moves, 0, to_last)
        seconds = np.where(fits, plans.seconds, np.inf)
        first = int(seconds.argmin()) if len(seconds) else 0
        if not len(seconds) or seconds[first] >= (np.inf if best is None else best.seconds):
            return best
        at, ends, devices = int(which[first]), list[int](), [self.moves.ranks[moves[first]]]
        for level in reversed(self.levels):
            ends.append(int(level.begin[at]))
            devices.append(self.moves.ranks[level.move[at]])
            at = int(level.parent[at])
        return CutPlan(tuple(ends), tuple(devices[:-1]), float(seconds[first]), bool(plans.recomputes[first]))

    def _extend(self, which: Indices, moves: Indices, to_last: int, limit: float) -> LastStages:
        """The best plans of each state with one stage more, those first that take the least at least."""
        rows = max(ENTRIES // (self.last + 1), 1)
        parts = [
            self._rank(which[at : at + rows], moves[at : at + rows], to_last, limit)
            for at in range(0, max(len(moves), 1), rows)
        ]
        seconds, least, *arrays = (np.concatenate(own) for own in zip(*parts, strict=True))
        plans = LastStages(*arrays)
        keys = plans.begin * len(self.moves.devices) + plans.state
        order = np.lexsort((seconds, keys))
        keys = keys[order]
        order = order[np.arange(len(keys)) - np.searchsorted(keys, keys) < self.beam.plans_per_state]
        width = max(self.beam.width // self.last, 1)
        return plans.take(order[np.argsort(least[order], kind="stable")][:width])

    def _rank(self, which: Indices, moves: Indices, to_last: int, limit: float) -> tuple[Any, ...]:
        """Plans with the next stage on the devices of a move each, begun everywhere it may: their latency
        with the other layers in one stage, whether it fits or not; what they take at least; and their arrays.

        What is left takes its share of the least work; one of its stages does so in every micro-batch.
        """
        sent = self._sent(self.levels[-1].take(which), moves, to_last)
        sent = sent._replace(parent=which, state=self.moves.source[moves])
        row, begins = np.nonzero(np.arange(1, self.last) < sent.begin[:, None])
        plans, fits = self._in_front(sent.take(row), moves[row], begins + 1, to_last)
        share = self.moves.least_work[plans.begin] / self.moves.devices[plans.state]
        least = np.maximum(plans.least + share, (self.choice.micro_batches - 1) * share)
        promising = np.flatnonzero(fits & (least < limit * (1 - 1e-12)))
        plans, least = plans.take(promising), least[promising]
        whole = self.moves.whole[plans.state]
        complete, _ = self._in_front(self._sent(plans, whole, to_last + 1), whole, 0, to_last + 1)
        return (complete.seconds, least, *plans)
