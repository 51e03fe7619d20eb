"""Seconds and parameters of a transformer's layers on one device of a stage, with given degrees of
parallelism."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from .block_kernels import block_work, embedding_work, head_work, predictor_work
from .corrections import LayerCorrection, LayerKind
from .layer_work import NUMBER, LayerWork
from .parallel_degrees import ParallelDegrees, padded_vocabulary
from .rank_costs import PassSeconds, RankCosts
from .training_setting import TrainingSetting
from .transformer_shape import LayerParameters, TransformerShape
from .weight_update import (
    GRADIENT,
    WEIGHT,
    Line,
    ParameterCounts,
    gradient_collective,
    line_below,
    update_seconds,
)


class LayerSeconds:
    """What each kind of layer takes on one device; the stages are sums of them."""

    def __init__(
        self, shape: TransformerShape, degrees: ParallelDegrees, setting: TrainingSetting, costs: RankCosts
    ) -> None:
        self.shape, self.degrees, self.setting, self.costs = shape, degrees, setting, costs
        # Of equal (virtual) stages, also of the tables that are made of this one with other settings.
        self._sums: dict[tuple[object, ...], PassSeconds] = {}
        self._stage_parameters: dict[tuple[object, ...], ParameterCounts] = {}
        tokens = setting.tokens
        code = costs.implementation
        self.blocks = {
            routed: self._work(routed, partial(block_work, shape, routed, degrees, tokens, code))
            for routed in set(shape.routed)
        }
        self.embedding = self._work("embedding", lambda: embedding_work(shape, degrees, tokens))
        self.head = self._work("head", lambda: head_work(shape, degrees, tokens, code))
        self.block_parameters = {routed: self._block_parameters(routed) for routed in self.blocks}
        self._seconds = {
            (routed, again): self._beside_collectives(
                self._block_seconds(work, routed, again), self.block_parameters[routed]
            )
            for routed, work in self.blocks.items()
            for again in (False, True)
        }
        rows = padded_vocabulary(shape, degrees.tensor, code.vocabulary_multiple)
        self._table = rows * shape.hidden / degrees.tensor
        lookup = costs.seconds(self.embedding, degrees)
        scores = self._corrected(costs.seconds(self.head, degrees), None)
        table = ParameterCounts(self._table, 0)
        self._lookup, self._scores = (self._beside_collectives(own, table) for own in (lookup, scores))
        self._first_lookup = self._with_first_block(lookup, table)
        self._routed_before = [0, *accumulate(shape.routed)]
        self.least_update_seconds = self._least_update_seconds()
        """That the slowest stage takes at least, however the blocks are divided."""
        self._boundary = NUMBER * tokens.on(degrees) * shape.hidden / degrees.tensor
        self._kept_again = code.checkpointed * self._boundary

    def transfer_seconds(self, slot: int) -> float:
        """Of what crosses the cut behind a (virtual) stage, from a device to the one that follows it in the
        pipeline; behind the predictors their results, too."""
        degrees, place = self.degrees, self.setting.predictor_slot(self.slots)
        if degrees.pipeline == 1:
            return 0.0
        tensors = 1 + self.setting.predictors * (place is not None and place <= slot)
        bytes = tensors * self._boundary
        return self.costs.links.transfer(bytes, degrees.tensor * degrees.context * degrees.data)

    def cut_seconds(self, slot: int) -> tuple[float, float]:
        """Over the cuts before and behind a (virtual) stage; 0 before the first and behind the last."""
        enter = self.transfer_seconds(slot - 1) if slot else 0.0
        return enter, self.transfer_seconds(slot) if slot < self.slots - 1 else 0.0

    @property
    def reshards(self) -> bool:
        """Return whether the schedule gathers and reshards the weights of virtual stages."""
        return self.degrees.zero == 3 and self.degrees.pipeline > 1

    def gather_seconds(self, ranges: Sequence[range]) -> list[float]:
        """Seconds of gathering the weights of each (virtual) stage."""
        return [
            gradient_collective("all_gather", WEIGHT, self.parameters(blocks, slot), self.degrees, self.costs)
            for slot, blocks in enumerate(ranges)
        ]

    def fixed_parts(self, slot: int) -> list[tuple[int, PassSeconds]]:
        """What a (virtual) stage has beside blocks, with how many of each: embedding, predictors, head."""
        setting = self.setting
        parts = []
        if slot == 0:
            parts.append((1, self._first_lookup))
        if setting.predictors and slot == setting.predictor_slot(self.slots):
            parts += [(setting.predictors, part) for part in (self._lookup, self._one_predictor)]
        if slot == self.slots - 1:
            parts.append((1 + setting.predictors, self._scores))
        return parts

    def fixed_seconds(self, slot: int) -> float:
        """Of a micro-batch, forward and backward, on a (virtual) stage without blocks."""
        return self._fixed_seconds_by_slot.get(slot, 0.0)

    @cached_property
    def _fixed_parts_by_slot(self) -> dict[int, tuple[tuple[int, PassSeconds], ...]]:
        return {slot: tuple(self.fixed_parts(slot)) for slot in self.fixed_slots}

    @cached_property
    def _fixed_seconds_by_slot(self) -> dict[int, float]:
        parts = self._fixed_parts_by_slot
        return {slot: sum(count * own.both for count, own in own_parts) for slot, own_parts in parts.items()}

    @property
    def fixed_slots(self) -> list[int]:
        """The (virtual) stages that have something beside blocks."""
        place = self.setting.predictor_slot(self.slots)
        return sorted({0, self.slots - 1} | ({place} if place is not None else set()))

    @cached_property
    def predictor(self) -> LayerWork:
        """One of further tokens, without its lookup and its scores."""
        shape, block = self.shape, self.blocks[self.shape.routed[-1]]
        return self._work(
            "predictor", lambda: predictor_work(shape, self.degrees, self.setting.tokens) + block
        )

    def _work(self, name: Hashable, build: Callable[[], LayerWork]) -> LayerWork:
        """A layer's kernels, which replicas, stages and ZeRO do not change."""
        degrees, works = self.degrees, self.costs.works
        shares = degrees.tensor, degrees.context, degrees.expert, degrees.exchange
        key = self.shape, name, shares, self.setting.tokens
        if key not in works:
            works[key] = build()
        return works[key]

    @cached_property
    def _predictor_seconds(self) -> dict[bool, PassSeconds]:
        """Of one, by whether its forward runs again."""
        return {
            again: self._beside_collectives(
                self._block_seconds(self.predictor, self.shape.routed[-1], again), self._predictor_parameters
            )
            for again in (False, True)
        }

    @property
    def _one_predictor(self) -> PassSeconds:
        return self._predictor_seconds[self._predictors_again]

    @property
    def _predictors_again(self) -> bool:
        """Whether the predictors' forward runs again: Megatron-LM's block method leaves them out."""
        return self.setting.recompute == "full" and self.setting.recompute_blocks is None

    @property
    def slots(self) -> int:
        """Virtual stages of all devices of the pipeline."""
        return self.degrees.pipeline * self.setting.virtual_stages

    @cached_property
    def fewest_blocks(self) -> tuple[int, ...]:
        """Fewest blocks of each (virtual) stage that the search allows."""
        return self.setting.fewest_blocks(self.shape.blocks, self.slots)

    def own_blocks(self, ranges: Sequence[range], device: int) -> tuple[range, ...]:
        """Of the blocks of all virtual stages those of a device, which has every p-th."""
        return tuple(ranges[device :: self.degrees.pipeline])

    def seconds(self, blocks: range, slot: int) -> PassSeconds:
        """Of a micro-batch on a (virtual) stage."""
        number = self.setting.recomputed(len(blocks))
        fixed = self._fixed_parts_by_slot.get(slot, ())
        key = (self._counts(blocks[:number]), self._counts(blocks[number:]), fixed)
        own = self._sums.get(key)
        if own is None:
            parts = [*self._block_parts(blocks), *fixed]
            own = self._sums[key] = PassSeconds(
                sum(n * each.forward for n, each in parts), sum(n * each.backward for n, each in parts)
            )
        return own

    def _numbers_by_kind(self, starts: np.ndarray, stops: np.ndarray) -> dict[bool, np.ndarray]:
        """Blocks of each kind from one place up to another; in the order of `_kinds`."""
        before = np.array(self._routed_before)
        routed = before[stops] - before[starts]
        numbers = {True: routed, False: stops - starts - routed}
        return {kind: own for kind, own in numbers.items() if kind in self.blocks}

    @cached_property
    def least_block_seconds(self) -> tuple[dict[bool, float], float]:
        """Of a block by kind, with none or all running again, and, where the first do, the least of that."""
        kinds = {kind: self._seconds[kind, self._all_again].both for kind in self.blocks}
        partial = not self._all_again and self.setting.recompute == "full"
        return {False: 0.0, True: 0.0, **kinds}, self._least_again if partial else 0.0

    def block_seconds(self, kind: bool, *, again: bool) -> PassSeconds:
        """Of a micro-batch in a block, with experts or without, whose forward runs again or does not."""
        return self._seconds[kind, again]

    @property
    def _least_again(self) -> float:
        """Seconds of running a block's forward again, of the kind where they are least."""
        return min(self._seconds[kind, True].both - self._seconds[kind, False].both for kind in self.blocks)

    def _block_parts(self, blocks: range) -> list[tuple[int, PassSeconds]]:
        """Numbers of equal blocks with what each takes; the first ones may run again."""
        number = self.setting.recomputed(len(blocks))
        parts = ((blocks[:number], True), (blocks[number:], False))
        return [
            (count, self._seconds[kind, again]) for own, again in parts for kind, count in self._kinds(own)
        ]

    @cached_property
    def whole_seconds(self) -> float:
        """Of a micro-batch, forward and backward, on all stages, with as few blocks run again as can be: as
        many as can on one stage that runs only its first ones again."""
        blocks = self.shape.blocks
        elsewhere = sum(self.fewest_blocks[1:])
        if elsewhere:
            elsewhere -= 1
        again = self.setting.recomputed(blocks - elsewhere) + elsewhere * self.setting.recomputed(1)
        kinds = self._kinds(range(blocks))
        own = sum(count * self._seconds[kind, self._all_again].both for kind, count in kinds)
        return own + self._fixed_seconds + (0.0 if self._all_again else again * self._least_again)

    @property
    def _all_again(self) -> bool:
        """Whether every block's forward runs again."""
        return self.setting.recomputed(self.shape.blocks) == self.shape.blocks

    @property
    def _fixed_seconds(self) -> float:
        return sum(map(self.fixed_seconds, self.fixed_slots))

    def least_slowest_seconds(self) -> float:
        """That the slowest stage takes at least: the mean, or the longest layer."""
        blocks = [self._seconds[kind, self._all_again].both for kind in self.blocks]
        longest = max(*blocks, *map(self.fixed_seconds, self.fixed_slots))
        return max(self.whole_seconds / self.degrees.pipeline, longest)

    def least_backward_share(self) -> float:
        """Of a layer's seconds those of its backward, where that is smallest."""
        layers = [self._seconds[kind, self._all_again] for kind in self.blocks]
        layers += [own for slot in self.fixed_slots for _, own in self.fixed_parts(slot)]
        return min(own.backward / own.both for own in layers)

    @cached_property
    def _parameter_parts(self) -> list[ParameterCounts]:
        """Parameters of all blocks of each kind, and of what some (virtual) stages have besides."""
        parts = [self.parameters(range(0), slot) for slot in self.fixed_slots]
        for routed, count in self._kinds(range(self.shape.blocks)):
            own = self.block_parameters[routed]
            parts.append(ParameterCounts(count * own.dense, count * own.routed))
        return parts

    @cached_property
    def update_lines(self) -> tuple[Line, Line]:
        """Lower bounds on a device's update seconds, by its dense parameters and by those of its experts.

        A device's update takes no less than the sum of both lines; without experts no less than the first.
        """
        counts = [*self._parameter_parts, *self.block_parameters.values()]
        lines = []
        for kind in range(2):
            own = [each[kind] for each in counts if each[kind]]

            def seconds(count: float, kind: int = kind) -> float:
                only = ParameterCounts(0.0, count) if kind else ParameterCounts(count, 0.0)
                return update_seconds(only, self.degrees, self.costs)

            whole = sum(each[kind] for each in self._parameter_parts)
            is_concave = self.costs.links.is_concave
            lines.append(
                line_below(seconds, min(own), whole, is_concave=is_concave) if own else Line(0.0, 0.0)
            )
        return lines[0], lines[1]

    @property
    def routed_update_slope(self) -> float:
        """Least update seconds of each of an expert's parameters: of all on one device."""
        whole = sum(each.routed for each in self._parameter_parts)
        line = self.update_lines[1]
        return line.start / whole + line.slope if whole else 0.0

    def _least_update_seconds(self) -> float:
        """No less than the mean of the stages, by the lines below their updates: one may have no experts."""
        dense, routed = (sum(own) / self.degrees.pipeline for own in zip(*self._parameter_parts, strict=True))
        line = self.update_lines[0]
        return float(line.start + line.slope * dense + self.routed_update_slope * routed)

    def _counts(self, blocks: range) -> tuple[int, int]:
        """Blocks without experts and with."""
        routed = self._routed_before[blocks.stop] - self._routed_before[blocks.start]
        return len(blocks) - routed, routed

    def _kinds(self, blocks: range) -> list[tuple[bool, int]]:
        """With experts or without: how many of the blocks."""
        dense, routed = self._counts(blocks)
        return [(kind, count) for kind, count in ((True, routed), (False, dense)) if count]

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
        slots = self.slots
        first, last = slot == 0, slot == slots - 1
        predicts = self.setting.predictors > 0 and slot == self.setting.predictor_slot(slots)
        key = self._counts(blocks), first, last, predicts
        own = self._stage_parameters.get(key)
        if own is None:
            own = self._stage_parameters[key] = self._parameters_with(blocks, first, last, predicts)
        return own

    def _parameters_with(self, blocks: range, first: bool, last: bool, predicts: bool) -> ParameterCounts:
        """Of a stage that is the first, the last, or has the predictors, or is none of these."""
        shape, table = self.shape, self._table
        vectors = shape.beside_matrices()
        tables = table * (first + last - (first and last and shape.tied))
        tables += vectors.first * first
        tables += (vectors.last + vectors.vocabulary * table / shape.hidden) * last
        parts = [(count, self.block_parameters[routed]) for routed, count in self._kinds(blocks)]
        if predicts:
            parts.append((self.setting.predictors, self._predictor_parameters))
            # The embedding again, but where the stage has it, or the head that is the same.
            tables += table * (not first and not (last and shape.tied))
        return ParameterCounts(
            tables + sum(n * own.dense for n, own in parts), sum(n * own.routed for n, own in parts)
        )

    def correction(self, routed: bool | None) -> LayerCorrection | None:
        """Return the measured layer that corrects a block with experts or without, or (None) the head."""
        kind: LayerKind = "head" if routed is None else "experts" if routed else "dense"
        return self.costs.corrections.of(kind, self.degrees, self.costs.implementation.name)

    def _ratios(self, routed: bool | None) -> PassSeconds:
        """Ratios of measured seconds to sums of kernels."""
        own = self.correction(routed)
        return PassSeconds(1.0, 1.0) if own is None else PassSeconds(own.forward, own.backward)

    def _corrected(self, own: PassSeconds, routed: bool | None) -> PassSeconds:
        ratios = self._ratios(routed)
        return PassSeconds(own.forward * ratios.forward, own.backward * ratios.backward)

    def _block_seconds(self, work: LayerWork, routed: bool, again: bool) -> PassSeconds:
        forward, backward = self._corrected(self.costs.seconds(work, self.degrees), routed)
        if again:
            return PassSeconds(forward, backward + forward)
        if self.setting.recompute == "selective":
            more = sum(self.costs.kernel_seconds(kernel, self.degrees) for kernel in work.selective)
            return PassSeconds(forward, backward + more * self._ratios(routed).forward)
        if self.setting.recompute == "offload":
            copies = self._copy_seconds(work)
            return PassSeconds(max(forward, copies), max(backward, copies))
        return PassSeconds(forward, backward)

    def _copy_seconds(self, work: LayerWork) -> float:
        """Of a block's activations to the host, or back: beside the computing of a block, in which
        megatron-core copies the tensors of the block before out, and brings those of the next one back."""
        assert self.costs.host_bandwidth is not None
        return work.offload.copied / self.costs.host_bandwidth

    def _beside_collectives(
        self, own: PassSeconds, parameters: ParameterCounts, *, first: bool = False
    ) -> PassSeconds:
        """A layer's seconds with the collectives of ZeRO 2 and 3.

        Weights are gathered and gradients reduced while neighbours compute: a pass takes the longer of both.
        Nothing computes before the `first` layer's gather, or after the reduction of its gradients. In a
        pipeline no layer gathers for itself.
        """
        if bytes := self.costs.implementation.accumulation:
            # Gradients that are reduced at once are copied, not added to others in float32.
            bytes -= GRADIENT * self.degrees.reduces_each
            own = own._replace(backward=own.backward + self.costs.memory_seconds(bytes * sum(parameters)))
        if not self.degrees.reduces_each:
            return own
        reduce = gradient_collective("reduce_scatter", GRADIENT, parameters, self.degrees, self.costs)
        if self.degrees.pipeline > 1:
            return own._replace(backward=max(own.backward, reduce))
        gather = gradient_collective("all_gather", WEIGHT, parameters, self.degrees, self.costs)
        again = gather if self.degrees.zero == 3 else 0.0
        if first:
            return PassSeconds(own.forward + gather, max(own.backward, again) + reduce)
        return PassSeconds(max(own.forward, gather), max(own.backward, reduce + again))

    def _with_first_block(self, lookup: PassSeconds, table: ParameterCounts) -> PassSeconds:
        """Seconds of the embedding, with what the first block's collectives add.

        Beside them only the embedding computes, which takes next to no time: they are not hidden either.
        """
        if self.degrees.zero < 2 or self.degrees.pipeline > 1:
            return self._beside_collectives(lookup, table)
        kind = self.shape.routed[0]
        block = self._block_seconds(self.blocks[kind], kind, self.setting.recompute == "full")
        alone = self._beside_collectives(block, self.block_parameters[kind], first=True)
        hidden = self._beside_collectives(block, self.block_parameters[kind])
        own = self._beside_collectives(lookup, table, first=True)
        forward, backward = (own[way] + alone[way] - hidden[way] for way in (0, 1))
        return PassSeconds(forward, backward)

    def _block_parameters(self, routed: bool) -> ParameterCounts:
        attention = self._on_device(self.shape.attention_parameters())
        return attention.plus(self._on_device(self.shape.feed_forward_parameters(routed)))

    @cached_property
    def _predictor_parameters(self) -> ParameterCounts:
        """Of one: a block, two norms of what is projected and one behind, the projection."""
        hidden = self.shape.hidden
        projection = LayerParameters(3 * hidden, 2 * hidden * hidden, 0)
        return self._block_parameters(self.shape.routed[-1]).plus(self._on_device(projection))

    def _on_device(self, layer: LayerParameters) -> ParameterCounts:
        degrees = self.degrees
        return ParameterCounts(layer.whole + layer.shared / degrees.tensor, layer.routed / degrees.expert)
