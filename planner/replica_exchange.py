"""Exchange between the replicas of a stage under ZeRO, and its seconds.

Rajbhandari et al., "ZeRO", SC 2020, section 7. By ZeRO stage, the replicas of a stage run

    1   after the last backward a reduce-scatter of the gradients, and an all-gather of the updated weights
    2   a reduce-scatter of each layer's gradients in every backward, and the all-gather at the end
    3   as 2, but instead of the all-gather at the end, one of each layer's weights in every forward and in
        every backward

In stage 1 nothing overlaps with compute: DeepSpeed's and PyTorch's pipelines, and Megatron-LM by default,
reduce after the last backward. From stage 2 on, layer k's weights are gathered while the previous layer runs,
and its gradients are reduced while the next one runs, as FSDP2 does. A stage of the layers a to z, with
seconds f and b, all-gathers g and reduce-scatters r by layer, takes

    forward    g_a + sum of max(f_k, g_(k+1))
    backward   g_z + sum of max(b_k, g_(k-1) + r_(k+1)) + r_a      (g = 0 in stage 2)

Without ZeRO, gradients are reduced as DistributedDataParallel does: `search/replica_group.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_models.collectives import AllReduceBytes, TiedSum, all_gather_seconds, reduce_scatter_seconds
from ..cost_models.layer import LayerCosts
from ..cost_models.optimizers import Precision
from ..cost_models.topology import Topology
from .stage_table import Floats, Indices, StageTable, part_seconds


def gradient_bytes(trainable: Floats, precision: Precision) -> Floats:
    """Return the bytes of the gradients of `trainable` bytes of weights, in the dtype of their reduction."""
    return trainable * (precision.gradient / precision.weight)


def bytes_at_end(trainable: Floats, precision: Precision, zero: int) -> Floats:
    """Return the bytes of an all-reduce that sends as much as the exchange after the last backward.

    A reduce-scatter sends half of an all-reduce, and so does an all-gather.

    Args:
        trainable: Bytes of trainable weights by stage.
        precision: Bytes of weights and gradients.
        zero: ZeRO stage.
    """
    if zero == 0:
        return gradient_bytes(trainable, precision)
    if zero == 1:
        return (gradient_bytes(trainable, precision) + trainable) / 2
    return trainable / 2 if zero == 2 else np.zeros_like(trainable)


def bytes_by_layer(trainable: Floats, parameters: Floats, precision: Precision, zero: int) -> Floats:
    """Return the bytes of an all-reduce that sends as much as the exchange in a forward and a backward.

    Args:
        trainable: Bytes of trainable weights by stage.
        parameters: Bytes of all weights by stage.
        precision: Bytes of weights and gradients.
        zero: ZeRO stage.
    """
    if zero < 2:
        return np.zeros_like(trainable)
    reduced = gradient_bytes(trainable, precision) / 2
    return reduced if zero == 2 else reduced + parameters


def tied_exchanges(sums: Sequence[TiedSum]) -> Iterator[AllReduceBytes]:
    """Yield the port loads of the sums of tied weights' gradients, for which no other exchange waits."""
    for number, tied_sum in enumerate(sums):
        yield AllReduceBytes(-1 - number, tied_sum.ranks, 0.0, before=tied_sum.bytes)


@dataclass(frozen=True, eq=False)
class ReplicaExchange:
    """ZeRO exchange between the devices that reduce the gradients of a stage.

    Tables of stages have the shapes of `StageTable`.
    """

    topology: Topology
    devices: Sequence[int]
    precision: Precision
    zero: int

    @property
    def is_by_layer(self) -> bool:
        """True if forwards and backwards exchange something."""
        return self.zero >= 2 and len(self.devices) > 1

    def at_end(self, trainable: Floats) -> Floats:
        """Return the seconds of the exchange after the last backward.

        Args:
            trainable: Bytes of trainable weights by stage.
        """
        if self.zero == 3:
            return np.zeros_like(trainable)
        gathered = np.asarray(all_gather_seconds(self.topology, self.devices, trainable))
        return gathered if self.zero == 2 else gathered + self._reduce_seconds(trainable)

    def forward(self, table: StageTable, seconds: Floats) -> Floats:
        """Return the forward seconds of every stage, exchange included.

        Args:
            table: Costs of all stages.
            seconds: (layers,) forward seconds.
        """
        gathered, (first, last) = self._gather_seconds(table.costs), _ends(table)
        meanwhile = np.maximum(seconds, np.append(gathered[1:], 0.0))
        return _whole(table, gathered[first] + _sum_between(meanwhile, first, last) + seconds[last])

    def backward(self, table: StageTable, seconds: Floats, part: str = "backward") -> Floats:
        """Return the backward seconds of every stage, exchange included.

        Args:
            table: Costs of all stages.
            seconds: (layers,) seconds of the part.
            part: "backward" for a whole one. If it is split, "input", which needs the weights, or "weight",
                which makes the gradients to reduce.
        """
        nothing, costs = np.zeros(len(seconds)), table.costs
        gathered = nothing if part == "weight" else self._gather_seconds(costs)
        reduced = nothing if part == "input" else self._reduce_seconds(costs.trainable_bytes)
        next_gather, last_reduce = np.append(0.0, gathered[:-1]), np.append(reduced[1:], 0.0)
        first, last = _ends(table)
        inner = _sum_between(np.maximum(seconds, next_gather + last_reduce), first + 1, last)
        outer = np.maximum(seconds[last], next_gather[last]) + np.maximum(seconds[first], last_reduce[first])
        several = np.where(first == last, seconds[first], inner + outer)
        return _whole(table, gathered[last] + several + reduced[first])

    def _gather_seconds(self, costs: LayerCosts) -> Floats:
        """Return the (layers,) seconds of an all-gather of each layer's weights."""
        if self.zero < 3:
            return np.zeros(len(costs.parameter_bytes))
        return np.asarray(all_gather_seconds(self.topology, self.devices, costs.parameter_bytes))

    def _reduce_seconds(self, trainable: Floats) -> Floats:
        gradients = gradient_bytes(np.asarray(trainable), self.precision)
        return np.asarray(reduce_scatter_seconds(self.topology, self.devices, gradients))


def _ends(table: StageTable) -> tuple[Indices, Indices]:
    """Return the (n + 1, n + 1) first and last layers of every stage."""
    cut_points = np.array(table.cut_points)
    first = np.minimum(cut_points, len(table.costs.forward_seconds) - 1)
    shape = table.valid.shape
    return np.broadcast_to(first[:, None], shape), np.broadcast_to(np.maximum(cut_points - 1, 0)[None], shape)


def _sum_between(values: Floats, first: Indices, last: Indices) -> Floats:
    """Return the (n + 1, n + 1) sums of `values[first:last]`; `first` is constant in each row."""
    sums = np.zeros(first.shape)
    for row, start in enumerate(first[:, 0].tolist()):
        running = np.append(0.0, np.cumsum(values[start:]))
        sums[row] = running[np.maximum(last[row] - start, 0)]
    return sums


def _whole(table: StageTable, seconds: Floats) -> Floats:
    return np.where(table.valid, seconds, 0.0)


def stage_figure(table: StageTable, name: str, scale: float, exchange: ReplicaExchange) -> Floats:
    """Return a figure of every stage on a device that takes `scale` times as long, exchange included.

    The host that launches is not slower.

    Args:
        table: Costs of all stages.
        name: Attribute of the table, or `input` or `weight`, the parts of a backward. `first_backward` and
            `first_weight` are those of the first micro-batch of a step. If replicas exchange gradients layer
            by layer, the first takes as long as any other.
        scale: Factor on the seconds.
        exchange: Exchange between the replicas.
    """
    part, costs = name.removeprefix("first_"), table.costs
    is_split = part in ("input", "weight")
    if exchange.is_by_layer and part == "forward":
        return exchange.forward(table, costs.forward_seconds * scale)
    if exchange.is_by_layer and (is_split or part == "backward"):
        seconds = part_seconds(costs, part) if is_split else costs.backward_seconds
        return exchange.backward(table, seconds * scale, part)
    values: Floats = table.stage_sums(part_seconds(costs, part)) if is_split else getattr(table, part)
    usual = values * (1.0 if name.endswith("_launch") else scale)
    if name == part:
        return usual
    if part == "backward":
        return usual - table.accumulation * scale
    return usual - table.stage_sums(np.minimum(costs.accumulation, part_seconds(costs, part))) * scale
