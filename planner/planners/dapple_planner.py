"""DAPPLE: synchronous pipelines with replicated stages and the least estimated latency, on real machines.

Fan et al., "DAPPLE: A pipelined data parallel approach for training large models", PPoPP 2021, section 4. T =
T_w + T_s + T_e over stages and transfers. A transfer is a stage whose forward and backward take its seconds,
without an all-reduce. With M micro-batches, the pivot Q, and F, B, AR of the stages:

    T_w = sum of F_s up to Q                 T_s = (M - 1) (F_Q + B_Q)
    T_e = max over s of AR_s + (sum of B_a for a = s..Q)         for s <= Q
                        AR_s - (sum of B_a for a = Q+1..s-1)     for s > Q

The backwards on the earlier stages hide the all-reduce of a stage. Q is the last stage or, going back from
it, each stage whose (M - 1)(F + B) is above that of Q plus F + B of the stages between. Both cases of T_e are
AR_s + (backwards up to Q) - (backwards before s), so that

    T = (F + B of the stages before Q) + M (F_Q + B_Q) + max over s of (AR_s - backwards before s)

The paper's recursion keeps, for the layers planned so far and the devices used of each machine, the plan with
the least latency when all other layers are one stage on all other devices. From each, the next stage takes
more layers, a number of devices, and one of three placements. Here plans grow from the last stage to the
first, with the same placements, because Q is found in this order and the micro-batches in flight on a stage
are then known.

Beyond the paper: the plan may leave devices unused; states are separate by number of stages, and may keep
several plans (`BeamLimits`), because the least latency so far is not always the start of the best plan; a
stage must fit with its micro-batches in flight, recomputing if it must. States whose every continuation is
slower than the best known plan are dropped.

Placements (section 4.2): three ways to assign devices to the next stage, on real machine boundaries. Devices
of a machine are used in rank order, so their number determines which are free.
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
"""Most blocks of layers between which a search may cut, and a quick search of each micro-batch size."""


ENTRIES = 400_000
"""Plans that are costed together as arrays."""


@dataclass(frozen=True)
class BeamLimits:
    """Limits of a beam search.

    Attributes:
        groups: Most groups of devices. With more devices, neighbours are grouped.
        width: Most plans times cut points that are kept for each number of stages.
        plans_per_state: Most plans of each state.
    """

    groups: int = MOST_GROUPS
    width: int = 600_000
    plans_per_state: int = 4


FULL, QUICK = BeamLimits(), BeamLimits(groups=8, width=13_000, plans_per_state=2)


def _propose(problem: Problem) -> Iterator[Proposal]:
    """Yield the plan of least estimated latency for the most promising micro-batch sizes."""
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
        space: Costs and limits.
        choice: Micro-batches.
        gpus: Number of first devices that may be used.
        most_stages: Most stages. None for any number.
        use_all: Whether every device must be used.
        beam: Limits of the search.

    Returns:
        The plan; None if none fits.
    """
    has_replicas = space.runtime is None or space.runtime.replicas != "none"
    machines = split_machines(
        gpus, min(gpus, space.topology.gpus_per_node), beam.groups if has_replicas else gpus
    )
    best: CutPlan | None = None
    for allowed_counts in size_choices(space, range(1, sum(machines.rooms) + 1)):
        best = _DappleSearch(Moves(space, choice, machines, allowed_counts), use_all, beam).run(
            best, most_stages or gpus
        )
    return best


TIE = 1e-12
"""Relative difference below which equal stages leave the pivot unchanged despite rounding."""


Counts = tuple[int, ...]
"""Number of devices by machine."""


def fresh_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Return devices of unused machines first, which keeps replicas on the fast links of one machine."""
    return _in_order(machines, used, count, sorted(range(len(used)), key=lambda machine: used[machine] > 0))


def append_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Return free devices of used machines first, which leaves no machine half empty."""
    return _in_order(machines, used, count, sorted(range(len(used)), key=lambda machine: used[machine] == 0))


def scatter_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Return one device in turn of each used machine, so that transfers stay inside the machines.

    If used machines are not several, or have too few devices left, all machines with free devices count.
    """
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
    """Nodes of a topology, in groups of `each` neighbouring devices that stay together."""

    rooms: Counts
    starts: tuple[int, ...]
    each: int

    def ranks(self, used: Counts, counts: Counts) -> tuple[int, ...]:
        """Return the ranks of these groups after the used ones."""
        first = [start + count for start, count in zip(self.starts, used, strict=True)]
        groups = [at + index for at, count in zip(first, counts, strict=True) for index in range(count)]
        return tuple(group * self.each + index for group in groups for index in range(self.each))


def split_machines(gpus: int, gpus_per_node: int, most_groups: int = MOST_GROUPS) -> Machines:
    """Return the nodes of `gpus` devices. Devices left over by the groups stay unused."""
    each = group_devices(gpus, gpus_per_node, most_groups)
    room = max(gpus_per_node // each, 1)
    starts = range(0, gpus // each, room)
    return Machines(tuple(min(room, gpus // each - start) for start in starts), tuple(starts), each)


class Moves:
    """Ways to assign devices to a stage, with the costs of stages on them.

    A *state* is a number for the devices used of each machine; state 0 is nothing. A *move* is a number for
    the devices of a stage that lead from one state to another. The last moves, one for each state but 0, have
    as many devices of that state as a stage may have.

    Attributes: `ranks`: by move, its devices. `source`: by move except the last ones, the state before it.
    `devices` (states,): number of devices used. `into`: by state, the moves that lead to it. `whole`
    (states,): the last moves. `group` (moves,): index of the costs. `least_work` (cut points,): least device
    seconds of a micro-batch up to each cut point.

    Args:
        space: Costs and limits.
        choice: Micro-batches.
        machines: Nodes and groups.
        counts: Numbers of groups that a stage may have.
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
        self.table = cache(lambda name: np.array([getattr(work, name) for work in self.costs.values()]))
        work = space.cheapest_work(choice.size, range(1, space.topology.gpus + 1), first_share=0.0)
        until = np.append(0.0, np.cumsum(np.zeros(len(space.chain)) if work is None else work))
        self.least_work = until[list(space.table(space.chain.sizes[0]).cut_points)]
        self._pace = cache(
            lambda pair: space.pace(*(self.ranks[move] for move in divmod(pair, len(self.ranks))))
        )

    def transfer(self, senders: Indices, receivers: Indices, cut_points: Indices) -> Floats:
        """Return the seconds of a micro-batch from stages to the next, by cut point.

        Arrays have one length.
        """
        pairs, inverse = np.unique(senders * len(self.ranks) + receivers, return_inverse=True)
        latency, pace = np.array([self._pace(pair) for pair in pairs.tolist()]).reshape(-1, 2)[inverse].T
        crossing = self.table("crossing")
        bytes = np.maximum(
            crossing[self.group[senders], cut_points], crossing[self.group[receivers], cut_points]
        )
        seconds: Floats = latency + bytes * pace
        return seconds


class LastStages(NamedTuple):
    """Last stages of plans as arrays of one length.

    Attributes:
        begin: Cut point where they start.
        state: State where they start.
        move: Devices of the first of them.
        parent: Row of the last stages without this one.
        recomputes: Whether a stage recomputes.
        aligned: Terms of T: seconds up to the pivot's last backward.
        hidden: The same without one micro-batch of the pivot.
        exposed: Longest all-reduce after it.
        least: Seconds that T is not below, for any stages in front.
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
        return LastStages(*(values[which] for values in arrays))

    def prepend(
        self, forward: Floats, backward: Floats, reduced: Floats | float, micro_batches: int
    ) -> LastStages:
        """Return the plans with a stage or a transfer in front.

        Args:
            forward: Forward seconds.
            backward: Backward seconds.
            reduced: All-reduce seconds.
            micro_batches: Number of micro-batches.
        """
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
        """T, if these are all stages."""
        return self.aligned + self.exposed


class _DappleSearch:
    """One search: a level for every number of stages, last stages first."""

    def __init__(self, moves: Moves, use_all: bool, beam: BeamLimits) -> None:
        self.moves, self.beam, self.choice = moves, beam, moves.choice
        self.last = len(moves.space.usable) - 1
        states = np.arange(1, len(moves.devices))
        states = states[moves.devices[1:] == moves.space.topology.gpus] if use_all else states
        none = np.zeros_like(states)
        terms = np.full((4, len(states)), -np.inf)
        self.levels = [LastStages(none + self.last, states, none, none, none > 0, *terms)]

    def run(self, best: CutPlan | None, most_stages: int) -> CutPlan | None:
        """Return the best plan, or the known one if none is faster."""
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
        """Return the plans with the transfer from a stage in front of each, on the devices of a move."""
        if to_last == 1:
            return plans
        seconds = self.moves.transfer(moves, plans.move, plans.begin)
        return plans.prepend(seconds, seconds, 0.0, self.choice.micro_batches)

    def _in_front(
        self, plans: LastStages, moves: Indices, begin: Indices | int, to_last: int
    ) -> tuple[LastStages, Indices]:
        """Return the plans with a stage in front of each, and which of these stages fit."""
        in_flight, group = self.choice.in_flight(to_last), self.moves.group[moves]
        names = ("forward", "backward", "all_reduce", "never", "always")
        tables = (self.moves.table(name)[group, begin, plans.begin] for name in names)
        forward, backward, reduced, never, always = tables
        recompute = in_flight > never
        begins, recomputes = np.broadcast_to(begin, moves.shape), plans.recomputes | recompute
        longer = plans.prepend(forward, backward + recompute * forward, reduced, self.choice.micro_batches)
        longer = longer._replace(begin=begins, move=moves, recomputes=recomputes)
        return longer, ~recompute | (in_flight <= always)

    def _finish(self, which: Indices, moves: Indices, to_last: int, best: CutPlan | None) -> CutPlan | None:
        """Return the best plan with the remaining layers in one stage, on the devices of a move each."""
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
        """Return the best plans of each state with one more stage, least lower estimates first."""
        rows = max(ENTRIES // (self.last + 1), 1)
        parts = [
            self._rank(which[at : at + rows], moves[at : at + rows], to_last, limit)
            for at in range(0, max(len(moves), 1), rows)
        ]
        seconds, least, *arrays = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        plans = LastStages(*arrays)
        keys = plans.begin * len(self.moves.devices) + plans.state
        order = np.lexsort((seconds, keys))
        keys = keys[order]
        order = order[np.arange(len(keys)) - np.searchsorted(keys, keys) < self.beam.plans_per_state]
        width = max(self.beam.width // self.last, 1)
        return plans.take(order[np.argsort(least[order], kind="stable")][:width])

    def _rank(self, which: Indices, moves: Indices, to_last: int, limit: float) -> tuple[Any, ...]:
        """Return plans with the next stage on the devices of a move each, begun at every possible cut point.

        The result holds their latency with the other layers in one stage (fitting or not), their lower
        estimates, and their arrays. The remaining layers take their share of the least work, and one of their
        stages does so in every micro-batch.
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
