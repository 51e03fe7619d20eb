"""What all stages cost on a group of replicas: seconds, the all-reduce, and the micro-batches that fit.

What of the all-reduce follows the last backward is, for one stage, what
`cost_models.collectives.exposed_all_reduce_seconds` says. For all stages at once: buckets are filled from
the end of a stage towards its start, so those of stages with one end are the same, but for the last one.
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
    """The buckets of all stages between `cut_points` (n + 1).

    `closed`: (layer, stage ends, bytes) of the buckets that become complete with a layer, from the last layer
    to the first; `last_bytes` (n + 1, n + 1): bytes of the bucket that stage [start, end] fills last, 0 where
    its first layer completed one; `left_layer`: the layer that it becomes complete with.
    """

    cut_points: tuple[int, ...]
    closed: tuple[tuple[int, Indices, Floats], ...]
    last_bytes: Floats
    left_layer: Indices

    def exposed_seconds(self, backward_seconds: Floats, reduce: Callable[[Floats], Floats]) -> Floats:
        """(n + 1, n + 1): seconds from the end of each stage's backward until its gradients are reduced.

        `backward_seconds` by layer; `reduce`: seconds of an all-reduce of so many bytes.
        """
        # Backward seconds from a layer to the end of its block, and of runs of blocks.
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
        """(layers,): the block of each layer."""
        return np.repeat(np.arange(len(self.cut_points) - 1), np.diff(self.cut_points))

    @cached_property
    def _runs_after_left(self) -> Indices:
        """(n + 1, n + 1): flat indices of the runs of blocks from behind `left_layer` to each stage's end."""
        begins = self._blocks[self.left_layer] + 1
        return np.ravel_multi_index((begins, np.arange(begins.shape[1])[None]), begins.shape)


def make_buckets(gradient_bytes: Floats, cut_points: Sequence[int]) -> Buckets:
    """The buckets as DistributedDataParallel makes them: see `collectives.gradient_buckets`."""
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
    """Of the host of each device: bytes per second of copies there, and as many back; and how many bytes of
    its memory the device may use."""

    bandwidth: float
    limit: float = inf


def find_host(topology: Topology, options: PlanOptions, sharers: int) -> HostMemory | None:
    """The host of every device, the slowest of several kinds; None where no stage may offload. `sharers`:
    GPUs that share every layer. Raises UsageError."""
    if options.recompute != OFFLOAD:
        return None
    if sharers > 1:
        raise UsageError(
            f"recompute={OFFLOAD!r} of layers that {sharers} GPUs share: it is not run",
            "Use recompute='auto', or a profile of whole layers.",
        )
    rates = list[float]()
    for kind in topology.kinds:
        rate = options.host_bandwidth or host_bandwidth(kind.name)
        if rate is None:
            raise UsageError(
                f"recompute={OFFLOAD!r}: how fast {kind.name} copies to its host's memory is not known",
                "Give it: host_bandwidth=25e9 for 25 GB/s, say.",
            )
        rates.append(rate)
    limit = options.host_memory_bytes
    return HostMemory(min(rates), inf if limit is None else float(limit))


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaMemory:
    """Bytes of all stages on a replica, and how many micro-batches fit into `limit` bytes. Tables as of
    `StageTable`."""

    table: StageTable
    replicas: int
    limit: float
    optimizer: str
    ledger: LedgerOptions
    host: HostMemory | None = None
    """Where stages may offload."""
    _room: dict[str, Floats] = field(default_factory=dict, init=False)

    def fits_host(self, in_flight: float) -> npt.NDArray[np.bool_]:
        """Whether the host has memory for so many micro-batches of each stage that offloads."""
        assert self.host is not None
        fits: npt.NDArray[np.bool_] = np.asarray(
            in_flight * self.table.stage_bytes.offloaded <= self.host.limit
        )
        return fits

    def room(
        self, recompute: Recompute, start: Indices, end: Indices, again: Indices | None = None
    ) -> Floats:
        """(pairs,): `most_in_flight` of some stages alone; `again` as of `StageTable.stage_memory`."""
        if recompute in self._room and again is None:
            return self._room[recompute][start, end]
        if recompute == OFFLOAD:
            return self.most_in_flight(recompute)[start, end]
        if self.limit == inf:
            return np.full(len(start), inf)

        return self._most(lambda count, moment: self.pair_bytes(count, recompute, start, end, again, moment))

    def pair_bytes(
        self,
        in_flight: float,
        recompute: Recompute,
        start: Indices,
        end: Indices,
        again: Indices | None = None,
        moment: Moment = "any",
    ) -> Floats:
        """(pairs,): `bytes` of some stages alone; `again` as of `StageTable.stage_memory`."""
        options: LedgerOptions = {**self.ledger, "moment": moment}
        return self.table.stage_memory(
            start, end, in_flight, recompute, self.optimizer, self.replicas, again, **options
        )

    def most_in_flight(self, recompute: Recompute) -> Floats:
        """How many micro-batches each stage has room for, as a fraction; negative where for none."""
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
        """Whether the optimizer's step allocates memory."""
        return find_optimizer(self.optimizer).has_temporaries(self.ledger.get("precision", FLOAT32))

    def bytes(self, in_flight: float, recompute: Recompute, moment: Moment = "any") -> Floats:
        """What each stage needs on one replica."""
        options: LedgerOptions = {**self.ledger, "moment": moment}
        return self.table.memory(in_flight, recompute, self.optimizer, self.replicas, **options)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaGroupCosts(ReplicaMemory):
    """What all stages cost on so many devices of these kinds, so joined.

    Seconds are those of the slowest replica; `accumulation`: of a backward what the first of a step does not
    take; `exposed_allreduce`: of the all-reduce that follows the last backward.
    """

    per_replica_batch: int
    size: int
    forward: Floats
    backward: Floats
    accumulation: Floats
    exposed_allreduce: Floats
    least_tied: Floats | float = 0.0
    """Of sums of tied weights' gradients, at the least: they follow the all-reduce."""

    def backward_seconds(self, micro_batches: int) -> tuple[Floats, Floats]:
        """Backward seconds of a micro-batch, and the part of them that the first of several does not take; a
        single one is the first."""
        if micro_batches > 1:
            return self.backward, self.accumulation
        return self.backward - self.accumulation, np.zeros_like(self.accumulation)

    @cached_property
    def copy_seconds(self) -> Floats:
        """Of what a micro-batch offloads, to the host: at the end of its forward, and as long back."""
        assert self.host is not None
        seconds: Floats = np.asarray(self.table.stage_bytes.offloaded) / self.host.bandwidth
        return seconds


def most_within(limit: float, need: Callable[[float, Moment], Floats], *, temporaries: bool = True) -> Floats:
    """How many micro-batches fit into `limit` bytes, as a fraction; negative where none does.

    `need`: the bytes with so many in flight, at each moment a line; `temporaries`: of the optimizer's step.
    """
    most = _most_at(limit, need(1, "passes"), need(2, "passes"))
    return np.minimum(most, _most_at(limit, need(1, "step"), need(2, "step"))) if temporaries else most


def _most_at(limit: float, one: Floats, two: Floats) -> Floats:
    """From the bytes with one micro-batch held, and with two."""
    base, each = 2 * one - two, two - one
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(each > 0, (limit - base) / each, np.where(one <= limit, inf, -inf))
    # A stage that fits to the byte may not be lost to rounding.
    room: Floats = most * (1 + 1e-12)
    return room
