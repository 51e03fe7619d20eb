"""Bytes of a transformer's layers on one device of a stage, beside their seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .layer_bytes import LayerBytes
from .layer_work import NUMBER
from .parallel_degrees import ParallelDegrees
from .rank_costs import RankCosts
from .training_setting import TrainingSetting, block_ranges, chunks_in_flight, chunks_unsharded
from .transformer_shape import TransformerShape
from .weight_update import GRADIENT, STATE, WEIGHT

LIBRARIES, EXPERT_LIBRARIES = 0.06e9, 0.33e9
"""Bytes that cuBLAS, cuDNN and Transformer Engine keep, and those more with experts (Transformer Engine has a
workspace of 32 MiB for each stream of their grouped products; the rest is not explained).

They are what is left of the memory of the published B200 steps when all else is taken off: 0.05 to 0.07 GB in
five stages of Llama, 0.36 to 0.44 GB in three of DeepSeek-V2."""


@dataclass(frozen=True)
class StageEstimate:
    """Of one device of a stage: the `blocks` of each of its virtual stages, seconds of a micro-batch in all
    of them, `ledger` in bytes by term, at its peak; `host_bytes`: what it keeps in the host's memory then."""

    blocks: tuple[range, ...]
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    ledger: dict[str, float]
    host_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """At the peak."""
        return sum(self.ledger.values())


class LayerTable(LayerBytes):
    """What each kind of layer takes and needs on one device; the stages are sums of them."""

    def __init__(
        self, shape: TransformerShape, degrees: ParallelDegrees, setting: TrainingSetting, costs: RankCosts
    ) -> None:
        super().__init__(shape, degrees, setting, costs)
        self._bytes: dict[tuple[object, ...], float] = {}
        self._state_bytes: dict[tuple[int, int], float] = {}
        # Of the last runs that were asked for; of tables with other blocks that run again, too.
        self._columns: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._again: dict[tuple[object, ...], np.ndarray] = {}

    def with_setting(self, setting: TrainingSetting) -> LayerTable:
        """The same layers, of other virtual stages on a device, or with other blocks that run again."""
        other = copy(self)
        other.setting, other._bytes = setting, {}
        names = ("fewest_blocks", "least_block_seconds", "whole_seconds", "_fixed_parts_by_slot")
        for name in (*names, "_fixed_seconds_by_slot", "_head_bytes"):
            other.__dict__.pop(name, None)
        return other

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
            self._host_bytes(blocks, device),
        )

    def ledger(self, blocks: Sequence[range], device: int) -> dict[str, float]:
        """Bytes by term of one device with the blocks of its virtual stages, at its peak: in the head, or
        where the last block's backward begins."""
        degrees = self.degrees
        dense, routed = self.device_parameters(blocks, device)
        groups = degrees.gradient_group, degrees.expert_gradient_group
        spread = groups if degrees.zero else (1, 1)
        share = groups if degrees.reduces_each else (1, 1)
        saved = [self._saved(own) for own in blocks]
        if self._has_predictors(device):
            saved[-1] += self.setting.predictors * self._predictor_saved
        last = device == degrees.pipeline - 1
        return {
            "weights": WEIGHT * self._gathered_parameters(blocks, device),
            "gradients": GRADIENT * (dense / share[0] + routed / share[1]) + self._unreduced_bytes(blocks),
            "optimizer": STATE * (dense / spread[0] + routed / spread[1]),
            "activations": self._most_in_flight(saved, device),
            "workspace": max(
                *map(self._backward_bytes, blocks),
                self._predictor_workspace if self._has_predictors(device) else 0.0,
                self._head_bytes if last else 0.0,
                self._embedding_bytes - saved[0] if device == 0 else 0.0,
            )
            + self._sent_gradient(device),
            "placeholders": self._placeholders(blocks, self._has_predictors(device)),
            "libraries": self._libraries,
        }

    def _gathered_parameters(self, blocks: Sequence[range], device: int) -> float:
        """Most parameters of which a device has the whole weights at a time: two layers under FSDP that
        reshards, those of the virtual stages that a schedule keeps gathered, or all."""
        if self.degrees.zero < 3:
            return sum(self.device_parameters(blocks, device))
        if not self.reshards:
            return 2 * self._largest_parameters(blocks)
        stages, setting = self.degrees.pipeline, self.setting
        counts = [sum(self.parameters(own, chunk * stages + device)) for chunk, own in enumerate(blocks)]
        together = chunks_unsharded(
            device,
            stages,
            setting.micro_batches,
            setting.virtual_stages,
            self.degrees.max_param_unsharded_stages,
        )
        return max(sum(counts[chunk] for chunk in own) for own in together)

    def _most_in_flight(self, bytes: Sequence[float], device: int) -> float:
        """At the peak, of so many bytes of a micro-batch in each virtual stage of a device."""
        alive = self._chunks_in_flight(device)
        return max(sum(n * own for n, own in zip(each, bytes, strict=True)) for each in alive)

    def _host_bytes(self, blocks: Sequence[range], device: int) -> float:
        """What a device keeps in the host's memory of all micro-batches in flight."""
        if self.setting.recompute != "offload":
            return 0.0
        copied = [sum(n * self.blocks[kind].offload.copied for kind, n in self._kinds(own)) for own in blocks]
        if self._has_predictors(device):
            copied[-1] += self.setting.predictors * self.predictor.offload.copied
        return self._most_in_flight(copied, device)

    def _largest_parameters(self, blocks: Sequence[range]) -> float:
        """Of a block, or of the embedding or head: FSDP has that which computes and the next one whole."""
        kinds = {kind for own in blocks for kind, _ in self._kinds(own)}
        return max([self._table + self.shape.hidden, *(sum(self.block_parameters[kind]) for kind in kinds)])

    def _unreduced_bytes(self, blocks: Sequence[range]) -> float:
        """Where gradients are spread: of the layer whose backward runs, in bfloat16 and in float32."""
        if not self.degrees.reduces_each:
            return 0.0
        return (NUMBER + GRADIENT) * self._largest_parameters(blocks)

    def _saved(self, blocks: range) -> float:
        """Bytes that the blocks keep of a micro-batch for backward: those that run again their input."""
        number = self.setting.recomputed(len(blocks))
        saved = sum(count * self._saved_by_kind[kind] for kind, count in self._kinds(blocks[number:]))
        return saved + number * self._kept_again

    def _backward_bytes(self, blocks: range) -> float:
        """Besides, while a block's backward runs: where its forward runs again, all that this keeps, when
        what the blocks behind it saved of the micro-batch is free again."""
        number = self.setting.recomputed(len(blocks))
        first, rest = self._kinds(blocks[:number]), self._kinds(blocks[number:])
        free = sum(count * self._saved_by_kind[kind] for kind, count in rest)
        again = [self.blocks[kind].saved + self.blocks[kind].workspace - free for kind, _ in first]
        return max([0.0, *again, *(self._workspace(self.blocks[kind]) for kind, _ in rest)])

    def columns(self, ends: np.ndarray, stage: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of a stage without virtual stages, by the blocks that it begins with and ends before (2, runs):
        seconds of its update, bytes beside activations, and those of activations that it keeps of a
        micro-batch: the sums of its ledger, of all runs at once."""
        alive = self._chunks_in_flight(stage)[0][0]
        update, states, placeholders = self._fixed_columns(ends, stage)
        saved, space = self.saved_by_run(ends, stage)
        activations = alive * saved
        saved = activations / alive
        total = states + activations + space + placeholders + self._libraries
        return update, total - saved * alive, saved

    def _fixed_columns(self, ends: np.ndarray, stage: int) -> np.ndarray:
        """Of each run what no block that runs again changes: seconds of the update, bytes of weights,
        gradients and states, and those of placeholders."""
        predicts = self._has_predictors(stage)
        key = stage == 0, stage == self.degrees.pipeline - 1, predicts
        of, columns = self._columns.get(key, (None, None))
        if of is not ends or columns is None:
            rows = [
                (
                    self.update_seconds((run,), stage),
                    self._state_sum((run,), stage),
                    self._placeholders((run,), predicts),
                )
                for run in map(range, *ends.tolist())
            ]
            columns = np.array(rows).T
            self._columns[key] = ends, columns
        return columns

    def least_blocks_again(
        self, numbers: Mapping[bool, np.ndarray], device: int, memory_bytes: float
    ) -> np.ndarray:
        """How many of so many blocks of each kind a device runs again at least so that it needs no more than
        this, however they lie in its virtual stages, of which each has those that it must have; inf where it
        needs more."""
        arrays = ((kind, own.shape, own.tobytes()) for kind, own in numbers.items())
        key = replace(self.setting, recompute_blocks=None), self._all_again, device, memory_bytes, *arrays
        if key not in self._again:
            self._again[key] = self._blocks_to_free(numbers, device, memory_bytes)
        again, total = self._again[key], np.asarray(sum(numbers.values()))
        most = np.minimum(total, self.setting.virtual_stages * self.setting.recomputed(self.shape.blocks))
        return np.where(again <= most, again, np.inf)

    def _blocks_to_free(self, numbers: Mapping[bool, np.ndarray], device: int, memory: float) -> np.ndarray:
        """The same, were any of them allowed to run again; inf where it needs more and none may."""
        states = sum(own * self._block_states[kind] for kind, own in numbers.items())
        room = memory * (1 + 1e-9) - self._states(device, 0) - states - self._least_beside(numbers, device)
        peaks = np.array(self._chunks_in_flight(device), dtype=np.float64)
        peaks = np.concatenate([peaks, peaks.mean(axis=0)[None]])
        # Every block has at least as many micro-batches in flight as its device's stage with fewest, one of
        # each stage that must have it those of its stage.
        least, smallest = peaks.min(axis=1), min(self._saved_by_kind.values())
        must = np.array(self.fewest_blocks[device :: self.degrees.pipeline]) > 0
        more = (peaks - least[:, None])[:, must]
        saved = np.asarray(sum(own * self._saved_by_kind[kind] for kind, own in numbers.items()))
        beyond = np.multiply.outer(more.sum(axis=1) * smallest, np.ones(saved.shape))
        too_much = np.multiply.outer(least, saved) + beyond - room
        if self.setting.recompute != "full" or (too_much <= 0).all():
            return np.where((too_much <= 0).all(axis=0), 0.0, np.inf)
        again = [self._again_at_peak(*own) for own in zip(too_much, least, more, strict=True)]
        return np.asarray(np.max(again, axis=0))

    def _again_at_peak(self, too_much: np.ndarray, least: float, more: np.ndarray) -> np.ndarray:
        """How many blocks must run again to free so many bytes: the first ones in the stages with most
        micro-batches in flight, `more` than in that with the least."""
        saved = self._saved_by_kind.values()
        once = max(0.0, least * (max(saved) - self._kept_again))
        first = once + np.sort(more)[::-1] * max(0.0, min(saved) - self._kept_again)
        freed = np.append(0.0, np.cumsum(first))
        again = np.searchsorted(freed, too_much * (1 - 1e-9)).astype(float)
        rest = np.ceil((too_much - freed[-1]) / once - 1e-9) if once else np.inf
        return np.where(too_much <= 0, 0.0, np.where(again < len(freed), again, len(freed) - 1 + rest))

    def _least_beside(self, numbers: Mapping[bool, np.ndarray], device: int) -> np.ndarray:
        """Bytes that a device with so many blocks of each kind needs at least beside weights, gradients,
        states and activations: workspace, placeholders, libraries."""
        total = np.zeros(np.asarray(sum(numbers.values())).shape)
        for kinds in ((False,), (True,), (False, True)):
            if set(kinds) <= set(numbers):
                there = np.all([numbers[kind] > 0 for kind in kinds], axis=0)
                total = np.where(there, np.maximum(total, self._beside_bytes(kinds, device)), total)
        return np.maximum(total, self._beside_bytes((), device))

    def _beside_bytes(self, kinds: tuple[bool, ...], device: int) -> float:
        predicts, last = self._has_predictors(device), device == self.degrees.pipeline - 1
        key = kinds, predicts, last, device == 0, self._all_again, self.setting.predictors
        if key not in self._beside:
            self._beside[key] = self._beside_with(kinds, predicts, device)
        return self._beside[key]

    def _beside_with(self, kinds: Sequence[bool], predicts: bool, device: int) -> float:
        last = device == self.degrees.pipeline - 1
        places = [self.shape.routed.index(kind) for kind in kinds]
        spaces = [self._workspace(self.blocks[kind]) for kind in kinds]
        if self._all_again:
            spaces = [self.blocks[kind].saved + self.blocks[kind].workspace for kind in kinds]
        elif self.setting.recompute == "full":
            # What runs again may need less, where more blocks follow it.
            spaces = [min(map(self._workspace, self.blocks.values()))] if kinds else []
        spaces.append(self._predictor_workspace if predicts else 0.0)
        spaces.append(self._head_bytes if last else 0.0)
        tables = self._placeholders([range(place, place + 1) for place in places], predicts)
        return max(spaces) + self._sent_gradient(device) + tables + self._libraries

    @property
    def _libraries(self) -> float:
        return LIBRARIES + EXPERT_LIBRARIES * any(self.shape.routed)

    @cached_property
    def _block_states(self) -> dict[bool, float]:
        """Bytes of weights, gradients and states of a block of each kind."""
        places = {kind: self.shape.routed.index(kind) for kind in self.blocks}
        empty = (range(0),) * (self.setting.virtual_stages - 1)
        return {
            kind: self._state_sum((range(place, place + 1), *empty), 0) - self._states(0, 0)
            for kind, place in places.items()
        }

    def _state_sum(self, blocks: Sequence[range], device: int) -> float:
        """Bytes of weights, gradients and optimizer state; without weights that are not gathered always."""
        ledger = self.ledger(blocks, device)
        names = ("gradients", "optimizer") if self.reshards else ("weights", "gradients", "optimizer")
        return sum(ledger[name] for name in names)

    def peak_room(self, device: int, memory_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the micro-batches in flight at each peak in each virtual stage of a device, and its room.

        The room of a peak is the bytes that the device has at most for blocks: their states, and what they
        keep of these micro-batches. It is negative where the device does not fit without a block, or with one
        that it must have. On the first device the peaks of the embedding's backward follow, when the first
        virtual stage has one micro-batch less.
        """
        space = memory_bytes * (1 + 1e-9) - self._states(device, 0)
        room = space - min(self._beside_bytes((kind,), device) for kind in self.blocks)
        if not any(self.fewest_blocks[device :: self.degrees.pipeline]):
            room = min(space - self._beside_bytes((), device), max(room, 0.0))
        peaks = np.array(self._chunks_in_flight(device), dtype=np.float64)
        rooms = np.full(len(peaks), room)
        if device == 0:
            after = peaks - np.eye(1, peaks.shape[1])
            peaks = np.concatenate([peaks, after])
            rooms = np.append(rooms, np.full(len(after), space - self._embedding_bytes - self._libraries))
        return peaks, rooms

    def block_bytes(self, kind: bool, *, again: bool) -> tuple[float, float]:
        """Of a block, with experts or without, whose forward runs again or does not: its states, and what it
        keeps of a micro-batch."""
        return self._block_states[kind], self._kept_again if again else self._saved_by_kind[kind]

    def _chunks_in_flight(self, device: int) -> tuple[tuple[int, ...], ...]:
        setting = self.setting
        return chunks_in_flight(device, self.degrees.pipeline, setting.micro_batches, setting.virtual_stages)

    def bytes_on(self, blocks: Sequence[range], device: int) -> float:
        """The sum of the ledger of a device with the blocks of its virtual stages."""
        again = (own[: self.setting.recomputed(len(own))] for own in blocks)
        key = device, *map(self._counts, blocks), *map(self._counts, again)
        if key not in self._bytes:
            self._bytes[key] = sum(self.ledger(blocks, device).values())
        return self._bytes[key]

    def least_bytes(self) -> float:
        """That the largest stage needs at least: the mean of what weights, gradients and states need."""
        stages, blocks = self.degrees.pipeline, self.shape.blocks
        ends = sum(self._states(device, 0) for device in {slot % stages for slot in self.fixed_slots})
        return (ends + self._states(0, blocks) - self._states(0, 0)) / stages

    def _states(self, device: int, number: int) -> float:
        """Bytes of weights, gradients and states of a device with the first so many blocks: as many in
        whatever virtual stages they lie."""
        last = device == self.degrees.pipeline - 1
        key = (device > 0) + 2 * last + 4 * self._has_predictors(device), number
        if key not in self._state_bytes:
            own = (range(number),) + (range(0),) * (self.setting.virtual_stages - 1)
            self._state_bytes[key] = self._state_sum(own if device == 0 else own[::-1], device)
        return self._state_bytes[key]

    def peak_bytes(self, counts: Sequence[int]) -> float:
        """Of the device that needs most, of (virtual) stages with so many blocks."""
        return max(self.device_bytes(counts))

    def device_bytes(self, counts: Sequence[int]) -> list[float]:
        """Of each device, of (virtual) stages with so many blocks."""
        ranges, devices = block_ranges(counts), range(self.degrees.pipeline)
        return [self.bytes_on(self.own_blocks(ranges, each), each) for each in devices]
