"""The search for the fastest straight pipeline: cuts x stages x micro-batches x schedule x recomputation.

Every subproblem (a setting and a stage count) has a proven bound. Two passes over them:

1. A narrow beam of the plans with the lowest bounds gives every subproblem that is still of interest a plan.
2. Branch and bound, a stage at a time for all unfinished plans at once, keeps each whose bound lies below the
   best plan known; the whole plans that are left are simulated, the lowest bounds first.

Where the number of unfinished plans passes a fixed width, those with the highest bounds are put aside; where
the work that a search may spend is done, the rest stays unscored. The smallest of their bounds then limits
what is proven. Work is counted, not timed: the same input always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..cost_models.layer import Chain
from ..cost_models.memory import LedgerOptions
from ..cost_models.runtime import Runtime
from ..cost_models.timeline import PipelineCosts, step_seconds
from ..cost_models.topology import Topology
from .balance import balance_table
from .bound import Bound, Ends, Floats, Instance, State, bound_of, starts_of
from .plan_file import TIE
from .setting import Setting
from .stage_table import StageTable

BEAM = 32
WIDTH = 500_000
"""Entries of the table of unfinished plans x next places that are looked at side by side."""
BATCH = 128
WORK = 4e8
"""What a search may spend on proving that its best plan is the best there is, see `_Work`."""


@dataclass(frozen=True)
class Candidate:
    """A scored straight plan: the places its stages end at, and its simulated step."""

    setting: Setting
    ends: tuple[int, ...]
    step_seconds: float


@dataclass(frozen=True)
class Found:
    """What a search found and proved of its space.

    `bound_seconds` holds for every plan of the space; `root_bound_seconds` is the bound before searching.
    Both are inf where the space holds no plan that fits.
    """

    best: Candidate | None
    bound_seconds: float
    root_bound_seconds: float
    exact: bool


@dataclass(frozen=True, eq=False)
class Space:
    """The plans to search: a chain on a topology under a memory limit, for a runtime or any. `ledger`: what
    the device and the precision add to every stage's memory."""

    chain: Chain
    topology: Topology
    optimizer: str
    memory_limit: float | None
    past_largest: bool = False
    runtime: Runtime | None = None
    ledger: LedgerOptions = field(default_factory=LedgerOptions)

    def table(self, size: float) -> StageTable:
        """The stages of the chain at a micro-batch size."""
        return _table(self.chain, size, self.past_largest)

    def instance(self, setting: Setting) -> Instance:
        """The straight plans of a setting, stage s on device s."""
        return Instance(
            table=self.table(setting.micro_batch_size),
            setting=setting,
            links=tuple(self.topology.link(s, s + 1) for s in range(self.topology.gpus - 1)),
            optimizer=self.optimizer,
            memory_limit=self.memory_limit,
            ledger=self.ledger,
            single_process=self.runtime is not None and self.runtime.one_process,
            trains_every_stage=self.runtime is not None and self.runtime.trains_every_stage,
        )


@lru_cache(maxsize=64)
def _table(chain: Chain, size: float, past_largest: bool) -> StageTable:
    return StageTable.of(chain, size, past_largest=past_largest)


def pipeline_costs(instance: Instance, ends: Ends) -> PipelineCosts:
    """Costs of many plans side by side, for the simulator. ends: (plans, stages), places."""
    stages, count = ends.shape[1], instance.setting.micro_batches
    starts = starts_of(ends)
    shape = (stages, count, len(ends))

    def over_micro_batches(table: Floats) -> Floats:
        return np.broadcast_to(table[starts, ends].T[:, None, :], shape)

    table, recompute = instance.table, instance.setting.recompute
    launch = over_micro_batches(table.forward_launch) if instance.single_process else None
    relaunch = table.backward_launch + (table.forward_launch if instance.setting.recomputed else 0.0)
    backward = over_micro_batches(instance.usual_backward)
    backward_launch = over_micro_batches(relaunch) if instance.single_process else None
    if recompute == "except_last":
        backward = _with_last(backward, over_micro_batches(table.backward))
        if backward_launch is not None:
            backward_launch = _with_last(backward_launch, over_micro_batches(table.backward_launch))
    boundaries = range(stages - 1)
    occupancy = [instance.occupancy(s)[ends[:, s]] for s in boundaries]
    latency = [np.full(len(ends), instance.links[s].latency_seconds) for s in boundaries]
    return PipelineCosts(
        forward=over_micro_batches(table.forward),
        backward=backward,
        occupancy=np.array(occupancy).reshape(stages - 1, len(ends)),
        latency=np.array(latency).reshape(stages - 1, len(ends)),
        forward_launch=launch,
        backward_launch=backward_launch,
    )


def _with_last(usual: Floats, last: Floats) -> Floats:
    return np.concatenate([usual[:, :-1], last[:, -1:]], axis=1)


def score(instance: Instance, ends: Ends) -> Floats:
    """Simulated step seconds of many plans. ends: (plans, stages), places."""
    return step_seconds(instance.setting.schedule, pipeline_costs(instance, ends))


def search(space: Space, settings: Sequence[Setting], stage_counts: Iterable[int]) -> Found:
    """The fastest straight plan of these settings and stage counts.

    Among plans within `TIE` of each other: the fewest stages, then the setting that stands first.
    """
    counts, work = sorted(set(stage_counts)), _Work(WORK)
    # One instance a setting: it keeps which stages fit, by micro-batches in flight, for every stage count.
    instances = [space.instance(setting) for setting in settings]
    problems = [_Subproblem(instance, stages, work) for stages in counts for instance in instances]
    seed: Candidate | None = None
    for problem in sorted(problems, key=lambda p: p.quick_bound):
        seed = problem.seed(seed)
    limit = seed.step_seconds * (1 + TIE) if seed else np.inf
    best: Candidate | None = None
    for problem in problems:
        found = problem.solve(limit)
        if found is not None:
            best, limit = found, found.step_seconds
    best = best or seed
    proven = min((problem.proven for problem in problems), default=np.inf)
    root = min((problem.root_if_known for problem in problems), default=np.inf)
    step = best.step_seconds if best else np.inf
    exact = proven >= step * (1 - TIE)
    return Found(best, step if exact else proven, min(root, step), exact)


class _Work:
    """What may still be spent, in nanoseconds or so: counted from the sizes of tables, never timed."""

    def __init__(self, amount: float) -> None:
        self.left = amount

    def extend(self, entries: int) -> None:
        """Bounds were computed for so many unfinished plans and next places."""
        self.left -= 20_000 + 100 * entries

    def simulate(self, plans: int, actions: int) -> None:
        """So many plans of so many actions were simulated side by side."""
        self.left -= actions * (1_500 if plans == 1 else 3_000 + 25 * plans)


class _Subproblem:
    """The plans of one setting with one number of stages."""

    def __init__(self, instance: Instance, stages: int, work: _Work) -> None:
        self.instance, self.stages, self.work = instance, stages, work
        self.quick_bound = instance.quick_bound(stages)
        self.proven = np.inf
        """A bound on the plans that were not scored, where some may be faster than the best known."""
        self._bound: Bound | None = None

    @property
    def bound(self) -> Bound:
        """The bound, made when it is first needed."""
        if self._bound is None:
            self._bound = bound_of(self.instance, self.stages)
        return self._bound

    @property
    def root_if_known(self) -> float:
        """The bound before searching: the quick one where no better was needed."""
        return self.quick_bound if self._bound is None else max(self.quick_bound, self._bound.root())

    def seed(self, best: Candidate | None) -> Candidate | None:
        """A good plan, where one faster than `best` is possible; else `best`."""
        limit = best.step_seconds if best else np.inf
        if self.quick_bound >= limit or self.bound.root() >= limit or np.isinf(self.bound.root()):
            return best
        beam, _ = self._unfinished(limit, BEAM)
        found, _ = self._fastest(np.concatenate([beam, self._balanced()]), limit)
        return found or best

    def solve(self, limit: float) -> Candidate | None:
        """The fastest plan below `limit`, by branch and bound; None where there is none."""
        if self.quick_bound >= limit or self.bound.root() >= limit:
            return None
        if self.work.left <= 0:
            self.proven = self.bound.root()
            return None
        plans, aside = self._unfinished(limit, max(BEAM, WIDTH // (self.instance.last_place + 1)))
        best, left = self._fastest(plans, limit)
        self.proven = min(aside, left)
        return best

    def _fastest(self, plans: Ends, limit: float) -> tuple[Candidate | None, float]:
        """The fastest of these plans, where it is faster than `limit`, and the least bound of those that the
        work did not reach (inf: none). The lowest bounds are simulated first, more and more side by side."""
        bounds = self.bound.finished(plans)
        order = np.argsort(bounds, kind="stable")
        plans, bounds = plans[order], bounds[order]
        best: Candidate | None = None
        start, batch = 0, 1
        while start < len(plans) and bounds[start] < limit * (1 - TIE if best else 1):
            if start and self.work.left <= 0:
                return best, float(bounds[start])
            steps = score(self.instance, plans[start : start + batch])
            self.work.simulate(len(steps), 2 * self.stages * self.instance.setting.micro_batches)
            first = int(steps.argmin())
            if steps[first] < limit:
                best, limit = self._candidate(plans[start + first], steps[first]), float(steps[first])
            start, batch = start + batch, min(8 * batch, BATCH)
        return best, np.inf

    def _candidate(self, ends: Ends, step: float) -> Candidate:
        return Candidate(self.instance.setting, tuple(int(end) for end in ends), float(step))

    def _unfinished(self, limit: float, width: int) -> tuple[Ends, float]:
        """Whole plans whose bound lies below `limit`, at most `width` unfinished ones at a time, and the
        smallest bound of those put aside (inf: none)."""
        state: State = self.bound.start()
        ends = np.zeros((1, 0), dtype=np.int64)
        aside = np.inf
        for stage in range(self.stages):
            table, states = self.bound.extend(stage, state)
            self.work.extend(table.size)
            if stage == self.stages - 1:
                table[:, :-1] = np.inf
            parents, places = np.nonzero(table < limit)
            bounds = table[parents, places]
            if len(bounds) > width:
                order = np.argsort(bounds, kind="stable")
                aside = min(aside, float(bounds[order[width]]))
                keep = np.sort(order[:width])
                parents, places = parents[keep], places[keep]
            state = {name: values[parents, places] for name, values in states.items()}
            state["place"] = places
            ends = np.concatenate([ends[parents], places[:, None]], axis=1)
        return ends, aside

    def _balanced(self) -> Ends:
        """The plan whose busiest stage is cheapest, the transfers at its cuts counted."""
        table = self.instance.table
        work = table.forward + self.instance.usual_backward
        if self.stages > 1:
            cut = 2 * self.instance.transfer(0) * (table.crossing > 0)
            work = work + cut[:, None] + cut[None, :]
        ends = balance_table(lambda stage: np.where(self._allowed(stage), work, np.inf), self.stages)
        return np.array([ends], dtype=np.int64)

    def _allowed(self, stage: int) -> npt.NDArray[np.bool_]:
        return self.instance.allowed(self.stages - stage, self.stages)
