"""Share of a training step that was measured on the machine, and how far the prediction may be off."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .layer_seconds import LayerSeconds
from .layer_work import LayerWork
from .rank_costs import MeasuredGroupLinks

ESTIMATE_ERROR = 0.33
"""Relative error of seconds that were not measured. Published throughputs without a table of kernels were off
by up to 17 % on GPUs at full power, and by up to 45 % on others: this is about the middle."""


LEAST_ERROR = 0.05
"""Relative error of a step whose parts were all measured: steps of Megatron-LM on B200, predicted from
kernels that were measured on it, were 4.9 % off in the median."""


class MeasuredShare(NamedTuple):
    """Shares of a step's work by source; they add up to 1.

    Attributes:
        whole: Layers that were measured whole, and an optimizer step.
        kernels: Kernels, collectives and transfers that were measured one by one.
        estimated: All else.
        error: Relative error that follows.
    """

    whole: float
    kernels: float
    estimated: float
    error: float


class _Source(NamedTuple):
    """Source of some seconds: the share that was measured, whole or by kernels, and its relative error."""

    name: Literal["whole", "kernels"]
    measured: float
    error: float = LEAST_ERROR


def measured_share(layers: LayerSeconds, ranges: Sequence[range]) -> MeasuredShare:
    """Work out the shares of the pipeline's busiest device.

    Args:
        layers: Layers with the plan's degrees and setting.
        ranges: Blocks of each (virtual) stage.
    """
    stages = layers.degrees.pipeline
    devices = [list(_work(layers, ranges, device)) for device in range(stages)]
    work = max(devices, key=lambda own: sum(seconds for seconds, _ in own))
    sums: defaultdict[str, float] = defaultdict(float)
    for seconds, source in work:
        sums[source.name] += seconds * source.measured
        sums["estimated"] += seconds * (1 - source.measured)
        sums["error"] += seconds * source.measured * source.error
        sums["error"] += seconds * (1 - source.measured) * max(source.error, ESTIMATE_ERROR)
    total = sums["whole"] + sums["kernels"] + sums["estimated"]
    return MeasuredShare(*(sums[name] / total for name in MeasuredShare._fields))


def _work(layers: LayerSeconds, ranges: Sequence[range], device: int) -> Iterator[tuple[float, _Source]]:
    """Parts of a device's work in a step: their seconds and source."""
    costs, batches, stages = layers.costs, layers.setting.micro_batches, layers.degrees.pipeline
    slots = range(device, len(ranges), stages)
    again = layers.setting.recompute == "full"
    for slot in slots:
        for routed, count in Counter(layers.shape.routed[block] for block in ranges[slot]).items():
            seconds = batches * count * layers.block_seconds(routed, again=again).both
            yield seconds, _layer_source(layers, layers.blocks[routed], routed)
        end = layers.head if slot == len(ranges) - 1 else layers.embedding
        yield batches * layers.fixed_seconds(slot), _layer_source(layers, end, None)
        has_links = isinstance(costs.links, MeasuredGroupLinks)
        yield batches * sum(layers.cut_seconds(slot)), _Source("kernels", float(has_links))
    update = layers.update_seconds([ranges[slot] for slot in slots], device)
    yield update, _Source("whole", float(costs.corrections.update is not None))


def _layer_source(layers: LayerSeconds, work: LayerWork, routed: bool | None) -> _Source:
    """Source of the seconds of a block with experts or without, or (None) of head or embedding."""
    correction = layers.correction(routed)
    if correction is not None and correction.measures(work):
        return _Source("whole", 1.0, max(correction.spread, LEAST_ERROR))
    costs, degrees = layers.costs, layers.degrees
    total = measured = 0.0
    for kernel in (*work.forward, *work.backward):
        seconds = costs.kernel_seconds(kernel, degrees)
        total += seconds
        measured += seconds * costs.is_measured(kernel, degrees)
    error = ESTIMATE_ERROR if correction is None else costs.corrections.error(correction)
    return _Source("kernels", measured / total if total else 0.0, max(error, LEAST_ERROR))
