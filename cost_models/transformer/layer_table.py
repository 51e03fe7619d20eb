"""Seconds and bytes of a transformer's layers on one device of a stage, with given degrees of parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

from .block_kernels import NUMBER, LayerWork, block_work, embedding_work, head_work
from .parallel_degrees import ParallelDegrees, padded_vocabulary
from .rank_costs import PassSeconds, RankCosts
from .training_setting import TrainingSetting, block_ranges, chunks_in_flight
from .transformer_shape import LayerParameters, TransformerShape
from .weight_update import GRADIENT, STATE, WEIGHT, ParameterCounts, gradient_collective, update_seconds

LIBRARIES = 0.22e9

"""Bytes that cuBLAS, cuDNN and Transformer Engine keep: what is left of the memory of the published B200
steps when all else is taken off (0.21 to 0.25 GB in four of them)."""


@dataclass(frozen=True)
class StageEstimate:
    """Of one device of a stage: the `blocks` of each of its virtual stages, seconds of a micro-batch in all
    of them, `ledger` in bytes by term, at its peak."""

    blocks: tuple[range, ...]
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    ledger: dict[str, float]

    @property
    def bytes(self) -> float:
        """At the peak."""
        return sum(self.ledger.values())


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
        self._parameters = {routed: self._block_parameters(routed) for routed in self.blocks}
        self._seconds = {
            routed: self._beside_collectives(self._block_seconds(work), self._parameters[routed])
            for routed, work in self.blocks.items()
        }
        self._table = padded_vocabulary(shape, degrees.tensor) * shape.hidden / degrees.tensor
        self._ends = [
            self._beside_collectives(costs.seconds(work, degrees), ParameterCounts(self._table, 0))
            for work in (self.embedding, self.head)
        ]
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

    @property
    def slots(self) -> int:
        """Virtual stages of all devices of the pipeline."""
        return self.degrees.pipeline * self.setting.virtual_stages

    def own_blocks(self, ranges: Sequence[range], device: int) -> tuple[range, ...]:
        """Of the blocks of all virtual stages those of a device, which has every p-th."""
        return tuple(ranges[device :: self.degrees.pipeline])

    def seconds(self, blocks: range, slot: int) -> PassSeconds:
        """Of a micro-batch on a (virtual) stage."""
        parts = [(count, self._seconds[routed]) for routed, count in self._kinds(blocks)]
        if slot == 0:
            parts.append((1, self._ends[0]))
        if slot == self.slots - 1:
            parts.append((1, self._ends[1]))
        return PassSeconds(
            sum(n * own.forward for n, own in parts), sum(n * own.backward for n, own in parts)
        )

    def with_virtual_stages(self, number: int) -> LayerTable:
        """The same layers, of so many virtual stages on a device."""
        other = copy(self)
        other.setting, other._bytes = replace(self.setting, virtual_stages=number), {}
        return other

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
        parts = [self.parameters(range(0), slot) for slot in {0, self.slots - 1}]
        for routed, count in self._kinds(range(self.shape.blocks)):
            own = self._parameters[routed]
            parts.append(ParameterCounts(count * own.dense, count * own.routed))
        dense = sum(part.dense for part in parts) / stages
        experts = sum(part.routed for part in parts) / stages
        once, twice, of_dense = (
            update_seconds(own, self.degrees, self.costs)
            for own in (
                ParameterCounts(0, experts),
                ParameterCounts(0, 2 * experts),
                ParameterCounts(dense, 0),
            )
        )
        return of_dense + twice - once

    def _counts(self, blocks: range) -> tuple[int, int]:
        """Blocks without experts and with."""
        routed = self._routed_before[blocks.stop] - self._routed_before[blocks.start]
        return len(blocks) - routed, routed

    def _kinds(self, blocks: range) -> list[tuple[bool, int]]:
        """With experts or without: how many of the blocks."""
        dense, routed = self._counts(blocks)
        return [(kind, count) for kind, count in ((True, routed), (False, dense)) if count]

    def stage(self, blocks: Sequence[range], device: int) -> StageEstimate:
        """A device with the blocks of its virtual stages."""
        stages = self.degrees.pipeline
        seconds = [self.seconds(own, chunk * stages + device) for chunk, own in enumerate(blocks)]
        return StageEstimate(
            tuple(blocks),
            sum(own.forward for own in seconds),
            sum(own.backward for own in seconds),
            self.update_seconds(blocks, device),
            self.ledger(blocks, device),
        )

    def update_seconds(self, blocks: Sequence[range], device: int) -> float:
        """Of a device with the blocks of its virtual stages: reduction, update and gathering."""
        return update_seconds(self.device_parameters(blocks, device), self.degrees, self.costs)

    def device_parameters(self, blocks: Sequence[range], device: int) -> ParameterCounts:
        """Of all virtual stages of a device."""
        own = [
            self.parameters(each, chunk * self.degrees.pipeline + device) for chunk, each in enumerate(blocks)
        ]
        return ParameterCounts(sum(each.dense for each in own), sum(each.routed for each in own))

    def parameters(self, blocks: range, slot: int) -> ParameterCounts:
        """On one device, of a (virtual) stage."""
        shape, table = self.shape, self._table
        first, last = slot == 0, slot == self.slots - 1
        vectors = shape.beside_matrices()
        tables = table * (first + last - (first and last and shape.tied))
        tables += vectors.first * first + vectors.last * last
        parts = [(count, self._parameters[routed]) for routed, count in self._kinds(blocks)]
        return ParameterCounts(
            tables + sum(n * own.dense for n, own in parts), sum(n * own.routed for n, own in parts)
        )

    def ledger(self, blocks: Sequence[range], device: int) -> dict[str, float]:
        """Bytes by term of one device with the blocks of its virtual stages, at its peak: in the head, or
        where the last block's backward begins."""
        degrees, setting = self.degrees, self.setting
        dense, routed = self.device_parameters(blocks, device)
        groups = degrees.gradient_group, degrees.expert_gradient_group
        spread = groups if degrees.zero else (1, 1)
        share = groups if degrees.zero > 1 else (1, 1)
        works = [self.blocks[kind] for kind in {kind for own in blocks for kind, _ in self._kinds(own)}]
        saved = [self._saved(own) for own in blocks]
        alive = chunks_in_flight(device, degrees.pipeline, setting.micro_batches, setting.virtual_stages)
        again = {"none": 0.0, "selective": 0.0, "full": 1.0}[setting.recompute]
        rebuilt = max((again * work.saved + work.workspace for work in works), default=0.0)
        last = device == degrees.pipeline - 1
        return {
            "weights": WEIGHT
            * (2 * self._largest_parameters(blocks) if degrees.zero == 3 else dense + routed),
            "gradients": GRADIENT * (dense / share[0] + routed / share[1]) + self._unreduced_bytes(blocks),
            "optimizer": STATE * (dense / spread[0] + routed / spread[1]),
            "activations": max(sum(n * own for n, own in zip(each, saved, strict=True)) for each in alive),
            "workspace": max(rebuilt, self.head.saved if last else 0.0),
            "placeholders": self._placeholders(blocks),
            "libraries": LIBRARIES,
        }

    def _largest_parameters(self, blocks: Sequence[range]) -> float:
        """Of a block, or of the embedding or head: FSDP has that which computes and the next one whole."""
        kinds = {kind for own in blocks for kind, _ in self._kinds(own)}
        return max([self._table + self.shape.hidden, *(sum(self._parameters[kind]) for kind in kinds)])

    def _unreduced_bytes(self, blocks: Sequence[range]) -> float:
        """Where gradients are spread: of the layer whose backward runs, in bfloat16 and in float32."""
        if self.degrees.zero < 2:
            return 0.0
        return (NUMBER + GRADIENT) * self._largest_parameters(blocks)

    def _saved(self, blocks: range) -> float:
        """Bytes that the blocks keep of a micro-batch for backward."""
        match self.setting.recompute:
            case "full":
                return len(blocks) * self._boundary
            case "selective":
                own = {kind: work.saved - work.attention_saved for kind, work in self.blocks.items()}
            case "none":
                own = {kind: work.saved for kind, work in self.blocks.items()}
        return sum(count * own[kind] for kind, count in self._kinds(blocks))

    def stage_bytes(self, blocks: range, stage: int) -> float:
        """The sum of the ledger of a stage that is the only one of its device."""
        dense, routed = self._counts(blocks)
        key = stage, dense, routed
        if key not in self._bytes:
            self._bytes[key] = sum(self.ledger((blocks,), stage).values())
        return self._bytes[key]

    def least_bytes(self) -> float:
        """That the largest stage needs at least: the mean of what weights, gradients and states need."""
        states = ("weights", "gradients", "optimizer")
        nothing, everything = range(0), range(self.shape.blocks)

        def of(blocks: range, device: int) -> float:
            own = (blocks,) + (nothing,) * (self.setting.virtual_stages - 1)
            ledger = self.ledger(own if device == 0 else own[::-1], device)
            return sum(ledger[name] for name in states)

        stages = self.degrees.pipeline
        ends = sum(of(nothing, device) for device in {0, stages - 1})
        return (ends + of(everything, 0) - of(nothing, 0)) / stages

    def peak_bytes(self, counts: Sequence[int]) -> float:
        """Of the device that needs most, of (virtual) stages with so many blocks."""
        ranges = block_ranges(counts)
        if self.setting.virtual_stages == 1:
            return max(self.stage_bytes(own, stage) for stage, own in enumerate(ranges))
        devices = range(self.degrees.pipeline)
        return max(sum(self.ledger(self.own_blocks(ranges, each), each).values()) for each in devices)

    def _block_seconds(self, work: LayerWork) -> PassSeconds:
        forward, backward = self.costs.seconds(work, self.degrees)
        match self.setting.recompute:
            case "full":
                return PassSeconds(forward, backward + forward)
            case "selective":
                again = sum(self.costs.kernel_seconds(kernel, self.degrees) for kernel in work.attention)
                return PassSeconds(forward, backward + again)
            case "none":
                return PassSeconds(forward, backward)

    def _beside_collectives(self, own: PassSeconds, parameters: ParameterCounts) -> PassSeconds:
        """With ZeRO 2 and 3 a layer's weights are gathered, and its gradients reduced, while its neighbours
        compute: a pass takes the longer of both."""
        zero = self.degrees.zero
        if zero < 2:
            return own
        gather = gradient_collective("all_gather", WEIGHT, parameters, self.degrees, self.costs)
        reduce = gradient_collective("reduce_scatter", GRADIENT, parameters, self.degrees, self.costs)
        return PassSeconds(
            max(own.forward, gather), max(own.backward, reduce + (gather if zero == 3 else 0.0))
        )

    def _block_parameters(self, routed: bool) -> ParameterCounts:
        attention = self._on_device(self.shape.attention_parameters())
        return attention.plus(self._on_device(self.shape.feed_forward_parameters(routed)))

    def _on_device(self, layer: LayerParameters) -> ParameterCounts:
        degrees = self.degrees
        return ParameterCounts(layer.whole + layer.shared / degrees.tensor, layer.routed / degrees.expert)

    def _placeholders(self, blocks: Sequence[range]) -> float:
        """Transformer Engine returns for a weight whose gradient was added up elsewhere an empty tensor in
        its place; it keeps one for each shape of a weight."""
        shape = self.shape
        kinds = sorted({routed for own in blocks for routed, _ in self._kinds(own)})
        layers = [self._on_device(shape.feed_forward_parameters(routed)) for routed in kinds]
        if layers:
            layers.append(self._on_device(shape.attention_parameters()))
        experts = 1 if shape.experts is None else shape.experts.number // self.degrees.expert
        return NUMBER * sum(layer.dense + layer.routed / experts for layer in layers)
