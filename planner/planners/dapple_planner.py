"""DAPPLE: synchronous pipelines with replicated stages, the least estimated latency, on real machines.

Fan et al., "DAPPLE: A pipelined data parallel approach for training large models", PPoPP 2021, section 4. The
paper's recursion: for the layers planned so far and the devices taken of each machine it keeps the plan whose
latency is least when all other layers are one last stage on all other devices; from each, the next stage
takes more layers, a number of devices, and one of three placements.

Beyond the paper: the plan may leave devices unused; states are kept apart by their number of stages, and may
keep several plans (`BeamLimits`), since the least latency now is not always the start of the best plan; a
stage has to fit with the micro-batches in flight there, recomputing where it must. States whose every
continuation is slower than the best plan known are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.port_sharing import Routes
from ..candidate import Proposal
from ..search.space import Space
from ..stage_table import Floats
from .dapple_moves import CostedPlans, DappleStage, Ints, Machines, Moves, split_machines
from .replica_groups import MOST_GROUPS, MicroBatchChoice, count_replicas, micro_batch_choices, thin_cuts

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS, QUICK_BLOCKS = 100, 24
"""Blocks of layers between which a search may cut, and a quick search of each micro-batch size."""
PROMISING = 3
"""Micro-batch sizes that are searched fully after a quick search of all."""


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
class DapplePlan:
    """A plan of the search: by stage the place it ends at and its devices, its latency by the estimate, and
    whether some stage recomputes."""

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    latency_seconds: float
    recomputes: bool


@dataclass(frozen=True)
class StageLimits:
    """The most stages of a plan (None: any number), and whether it must use all devices."""

    most_stages: int | None = None
    use_all: bool = False


UNLIMITED = StageLimits()


@dataclass(frozen=True)
class Dapple:
    """The planner by its name."""

    name: str = "dapple"

    def propose(self, problem: Problem) -> Iterable[Proposal]:
        """The plan of least estimated latency for the most promising micro-batch sizes."""
        space, gpus = thin_cuts(problem.space, BLOCKS), problem.usable_gpus
        coarse, routes, quick_plans = thin_cuts(space, QUICK_BLOCKS), Routes(space.topology), []
        limits = StageLimits(problem.stage_counts[-1], problem.options.use_all)
        for choice in micro_batch_choices(problem.configs):
            quick_plan = find_dapple_plan(coarse, choice, gpus, limits, beam=QUICK, routes=routes)
            if quick_plan is not None:
                quick_plans.append((quick_plan.latency_seconds, choice))
        cut_points = space.table(space.chain.sizes[0]).cut_points
        for _, choice in sorted(quick_plans, key=lambda own: own[0])[:PROMISING]:
            dapple_plan = find_dapple_plan(space, choice, gpus, limits, routes=routes)
            if dapple_plan is not None:
                ends = tuple(cut_points[end] for end in dapple_plan.ends)
                config = choice.config(dapple_plan.recomputes)
                yield Proposal(config, ends, dapple_plan.devices, dapple_plan.latency_seconds)


DAPPLE = Dapple()


def find_dapple_plan(
    space: Space,
    choice: MicroBatchChoice,
    gpus: int,
    limits: StageLimits = UNLIMITED,
    *,
    beam: BeamLimits = FULL,
    routes: Routes | None = None,
) -> DapplePlan | None:
    """The plan for one micro-batch size on the first `gpus` devices; None where none fits. `routes` are kept
    from one call to the next."""
    groups = gpus if count_replicas(space) == "none" else beam.groups
    machines = split_machines(gpus, min(gpus, space.topology.gpus_per_node), groups)
    routes = routes or Routes(space.topology)
    best: DapplePlan | None = None
    for counts in count_rules(space, machines):
        faster = _DappleSearch(Moves(space, choice, machines, routes, counts), limits, beam).run(best)
        best = faster or best
    return best


TIE = 1e-12
"""Equal stages leave the pivot where it is, whatever the rounding."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Latency:
    """Seconds of the step, and the pivot: 2 s for stage s, 2 s + 1 for the transfer after it."""

    seconds: Floats
    pivot: npt.NDArray[np.int64]


def latency(stages: Sequence[DappleStage], transfers: Sequence[Floats], micro_batches: int) -> Latency:
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
    seconds, pivot = reaches[-1], np.asarray(len(works) - 1)
    hidden = seconds - works[-1]
    for index in range(len(works) - 2, -1, -1):
        # (M - 1) w_s > (M - 1) w_Q + between  <=>  before_s + M w_s > before_Q + (M - 1) w_Q
        moves = reaches[index] > hidden * (1 + TIE)
        seconds = np.where(moves, reaches[index], seconds)
        hidden = np.where(moves, reaches[index] - works[index], hidden)
        pivot = np.where(moves, index, pivot)
    whole = seconds + exposed
    return Latency(whole, np.broadcast_to(pivot, whole.shape))


def _with_transfers(stages: Sequence[DappleStage], transfers: Sequence[Floats]) -> Iterator[DappleStage]:
    for stage, transfer in zip_longest(stages, transfers):
        yield stage
        if transfer is not None:
            yield DappleStage(transfer, transfer, np.zeros(1))


def count_rules(space: Space, machines: Machines) -> Sequence[tuple[int, ...] | None]:
    """The numbers of groups that stages may have, for each kind of plan that the runtime runs; None: any."""
    rule = count_replicas(space)
    if rule == "any":
        return [None]
    if rule == "none":
        return [(1,)]
    return [(count,) for count in range(1, sum(machines.rooms) + 1)]


@dataclass(frozen=True)
class _Starts:
    """Unfinished plans, of as many stages each: arrays (stages, plans) of the cut points they end at, of
    their moves, and of the joints from each stage to the next."""

    ends: Ints
    moves: Ints
    joints: Ints

    def __len__(self) -> int:
        return int(self.ends.shape[1])

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints]:
        return self.ends, self.moves, self.joints

    def select(self, which: Ints) -> _Starts:
        """Some of them."""
        return _Starts(self.ends[:, which], self.moves[:, which], self.joints[:, which])

    def then(self, ends: Ints, moves: Ints, joints: Ints) -> _Starts:
        """Each with one more stage; joints to it, for all but first stages."""
        further = np.vstack([self.joints, joints]) if len(self.ends) else self.joints
        return _Starts(np.vstack([self.ends, ends]), np.vstack([self.moves, moves]), further)


class _DappleSearch:
    """One search: a level for every number of stages."""

    def __init__(self, moves: Moves, limits: StageLimits, beam: BeamLimits) -> None:
        self.moves, self.limits, self.beam = moves, limits, beam
        self.choice = moves.choice
        self.last = moves.cut_points - 1
        self.best: DapplePlan | None = None
        self.limit = np.inf

    def run(self, best: DapplePlan | None = None) -> DapplePlan | None:
        """The best plan, where one is faster than the known."""
        self.limit = best.latency_seconds if best else np.inf
        starts = _Starts(*(np.zeros((0, 1), dtype=np.int64) for _ in range(3)))
        while len(starts):
            self.moves.space.budget.check()
            self._finish(starts)
            if len(starts.ends) + 1 == self.limits.most_stages:
                break
            starts = self._extend(starts)
        return self.best

    def _after(self, starts: _Starts) -> tuple[Ints, Ints]:
        """Every start with every move: which start, which move."""
        states = self.moves.states(starts.moves[-1]) if len(starts.moves) else np.zeros(len(starts), np.int64)
        return self.moves.after(states)

    def _joints(self, starts: _Starts, moves: Ints) -> Ints:
        """From the last stage of each start to a move."""
        if not len(starts.moves):
            return np.zeros(len(moves), np.int64)
        return self.moves.joints(starts.moves[-1], moves)

    def _finish(self, starts: _Starts) -> None:
        """All layers that are left in one last stage, on any devices."""
        which, moves = self._after(starts)
        possible = self._may_finish(starts, which, moves)
        which, moves = which[possible], moves[possible]
        if not len(which):
            return
        starts = starts.select(which)
        whole = starts.then(np.full(len(which), self.last), moves, self._joints(starts, moves))
        costed = CostedPlans(self.moves, *whole.arrays, len(whole.ends))
        seconds = np.where(costed.fits, latency(*costed.parts, self.choice.micro_batches).seconds, np.inf)
        first = int(seconds.argmin())
        if seconds[first] < self.limit:
            self.limit = float(seconds[first])
            self.best = DapplePlan(
                ends=tuple(whole.ends[:, first].tolist()),
                devices=tuple(self.moves.ranks(move) for move in whole.moves[:, first].tolist()),
                latency_seconds=self.limit,
                recomputes=bool(costed.recomputes[first]),
            )

    def _may_finish(self, starts: _Starts, which: Ints, moves: Ints) -> Bools:
        """Whether a last stage after a start may make the best plan, by its seconds alone, and takes all
        devices where it must."""
        if not len(which):
            return np.zeros(0, dtype=np.bool_)
        begin = starts.ends[-1][which] if len(starts.ends) else 0
        works = self.moves.work(self.choice.in_flight(1))[self.moves.costs_indices(moves), begin, self.last]
        rounds = self.choice.micro_batches - 1
        possible: Bools = rounds * works < self.limit if rounds else works < np.inf
        if self.limits.use_all:
            possible &= self.moves.free_devices(self.moves.states(moves)) == 0
        return possible

    def _extend(self, starts: _Starts) -> _Starts:
        """The best starts of one stage more, by state."""
        which, moves = self._after(starts)
        rows = max(self.beam.entries // (self.last + 1), 1)
        parts = [
            self._rank_starts(starts.select(which[at : at + rows]), moves[at : at + rows])
            for at in range(0, len(which), rows)
        ]
        if not parts:
            return starts.select(which)
        arrays = zip(*(starts.arrays for starts, _, _ in parts), strict=True)
        longer = _Starts(*(np.concatenate(own, axis=1) for own in arrays))
        return self._best_of_states(
            longer, *(np.concatenate([part[index] for part in parts]) for index in (1, 2))
        )

    def _rank_starts(self, starts: _Starts, moves: Ints) -> tuple[_Starts, Floats, Floats]:
        """Starts with the next stage on the devices of a move each, ended everywhere it may; their latency
        with the rest in one stage, whether it fits or not; and what they take at least."""
        joints, rest = self._joints(starts, moves), self.moves.rest(self.moves.states(moves))
        least = self._least(starts, moves, joints)
        promising = least < self.limit * (1 - 1e-12)
        rows = np.flatnonzero(promising.any(axis=1) & (rest >= 0))
        joints_on = np.zeros(len(moves), dtype=np.int64)
        joints_on[rows] = self.moves.joints(moves[rows], rest[rows])
        which, ends = np.nonzero(promising & (rest >= 0)[:, None])
        longer = starts.select(which).then(ends, moves[which], joints[which])
        whole = longer.then(np.full(len(which), self.last), rest[which], joints_on[which])
        costed = CostedPlans(self.moves, *whole.arrays, len(whole.ends))
        seconds = latency(*costed.parts, self.choice.micro_batches).seconds
        fitting = np.flatnonzero(costed.start_fits)
        return longer.select(fitting), seconds[fitting], least[which, ends][fitting]

    def _least(self, starts: _Starts, moves: Ints, joints: Ints) -> Floats:
        """(moves, cut points): what a plan takes at least whose next stage ends there; inf where it may not.

        A latency is at least (M - 1) (F + B) of any stage plus F + B of all before it, transfers counted; of
        the stages that are left some one has its share of the work that is left.
        """
        count, level = self.choice.micro_batches, len(starts.ends)
        begin = starts.ends[-1] if level else np.zeros(len(moves), dtype=np.int64)
        before, slowest = np.zeros(len(moves)), np.zeros(len(moves))
        if level:
            parts, transfers = CostedPlans(self.moves, *starts.arrays, level + 2).parts
            between = self.moves.transfer(joints, starts.moves[-1], moves, begin)
            for part, transfer in zip(parts, [*transfers, between], strict=True):
                work = part.forward + part.backward
                slowest = np.maximum(slowest, before + (count - 1) * work)
                before = before + work + 2 * transfer
        works = self.moves.work(self.choice.in_flight(2))[self.moves.costs_indices(moves), begin]
        free = np.maximum(self.moves.free_devices(self.moves.states(moves)), 1)
        share = self.moves.least_work[None, :] / free[:, None]
        following = before[:, None] + np.maximum(max(count - 1, 1) * works, works + (count - 1) * share)
        cut_points = np.arange(self.last + 1)
        possible = (cut_points > begin[:, None]) & (cut_points < self.last)
        return np.where(possible, np.maximum(following, slowest[:, None]), np.inf)

    def _best_of_states(self, starts: _Starts, seconds: Floats, least: Floats) -> _Starts:
        """The best of each state, those first that take the least at least."""
        states = self.moves.states(starts.moves[-1])
        keys = starts.ends[-1] * (states.max(initial=0) + 1) + states
        order = np.lexsort((seconds, keys))
        keys = keys[order]
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else keys
        sizes = np.diff(np.append(begins, len(keys)))
        place = np.arange(len(keys)) - np.repeat(begins, sizes)
        order = order[place < self.beam.plans_per_state]
        width = max(self.beam.entries // (3 * self.last), 1)
        return starts.select(order[np.argsort(least[order], kind="stable")][:width])
