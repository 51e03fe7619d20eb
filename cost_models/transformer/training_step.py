"""Seconds and memory of a training step of a transformer with given degrees of parallelism.

A step: the pipeline (1F1B; sends and receives block, as in Megatron-LM without overlap), the reduction of the
gradients in float32, the optimizer's update, and the gathering of the updated weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from ..errors import UsageError
from ..schedules.action import Program
from ..schedules.one_f_one_b import in_flight, program
from ..simulator.pipeline_costs import PipelineCosts
from ..timeline import simulate
from .block_kernels import NUMBER, LayerKernels, Tokens, block_work, embedding_work, head_work
from .parallel_degrees import ParallelDegrees, padded_vocabulary
from .rank_costs import PassSeconds, RankCosts, rank_group
from .transformer_shape import LayerParameters, TransformerShape

Recomputation = Literal["none", "full"]
WEIGHT, GRADIENT, STATE = 2, 4, 12
"""Bytes of a parameter: in bfloat16, its float32 gradient, and Adam's float32 master weight and two
moments."""
_UPDATED = GRADIENT + 3 * 2 * 4 + WEIGHT
"""That the update of a parameter reads and writes."""


class ParameterCounts(NamedTuple):
    """Of one device: dense ones, and those of its routed experts."""

    dense: float
    routed: float

    def plus(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(self.dense + other.dense, self.routed + other.routed)


@dataclass(frozen=True)
class TrainingSetting:
    """What a step trains: `micro_batches` of `tokens` on each replica. `recompute` full: a block keeps its
    input, and runs its forward again before its backward."""

    micro_batches: int
    tokens: Tokens
    recompute: Recomputation = "none"


@dataclass(frozen=True)
class StageEstimate:
    """Of one device of a stage: `ledger` in bytes by term, at its peak."""

    blocks: range
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    ledger: dict[str, float]

    @property
    def bytes(self) -> float:
        """At the peak."""
        return sum(self.ledger.values())


@dataclass(frozen=True)
class StepEstimate:
    """Of a training step. `update_seconds`: after the pipeline; of the stage that takes longest."""

    step_seconds: float
    pipeline_seconds: float
    update_seconds: float
    stages: tuple[StageEstimate, ...]

    @property
    def peak_bytes(self) -> float:
        """Of the device that needs most."""
        return max(stage.bytes for stage in self.stages)


def even_blocks(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage, as equal as can be; the first stages and then the last have those that are left
    out, since embedding and head are there."""
    base, left = divmod(blocks, stages)
    middle = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    more = set(middle[:left])
    return [base + (stage in more) for stage in range(stages)]


def estimate_step(
    shape: TransformerShape,
    degrees: ParallelDegrees,
    setting: TrainingSetting,
    costs: RankCosts,
    blocks: Sequence[int] | None = None,
) -> StepEstimate:
    """Of the stages with so many `blocks` each (None: even ones). Raises UsageError for what cannot be."""
    degrees.check(shape, setting.tokens.sequence)
    counts = even_blocks(shape.blocks, degrees.pipeline) if blocks is None else list(blocks)
    if len(counts) != degrees.pipeline or sum(counts) != shape.blocks or min(counts) < 0:
        raise UsageError(
            f"blocks={counts}: not {degrees.pipeline} stages of {shape.blocks} blocks", "Let them add up."
        )
    return estimate_stages(LayerTable(shape, degrees, setting, costs), counts)


def estimate_stages(layers: LayerTable, counts: Sequence[int]) -> StepEstimate:
    """Of the stages with so many blocks each, which add up."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    stages = tuple(layers.stage(own, index) for index, own in enumerate(ranges))
    pipeline = _pipeline_seconds(stages, layers.transfer_seconds, layers.setting.micro_batches)
    update = max(stage.update_seconds for stage in stages)
    return StepEstimate(pipeline + update, pipeline, update, stages)


class LayerTable:
    """What each kind of layer costs on one device; the stages are sums of them."""

    def __init__(
        self, shape: TransformerShape, degrees: ParallelDegrees, setting: TrainingSetting, costs: RankCosts
    ) -> None:
        self.shape, self.degrees, self.setting, self.costs = shape, degrees, setting, costs
        tokens = setting.tokens
        self.blocks = {routed: block_work(shape, routed, degrees, tokens) for routed in set(shape.routed)}
        self.embedding = embedding_work(shape, degrees, tokens)
        self.head = head_work(shape, degrees, tokens)
        self._seconds = {routed: self._block_seconds(work) for routed, work in self.blocks.items()}
        self._ends = [costs.seconds(work, degrees) for work in (self.embedding, self.head)]
        self._bytes: dict[tuple[int, int, int], float] = {}
        self._routed_before = [0, *accumulate(shape.routed)]
        self._boundary = NUMBER * tokens.on(degrees) * shape.hidden / degrees.tensor

    @property
    def transfer_seconds(self) -> float:
        """Of what crosses a cut, from a device to the one that follows it in the pipeline."""
        degrees = self.degrees
        if degrees.pipeline == 1:
            return 0.0
        return self.costs.links.transfer(self._boundary, degrees.tensor * degrees.context * degrees.data)

    def seconds(self, blocks: range, stage: int) -> PassSeconds:
        """Of a micro-batch on a stage."""
        parts = [(count, self._seconds[routed]) for routed, count in self._kinds(blocks)]
        if stage == 0:
            parts.append((1, self._ends[0]))
        if stage == self.degrees.pipeline - 1:
            parts.append((1, self._ends[1]))
        return PassSeconds(
            sum(n * own.forward for n, own in parts), sum(n * own.backward for n, own in parts)
        )

    def whole_seconds(self) -> float:
        """Of a micro-batch, forward and backward, on all stages."""
        blocks = sum(self._seconds[routed].both for routed in self.shape.routed)
        return blocks + sum(end.both for end in self._ends)

    def least_slowest_seconds(self) -> float:
        """That the slowest stage takes at least: the mean, or the longest layer."""
        longest = max(own.both for own in (*self._seconds.values(), *self._ends))
        return max(self.whole_seconds() / self.degrees.pipeline, longest)

    def least_backward_share(self) -> float:
        """Of a layer's seconds those of its backward, where that is smallest."""
        return min(own.backward / own.both for own in (*self._seconds.values(), *self._ends))

    def least_update_seconds(self) -> float:
        """That the slowest stage takes at least, however the blocks are divided: no less than their mean, and
        an update's seconds grow with the parameters on a straight line."""
        stages = self.degrees.pipeline
        parts = [self.parameters(range(0), stage) for stage in {0, stages - 1}]
        for routed, count in self._kinds(range(self.shape.blocks)):
            own = self._block_parameters(routed)
            parts.append(ParameterCounts(count * own.dense, count * own.routed))
        dense = sum(part.dense for part in parts) / stages
        experts = sum(part.routed for part in parts) / stages
        once, twice = (self._update_seconds(ParameterCounts(0, times * experts)) for times in (1, 2))
        return self._update_seconds(ParameterCounts(dense, 0)) + twice - once

    def _counts(self, blocks: range) -> tuple[int, int]:
        """Blocks without experts and with."""
        routed = self._routed_before[blocks.stop] - self._routed_before[blocks.start]
        return len(blocks) - routed, routed

    def _kinds(self, blocks: range) -> list[tuple[bool, int]]:
        """With experts or without: how many of the blocks."""
        dense, routed = self._counts(blocks)
        return [(kind, count) for kind, count in ((True, routed), (False, dense)) if count]

    def stage(self, blocks: range, stage: int) -> StageEstimate:
        seconds = self.seconds(blocks, stage)
        own = self.parameters(blocks, stage)
        return StageEstimate(
            blocks, seconds.forward, seconds.backward, self._update_seconds(own), self.ledger(blocks, stage)
        )

    def parameters(self, blocks: range, stage: int) -> ParameterCounts:
        """On one device of a stage."""
        degrees, shape = self.degrees, self.shape
        table = padded_vocabulary(shape, degrees.tensor) * shape.hidden / degrees.tensor
        first, last = stage == 0, stage == degrees.pipeline - 1
        tables = table * (first + last - (first and last and shape.tied)) + shape.hidden * last
        parts = [(count, self._block_parameters(routed)) for routed, count in self._kinds(blocks)]
        return ParameterCounts(
            tables + sum(n * own.dense for n, own in parts), sum(n * own.routed for n, own in parts)
        )

    def ledger(self, blocks: range, stage: int) -> dict[str, float]:
        """Bytes by term of one device of a stage, at its peak: in the head, or where the last block's
        backward begins."""
        degrees, setting = self.degrees, self.setting
        dense, routed = self.parameters(blocks, stage)
        spread = (degrees.gradient_group, degrees.expert_gradient_group) if degrees.zero else (1, 1)
        works = [(count, self.blocks[routed]) for routed, count in self._kinds(blocks)]
        last = stage == degrees.pipeline - 1
        alive = in_flight(stage, degrees.pipeline, setting.micro_batches)
        if setting.recompute == "full":
            saved = alive * len(blocks) * self._boundary
            rebuilt = max((work.saved + work.workspace for _, work in works), default=0.0)
        else:
            saved = alive * sum(count * work.saved for count, work in works)
            rebuilt = max((work.workspace for _, work in works), default=0.0)
        return {
            "weights": WEIGHT * (dense + routed),
            "gradients": GRADIENT * (dense + routed),
            "optimizer": STATE * (dense / spread[0] + routed / spread[1]),
            "activations": saved,
            "workspace": max(rebuilt, self.head.saved if last else 0.0),
            "placeholders": self._placeholders(blocks),
            "libraries": LIBRARIES,
        }

    def stage_bytes(self, blocks: range, stage: int) -> float:
        """The sum of its ledger."""
        dense, routed = self._counts(blocks)
        key = stage, dense, routed
        if key not in self._bytes:
            self._bytes[key] = sum(self.ledger(blocks, stage).values())
        return self._bytes[key]

    def least_bytes(self) -> float:
        """That the largest stage needs at least: the mean of what weights, gradients and states need."""
        states = ("weights", "gradients", "optimizer")
        stages = self.degrees.pipeline
        ends = sum(sum(self.ledger(range(0), stage)[name] for name in states) for stage in {0, stages - 1})
        whole = self.ledger(range(self.shape.blocks), 0)
        first = self.ledger(range(0), 0)
        return (ends + sum(whole[name] - first[name] for name in states)) / stages

    def peak_bytes(self, counts: Sequence[int]) -> float:
        """Of the device that needs most, of stages with so many blocks."""
        ends = list(accumulate(counts))
        ranges = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return max(self.stage_bytes(own, stage) for stage, own in enumerate(ranges))

    def _block_seconds(self, work: LayerKernels) -> PassSeconds:
        forward, backward = self.costs.seconds(work, self.degrees)
        return PassSeconds(forward, backward + (forward if self.setting.recompute == "full" else 0.0))

    def _block_parameters(self, routed: bool) -> ParameterCounts:
        attention = self._on_device(self.shape.attention_parameters())
        return attention.plus(self._on_device(self.shape.feed_forward_parameters(routed)))

    def _on_device(self, layer: LayerParameters) -> ParameterCounts:
        degrees = self.degrees
        return ParameterCounts(layer.whole + layer.shared / degrees.tensor, layer.routed / degrees.expert)

    def _update_seconds(self, own: ParameterCounts) -> float:
        """Reduction, update and gathering of the weights; with ZeRO each device updates its share."""
        total = 0.0
        for count, group in ((own.dense, "gradients"), (own.routed, "expert_gradients")):
            if not count:
                continue
            size, stride = rank_group(group, self.degrees)
            links = self.costs.links
            share = count
            if size > 1 and self.degrees.zero:
                share = count / size
                total += links.collective("reduce_scatter", GRADIENT * count, size, stride)
                total += links.collective("all_gather", WEIGHT * count, size, stride)
            elif size > 1:
                total += links.collective("all_reduce", GRADIENT * count, size, stride)
            # The gradients are zeroed, their norm is taken, the weights are updated.
            for bytes in (GRADIENT * count, GRADIENT * share, _UPDATED * share):
                total += self.costs.memory_seconds(bytes)
        return total

    def _placeholders(self, blocks: range) -> float:
        """Transformer Engine returns for a weight whose gradient was added up elsewhere an empty tensor in
        its place; it keeps one for each shape of a weight."""
        shape = self.shape
        layers = [self._on_device(shape.feed_forward_parameters(routed)) for routed, _ in self._kinds(blocks)]
        if layers:
            layers.append(self._on_device(shape.attention_parameters()))
        experts = 1 if shape.experts is None else shape.experts.number // self.degrees.expert
        return NUMBER * sum(layer.dense + layer.routed / experts for layer in layers)


LIBRARIES = 0.22e9
"""Bytes that cuBLAS, cuDNN and Transformer Engine keep: what is left of the memory of the published B200
steps when all else is taken off (0.21 to 0.25 GB in four of them)."""


@lru_cache(maxsize=32)
def _program(stages: int, micro_batches: int) -> Program:
    return program(stages, micro_batches)


_SIMULATED = 64
"""Micro-batches that are simulated, at least 16 a stage: more follow as the last of these did."""


def _pipeline_seconds(stages: Sequence[StageEstimate], transfer: float, micro_batches: int) -> float:
    """Of all micro-batches."""
    forward = np.array([stage.forward_seconds for stage in stages])
    backward = np.array([stage.backward_seconds for stage in stages])
    if len(stages) == 1:
        return float(micro_batches * (forward[0] + backward[0]))
    cuts = np.zeros(len(stages) - 1)
    costs = replace(
        PipelineCosts(forward[:, None], backward[:, None], cuts + transfer, cuts).general(),
        transfers="rendezvous",
    )

    def seconds(count: int) -> float:
        return float(simulate(_program(len(stages), count), costs).step_seconds)

    many = max(_SIMULATED, 16 * len(stages))
    if micro_batches <= 2 * many:
        return seconds(micro_batches)
    first = seconds(many)
    return first + (seconds(2 * many) - first) * (micro_batches - many) / many
