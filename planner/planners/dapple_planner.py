"""DAPPLE: synchronous pipelines with replicated stages, the least estimated latency, on real machines.

Fan et al., "DAPPLE: A pipelined data parallel approach for training large models", PPoPP 2021, section 4. The
paper's recursion: for the layers planned so far and the devices taken of each machine it keeps the plan whose
latency is least when all other layers are one last stage on all other devices; from each, the next stage
takes more layers, a number of devices, and one of three placements.

Beyond the paper: the plan may leave devices unused; states are kept apart by their number of stages, and may
keep several plans (`BeamLimits`), since the least latency now is not always the start of the best plan; a
stage has to fit with the micro-batches in flight there, recomputing where it must. States whose every
continuation is slower than the best plan known are dropped.

Placements (section 4.2): three ways to give the next stage its devices, on real machine boundaries. Devices
of a machine are used in the order of their ranks, so that their number says which are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
    count_replicas,
    group_devices,
    propose_promising,
)

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS, QUICK_BLOCKS = 100, 24
"""Blocks of layers between which a search may cut, and a quick search of each micro-batch size."""


@dataclass(frozen=True)
class BeamLimits:
    """What a search may do. More devices than `groups` stay together with their neighbours; `entries` next
    stages are costed side by side, and a third as many plans, by cut points, are kept of each number of
    stages, `plans_per_state` of each state."""

    groups: int = MOST_GROUPS
    entries: int = 400_000
    plans_per_state: int = 4


FULL, QUICK = BeamLimits(), BeamLimits(groups=8, entries=20_000, plans_per_state=1)


@dataclass(frozen=True)
class StageLimits:
    """The most stages of a plan (None: any number), and whether it must use all devices."""

    most_stages: int | None = None
    use_all: bool = False


UNLIMITED = StageLimits()


def _propose(problem: Problem) -> Iterator[Proposal]:
    """The plan of least estimated latency for the most promising micro-batch sizes."""
    limits = StageLimits(problem.stage_counts[-1], problem.options.use_all)

    def find(space: Space, choice: MicroBatchChoice, is_quick: bool) -> CutPlan | None:
        beam = QUICK if is_quick else FULL
        return find_dapple_plan(space, choice, problem.usable_gpus, limits, beam=beam)

    return propose_promising(problem, BLOCKS, QUICK_BLOCKS, find)


PLANNERS = (Planner("dapple", _propose),)


def find_dapple_plan(
    space: Space,
    choice: MicroBatchChoice,
    gpus: int,
    limits: StageLimits = UNLIMITED,
    *,
    beam: BeamLimits = FULL,
) -> CutPlan | None:
    """The plan for one micro-batch size on the first `gpus` devices; None where none fits."""
    rule = count_replicas(space)
    machines = split_machines(
        gpus, min(gpus, space.topology.gpus_per_node), gpus if rule == "none" else beam.groups
    )
    every = range(1, sum(machines.rooms) + 1)
    counts = {"any": [every], "none": [range(1, 2)], "equal": [range(n, n + 1) for n in every]}[rule]
    best: CutPlan | None = None
    for own in counts:
        best = _DappleSearch(Moves(space, choice, machines, own), limits, beam).run(best) or best
    return best


TIE = 1e-12
"""Equal stages leave the pivot where it is, whatever the rounding."""


@dataclass(frozen=True)
class DappleStage:
    """A stage of many plans side by side: arrays that broadcast together. Forward and backward of one
    micro-batch; the all-reduce of a step."""

    forward: Floats
    backward: Floats
    all_reduce: Floats


def latency(stages: Sequence[DappleStage], transfers: Sequence[Floats], micro_batches: int) -> Floats:
    """T = T_w + T_s + T_e of plans of `stages`, with a transfer of so many seconds after each but the last.

    A transfer is a stage whose forward and backward take its seconds, without an all-reduce. With those, for
    M micro-batches, the pivot Q, and F, B, AR of the stages:

        T_w = sum of F_s up to Q                 T_s = (M - 1) (F_Q + B_Q)
        T_e = max over s of AR_s + (sum of B_a for a = s..Q)         for s <= Q
                            AR_s - (sum of B_a for a = Q+1..s-1)     for s > Q

    The all-reduce of a stage is so hidden by the backwards that follow it on the stages before. Q is the last
    stage, or from there backwards each stage whose (M - 1)(F + B) is above that of Q plus F + B of the stages
    between. Both cases of T_e are AR_s + (backwards up to Q) - (backwards before s), so that
    T = (F + B of the stages before Q) + M (F_Q + B_Q) + max over s of (AR_s - backwards before s).
    """
    before, backwards, exposed = np.zeros(1), np.zeros(1), np.full(1, -np.inf)
    reaches, works = [], []
    for stage in _with_transfers(stages, transfers):
        work = stage.forward + stage.backward
        reaches.append(before + micro_batches * work)
        works.append(work)
        exposed = np.maximum(exposed, stage.all_reduce - backwards)
        before, backwards = before + work, backwards + stage.backward
    seconds = reaches[-1]
    hidden = seconds - works[-1]
    for index in range(len(works) - 2, -1, -1):
        # (M - 1) w_s > (M - 1) w_Q + between  <=>  before_s + M w_s > before_Q + (M - 1) w_Q
        moves = reaches[index] > hidden * (1 + TIE)
        seconds = np.where(moves, reaches[index], seconds)
        hidden = np.where(moves, reaches[index] - works[index], hidden)
    whole: Floats = seconds + exposed
    return whole


def _with_transfers(stages: Sequence[DappleStage], transfers: Sequence[Floats]) -> Iterator[DappleStage]:
    for stage, transfer in zip_longest(stages, transfers):
        yield stage
        if transfer is not None:
            yield DappleStage(transfer, transfer, np.zeros(1))


Counts = tuple[int, ...]
"""By machine, a number of its devices."""
Policy = Callable[[Counts, Counts, int], Counts]


def fresh_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Devices of unused machines first: keeps the replicas of a stage on the fast links of one machine."""
    fresh = [machine for machine, count_used in enumerate(used) if count_used == 0]
    return _in_order(machines, used, count, [*fresh, *_partly_used(used)])


def append_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Free devices of used machines first: leaves no machine half empty."""
    fresh = [machine for machine, count_used in enumerate(used) if count_used == 0]
    return _in_order(machines, used, count, [*_partly_used(used), *fresh])


def scatter_first(machines: Counts, used: Counts, count: int) -> Counts:
    """One device in turn of each used machine, where there are several with enough left, else of each machine
    that has any left: transfers from stage to stage then stay inside the machines."""
    free = [room - count_used for room, count_used in zip(machines, used, strict=True)]
    begun = [machine for machine in _partly_used(used) if free[machine]]
    enough = len(begun) > 1 and sum(free[machine] for machine in begun) >= count
    pool = begun if enough else range(len(machines))
    counts = [0] * len(machines)
    while count:
        for machine in pool:
            if count and counts[machine] < free[machine]:
                counts[machine] += 1
                count -= 1
    return tuple(counts)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def list_ranks(starts: Sequence[int], used: Counts, counts: Counts) -> tuple[int, ...]:
    """The ranks of `counts` devices after the `used` ones of machines whose first ranks are `starts`."""
    return tuple(
        start + count_used + index
        for start, count_used, number in zip(starts, used, counts, strict=True)
        for index in range(number)
    )


def _partly_used(used: Counts) -> list[int]:
    return [machine for machine, count_used in enumerate(used) if count_used]


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
        groups = list_ranks(self.starts, used, counts)
        return tuple(group * self.each + index for group in groups for index in range(self.each))


def split_machines(gpus: int, gpus_per_node: int, most_groups: int = MOST_GROUPS) -> Machines:
    """The nodes of so many devices; those that are left over by the groups stay unused."""
    each = group_devices(gpus, gpus_per_node, most_groups)
    room = max(gpus_per_node // each, 1)
    starts = range(0, gpus // each, room)
    return Machines(tuple(min(room, gpus // each - start) for start in starts), tuple(starts), each)


class Moves:
    """Choices of devices for a next stage, with their costs.

    A *state* is a number for what is taken of each machine; state 0 is nothing. A *move* is a number for the
    devices of a stage after a state. A *joint* is a number for the way from a move to one that follows.

    Attributes:
        ranks: By move, its devices.
        state: (moves,): the state after each.
        free: (states,): devices that are not taken.
        costs: Costs of stages on devices that are alike.
        group: (moves,): where the costs of each are.
    """

    def __init__(
        self, space: Space, choice: MicroBatchChoice, machines: Machines, counts: Sequence[int]
    ) -> None:
        self.space, self.choice, self.costs = space, choice, list[ReplicaWork]()
        self.ranks, self._from = list[tuple[int, ...]](), list[list[int]]()
        self._joints, self._paces = dict[int, int](), list[tuple[float, float]]()
        used, after, groups = {(0,) * len(machines.rooms): 0}, list[int](), list[int]()
        indices = dict[int, int]()
        most = min(sum(machines.rooms), choice.size // machines.each)
        fitting = [n for n in counts if n <= most and space.fits_someone(choice.size, n * machines.each)]
        policies = POLICIES if len(machines.rooms) > 1 else POLICIES[:1]
        states = list(used)
        for state in states:
            free = sum(machines.rooms) - sum(state)
            choices = (
                policy(machines.rooms, state, count)
                for count in sorted(fitting, reverse=True)
                if count <= free
                for policy in policies
            )
            self._from.append([])
            for choice_counts in dict.fromkeys(choices):
                self._from[-1].append(len(self.ranks))
                self.ranks.append(machines.ranks(state, choice_counts))
                following = tuple(a + b for a, b in zip(state, choice_counts, strict=True))
                if following not in used:
                    used[following] = len(states)
                    states.append(following)
                after.append(used[following])
                group = space.replica_group(choice.size, self.ranks[-1])
                groups.append(indices.setdefault(id(group), len(self.costs)))
                if groups[-1] == len(self.costs):
                    self.costs.append(cost_replicas(space, choice, self.ranks[-1]))
        self.state, self.group = np.array(after, dtype=np.int64), np.array(groups, dtype=np.int64)
        self.free = np.array([space.topology.gpus - machines.each * sum(own) for own in states])
        self.table = cache(lambda name: np.array([getattr(own, name) for own in self.costs]))
        self.work = cache(lambda in_flight: np.array([own.work(in_flight) for own in self.costs]))

    def after(self, states: Indices) -> tuple[Indices, Indices]:
        """List the moves from each of the states, those of most devices first.

        Returns:
            (moves,) each: positions in `states`, and moves.
        """
        lists = [self._from[state] for state in states.tolist()]
        positions = np.repeat(np.arange(len(lists)), [len(moves) for moves in lists])
        return positions, np.array([move for moves in lists for move in moves], dtype=np.int64)

    @cached_property
    def rest(self) -> Indices:
        """(states,): the move onto as many of the free devices as possible; -1 where there is none."""
        return np.array([moves[0] if moves else -1 for moves in self._from], dtype=np.int64)

    def joints(self, senders: Indices, receivers: Indices) -> Indices:
        """Numbers for the ways from moves to the moves that follow. Arrays of one length."""
        codes, inverse = np.unique(senders * len(self.ranks) + receivers, return_inverse=True)
        for code in codes.tolist():
            if code not in self._joints:
                self._joints[code] = len(self._paces)
                sender, receiver = divmod(code, len(self.ranks))
                self._paces.append(self.space.pace(self.ranks[sender], self.ranks[receiver]))
        return np.array([self._joints[code] for code in codes.tolist()], dtype=np.int64)[inverse]

    def transfer(self, joints: Indices, senders: Indices, receivers: Indices, cut_points: Indices) -> Floats:
        """Seconds of a micro-batch from a stage to the next, cut at a place. Arrays of one length."""
        crossing = self.table("crossing")
        bytes = np.maximum(
            crossing[self.group[senders], cut_points], crossing[self.group[receivers], cut_points]
        )
        latency, pace = np.array(self._paces).reshape(-1, 2)[joints].T
        seconds: Floats = latency + bytes * pace
        return seconds

    @cached_property
    def least_work(self) -> Floats:
        """(cut points,): device seconds of a micro-batch from each place to the end, however it is shared."""
        shared = range(1, min(self.choice.size, self.space.topology.gpus) + 1)
        least = np.full(self.cut_points - 1, np.inf)
        scale = min(device.seconds_scale for device in self.space.topology.kinds)
        for replicas in shared:
            if self.space.fits_someone(self.choice.size, replicas):
                table = self.space.table(-(-self.choice.size // replicas))
                blocks = np.diagonal(table.forward + table.backward, 1)
                least = np.minimum(least, replicas * blocks * scale)
        if any(device.profile is not None for device in self.space.topology.kinds):
            least = np.zeros(self.cut_points - 1)
        return np.append(np.cumsum(least[::-1])[::-1], 0.0)

    @cached_property
    def cut_points(self) -> int:
        """Where stages may start or end."""
        return self.space.table(self.space.chain.sizes[0]).blocks + 1


Plans = Indices
"""(stages, 3, plans): the cut point each stage ends at, its move, and the joint from the stage before."""


def add_stage(plans: Plans, ends: Indices | int, moves: Indices, joints: Indices) -> Plans:
    """Each plan with one more stage."""
    stage = np.stack([np.broadcast_to(ends, moves.shape), moves, joints])
    return np.concatenate([plans, stage[None]])


class CostedPlans(NamedTuple):
    """Costs of plans: their stages, the transfers between them, whether all stages fit, whether all but the
    last do, and whether one recomputes."""

    stages: list[DappleStage]
    transfers: list[Floats]
    fits: Indices
    start_fits: Indices
    recomputes: Indices


def cost_plans(costs: Moves, plans: Plans, stages: int) -> CostedPlans:
    """Cost plans that have so many stages when they are complete."""
    start_fits = fits = np.ones(plans.shape[2], dtype=bool)
    recomputes, begin, parts = ~fits, np.zeros(plans.shape[2], dtype=np.int64), list[DappleStage]()
    tables = [costs.table(name) for name in ("forward", "backward", "all_reduce", "never", "always")]
    for stage, (end, move, _) in enumerate(plans):
        forward, backward, reduced, never, always = (table[costs.group[move], begin, end] for table in tables)
        in_flight = costs.choice.in_flight(stages - stage)
        recompute = in_flight > never
        start_fits, fits = fits, fits & (~recompute | (in_flight <= always))
        recomputes = recomputes | recompute
        parts.append(DappleStage(forward, backward + recompute * forward, reduced))
        begin = end
    transfers = [costs.transfer(after[2], first[1], after[1], first[0]) for first, after in pairwise(plans)]
    return CostedPlans(parts, transfers, fits, start_fits, recomputes)


class _DappleSearch:
    """One search: a level for every number of stages."""

    def __init__(self, moves: Moves, limits: StageLimits, beam: BeamLimits) -> None:
        self.moves, self.limits, self.beam = moves, limits, beam
        self.choice = moves.choice
        self.last = moves.cut_points - 1
        self.best: CutPlan | None = None
        self.limit = np.inf

    def run(self, best: CutPlan | None = None) -> CutPlan | None:
        """The best plan, where one is faster than the known."""
        self.limit = best.seconds if best else np.inf
        plans = np.zeros((0, 3, 1), dtype=np.int64)
        while plans.shape[2]:
            self.moves.space.budget.check()
            states = self.moves.state[plans[-1, 1]] if len(plans) else np.zeros(1, dtype=np.int64)
            which, moves = self.moves.after(states)
            if not len(moves):
                break
            self._finish(plans[..., which], moves)
            if len(plans) + 1 == self.limits.most_stages:
                break
            plans = self._extend(plans[..., which], moves)
        return self.best

    def _joints(self, plans: Plans, moves: Indices) -> Indices:
        """Return the joints from the last stage of each plan to a move."""
        return self.moves.joints(plans[-1, 1], moves) if len(plans) else np.zeros(len(moves), np.int64)

    def _finish(self, plans: Plans, moves: Indices) -> None:
        """Score plans that end with the remaining layers in one stage, on the devices of a move each."""
        begin = plans[-1, 0] if len(plans) else 0
        works = self.moves.work(self.choice.in_flight(1))[self.moves.group[moves], begin, self.last]
        rounds = self.choice.micro_batches - 1
        possible = rounds * works < self.limit if rounds else works < np.inf
        if self.limits.use_all:
            possible &= self.moves.free[self.moves.state[moves]] == 0
        plans, moves = plans[..., possible], moves[possible]
        if not len(moves):
            return
        whole = add_stage(plans, self.last, moves, self._joints(plans, moves))
        costed = cost_plans(self.moves, whole, len(whole))
        seconds = self._seconds(costed)
        seconds = np.where(costed.fits, seconds, np.inf)
        first = int(seconds.argmin())
        if seconds[first] < self.limit:
            self.limit = float(seconds[first])
            self.best = CutPlan(
                ends=tuple(whole[:, 0, first].tolist()),
                devices=tuple(self.moves.ranks[move] for move in whole[:, 1, first].tolist()),
                seconds=self.limit,
                recomputes=bool(costed.recomputes[first]),
            )

    def _seconds(self, costed: CostedPlans) -> Floats:
        return latency(costed.stages, costed.transfers, self.choice.micro_batches)

    def _extend(self, plans: Plans, moves: Indices) -> Plans:
        """The best plans with one stage more on the devices of a move each, by state."""
        rows = max(self.beam.entries // (self.last + 1), 1)
        parts = [
            self._rank(plans[..., at : at + rows], moves[at : at + rows]) for at in range(0, len(moves), rows)
        ]
        return self._best_of_states(*(np.concatenate(own, axis=-1) for own in zip(*parts, strict=True)))

    def _rank(self, plans: Plans, moves: Indices) -> tuple[Plans, Floats, Floats]:
        """Plans with the next stage on the devices of a move each, ended everywhere it may; their latency
        with the rest in one stage, whether it fits or not; and what they take at least."""
        joints, rest = self._joints(plans, moves), self.moves.rest[self.moves.state[moves]]
        least = self._least(plans, moves, joints)
        promising = (least < self.limit * (1 - 1e-12)) & (rest >= 0)[:, None]
        rows = np.flatnonzero(promising.any(axis=1))
        joints_on = np.zeros(len(moves), dtype=np.int64)
        joints_on[rows] = self.moves.joints(moves[rows], rest[rows])
        which, ends = np.nonzero(promising)
        longer = add_stage(plans[..., which], ends, moves[which], joints[which])
        whole = add_stage(longer, self.last, rest[which], joints_on[which])
        costed = cost_plans(self.moves, whole, len(whole))
        fitting = np.flatnonzero(costed.start_fits)
        return longer[..., fitting], self._seconds(costed)[fitting], least[which, ends][fitting]

    def _least(self, plans: Plans, moves: Indices, joints: Indices) -> Floats:
        """(moves, cut points): what a plan takes at least whose next stage ends there; inf where it may not.

        A latency is at least (M - 1) (F + B) of any stage plus F + B of all before it, transfers counted; of
        the stages that are left some one has its share of the work that is left.
        """
        count = self.choice.micro_batches
        begin = plans[-1, 0] if len(plans) else np.zeros(len(moves), dtype=np.int64)
        before, slowest = np.zeros(len(moves)), np.zeros(len(moves))
        if len(plans):
            costed = cost_plans(self.moves, plans, len(plans) + 2)
            between = self.moves.transfer(joints, plans[-1, 1], moves, begin)
            for part, transfer in zip(costed.stages, [*costed.transfers, between], strict=True):
                work = part.forward + part.backward
                slowest = np.maximum(slowest, before + (count - 1) * work)
                before = before + work + 2 * transfer
        works = self.moves.work(self.choice.in_flight(2))[self.moves.group[moves], begin]
        free = np.maximum(self.moves.free[self.moves.state[moves]], 1)
        share = self.moves.least_work[None, :] / free[:, None]
        following = before[:, None] + np.maximum(max(count - 1, 1) * works, works + (count - 1) * share)
        cut_points = np.arange(self.last + 1)
        possible = (cut_points > begin[:, None]) & (cut_points < self.last)
        return np.where(possible, np.maximum(following, slowest[:, None]), np.inf)

    def _best_of_states(self, plans: Plans, seconds: Floats, least: Floats) -> Plans:
        """The best of each state, those first that take the least at least."""
        states = self.moves.state[plans[-1, 1]]
        keys = plans[-1, 0] * (states.max(initial=0) + 1) + states
        order = np.lexsort((seconds, keys))
        keys = keys[order]
        place = np.arange(len(keys)) - np.searchsorted(keys, keys)
        order = order[place < self.beam.plans_per_state]
        width = max(self.beam.entries // (3 * self.last), 1)
        return plans[..., order[np.argsort(least[order], kind="stable")][:width]]
