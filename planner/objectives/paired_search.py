"""The search for the WPipe pipeline with the highest throughput.

Each of p devices (or groups of as many replicas) has a part of the layers in either group, the i-th and the
(p + i)-th, and runs them in turn, round by round of p micro-batches; m of a global batch are a multiple of p.
In steady state a micro-batch takes no less than

    any device       f + b of both its parts, with what is run again
    any device       the all-reduces of both parts, shared by the m micro-batches between two updates
    any device       what its host takes to launch f and b of both
    any cut          its occupancy

as each of them is there once for every micro-batch and one at a time. The least that the largest of these can
be, over all cuts, is a table: with c the place between the groups, and x and y where the parts of a device
end, h(i, x, y) is the least for the devices behind i. Memory counts at the least that both parts hold. What
waits beside that is simulated: cuts are tried in the order of their bounds, until no bound is below the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from ...cost_models.memory import Recompute, Training, total, with_reserve
from ...cost_models.program import Program
from ...cost_models.schedules import find_schedule
from ..asynchronous import assemble_endless, reduced_seconds, steady_seconds
from ..candidate import PipelineConfig, Proposal, ScoredPlan
from ..plan_file import TIE
from ..search.placements import Placement
from ..search.replica_group import ReplicaGroupCosts
from ..search.space import Space
from ..search.stage_recompute import stage_modes
from ..stage_table import Floats
from .steady_search import Bools

MOST_PLACES = 26
"""Places to cut, both ends among them, of chains that are searched."""
MOST_SIMULATED, MOST_CUTS = 40, 400
"""Of a search: pipelines that are simulated, and cuts whose memory is counted."""
Table = dict[int, Floats]
"""By device, (x', x, y', y): seconds of a micro-batch with parts from x' to x and from y' to y; or (x, y)."""


@dataclass(frozen=True, eq=False)
class PairedSearch:
    """The pipelines of a configuration on the first devices of an order, of so many stages with as many
    replicas each."""

    space: Space
    config: PipelineConfig
    placement: Placement
    stages: int
    replicas: int

    def fastest(self, limit: float) -> tuple[ScoredPlan | None, float]:
        """Find the plan with the least seconds a global batch, if below `limit`, and a bound on all."""
        best: ScoredPlan | None = None
        simulated = 0
        for index, (bound, cuts) in enumerate(self._cuts()):
            if bound >= limit * (1 - TIE):
                return best, limit
            if index == MOST_CUTS or simulated == MOST_SIMULATED:
                return best, bound
            plan = self._plan(cuts)
            if plan is not None:
                simulated += 1
                step = steady_seconds(self.space, plan.proposal, plan.recompute)
                if step < limit:
                    best, limit = ScoredPlan(plan.proposal, plan.recompute, step), step
        return best, limit

    def _cuts(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Bounds in seconds a global batch and cuts of all 2 p parts, in increasing order of the bound."""
        heap: list[tuple[float, int, int, tuple[int, ...], tuple[int, ...]]] = []
        for middle in range(self.stages, self.places - self.stages):
            ahead = self._ahead(middle)
            heap.append((float(ahead[0][0, 0]), 0, middle, (0,), (middle,)))
        heap = [own for own in heap if own[0] < inf]
        heapify(heap)
        count = self.config.micro_batches
        while heap:
            bound, depth, middle, first, second = heappop(heap)
            self.space.budget.check()
            if -depth == self.stages:
                yield bound * count, (*first, *second[1:])
                continue
            costs = self._seconds(-depth)[first[-1], :, second[-1], :][: middle + 1, middle:]
            bounds = np.maximum(np.maximum(costs, self._ahead(middle)[-depth + 1]), bound)
            for x, y in np.argwhere(np.isfinite(bounds)).tolist():
                entry = float(bounds[x, y]), depth - 1, middle, (*first, x), (*second, middle + y)
                heappush(heap, entry)

    @cached_property
    def _aheads(self) -> dict[int, list[Floats]]:
        return {}

    def _ahead(self, middle: int) -> list[Floats]:
        """Least bottleneck of the last devices if the groups meet at `middle`, by number of devices before
        them: (x, y - middle)."""
        if middle not in self._aheads:
            last = np.full((middle + 1, self.places - middle), inf)
            last[-1, -1] = 0.0
            tables = [last]
            for device in reversed(range(self.stages)):
                costs = self._seconds(device)[: middle + 1, : middle + 1, middle:, middle:]
                tables.append(np.maximum(costs, tables[-1][None, :, None, :]).min(axis=(1, 3)))
            self._aheads[middle] = tables[::-1]
        return self._aheads[middle]

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Where parts may begin and end, as numbers of layers."""
        return self.space.table(self.space.chain.sizes[0]).cut_points

    @property
    def places(self) -> int:
        """Cut points."""
        return len(self.cut_points)

    def _ranks(self, device: int) -> tuple[int, ...]:
        return self.placement.ranks[device * self.replicas : (device + 1) * self.replicas]

    def _group(self, device: int) -> ReplicaGroupCosts:
        return self.space.replica_group(self.config.micro_batch_size, self._ranks(device))

    @cached_property
    def _tables(self) -> Table:
        return {}

    def _seconds(self, device: int) -> Floats:
        """Least seconds of a micro-batch in both parts of a device, (x', x, y', y)."""
        if device not in self._tables:
            costs, modes = self._group(device), stage_modes(self.config)
            seconds = np.full((self.places,) * 4, inf)
            for mode in modes:
                again = mode != "never"
                work = costs.backward + costs.forward * (1 + again)
                launch = costs.table.backward_launch + costs.table.forward_launch * (1 + again)
                trainable = np.asarray(costs.table.stage_bytes.trainable, dtype=np.float64)
                reduced = reduced_seconds(self.space, self._ranks(device), trainable)
                terms = (work, launch, reduced / self.config.micro_batches)
                own = np.maximum.reduce([np.add.outer(term, term) for term in terms])
                seconds = np.minimum(seconds, np.where(self._may_fit(device, mode), own, inf))
            seconds = np.maximum(seconds, self._occupancy(device)[None, :, None, :])
            for part, shape in ((device, (..., None, None)), (self.stages + device, (None, None, ...))):
                seconds = np.where(self._may_be(part)[shape], seconds, inf)
            self._tables[device] = seconds
        return self._tables[device]

    def _may_be(self, part: int) -> Bools:
        """(places, places): whether a part may lie there."""
        usable = self.space.usable.copy()
        start, end = np.nonzero(usable)
        usable[start, end] &= self.space.may_be(part, start, end)
        return usable

    def _occupancy(self, device: int) -> Floats:
        """Longer one of the transfers after both parts of a device, (x, y)."""
        following = (device + 1) % self.stages
        _, each = self.space.pace(self._ranks(device), self._ranks(following))
        crossing = [self._group(own).table.crossing for own in (device, following)]
        seconds = np.maximum(*crossing) * each
        last = device + 1 == self.stages
        return np.maximum(seconds[:, None], 0.0 if last else seconds[None, :])

    def _may_fit(self, device: int, mode: Recompute) -> Bools:
        """Return whether weights and versions of both parts fit on a device, with the most micro-batches in
        flight of one of them, (x', x, y', y)."""
        costs = self._group(device)
        if costs.limit == inf:
            return np.ones((1,) * 4, dtype=np.bool_)
        stage, needs = costs.table.stage_bytes, []
        training = Training(self.space.optimizer, self.space.number_bytes, self.replicas, self.space.zero)
        whole = stage.saved + stage.saved_input if mode == "never" else stage.input
        schedule = find_schedule(self.config.schedule)
        for chunk, versions in enumerate(schedule.chunk_versions):
            lasting = total({**training.states(stage), "versions": training.versions(stage, versions)})
            needs.append((lasting, self._in_flight[device][chunk] * whole))
        (lasting, passing), (other_lasting, other_passing) = needs
        context = costs.ledger.get("context_bytes", 0.0)
        bytes_kept = np.add.outer(lasting, other_lasting) + np.maximum.outer(passing, other_passing)
        needed: Floats = total(with_reserve({"parts": bytes_kept}, context))
        return np.asarray(needed <= costs.limit * (1 + 1e-12))

    @cached_property
    def _in_flight(self) -> list[tuple[int, int]]:
        """By device, the most micro-batches that either part holds at a time."""
        program = find_schedule(self.config.schedule).program(self.stages, 4 * self.stages, 2)
        return [_most_in_flight(program, device) for device in range(self.stages)]

    def _plan(self, cuts: Sequence[int]) -> ScoredPlan | None:
        """With what its devices must recompute, and no step; None where one has no room."""
        ends = tuple(self.cut_points[place] for place in cuts[1:])
        proposal = Proposal(self.config, ends, tuple(self._ranks(own) for own in range(self.stages)) * 2)
        never: list[Recompute] = ["never"] * len(ends)
        assembly = assemble_endless(self.space, proposal, never, 1)
        modes = list[Recompute]()
        for device in range(self.stages):
            limit = self.space.limit(self._ranks(device)) * (1 + 1e-12)
            fitting = (
                mode
                for mode in stage_modes(self.config)
                if sum(assembly.ledger(device, mode).values()) <= limit
            )
            mode = next(fitting, None)
            if mode is None:
                return None
            modes.append(mode)
        return ScoredPlan(proposal, tuple(modes) * 2, inf)


def _most_in_flight(program: Program, device: int) -> tuple[int, int]:
    """Return the most micro-batches in flight of each of a device's two parts."""
    level, most = [0, 0], [0, 0]
    for action in program.actions[device]:
        level[action.chunk] += 1 if action.kind == "F" else -1
        most[action.chunk] = max(most[action.chunk], level[action.chunk])
    return most[0], most[1]
