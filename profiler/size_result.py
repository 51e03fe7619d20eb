"""The results at one micro-batch size, of a model that was measured whole or in segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .counting_operations import LayerOperations
from .equal_layers import EqualLayers
from .memory.workspace import LossWorkspace, StepMemory
from .offload.segmented import SegmentedRun
from .passes.timed_passes import TimedPasses
from .size_run import SizeRun


@dataclass(frozen=True)
class SizeResult:
    """Entries by layer. `rounds` is without passes on the meta device, and without whole ones in segments."""

    size: int
    rounds: TimedPasses
    saved_bytes: Sequence[int]
    saved_input_bytes: Sequence[int]
    output_bytes: Sequence[int]
    forward_workspace_bytes: Sequence[int] | None
    backward_workspace_bytes: Sequence[int] | None
    loss_saved_bytes: int
    loss_output_bytes: int
    loss_workspace: LossWorkspace | None = None
    """None without a loss, and where it is not known."""
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    pending_gradient_bytes: Sequence[int] | None = None
    """None: not counted."""
    operations: Sequence[LayerOperations] | None = None
    """Of an estimate, and last those of the loss, if there is one."""

    @classmethod
    def of_run(cls, run: SizeRun) -> SizeResult:
        """Of a model that was on the device whole."""
        memory: StepMemory | None = run.memory
        return cls(
            size=run.size,
            rounds=run.rounds,
            saved_bytes=run.saved.saved_bytes,
            saved_input_bytes=run.saved.saved_input_bytes,
            output_bytes=run.saved.output_bytes,
            forward_workspace_bytes=memory.forward if memory else None,
            backward_workspace_bytes=memory.backward if memory else None,
            loss_saved_bytes=run.saved.loss_saved_bytes,
            loss_output_bytes=run.saved.loss_output_bytes,
            loss_workspace=run.loss_workspace,
            peak_bytes=run.peak_bytes,
            reserved_bytes=run.reserved_bytes,
            predicted_peak_bytes=memory.predicted_peak if memory else None,
            pending_gradient_bytes=run.pending_bytes or run.rounds.pending_bytes(),
            operations=None if run.operations is None else run.operations.layers,
        )

    @classmethod
    def of_segments(cls, size: int, run: SegmentedRun) -> SizeResult:
        """Of a model that was on the device in parts."""
        return cls(
            size=size,
            rounds=TimedPasses(layers=run.times),
            saved_bytes=run.saved_bytes,
            saved_input_bytes=run.saved_input_bytes,
            output_bytes=run.output_bytes,
            forward_workspace_bytes=run.forward_workspace_bytes,
            backward_workspace_bytes=run.backward_workspace_bytes,
            loss_saved_bytes=run.loss_saved_bytes,
            loss_output_bytes=run.loss_output_bytes,
            loss_workspace=run.loss_workspace,
        )

    def for_layers(self, blocks: EqualLayers) -> SizeResult:
        """Of all layers, from those that were counted for others too; without a step's peak."""
        counts = [
            self.forward_workspace_bytes,
            self.backward_workspace_bytes,
            self.pending_gradient_bytes,
        ]
        by_layer = blocks.by_layer
        forward, backward, pending = (None if each is None else by_layer(each) for each in counts)
        return replace(
            self,
            saved_bytes=by_layer(self.saved_bytes),
            saved_input_bytes=by_layer(self.saved_input_bytes),
            output_bytes=by_layer(self.output_bytes),
            forward_workspace_bytes=forward,
            backward_workspace_bytes=backward,
            predicted_peak_bytes=None,
            pending_gradient_bytes=pending,
            operations=None if self.operations is None else by_layer(self.operations),
        )
