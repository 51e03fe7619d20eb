"""Complete pipelines as arrays, with all inputs of their simulated step."""

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
"""Names of the host seconds of a stage."""
MANY_ACTIONS, MANY_STAGES = 50_000, 12
"""Longer steps are simulated for all stages at once; with fewer stages, steps of 8 times as many actions."""


@dataclass(frozen=True, eq=False)
class PipelineRoutes:
    """Devices of pipelines, and the bytes that their replicas exchange.

    Attributes:
        ports: Ports that stages share.
        devices: By pipeline, the ranks of each stage.
        at_end: (pipelines, stages) bytes exchanged after the last backward, see `replica_exchange`.
        before: (pipelines, stages) bytes exchanged before its end.
        tied: By pipeline, the sums of tied weights' gradients.
    """

    ports: TopologyPorts
    devices: Sequence[tuple[Ranks, ...]]
    at_end: Floats
    before: Floats
    tied: Sequence[tuple[TiedSum, ...]]

    def select(self, rows: npt.NDArray[np.int64]) -> PipelineRoutes:
        """Return the routes of some pipelines."""
        devices = [self.devices[row] for row in rows]
        tied = [self.tied[row] for row in rows]
        return PipelineRoutes(self.ports, devices, self.at_end[rows], self.before[rows], tied)


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines of one configuration with equal numbers of stages.

    Arrays hold seconds and have shape (pipelines, stages); transfers have (pipelines, stages - 1).

    Attributes:
        config: Configuration.
        forward: Forward of a micro-batch.
        backward: Backward with recomputation.
        plain: Backward without recomputation (that of the last micro-batch under `except_last`).
        accumulation: Seconds that the first of several backwards saves.
        exposed_allreduce: All-reduce after the last backward.
        occupancy: Seconds for which a transfer takes its link.
        latency: Latency of a transfer.
        forward_launch: Host seconds of a forward.
        backward_launch: Host seconds of a backward with recomputation.
        plain_launch: Host seconds of a backward without recomputation.
        hosts: Number of launching processes, see `Costs`.
        routes: Devices and ports that stages share. None if nothing is shared.
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
        """Return the number of pipelines."""
        return len(self.forward)

    @property
    def stages(self) -> int:
        """Number of stages of each pipeline."""
        return int(self.forward.shape[1])

    def select(self, rows: npt.NDArray[np.int64]) -> Pipelines:
        """Return some of the pipelines."""
        arrays = {name: values[rows] for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        routes = None if self.routes is None else self.routes.select(rows)
        return replace(self, routes=routes, **arrays)  # type: ignore[arg-type] # arrays only

    def step_seconds(self, limit: float | None = None) -> Floats:
        """Return the simulated step seconds of each pipeline.

        Args:
            limit: If given, only the fastest pipeline needs its exact step, and only if it is below the
                limit. The others get a bound that is at least the fastest step or the limit.

        Returns:
            (pipelines,) seconds.
        """
        if self.routes is None:
            if (ends := self._linear_ends(None)) is not None:
                return np.asarray((ends + self.exposed_allreduce.T).max(axis=0))
            return step_seconds(self._program, self.costs())
        sharings = self._sharings(self.routes)
        steps = np.array([alike_steps.port_seconds for alike_steps in sharings])
        patterns: dict[bytes, list[int]] = {}
        for row in range(len(self)) if limit is None else np.flatnonzero(steps < limit).tolist():
            patterns.setdefault(sharings[row].pattern, []).append(row)
        for rows in patterns.values():
            alike_steps = self.select(np.array(rows))._alike([sharings[row] for row in rows], limit)
            steps[rows] = np.maximum(steps[rows], alike_steps)
            limit = None if limit is None else min(limit, float(steps[rows].min()))
        return steps

    def _alike(self, sharings: Sequence[PortSharing], limit: float | None) -> Floats:
        """Return `step_seconds` of pipelines whose transfers wait for each other in the same way."""
        costs = replace(self.costs(), links=sharings[0].links)
        ends = self._linear_ends(sharings[0].links)
        if ends is None:
            ends = device_ends(self._program, costs)
        tied = () if self.routes is None else self.routes.tied
        if ends is not None:
            return _reductions(ends, self.exposed_allreduce, sharings, tied)
        # Shared ports only make steps longer, so the steps without them are bounds.
        steps = self.without_sharing().step_seconds()
        for row in np.argsort(steps, kind="stable").tolist():
            if limit is not None and steps[row] >= limit:
                break
            sharing = sharings[row]
            single = replace(
                costs.candidate(row), links=sharing.links, reduce_loads=sharing.reduce_loads, tied=tied[row]
            )
            steps[row] = step_seconds(self._program, single)[0]
            limit = None if limit is None else min(limit, float(steps[row]))
        return steps

    def after_tied_sums(self, ends: Floats) -> Floats:
        """Return (stages, pipelines) end times after the sums of tied weights' gradients.

        Args:
            ends: (stages, pipelines) times at which the stages' gradients are ready.
        """
        if self.routes is None or not any(self.routes.tied):
            return ends
        pairs = zip(ends.T, self.routes.tied, strict=True)
        return np.array([ends_after_sums(stage_ends, sums) for stage_ends, sums in pairs]).T

    def without_sharing(self) -> Pipelines:
        """Return the same pipelines with unshared ports and no tied weights."""
        return replace(self, routes=None)

    def _sharings(self, routes: PipelineRoutes) -> list[PortSharing]:
        """Return the ports that the stages of each pipeline share."""
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
                AllReduceBytes(stage, ranks, last, before=earlier)
                for stage, (ranks, last, earlier) in exchanged
                if len(ranks) > 1
            ]
            sharings.append(routes.ports.sharing(devices, hops, [*reduced, *tied_exchanges(tied)]))
        return sharings

    def _linear_ends(self, links: npt.NDArray[np.int64] | None) -> Floats | None:
        """Return `device_ends`, computed for all stages at once, or None if that does not pay."""
        count, threads = self.config.micro_batches, self.hosts == "one" and self._is_late
        most = MANY_ACTIONS if self.stages >= MANY_STAGES else 8 * MANY_ACTIONS
        unsuitable = 2 * self.stages * count <= most or self.config.recompute == "except_last"
        if unsuitable or threads:
            return None
        stages = (self.forward.T, self.backward.T, self.accumulation.T)
        launches = (self.forward_launch.T, self.backward_launch.T) if self._is_late else (None, None)
        costs = LinearCosts(*stages, self.occupancy.T, self.latency.T, links, *launches)
        return linear_ends(self.config.schedule, count, costs)

    @property
    def _is_late(self) -> bool:
        """True if a stage may wait for its host, because an action takes longer to launch than to run."""
        if self.hosts == "one":
            return bool(self.forward_launch.any() or self.backward_launch.any())
        passes = [(self.forward_launch, self.forward), (self.backward_launch, self.backward)]
        if self.config.recompute == "except_last":
            passes.append((self.plain_launch, self.plain))
        return any(bool((launch > seconds - self.accumulation).any()) for launch, seconds in passes)

    @property
    def _program(self) -> Program:
        return cached_program(self.config.schedule, self.stages, self.config.micro_batches)

    def costs(self) -> Costs:
        """Return the inputs of the simulator."""
        late = self._is_late
        recompute_launch = self.backward_launch - self.plain_launch
        return linear_costs(
            forward=self._over(self.forward, self.forward),
            backward=self._over(self.backward, self.plain),
            occupancy=self.occupancy.T,
            latency=self.latency.T,
            forward_launch=self._over(self.forward_launch, self.forward_launch) if late else None,
            backward_launch=self._over(self.backward_launch, self.plain_launch) if late else None,
            recompute_launch=self._over(recompute_launch, 0 * recompute_launch)
            if late and self.hosts == "one"
            else None,
            all_reduce=self.exposed_allreduce.T if self.exposed_allreduce.any() else None,
            accumulation=self.accumulation.T,
            hosts=self.hosts,
        )

    def _over(self, usual: Floats, last: Floats) -> Floats:
        """Return (stages, micro-batches, pipelines) seconds.

        The last micro-batch differs under `except_last`.
        """
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
    """Return (pipelines,) step seconds after all reductions.

    `device_ends` are the (stages, pipelines) times at which the stages have run their last actions.
    """
    ends = device_ends + exposed_allreduce.T
    for row, sharing in enumerate(sharings):
        if sharing.reduce_loads:
            ends[:, row] = all_reduce_ends(
                device_ends[:, row].tolist(), exposed_allreduce[row].tolist(), sharing.reduce_loads
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
    """Return the devices of pipelines and the bytes that their replicas exchange.

    Args:
        space: Costs and ports.
        config: Configuration of the pipelines.
        devices: By pipeline, the ranks of each stage.
        starts: (pipelines, stages) cut points where the stages begin.
        ends: (pipelines, stages) cut points where they end.
    """
    table, precision = space.table(space.chain.sizes[0]), space.number_bytes
    trainable = table.reduced_bytes(space.zero)[starts, ends]
    parameters = np.asarray(table.stage_bytes.parameters)[starts, ends]
    at_end = space.bytes_at_end(trainable)
    by_layer = bytes_by_layer(trainable, parameters, precision, space.zero)
    points = np.array(table.cut_points)[ends].tolist()
    tied = [_tied_sums(space, ranks, stage_ends) for ranks, stage_ends in zip(devices, points, strict=True)]
    return PipelineRoutes(space.ports, devices, at_end, by_layer * config.micro_batches, tied)


def _tied_sums(space: Space, devices: tuple[Ranks, ...], ends: Sequence[int]) -> tuple[TiedSum, ...]:
    """Return the sums of tied weights' gradients of one pipeline."""
    stages = [[stage] for stage in range(len(ends))]
    chain, precision = space.chain, space.number_bytes
    return tuple(tied_sums(chain.tied, ends, devices, stages, precision, space.tied_seconds))


def build_pipelines(
    space: Space, proposals: Sequence[Proposal], modes: Sequence[Sequence[Recompute]]
) -> Pipelines:
    """Return linear pipelines of one configuration and one number of stages as arrays.

    Args:
        space: Costs and limits.
        proposals: The plans.
        modes: By plan, the recomputation of each stage.
    """
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
            repeated = at[0], repeat_end(cut_points, *at, modes[row][stage])
            copies = group.copy_seconds[at] if modes[row][stage] == OFFLOAD else 0.0
            columns["forward"][row, stage] = group.forward[at] + copies
            columns["plain"][row, stage] = backward[at] + copies
            columns["backward"][row, stage] = (
                backward[at] + copies + (group.forward[repeated] if repeated[1] > repeated[0] else 0.0)
            )
            columns["accumulation"][row, stage] = accumulation[at]
            columns["exposed_allreduce"][row, stage] = group.exposed_allreduce[at]
            places_of[:, row, stage] = at
            launch, plain_launch = group.table.forward_launch[at], group.table.backward_launch[at]
            columns["forward_launch"][row, stage] = launch
            columns["plain_launch"][row, stage] = plain_launch
            columns["backward_launch"][row, stage] = plain_launch + group.table.forward_launch[repeated]
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
        routes=find_routes(
            space, config, [proposal_.devices for proposal_ in proposals], places_of[0], places_of[1]
        ),
    )
