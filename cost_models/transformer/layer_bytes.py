"""Bytes of a transformer's single layers on one device; bytes and seconds of many runs of blocks at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .layer_seconds import LayerSeconds
from .layer_work import NUMBER, LayerWork
from .parallel_degrees import ParallelDegrees
from .rank_costs import RankCosts
from .training_setting import TrainingSetting
from .transformer_shape import TransformerShape


class LayerBytes(LayerSeconds):
    """What each kind of layer keeps on one device, beside its seconds."""

    def __init__(
        self, shape: TransformerShape, degrees: ParallelDegrees, setting: TrainingSetting, costs: RankCosts
    ) -> None:
        super().__init__(shape, degrees, setting, costs)
        self._beside: dict[tuple[object, ...], float] = {}
        self._range_sums: list[np.ndarray] = []

    def _has_predictors(self, device: int) -> bool:
        """Whether the last of a device's (virtual) stages has the predictors of further tokens."""
        setting, last = self.setting, self.degrees.pipeline - 1
        return setting.predictors > 0 and device == last - setting.predictor_offset

    @property
    def _predictor_saved(self) -> float:
        """Bytes that one predictor keeps of a micro-batch: where it runs again the hidden states and the
        embeddings."""
        if self._predictors_again:
            return 2 * self._boundary
        return self._device_bytes(self.predictor)

    @property
    def _predictor_workspace(self) -> float:
        """Besides, while a predictor's backward runs."""
        again = self.predictor.saved if self._predictors_again else 0.0
        return self._workspace(self.predictor) + again

    @cached_property
    def _saved_by_kind(self) -> dict[bool, float]:
        return {kind: self._device_bytes(work) for kind, work in self.blocks.items()}

    def _device_bytes(self, work: LayerWork) -> float:
        """Bytes that a layer whose whole forward does not run again keeps on the device of a micro-batch: of
        what is offloaded that which is not copied out while its forward runs, since no forward waits."""
        if self.setting.recompute == "selective":
            return work.saved - work.selective_saved
        if self.setting.recompute != "offload" or not work.offload.copied:
            return work.saved
        forward = self.costs.seconds(work, self.degrees).forward
        return work.saved - work.offload.saved * min(1.0, forward / self._copy_seconds(work))

    def _workspace(self, work: LayerWork) -> float:
        """Besides, while a layer's backward runs: offloaded tensors of this one, of one that is copied out,
        and of one that comes back."""
        return work.workspace + (3 * work.offload.copied if self.setting.recompute == "offload" else 0.0)

    @cached_property
    def _head_bytes(self) -> float:
        """Bytes at the peak of the head: the scores of all predictors are alive at once."""
        return (1 + self.setting.predictors) * self.head.saved + self.head.workspace

    @cached_property
    def _embedding_bytes(self) -> float:
        """Bytes while the embedding's backward runs: the gradients of its result and of its whole weight in
        bfloat16. What the first (virtual) stage saved of the micro-batch is free then."""
        return self._boundary + NUMBER * self._table

    def _sent_gradient(self, device: int) -> float:
        """Bytes of the gradient that a device sent to the one before.

        Megatron-LM's schedule holds it until it has the next one.
        """
        return self._boundary if device else 0.0

    def saved_by_run(self, ends: np.ndarray, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a stage without virtual stages, by the blocks that it begins with and ends before (2, runs):
        bytes that it keeps of a micro-batch for backward, and those besides while a backward runs. What
        `ledger` says of each, to the last bit, so that the same runs fit."""
        starts, stops = ends
        middles = starts + np.minimum(stops - starts, self.setting.recomputed(self.shape.blocks))
        saved, space = np.zeros(len(starts)), np.zeros(len(starts))
        rest = self._numbers_by_kind(middles, stops)
        for kind, number in rest.items():
            saved = saved + number * self._saved_by_kind[kind]
            space = np.maximum(space, np.where(number > 0, self._workspace(self.blocks[kind]), 0.0))
        for kind, number in self._numbers_by_kind(starts, middles).items():
            again = self.blocks[kind].saved + self.blocks[kind].workspace - saved
            space = np.maximum(space, np.where(number > 0, again, 0.0))
        saved = saved + (middles - starts) * self._kept_again
        if self._has_predictors(stage):
            saved = saved + self.setting.predictors * self._predictor_saved
            space = np.maximum(space, self._predictor_workspace)
        if stage == self.degrees.pipeline - 1:
            space = np.maximum(space, self._head_bytes)
        if stage == 0:
            space = np.maximum(space, self._embedding_bytes - saved)
        return saved, space + self._sent_gradient(stage)

    def seconds_between(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of a micro-batch, forward and backward, in the blocks from one place up to another, without what
        else a (virtual) stage has; of no meaning where the one is behind the other."""
        again, once = self._seconds_before_places
        ends = np.minimum(stops, starts + self.setting.recomputed(self.shape.blocks))
        ends = np.maximum(ends, starts)
        both = again[ends] - again[starts] + once[stops] - once[ends]
        return both[..., 0], both[..., 1]

    @property
    def _seconds_before_places(self) -> list[np.ndarray]:
        """Of the blocks before a place that run again, and of those that do not."""
        if not self._range_sums:
            self._range_sums += [
                np.cumsum([(0.0, 0.0), *(self._seconds[kind, again] for kind in self.shape.routed)], axis=0)
                for again in (True, False)
            ]
        return self._range_sums

    def _placeholders(self, blocks: Sequence[range], predictors: bool) -> float:
        """Transformer Engine keeps an empty tensor for each shape of a weight whose gradient is elsewhere."""
        last = {self.shape.routed[-1]} if predictors else set()
        kinds = sorted({routed for own in blocks for routed, _ in self._kinds(own)} | last)
        key = "placeholders", *kinds
        if key not in self._beside:
            self._beside[key] = self._placeholder_bytes(kinds)
        return self._beside[key]

    def _placeholder_bytes(self, kinds: Sequence[bool]) -> float:
        shape = self.shape
        if not self.costs.implementation.has_placeholders:
            return 0.0
        if layers := [self._on_device(shape.feed_forward_parameters(routed)) for routed in kinds]:
            layers.append(self._on_device(shape.attention_parameters()))
        experts = 1 if shape.experts is None else shape.experts.number // self.degrees.expert
        return NUMBER * sum(layer.dense + layer.routed / experts for layer in layers)
