"""What an answer says of the machine that was measured for it."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost_models.quantities import format_count
from ..cost_models.transformer.corrections import LayerCorrection
from ..cost_models.transformer.layer_seconds import LayerSeconds
from ..cost_models.transformer.measured_share import MeasuredShare
from ..cost_models.transformer.parallel_degrees import ParallelDegrees
from ..profiler.machine_file import MachineFile


def machine_notes(measured: MachineFile, layers: LayerSeconds, share: MeasuredShare) -> Iterator[str]:
    """Say how much of a step was measured, how kernel sums were corrected, and what is missing.

    Args:
        measured: The machine.
        layers: Layers of the plan.
        share: Shares of its step.
    """
    devices = format_count(measured.devices, "device")
    yield (
        f"measured on {measured.device_name} ({devices}), of the busiest device's work: {share.whole:.0%} as "
        f"whole layers and optimizer step, {share.kernels:.0%} as kernels, collectives and transfers; "
        f"estimated: {share.estimated:.0%}"
    )
    kinds = [*layers.blocks, None]
    corrections = [each for each in map(layers.correction, kinds) if each is not None]
    if corrections:
        yield "sums of kernels are corrected by whole layers: " + "; ".join(
            dict.fromkeys(map(_ratios, corrections))
        )
    if missing := measured.missing_parts():
        yield f"not measured yet: {', '.join(missing)}; run `pplan machine measure` again, it goes on"


def _ratios(layer: LayerCorrection) -> str:
    tensor, context, expert = layer.degrees
    degrees = ParallelDegrees(tensor, context, expert, data=expert, exchange="all-gather")
    name = {"dense": "block", "experts": "block with experts", "head": "head"}[layer.kind]
    return (
        f"{name} x {layer.forward:.2f} forward and {layer.backward:.2f} backward "
        f"(as {layer.implementation} computes it, {degrees.describe()})"
    )
