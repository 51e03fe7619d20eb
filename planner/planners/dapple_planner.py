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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.routes import Routes
from ..candidate import Proposal
from ..search.space import Space
from ..stage_table import Floats
from .dapple_moves import Ints, Moves, count_rules, split_machines
from .replica_groups import MOST_GROUPS, MicroBatchChoice, count_replicas, micro_batch_choices, thin

if TYPE_CHECKING:
    from ..problem import Problem
from .dapple_latency import DappleStage, latency

BLOCKS, GLANCE_BLOCKS = 100, 24
"""Places for cuts are thinned to so many blocks; for a glance at a micro-batch size."""
PROMISING = 3
"""Micro-batch sizes that are searched after a glance at all."""


@dataclass(frozen=True)
class BeamLimits:
    """What a search may do. More devices than `groups` stay together with their neighbours; `entries` next
    stages are looked at side by side, and a third as many plans, by cut points, are kept of each number of
    stages, `plans_per_state` of each state."""

    groups: int = MOST_GROUPS
    entries: int = 400_000
    plans_per_state: int = 4


FULL, GLANCE = BeamLimits(), BeamLimits(groups=8, entries=20_000, plans_per_state=1)


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
    """What a plan has to be: of so many stages at most (None: any number), and on all devices or not."""

    most_stages: int | None = None
    use_all: bool = False


ANY = StageLimits()


@dataclass(frozen=True)
class Dapple:
    """The planner by its name."""

    name: str = "dapple"

    def propose(self, problem: Problem) -> Iterable[Proposal]:
        """The plan of least estimated latency for the most promising micro-batch sizes."""
        space, gpus = thin(problem.space, BLOCKS), problem.usable_gpus
        coarse, routes = thin(space, GLANCE_BLOCKS), Routes(space.topology)
        whole = StageLimits(problem.stage_counts[-1], problem.options.use_all)
        glances = []
        for choice in micro_batch_choices(problem.configs):
            glance = plan(coarse, choice, gpus, whole, beam=GLANCE, routes=routes)
            if glance is not None:
                glances.append((glance.latency_seconds, choice))
        cut_points = space.table(space.chain.sizes[0]).cut_points
        for _, choice in sorted(glances, key=lambda glance: glance[0])[:PROMISING]:
            dapple_plan = plan(space, choice, gpus, whole, routes=routes)
            if dapple_plan is not None:
                ends = tuple(cut_points[end] for end in dapple_plan.ends)
                yield Proposal(choice.config(dapple_plan.recomputes), ends, dapple_plan.devices)


PLANNER = Dapple()


def plan(
    space: Space,
    choice: MicroBatchChoice,
    gpus: int,
    whole: StageLimits = ANY,
    *,
    beam: BeamLimits = FULL,
    routes: Routes | None = None,
) -> DapplePlan | None:
    """The plan found for one micro-batch size on the first `gpus` devices; None where none fits. `routes` are
    remembered from one call to the next."""
    groups = gpus if count_replicas(space) == "none" else beam.groups
    machines = split_machines(gpus, min(gpus, space.topology.gpus_per_node), groups)
    routes = routes or Routes(space.topology)
    best: DapplePlan | None = None
    for counts in count_rules(space, machines):
        faster = _DappleSearch(Moves(space, choice, machines, routes, counts), whole, beam).run(best)
        best = faster or best
    return best


@dataclass(frozen=True)
class _Starts:
    """Unfinished plans, of as many stages each: arrays (stages, plans) of the cut points they end at, of
    their moves, and of the joints from each stage to the next."""

    ends: Ints
    moves: Ints
    joints: Ints

    def __len__(self) -> int:
        return int(self.ends.shape[1])

    def select(self, which: Ints) -> _Starts:
        """Some of them."""
        return _Starts(self.ends[:, which], self.moves[:, which], self.joints[:, which])

    def then(self, ends: Ints, moves: Ints, joints: Ints) -> _Starts:
        """Each with one more stage; joints to it, for all but first stages."""
        further = np.vstack([self.joints, joints]) if len(self.ends) else self.joints
        return _Starts(np.vstack([self.ends, ends]), np.vstack([self.moves, moves]), further)


class _DappleSearch:
    """One search: a level for every number of stages."""

    def __init__(self, moves: Moves, whole: StageLimits, beam: BeamLimits) -> None:
        self.moves, self.whole, self.beam = moves, whole, beam
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
            if len(starts.ends) + 1 == self.whole.most_stages:
                break
            starts = self._extend(starts)
        return self.best

    def _after(self, starts: _Starts) -> tuple[Ints, Ints]:
        """Every start with every move: which start, which move."""
        states = self.moves.states(starts.moves[-1]) if len(starts.moves) else np.zeros(len(starts), np.int64)
        return self.moves.after(states)

    def _joints(self, starts: _Starts, moves: Ints) -> Ints:
        """From the last stage of each start to a move."""
        return (
            self.moves.joints(starts.moves[-1], moves)
            if len(starts.moves)
            else np.zeros(len(moves), np.int64)
        )

    def _finish(self, starts: _Starts) -> None:
        """All layers that are left in one last stage, on any devices."""
        which, moves = self._after(starts)
        possible = self._may_finish(starts, which, moves)
        which, moves = which[possible], moves[possible]
        if not len(which):
            return
        starts = starts.select(which)
        whole = starts.then(np.full(len(which), self.last), moves, self._joints(starts, moves))
        costed = _Costed(self.moves, whole, len(whole.ends))
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

    def _may_finish(self, starts: _Starts, which: Ints, moves: Ints) -> npt.NDArray[np.bool_]:
        """Whether a last stage after a start may make the best plan, by its seconds alone, and takes all
        devices where it must."""
        if not len(which):
            return np.zeros(0, dtype=np.bool_)
        begin = starts.ends[-1][which] if len(starts.ends) else 0
        works = self.moves.work(self.choice.in_flight(1))[self.moves.costs_indices(moves), begin, self.last]
        rounds = self.choice.micro_batches - 1
        possible: npt.NDArray[np.bool_] = rounds * works < self.limit if rounds else works < np.inf
        if self.whole.use_all:
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
        longer = _Starts(
            np.concatenate([starts.ends for starts, _, _ in parts], axis=1),
            np.concatenate([starts.moves for starts, _, _ in parts], axis=1),
            np.concatenate([starts.joints for starts, _, _ in parts], axis=1),
        )
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
        costed = _Costed(self.moves, whole, len(whole.ends))
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
            parts, transfers = _Costed(self.moves, starts, level + 2).parts
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


class _Costed:
    """What the stages of plans cost that have `stages` stages when they are whole."""

    def __init__(self, moves: Moves, plans: _Starts, stages: int) -> None:
        self.moves, self.plans = moves, plans
        self.fits = np.ones(len(plans), dtype=bool)
        self.start_fits = self.fits
        self.recomputes = np.zeros(len(plans), dtype=bool)
        tables = {
            name: moves.table(name) for name in ("forward", "backward", "all_reduce", "never", "always")
        }
        begin = np.zeros(len(plans), dtype=np.int64)
        self._stages: list[DappleStage] = []
        for stage, end in enumerate(plans.ends):
            at = (moves.costs_indices(plans.moves[stage]), begin, end)
            forward, backward, reduced, never, always = (table[at] for table in tables.values())
            in_flight = moves.choice.in_flight(stages - stage)
            recompute = in_flight > never
            self.start_fits = self.fits
            self.fits = self.fits & (~recompute | (in_flight <= always))
            self.recomputes = self.recomputes | recompute
            self._stages.append(DappleStage(forward, backward + recompute * forward, reduced))
            begin = end

    @property
    def parts(self) -> tuple[list[DappleStage], list[Floats]]:
        """The stages, and the transfers between them."""
        plans = self.plans
        each = zip(plans.joints, plans.moves, plans.moves[1:], plans.ends, strict=False)
        return self._stages, [self.moves.transfer(*joint) for joint in each]
