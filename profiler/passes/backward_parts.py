"""Backward in two parts, as zero-bubble schedules run it: the inputs' gradients, then the weights'.

(Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.)

One forward through all layers; then the input gradients of the whole chain in one run of autograd, which is
asked for the gradient of what the first layers made and therefore leaves out every weight gradient; then,
layer by layer in reverse order, the weight gradients from the gradients that were caught on the way. An
operation that computes both at once (a torch.autograd.Function of the user's, a compiled block) cannot be
parted: it runs in the first part, and again in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..user_model.flat_output import tensors_in
from .clocks import Clock
from .launch_lead import LeadTuner, Vector
from .layer_stamps import Holds, LayerStamps, LayerTimes, timeline
from .timing import Context, OutputGradients, backward_failures, forward_layers, hook_first
from .weight_paths import WeightPaths

if TYPE_CHECKING:
    from ..chain.layers import Layer


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one backward in two parts, an entry for each layer; the host's where the clock has its own.

    `input`: the gradient of what the layer was given; 0 for layers whose input needs none. `weight`: the
    gradients of its parameters, their accumulation included; 0 without parameters that need one.
    `pending_bytes`: of the gradients that the first part leaves for the second, each storage once, with the
    last layer that needs it. None: not counted, in journals of earlier versions.
    """

    input: Vector
    weight: Vector
    input_host: Vector | None = None
    weight_host: Vector | None = None
    pending_bytes: Vector | None = None


def run_parts(
    layers: Sequence[Layer],
    model_inputs: Any,
    gradients: OutputGradients,
    clock: Clock,
    *,
    leads: LeadTuner | None = None,
    context: Context = nullcontext,
) -> PartTimes:
    """One pass: forward, input gradients, weight gradients, which accumulate as in any backward.

    Afterwards every parameter has the same gradient as after a backward in one. Where layers share a
    parameter, each computes its own share of the gradient. `leads`: how long a device is held back, and is
    told what the pass showed. Raises as `run_layers` does.
    """
    leads = leads or LeadTuner()
    stamps = LayerStamps(clock, len(layers), Holds(backward=leads.inputs.holds))
    paths = WeightPaths(len(layers), tensors_in(model_inputs))

    def add_targets(index: int, tensors: list[Tensor]) -> None:
        if index < len(layers) - 1:
            hook_first(stamps, index, tensors)
        paths.add_layer(index, [get_gradient_edge(tensor) for tensor in tensors])

    with context():
        output = forward_layers(layers, model_inputs, stamps, add_targets)
    tensors, starts = gradients.of(output)
    del output, model_inputs
    paths.find()
    with paths.catching(), backward_failures():
        stamps.backward_starts()
        caught = torch.autograd.grad(tensors, paths.targets, starts, retain_graph=True, allow_unused=True)
        stamps.backward_ends()
    del tensors, starts
    paths.catch_targets(caught)
    del caught
    # Read before the next stamp is set: the clock uses what it settled again.
    inputs = stamps.times()
    behind = stamps.timelines()[1] if clock.has_host else None
    pending = np.array(paths.pending_bytes(), dtype=np.float64)
    both_idle = clock.stamp()
    with backward_failures():
        marks = _weight_gradients(paths, clock, leads.weights.holds)
    clock.settle()
    if behind is not None:
        leads.observe_parts(behind, timeline(clock, both_idle, list(marks.values())))
    return replace(_times(inputs, marks, paths.first, clock), pending_bytes=pending)


def _weight_gradients(paths: WeightPaths, clock: Clock, holds: Vector | None) -> dict[int, tuple[Any, Any]]:
    """Stamps around each layer that has any, before each of which the device is held back."""
    marks: dict[int, tuple[Any, Any]] = {}
    for layer in reversed(range(len(paths.branches))):
        branches = paths.branches[layer]
        if branches:
            if holds is not None:
                clock.hold_back(float(holds[len(marks)]))
            start = clock.stamp()
            while branches:
                branches.pop(0).run()
            marks[layer] = start, clock.stamp()
    return marks


def _times(
    inputs: LayerTimes, marks: dict[int, tuple[Any, Any]], first: Collection[int], clock: Clock
) -> PartTimes:
    count = len(inputs.backward)

    def weights(seconds: Callable[[Any, Any], float]) -> Vector:
        each = [seconds(*marks[layer]) if layer in marks else 0.0 for layer in range(count)]
        return np.maximum(each, 0.0)

    def parted(backward: Vector, weight: Vector) -> tuple[Vector, Vector]:
        # What ran in a first layer served its weights only.
        moved = np.array([layer in first for layer in range(count)])
        return np.where(moved, 0.0, backward), weight + np.where(moved, backward, 0.0)

    device = parted(inputs.backward, weights(clock.seconds))
    if inputs.backward_host is None:
        return PartTimes(*device)
    return PartTimes(*device, *parted(inputs.backward_host, weights(clock.host_seconds)))
