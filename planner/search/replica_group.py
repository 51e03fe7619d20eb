"""Costs of all stages on a group of replicas: seconds, gradient all-reduce, and micro-batches that fit.

For one stage, `cost_models.collectives.exposed_all_reduce_seconds` gives the part of the all-reduce that
follows the last backward. This module computes it for all stages at once. Buckets are filled from the end of
a stage towards its start, so stages with the same end share all buckets but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES
from ...cost_models.errors import UsageError
from ...cost_models.machines import host_bandwidth
from ...cost_models.memory import LedgerOptions, Moment, Recompute
from ...cost_models.optimizers import FLOAT32, find_optimizer
from ...cost_models.runtime import OFFLOAD
from ...cost_models.topology import Topology
from ..plan_options import PlanOptions
from ..stage_table import Floats, Indices, StageTable, sum_runs, sum_within


@dataclass(frozen=True, eq=False)
class Buckets:
    """Gradient buckets of all stages between n + 1 cut points.

    Attributes:
        cut_points: Numbers of layers before each cut point.
        closed: (layer, stage ends, bytes) of the buckets that a layer completes, from the last layer to the
            first.
        last_bytes: (n + 1, n + 1) bytes of the bucket that stage [start, end] fills last; 0 if its first
            layer completed a bucket.
        left_layer: (n + 1, n + 1) layer that completes this last bucket.
    """

    cut_points: tuple[int, ...]
    closed: tuple[tuple[int, Indices, Floats], ...]
    last_bytes: Floats
    left_layer: Indices

    def exposed_seconds(self, backward_seconds: Floats, reduce: Callable[[Floats], Floats]) -> Floats:
        """Return the seconds from the end of each stage's last backward until its gradients are reduced.

        Args:
            backward_seconds: (layers,) seconds of a backward.
            reduce: Function from bytes to the seconds of their all-reduce.

        Returns:
            (n + 1, n + 1) seconds.
        """
        # `tails`: backward seconds from a layer to the end of its block. `runs`: those of runs of blocks.
        layers = len(backward_seconds)
        tails = sum_within(backward_seconds[::-1], [layers - cut for cut in self.cut_points[::-1]])[::-1]
        runs = sum_runs(tails[list(self.cut_points[:-1])])
        end, ends_by_start = np.zeros(len(runs)), np.zeros_like(runs)
        closings = list(self.closed)
        seconds = np.split(
            reduce(np.concatenate([np.zeros(0), *(sizes for _, _, sizes in closings)])),
            np.cumsum([len(sizes) for _, _, sizes in closings])[:-1],
        )
        step = 0
        for start in reversed(range(len(runs) - 1)):
            while step < len(closings) and closings[step][0] >= self.cut_points[start]:
                layer, ends, _ = closings[step]
                ready = tails[layer] + runs[self._blocks[layer] + 1, ends]
                end[ends] = np.maximum(end[ends], ready) + seconds[step]
                step += 1
            ends_by_start[start] = end
        ready = tails.take(self.left_layer) + runs.take(self._runs_after_left)
        reduced = np.maximum(ends_by_start, ready) + reduce(self.last_bytes)
        whole = np.where(self.last_bytes > 0, reduced, ends_by_start)
        seconds_after: Floats = np.triu(np.maximum(whole - runs, 0.0), 1)
        return seconds_after

    @cached_property
    def _blocks(self) -> Indices:
        """(layers,) block of each layer."""
        return np.repeat(np.arange(len(self.cut_points) - 1), np.diff(self.cut_points))

    @cached_property
    def _runs_after_left(self) -> Indices:
        """(n + 1, n + 1) flat indices of the runs of blocks between `left_layer` and each stage's end."""
        begins = self._blocks[self.left_layer] + 1
        return np.ravel_multi_index((begins, np.arange(begins.shape[1])[None]), begins.shape)


def make_buckets(gradient_bytes: Floats, cut_points: Sequence[int]) -> Buckets:
    """Return the buckets that DistributedDataParallel makes, see `collectives.gradient_buckets`.

    Args:
        gradient_bytes: (layers,) bytes of gradients.
        cut_points: Numbers of layers before each cut point.
    """
    ends = np.array(cut_points)
    filled, size = np.zeros(len(ends)), np.full(len(ends), float(FIRST_BUCKET_BYTES))
    last = np.zeros(len(ends), dtype=np.int64)
    last_bytes, left_layer = np.zeros((len(ends),) * 2), np.zeros((len(ends),) * 2, dtype=np.int64)
    closed, row_of = [], {layer: row for row, layer in enumerate(cut_points)}
    for layer in reversed(range(cut_points[-1])):
        if gradient_bytes[layer] > 0:
            inside = ends > layer
            filled[inside] += gradient_bytes[layer]
            last[inside] = layer
            full = inside & (filled >= size)
            if full.any():
                closed.append((layer, np.flatnonzero(full), filled[full].copy()))
                filled[full], size[full] = 0.0, float(BUCKET_BYTES)
        if layer in row_of:
            last_bytes[row_of[layer]], left_layer[row_of[layer]] = filled, last
    return Buckets(tuple(cut_points), tuple(closed), last_bytes, left_layer)


class HostMemory(NamedTuple):
    """Host memory of each device, as a target of offloading.

    Attributes:
        bandwidth: Bytes per second of copies to the host, and as many back.
        limit: Bytes of host memory that each device may use.
    """

    bandwidth: float
    limit: float = inf


def find_host(topology: Topology, options: PlanOptions, sharers: int) -> HostMemory | None:
    """Return the host memory of every device, the slowest of several kinds.

    Args:
        topology: Devices.
        options: Options of the plan.
        sharers: GPUs that share every layer.

    Returns:
        The host memory; None if no stage may offload.

    Raises:
        UsageError: Layers are shared by several GPUs, or the copy bandwidth of a device is unknown.
    """
    if options.recompute != OFFLOAD:
        return None
    if sharers > 1:
        raise UsageError(
            f"recompute={OFFLOAD!r} is not supported for layers that {sharers} GPUs share",
            "Use recompute='auto', or a profile of whole layers.",
        )
    rates = list[float]()
    for kind in topology.kinds:
        rate = options.host_bandwidth or host_bandwidth(kind.name)
        if rate is None:
            raise UsageError(
                f"recompute={OFFLOAD!r}: the bandwidth between {kind.name} and its host is unknown",
                "Set it, for example host_bandwidth=25e9 for 25 GB/s.",
            )
        rates.append(rate)
    limit = options.host_memory_bytes
    return HostMemory(min(rates), inf if limit is None else float(limit))


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaMemory:
    """Bytes of all stages on one replica, and the micro-batches that fit into `limit` bytes.

    Attributes:
        table: Costs of all stages at the replica's share of a micro-batch.
        replicas: Number of replicas of each stage.
        limit: Bytes that a device may hold.
        optimizer: Name of the optimizer.
        ledger: Options of the memory ledger.
    """

    table: StageTable
    replicas: int
    limit: float
    optimizer: str
    ledger: LedgerOptions
    host: HostMemory | None = None
    """Host memory for stages that offload. None if they may not."""
    _room: dict[str, Floats] = field(default_factory=dict, init=False)

    def fits_host(self, in_flight: float) -> npt.NDArray[np.bool_]:
        """Return a mask of the stages whose offloaded micro-batches in flight fit on the host."""
        assert self.host is not None
        fits: npt.NDArray[np.bool_] = np.asarray(
            in_flight * self.table.stage_bytes.offloaded <= self.host.limit
        )
        return fits

    def room(
        self, recompute: Recompute, start: Indices, end: Indices, recompute_end: Indices | None = None
    ) -> Floats:
        """Return how many micro-batches fit, for some stages (see `most_in_flight`).

        Args:
            recompute: Recomputation mode.
            start: (pairs,) cut points where the stages begin.
            end: (pairs,) cut points where they end.
            recompute_end: (pairs,) cut points up to which they recompute, see `StageTable.stage_memory`.

        Returns:
            (pairs,) micro-batches.
        """
        if recompute in self._room and recompute_end is None:
            return self._room[recompute][start, end]
        if recompute == OFFLOAD:
            return self.most_in_flight(recompute)[start, end]
        if self.limit == inf:
            return np.full(len(start), inf)

        return self._most(
            lambda count, moment: self.pair_bytes(count, recompute, start, end, recompute_end, moment)
        )

    def pair_bytes(
        self,
        in_flight: float,
        recompute: Recompute,
        start: Indices,
        end: Indices,
        recompute_end: Indices | None = None,
        moment: Moment = "any",
    ) -> Floats:
        """Return the bytes of some stages on one replica.

        Args:
            in_flight: Micro-batches in flight.
            recompute: Recomputation mode.
            start: (pairs,) cut points where the stages begin.
            end: (pairs,) cut points where they end.
            recompute_end: (pairs,) cut points up to which they recompute, see `StageTable.stage_memory`.
            moment: Phase of the step that is counted.

        Returns:
            (pairs,) bytes.
        """
        options: LedgerOptions = {**self.ledger, "moment": moment}
        return self.table.stage_memory(
            start, end, in_flight, recompute, self.optimizer, self.replicas, recompute_end, **options
        )

    def most_in_flight(self, recompute: Recompute) -> Floats:
        """Return the micro-batches that each stage has room for, as a fraction; negative for none."""
        if recompute not in self._room:
            self._room[recompute] = (
                np.full(self.table.valid.shape, inf)
                if self.limit == inf
                else self._most(lambda in_flight, moment: self.bytes(in_flight, recompute, moment))
            )
            if recompute == OFFLOAD and self.host is not None and self.host.limit < inf:
                with np.errstate(divide="ignore"):
                    most = self.host.limit / np.asarray(self.table.stage_bytes.offloaded)
                self._room[recompute] = np.minimum(self._room[recompute], most)
        return self._room[recompute]

    def _most(self, need: Callable[[float, Moment], Floats]) -> Floats:
        return most_within(self.limit, need, temporaries=self.has_temporaries)

    @property
    def has_temporaries(self) -> bool:
        """True if the optimizer's step allocates temporary memory."""
        return find_optimizer(self.optimizer).has_temporaries(self.ledger.get("precision", FLOAT32))

    def bytes(self, in_flight: float, recompute: Recompute, moment: Moment = "any") -> Floats:
        """Return the bytes that each stage needs on one replica with `in_flight` micro-batches."""
        options: LedgerOptions = {**self.ledger, "moment": moment}
        return self.table.memory(in_flight, recompute, self.optimizer, self.replicas, **options)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaGroupCosts(ReplicaMemory):
    """Costs of all stages on one group of devices with given kinds and links.

    Seconds are those of the slowest replica. Arrays have shape (cut points, cut points).

    Attributes:
        per_replica_batch: Samples of a micro-batch on one replica.
        size: Samples of a micro-batch on all replicas.
        forward: Forward seconds of a micro-batch.
        backward: Backward seconds of a micro-batch, without recomputation.
        accumulation: Seconds that the first backward of a step saves because it adds to no gradients.
        exposed_allreduce: Seconds of the all-reduce after the last backward.
    """

    per_replica_batch: int
    size: int
    forward: Floats
    backward: Floats
    accumulation: Floats
    exposed_allreduce: Floats
    least_tied: Floats | float = 0.0
    """Least seconds of the sums of tied weights' gradients, which follow the all-reduce."""

    def backward_seconds(self, micro_batches: int) -> tuple[Floats, Floats]:
        """Return the backward seconds of a micro-batch, and the part that the first one of a step saves.

        With a single micro-batch, the only backward is the first one.
        """
        if micro_batches > 1:
            return self.backward, self.accumulation
        return self.backward - self.accumulation, np.zeros_like(self.accumulation)

    @cached_property
    def copy_seconds(self) -> Floats:
        """Seconds to copy a micro-batch's activations to the host, and as many back."""
        assert self.host is not None
        seconds: Floats = np.asarray(self.table.stage_bytes.offloaded) / self.host.bandwidth
        return seconds


def most_within(limit: float, need: Callable[[float, Moment], Floats], *, temporaries: bool = True) -> Floats:
    """Return how many micro-batches fit into `limit` bytes, as a fraction; negative if none does.

    Args:
        limit: Bytes that a device may hold.
        need: Function from micro-batches in flight and moment of the step to bytes. It is linear in the
            micro-batches at each moment.
        temporaries: Whether the optimizer's step allocates temporary memory, so that it is checked, too.
    """
    most = _most_at(limit, need(1, "passes"), need(2, "passes"))
    return np.minimum(most, _most_at(limit, need(1, "step"), need(2, "step"))) if temporaries else most


def _most_at(limit: float, with_one: Floats, with_two: Floats) -> Floats:
    """Return the micro-batches that fit, from the bytes with one and with two micro-batches in flight."""
    base, each = 2 * with_one - with_two, with_two - with_one
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(each > 0, (limit - base) / each, np.where(with_one <= limit, inf, -inf))
    # Rounding must not exclude a stage that fits to the byte.
    room: Floats = most * (1 + 1e-12)
    return room
