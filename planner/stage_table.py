"""Tables of all stages of a chain: seconds and bytes of the layers between any two cut points.

A *cut point* is where a stage may start or end: before the first layer, at every allowed cut, after the last
layer. Number i lies before layer `cut_points[i]`; n + 1 of them make n blocks that no cut divides. Matrices
have shape (n + 1, n + 1), entry [i, j] for the stage from cut point i to cut point j; only i < j is
meaningful.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain, LayerCosts, copy_bytes, list_cut_points
from ..cost_models.machines import device_context
from ..cost_models.memory import (
    LedgerOptions,
    StageBytes,
    count_first_layers,
    ledger,
    recompute_first,
    round_ledger,
    total,
    whole_word,
)
from ..cost_models.optimizers import Precision
from ..cost_models.precision import training_precision
from ..cost_models.quantities import format_count
from ..cost_models.runtime import OFFLOAD
from ..cost_models.topology import Device

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def sum_runs(values: Floats) -> Floats:
    """Sum every run of consecutive values.

    Each sum is computed from the values of its run alone. A difference of two running sums would lose the
    digits of a small run after large values.

    Args:
        values: (n,), not negative.

    Returns:
        (n + 1, n + 1): entry [i, j] is the sum of `values[i:j]`, 0 for i >= j.
    """
    sums = np.zeros((len(values) + 1,) * 2)
    for start in range(len(values) - 1, -1, -1):
        np.add(sums[start + 1, start + 1 :], values[start], out=sums[start, start + 1 :])
    return sums


def sum_within(values: Floats, cut_points: Sequence[int]) -> Floats:
    """Return, for each value, the sum from the cut point before it up to the value itself."""
    sums = values.copy()
    for start, end in pairwise(cut_points):
        if end - start > 1:
            np.cumsum(values[start:end], out=sums[start:end])
    return sums


def fullest_kind(kinds: Iterable[Device]) -> Device:
    """Return the kind of device with the largest process context, and so the largest ledger."""
    contexts = {kind: device_context(kind.name) for kind in kinds}
    return max(
        contexts, key=lambda kind: -1.0 if (context := contexts[kind]) is None else float(context.value)
    )


def ledger_options(
    device: Device, dtype: str, precision: Precision | None = None, zero: int = 0
) -> LedgerOptions:
    """Return what a device and the training add to every ledger: context, bytes of numbers, and ZeRO stage.

    Args:
        device: Kind of device. The context is 0 if it has no preset.
        dtype: Data type of the profile.
        precision: Bytes of numbers. None for those that are usual for the dtype.
        zero: ZeRO stage.

    Raises:
        UsageError: The dtype is unknown.
    """
    context = device_context(device.name)
    numbers = precision or training_precision(dtype).bytes
    if context is not None and numbers.kernels == "for-loop":
        # A profile of a CPU is used to plan a GPU.
        numbers = replace(numbers, kernels="foreach")
    return {
        "precision": numbers,
        "zero": zero,
        "context_bytes": 0.0 if context is None else context.value,
    }


@dataclass(frozen=True, eq=False)
class StageTable:
    """All stages of a chain at one micro-batch size per replica."""

    costs: LayerCosts
    cut_points: tuple[int, ...]

    @classmethod
    def of(cls, chain: Chain, size: float, *, past_largest: bool = False) -> StageTable:
        """Return the table of a chain for micro-batches of `size` samples.

        Args:
            chain: Costs of the layers.
            size: Samples per replica.
            past_largest: Whether costs may be extrapolated past the largest measured size.

        Raises:
            UsageError: The size has no costs, see `Chain.at`.
        """
        return cls(chain.at(size, past_largest=past_largest), list_cut_points(chain))

    @property
    def blocks(self) -> int:
        """Number of blocks, n."""
        return len(self.cut_points) - 1

    @cached_property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Mask of i < j."""
        return np.triu(np.ones((self.blocks + 1,) * 2, dtype=bool), 1)

    def stage_sums(self, values: Floats) -> Floats:
        """Return the sum of a (layers,) figure over each stage."""
        return sum_runs(np.add.reduceat(values, self.cut_points[:-1]))

    @cached_property
    def forward(self) -> Floats:
        """Forward seconds."""
        return self.stage_sums(self.costs.forward_seconds)

    @cached_property
    def backward(self) -> Floats:
        """Backward seconds, without recomputation."""
        return self.stage_sums(self.costs.backward_seconds)

    @cached_property
    def accumulation(self) -> Floats:
        """Backward seconds that the first micro-batch of a step saves, because it adds to no gradients."""
        return self.stage_sums(self.costs.accumulation)

    @cached_property
    def forward_launch(self) -> Floats:
        """Host seconds to launch the forward."""
        return self.stage_sums(self.costs.forward_host_seconds)

    @cached_property
    def backward_launch(self) -> Floats:
        """Host seconds to launch the backward."""
        return self.stage_sums(self.costs.backward_host_seconds)

    @cached_property
    def crossing(self) -> Floats:
        """(n + 1,) bytes that cross each cut point in one direction; 0 at both ends of the model."""
        inner = self.costs.output_bytes[np.array(self.cut_points[1:-1], dtype=int) - 1]
        return np.concatenate([[0.0], inner, [0.0]])

    @cached_property
    def stage_bytes(self) -> StageBytes:
        """Inputs of the memory ledger of every stage."""
        costs = self.costs
        starts = np.array(self.cut_points[:-1], dtype=int)
        whole, copies = self._copied_bytes(trainable=False), self._copied_bytes(trainable=True)
        return StageBytes(
            parameters=self.stage_sums(costs.parameter_bytes) + whole,
            trainable=self.stage_sums(costs.trainable_bytes) + copies,
            buffers=self.stage_sums(costs.buffer_bytes) + self._copied_buffers,
            saved=self.stage_sums(costs.saved_bytes),
            saved_input=np.append(costs.saved_input_bytes[starts], 0.0)[:, None],
            input=np.concatenate([[costs.input_bytes], self.crossing[1:]])[:, None],
            received=self.crossing[:, None],
            sent=self.crossing[None, :],
            workspace=self._workspace,
            copies=copies,
            largest=self._largest_parameter,
            **self._split_bytes(),
            **self._working_bytes(),
        )

    def _split_bytes(self) -> dict[str, Floats]:
        """Return the additional inputs for a backward in two parts.

        In PyTorch the first stage's backward has one part, and only the last stage's first part frees
        something.
        """
        costs, ends = self.costs, np.array(self.cut_points[1:], dtype=int) - 1
        is_inner = (np.arange(self.blocks + 1) > 0).astype(np.float64)[:, None]
        output = np.append(0.0, costs.output_bytes[ends])
        released = np.append(np.zeros(self.blocks), costs.loss_bytes + output[-1])
        return {
            "pending": self.stage_sums(costs.pending_bytes) * is_inner,
            "output": output[None, :],
            "released": released[None, :] * is_inner,
            "layer_workspace": self._largest(costs.workspace_bytes),
        }

    def _working_bytes(self) -> dict[str, Floats]:
        """Return the bytes of a micro-batch at work if saved tensors go to the host."""
        costs, starts = self.costs, np.array(self.cut_points[:-1])
        received = np.append(0.0, costs.output_bytes[:-1])
        loss = np.append(np.zeros(self.blocks), costs.loss_bytes)[None, :]
        largest = {"loss": loss}
        for name, more in (("working", 0.0), ("working_peak", costs.workspace_bytes)):
            further = received + costs.offloaded_bytes + more
            first = further.copy()
            first[starts] -= received[starts]  # counted as the stage's input
            rows = (np.maximum.reduceat(values, starts) for values in (first, further))
            largest[name] = self._running(*rows)
        return largest

    @cached_property
    def _largest_parameter(self) -> Floats:
        """Largest parameter of each stage in bytes, copies of tied weights included."""
        largest = self._largest(self.costs.largest_bytes)
        for weight in self.costs.tied:
            alone = copy_bytes([(weight.trainable_bytes, weight.layers)], self.cut_points)
            largest = np.maximum(largest, alone)
        return largest

    def _copied_bytes(self, *, trainable: bool) -> Floats | float:
        """Return the bytes of weights of each stage that an earlier stage has, too.

        Only trained ones if `trainable`.
        """
        tied = [
            (weight.trainable_bytes if trainable else weight.bytes, weight.layers)
            for weight in self.costs.tied
        ]
        return copy_bytes(tied, self.cut_points) if tied else 0.0

    @property
    def _copied_buffers(self) -> Floats | float:
        """Bytes of buffers of each stage that an earlier stage has, too."""
        shared = [(buffer.bytes, buffer.layers) for buffer in self.costs.shared_buffers]
        return copy_bytes(shared, self.cut_points) if shared else 0.0

    def reduced_bytes(self, zero: int) -> Floats:
        """Return the trainable bytes whose gradients the replicas of each stage reduce among themselves."""
        stages = self.stage_bytes
        return np.asarray(stages.trainable if zero else stages.trainable - stages.copies)

    @cached_property
    def _workspace(self) -> Floats:
        """Bytes that each stage needs at its peak in addition to all that its layers save.

        While a layer runs, the micro-batch at work holds what the layers up to it save, and its workspace.
        The peak of a stage is the maximum over its blocks of what earlier blocks save plus the block's peak.
        """
        costs, saved = self.costs, self.stage_sums(self.costs.saved_bytes)
        at_work = sum_within(costs.saved_bytes, self.cut_points) + costs.workspace_bytes
        peaks = np.maximum.reduceat(at_work, self.cut_points[:-1])
        largest = np.zeros_like(saved)
        largest[:, 1:] = np.where(self.valid[:, 1:], saved[:, :-1] + peaks, 0.0)
        return np.maximum(np.maximum.accumulate(largest, axis=1) - saved, 0.0) * self.valid

    def _largest(self, values: Floats) -> Floats:
        """Return the largest (layers,) value of each stage's layers."""
        blocks = np.maximum.reduceat(values, self.cut_points[:-1])
        return self._running(blocks, blocks)

    @cached_property
    def _gathered_bytes(self) -> Floats:
        """Largest parameter bytes of two consecutive layers: the one at work and the one being gathered.

        Each layer counts with the previous one, and a stage's first layer alone.
        """
        parameters, starts = self.costs.parameter_bytes, np.array(self.cut_points[:-1])
        pairs = parameters + np.append(0.0, parameters[:-1])
        within = pairs.copy()
        within[starts] = parameters[starts]
        return self._running(np.maximum.reduceat(within, starts), np.maximum.reduceat(pairs, starts))

    def _running(self, first: Floats, further: Floats) -> Floats:
        """Return the largest of each stage's blocks: `first` of its first block, `further` of the rest."""
        largest = np.zeros((self.blocks + 1,) * 2)
        for start in range(self.blocks):
            blocks = np.append(first[start], further[start + 1 :])
            largest[start, start + 1 :] = np.maximum.accumulate(blocks)
        return largest

    def memory(
        self,
        in_flight: float,
        recompute: str,
        optimizer: str,
        replicas: int = 1,
        **options: Unpack[LedgerOptions],
    ) -> Floats:
        """Return the bytes that each stage needs.

        Args:
            in_flight: Micro-batches in flight.
            recompute: Recomputation mode.
            optimizer: Name of the optimizer.
            replicas: Number of replicas.
            **options: Options of the ledger, see `ledger`.
        """
        terms = ledger(
            StageBytes(**self.tables(options.get("zero", 0))),
            in_flight=in_flight,
            recompute=recompute,
            optimizer=optimizer,
            replicas=replicas,
            **options,
        )
        return np.broadcast_to(total(terms), self.valid.shape)

    def stage_memory(
        self,
        start: Indices,
        end: Indices,
        in_flight: float,
        recompute: str,
        optimizer: str,
        replicas: int = 1,
        recompute_end: Indices | None = None,
        **options: Unpack[LedgerOptions],
    ) -> Floats:
        """Return the (pairs,) bytes that some stages need.

        Args:
            start: (pairs,) cut points where the stages begin.
            end: (pairs,) cut points where they end.
            in_flight: Micro-batches in flight.
            recompute: Recomputation mode.
            optimizer: Name of the optimizer.
            replicas: Number of replicas.
            recompute_end: (pairs,) cut points inside the stages up to which they recompute; `recompute` is
                then "always". None if they recompute as the mode says.
            **options: Options of the ledger, see `ledger`.
        """
        zero = options.get("zero", 0)
        stages = self._stages(start, end, zero)
        if recompute_end is not None:
            first, rest = self._stages(start, recompute_end, zero), self._stages(recompute_end, end, zero)
            stages = recompute_first(stages, first, rest)
        terms = ledger(
            stages,
            in_flight=in_flight,
            recompute=recompute,
            optimizer=optimizer,
            replicas=replicas,
            **options,
        )
        return np.broadcast_to(total(terms), start.shape)

    def _stages(self, start: Indices, end: Indices, zero: int) -> StageBytes:
        """Return the bytes of some stages, each of shape (pairs,)."""
        places = start * (self.blocks + 1) + end
        by_name: dict[str, Any] = {name: amounts.take(places) for name, amounts in self.tables(zero).items()}
        return StageBytes(**by_name)

    def stage_ledger(
        self,
        i: int,
        j: int,
        in_flight: float,
        recompute: str,
        optimizer: str,
        replicas: int = 1,
        **options: Unpack[LedgerOptions],
    ) -> dict[str, int]:
        """Return the ledger of one stage in whole bytes.

        Args:
            i: Cut point where it begins.
            j: Cut point where it ends.
            in_flight: Micro-batches in flight.
            recompute: Recomputation mode.
            optimizer: Name of the optimizer.
            replicas: Number of replicas.
            **options: Options of the ledger, see `ledger`.
        """
        terms = ledger(
            self.bytes_between(i, j, zero=options.get("zero", 0), recompute=recompute),
            in_flight=in_flight,
            recompute=OFFLOAD if recompute == OFFLOAD else whole_word(recompute),
            optimizer=optimizer,
            replicas=replicas,
            **options,
        )
        return round_ledger({name: float(amount) for name, amount in terms.items()})

    def bytes_between(self, i: int, j: int, *, zero: int = 0, recompute: str = "never") -> StageBytes:
        """Return the inputs of the ledger of one stage with a recomputation mode.

        Args:
            i: Cut point where it begins.
            j: Cut point where it ends.
            zero: ZeRO stage.
            recompute: Recomputation mode.

        Raises:
            UsageError: The mode recomputes more layers than the stage has.
        """
        by_name: dict[str, Any] = {name: float(amounts[i, j]) for name, amounts in self.tables(zero).items()}
        stage, first = StageBytes(**by_name), count_first_layers(recompute)
        if first is None:
            return stage
        start, end = self.cut_points[i], self.cut_points[j]
        middle = start + first
        if not start < middle < end:
            raise UsageError(
                f"recompute={recompute!r}: its stage has {format_count(end - start, 'layer')}",
                "Recompute at least one layer, and fewer than the stage has.",
            )
        cuts = sorted({0, start, middle, end, self.cut_points[-1]})
        parts, place = StageTable(self.costs, tuple(cuts)), cuts.index(middle)
        repeated, rest = parts.bytes_between(place - 1, place), parts.bytes_between(place, place + 1)
        return recompute_first(stage, repeated, rest)

    def first_sum(self, name: str, i: int, j: int, first: int) -> float:
        """Return the `forward` or `forward_launch` seconds of the first `first` layers of a stage."""
        costs = self.costs
        seconds = costs.forward_seconds if name == "forward" else costs.forward_host_seconds
        return float(seconds[self.cut_points[i] : min(self.cut_points[i] + first, self.cut_points[j])].sum())

    def tables(self, zero: int) -> dict[str, Floats]:
        """Return `stage_bytes` by name, with what ZeRO holds whole at a time if it shards layers."""
        return self._of_all_stages if zero < 2 else self._of_all_stages | {"gathered": self._gathered_bytes}

    @cached_property
    def _of_all_stages(self) -> dict[str, Floats]:
        """`stage_bytes` by name, each of the shape of `valid`."""
        amounts = vars(self.stage_bytes).items()
        return {
            name: np.broadcast_to(amount, self.valid.shape) for name, amount in amounts if amount is not None
        }


WEIGHT_SHARE = 0.5
"""Share of the weight gradient in a layer's backward.

In a matrix product or a convolution it takes as many operations as the input gradient.
"""


def part_seconds(costs: LayerCosts, part: str) -> Floats:
    """Return the (layers,) seconds of the `input` or `weight` gradients of every layer.

    They are measured, else a share of the whole backward.
    """
    seconds = costs.backward_input_seconds if part == "input" else costs.backward_weight_seconds
    if seconds is None:
        share = np.where(costs.trainable_bytes > 0, WEIGHT_SHARE, 0.0)
        seconds = costs.backward_seconds * (share if part == "weight" else 1 - share)
    return seconds


def least_backward(costs: LayerCosts, first_share: float, *, splits: bool) -> Floats:
    """Return the (layers,) least backward seconds, whole or (if `splits`) in two parts.

    Args:
        costs: Costs of the layers.
        first_share: Share of the backwards that are the first of a step, see `LayerCosts.mean_backward`.
        splits: Whether a backward may be two actions.
    """
    whole = costs.mean_backward(first_share)
    if not splits:
        return whole
    weight = part_seconds(costs, "weight")
    saved = first_share * np.minimum(costs.accumulation, weight)
    return np.minimum(whole, part_seconds(costs, "input") + weight - saved)


def layer_work(costs: LayerCosts, first_share: float, *, recompute: bool, splits: bool) -> Floats:
    """Return the (layers,) seconds of a forward (twice if `recompute`) and the least backward.

    Args:
        costs: Costs of the layers.
        first_share: See `least_backward`.
        recompute: Whether the forward runs twice.
        splits: See `least_backward`.
    """
    forward = (1 + recompute) * costs.forward_seconds
    return forward + least_backward(costs, first_share, splits=splits)
