"""Whole pipelines with everything their step depends on: many side by side, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...cost_models.collectives import (
    AllReduceBytes,
    Hop,
    PortSharing,
    Ranks,
    TiedSum,
    TopologyPorts,
    all_reduce_ends,
    ends_after_sums,
    tied_sums,
)
from ...cost_models.memory import Recompute
from ...cost_models.program import Program
from ...cost_models.runtime import OFFLOAD
from ...cost_models.schedules import cached_program
from ...cost_models.simulator import LinearCosts, linear_ends
from ...cost_models.step_costs import Costs, Hosts, linear_costs
from ...cost_models.timeline import device_ends, step_seconds
from ..candidate import PipelineConfig, Proposal
from ..replica_exchange import bytes_by_layer, tied_exchanges
from ..stage_table import Floats
from .space import Space
from .stage_recompute import repeat_end

LAUNCHES = ("forward_launch", "backward_launch", "plain_launch")
MANY_ACTIONS, MANY_STAGES = 50_000, 12
"""Steps of more actions are simulated for all stages at once; with fewer stages, those of 8 times as many."""


@dataclass(frozen=True, eq=False)
class PipelineRoutes:
    """Where pipelines run: by pipeline, the devices of each stage; (pipelines, stages) each, the bytes that
    the replicas of a stage exchange after the last backward, and before it, see `replica_exchange`; by
    pipeline, the sums of tied weights' gradients."""

    ports: TopologyPorts
    devices: Sequence[tuple[Ranks, ...]]
    at_end: Floats
    before: Floats
    tied: Sequence[tuple[TiedSum, ...]]

    def select(self, rows: npt.NDArray[np.int64]) -> PipelineRoutes:
        """Of a part of them."""
        devices = [self.devices[row] for row in rows]
        tied = [self.tied[row] for row in rows]
        return PipelineRoutes(self.ports, devices, self.at_end[rows], self.before[rows], tied)


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines of one configuration with as many stages: arrays of shape (pipelines, stages), transfers
    (pipelines, stages - 1), in seconds.

    `backward` with what is run again; `plain` without (of the last micro-batch under except_last);
    `accumulation`: what the first backward of several does not take.
    `exposed_allreduce`: of the all-reduce after the last backward. `forward_launch`, `backward_launch` and
    `plain_launch` (likewise with and without what is run again): on the `hosts`, as of `Costs`. `routes`: for
    the ports that stages share; None: there are none.
    """

    config: PipelineConfig
    forward: Floats
    backward: Floats
    plain: Floats
    accumulation: Floats
    exposed_allreduce: Floats
    occupancy: Floats
    latency: Floats
    forward_launch: Floats
    backward_launch: Floats
    plain_launch: Floats
    hosts: Hosts = "each"
    routes: PipelineRoutes | None = None

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def stages(self) -> int:
        """Of each."""
        return int(self.forward.shape[1])

    def select(self, rows: npt.NDArray[np.int64]) -> Pipelines:
        """A part of them."""
        arrays = {name: values[rows] for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        routes = None if self.routes is None else self.routes.select(rows)
        return replace(self, routes=routes, **arrays)  # type: ignore[arg-type] # arrays only

    def step_seconds(self, limit: float | None = None) -> Floats:
        """(pipelines,): simulated. With a `limit`, only the fastest, where it takes less; of the others a
        bound that is not below it, nor below the limit."""
        if self.routes is None:
            if (ends := self._linear_ends(None)) is not None:
                return np.asarray((ends + self.exposed_allreduce.T).max(axis=0))
            return step_seconds(self._program, self.costs())
        sharings = self._sharings(self.routes)
        steps = np.array([own.port_seconds for own in sharings])
        patterns: dict[bytes, list[int]] = {}
        for row in range(len(self)) if limit is None else np.flatnonzero(steps < limit).tolist():
            patterns.setdefault(sharings[row].pattern, []).append(row)
        for rows in patterns.values():
            own = self.select(np.array(rows))._alike([sharings[row] for row in rows], limit)
            steps[rows] = np.maximum(steps[rows], own)
            limit = None if limit is None else min(limit, float(steps[rows].min()))
        return steps

    def _alike(self, sharings: Sequence[PortSharing], limit: float | None) -> Floats:
        """`step_seconds` of pipelines whose transfers wait for each other in the same way."""
        costs = replace(self.costs(), links=sharings[0].links)
        ends = self._linear_ends(sharings[0].links)
        if ends is None:
            ends = device_ends(self._program, costs)
        tied = () if self.routes is None else self.routes.tied
        if ends is not None:
            return _reductions(ends, self.exposed_allreduce, sharings, tied)
        # Ports only make steps longer: what is alike without them is a bound.
        steps = self.without_sharing().step_seconds()
        for row in np.argsort(steps, kind="stable").tolist():
            if limit is not None and steps[row] >= limit:
                break
            own = sharings[row]
            single = replace(
                costs.candidate(row), links=own.links, reduce_loads=own.reduce_loads, tied=tied[row]
            )
            steps[row] = step_seconds(self._program, single)[0]
            limit = None if limit is None else min(limit, float(steps[row]))
        return steps

    def after_tied_sums(self, ends: Floats) -> Floats:
        """(stages, pipelines): when the stages are done, whose own gradients are ready at `ends`."""
        if self.routes is None or not any(self.routes.tied):
            return ends
        pairs = zip(ends.T, self.routes.tied, strict=True)
        return np.array([ends_after_sums(own, sums) for own, sums in pairs]).T

    def without_sharing(self) -> Pipelines:
        """The same where every transfer and every all-reduce has ports of its own, and no weight is tied."""
        return replace(self, routes=None)

    def _sharings(self, routes: PipelineRoutes) -> list[PortSharing]:
        """What the stages of each share."""
        count, sharings = self.config.micro_batches, []
        seconds = (routes.at_end.tolist(), routes.before.tolist(), self.occupancy.tolist())
        rows = zip(routes.devices, *seconds, routes.tied, strict=True)
        for devices, at_end, before, occupancy, tied in rows:
            hops = [
                Hop(*route, seconds * count)
                for cut, seconds in enumerate(occupancy)
                for route in ((cut, cut + 1), (cut + 1, cut))
            ]
            exchanged = enumerate(zip(devices, at_end, before, strict=True))
            reduced = [
                AllReduceBytes(stage, own, last, before=earlier)
                for stage, (own, last, earlier) in exchanged
                if len(own) > 1
            ]
            sharings.append(routes.ports.sharing(devices, hops, [*reduced, *tied_exchanges(tied)]))
        return sharings

    def _linear_ends(self, links: npt.NDArray[np.int64] | None) -> Floats | None:
        """`device_ends` with all stages side by side, where that is worth it and can be."""
        count, threads = self.config.micro_batches, self.hosts == "one" and self._is_late
        most = MANY_ACTIONS if self.stages >= MANY_STAGES else 8 * MANY_ACTIONS
        few = 2 * self.stages * count <= most or self.config.recompute == "except_last"
        if few or threads:
            return None
        stages = (self.forward.T, self.backward.T, self.accumulation.T)
        launches = (self.forward_launch.T, self.backward_launch.T) if self._is_late else (None, None)
        costs = LinearCosts(*stages, self.occupancy.T, self.latency.T, links, *launches)
        return linear_ends(self.config.schedule, count, costs)

    @property
    def _is_late(self) -> bool:
        """Whether a stage may wait for its host: something takes longer to launch than to run."""
        if self.hosts == "one":
            return bool(self.forward_launch.any() or self.backward_launch.any())
        passes = [(self.forward_launch, self.forward), (self.backward_launch, self.backward)]
        if self.config.recompute == "except_last":
            passes.append((self.plain_launch, self.plain))
        return any(bool((launch > own - self.accumulation).any()) for launch, own in passes)

    @property
    def _program(self) -> Program:
        return cached_program(self.config.schedule, self.stages, self.config.micro_batches)

    def costs(self) -> Costs:
        """For the simulator."""
        late = self._is_late
        again = self.backward_launch - self.plain_launch
        return linear_costs(
            forward=self._over(self.forward, self.forward),
            backward=self._over(self.backward, self.plain),
            occupancy=self.occupancy.T,
            latency=self.latency.T,
            forward_launch=self._over(self.forward_launch, self.forward_launch) if late else None,
            backward_launch=self._over(self.backward_launch, self.plain_launch) if late else None,
            recompute_launch=self._over(again, 0 * again) if late and self.hosts == "one" else None,
            all_reduce=self.exposed_allreduce.T if self.exposed_allreduce.any() else None,
            accumulation=self.accumulation.T,
            hosts=self.hosts,
        )

    def _over(self, usual: Floats, last: Floats) -> Floats:
        """(stages, micro-batches, pipelines); the last micro-batch differs under except_last."""
        count = self.config.micro_batches
        values = np.broadcast_to(usual.T[:, None, :], (self.stages, count, len(self)))
        if self.config.recompute != "except_last":
            return values
        return np.concatenate([values[:, :-1], last.T[:, None, :]], axis=1)


def _reductions(
    device_ends: Floats,
    exposed_allreduce: Floats,
    sharings: Sequence[PortSharing],
    tied: Sequence[tuple[TiedSum, ...]],
) -> Floats:
    """(pipelines,): the step, where `device_ends` (stages, pipelines) is when the stages have run their last
    actions."""
    ends = device_ends + exposed_allreduce.T
    for row, own in enumerate(sharings):
        if own.reduce_loads:
            ends[:, row] = all_reduce_ends(
                device_ends[:, row].tolist(), exposed_allreduce[row].tolist(), own.reduce_loads
            )
        ends[:, row] = ends_after_sums(ends[:, row], tied[row])
    return np.asarray(ends.max(axis=0))


def find_routes(
    space: Space,
    config: PipelineConfig,
    devices: Sequence[tuple[Ranks, ...]],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> PipelineRoutes:
    """Of pipelines whose stages are on these devices, between cut points (pipelines, stages)."""
    table, precision = space.table(space.chain.sizes[0]), space.number_bytes
    trainable = table.reduced_bytes(space.zero)[starts, ends]
    parameters = np.asarray(table.stage_bytes.parameters)[starts, ends]
    at_end = space.bytes_at_end(trainable)
    by_layer = bytes_by_layer(trainable, parameters, precision, space.zero)
    points = np.array(table.cut_points)[ends].tolist()
    tied = [_tied_sums(space, own, at) for own, at in zip(devices, points, strict=True)]
    return PipelineRoutes(space.ports, devices, at_end, by_layer * config.micro_batches, tied)


def _tied_sums(space: Space, devices: tuple[Ranks, ...], ends: Sequence[int]) -> tuple[TiedSum, ...]:
    """Of one pipeline."""
    stages = [[stage] for stage in range(len(ends))]
    chain, precision = space.chain, space.number_bytes
    return tuple(tied_sums(chain.tied, ends, devices, stages, precision, space.tied_seconds))


def build_pipelines(
    space: Space, proposals: Sequence[Proposal], modes: Sequence[Sequence[Recompute]]
) -> Pipelines:
    """Linear pipelines of one configuration and one number of stages, side by side."""
    config, cut_points = proposals[0].config, list(space.table(space.chain.sizes[0]).cut_points)
    shape = (len(proposals), len(proposals[0].ends))
    names = ("forward", "backward", "plain", "accumulation", "exposed_allreduce")
    columns = {name: np.zeros(shape) for name in (*names, *LAUNCHES)}
    occupancy, latency = (np.zeros((shape[0], shape[1] - 1)) for _ in range(2))
    places_of = np.zeros((2, *shape), dtype=np.int64)
    for row, proposal in enumerate(proposals):
        groups = [space.replica_group(config.micro_batch_size, devices) for devices in proposal.devices]
        for stage, (group, (first, end)) in enumerate(zip(groups, proposal.bounds, strict=True)):
            backward, accumulation = group.backward_seconds(config.micro_batches)
            at = cut_points.index(first), cut_points.index(end)
            again = at[0], repeat_end(cut_points, *at, modes[row][stage])
            copies = group.copy_seconds[at] if modes[row][stage] == OFFLOAD else 0.0
            columns["forward"][row, stage] = group.forward[at] + copies
            columns["plain"][row, stage] = backward[at] + copies
            columns["backward"][row, stage] = (
                backward[at] + copies + (group.forward[again] if again[1] > again[0] else 0.0)
            )
            columns["accumulation"][row, stage] = accumulation[at]
            columns["exposed_allreduce"][row, stage] = group.exposed_allreduce[at]
            places_of[:, row, stage] = at
            launch, plain_launch = group.table.forward_launch[at], group.table.backward_launch[at]
            columns["forward_launch"][row, stage] = launch
            columns["plain_launch"][row, stage] = plain_launch
            columns["backward_launch"][row, stage] = plain_launch + group.table.forward_launch[again]
        for cut, (here, there) in enumerate(pairwise(proposal.devices)):
            place = cut_points.index(proposal.ends[cut])
            sent = max(groups[cut].table.crossing[place], groups[cut + 1].table.crossing[place])
            latency[row, cut], pace = space.pace(here, there)
            occupancy[row, cut] = sent * pace
    return Pipelines(
        config,
        **columns,
        occupancy=occupancy,
        latency=latency,
        hosts=space.hosts,
        routes=find_routes(space, config, [own.devices for own in proposals], places_of[0], places_of[1]),
    )
