"""Passes at one micro-batch size: of the layers, of the whole model, and with backward in two parts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from .chain.layers import Layer
from .counting_operations import OperationCounter
from .measurement_target import MeasurementTarget
from .memory.live_bytes import build_meter
from .memory.workspace import LossWorkspace, StepMemory, Workspace, peak_of_step
from .passes.backward_parts import PartTimes, run_parts
from .passes.launch_lead import LeadTuner
from .passes.layer_stamps import AGAIN, LayerStamps, LayerTimes, stamped_layers
from .passes.timing import OutputGradients, WholeTimes, run_layers, run_whole
from .passes.watchers import CompositeWatcher, SavedBytes, Watcher
from .user_model.flat_output import tensors_in
from .user_model.loaded_model import ModelInput
from .user_model.losses import Loss


def _tries(may_do_better: Callable[[], bool]) -> Iterator[None]:
    """A pass, and further ones while another may do better: a few at the most, of which the last counts."""
    for _ in range(AGAIN):
        yield
        if not may_do_better():
            break


class SizePasses:
    """Runs the model that is measured, and its layers, at one micro-batch size.

    The input, and the gradients that backward starts from, are made for the first pass and used by all.
    `leads`: how long a device is held back before each pass, so that its host is ahead; the passes tell.
    """

    def __init__(self, subject: MeasurementTarget, size: int) -> None:
        self._subject, self._size = subject, size
        modes = subject.modes
        self._input: ModelInput | None = None
        modes.forget_compiled()
        self.layers = modes.layers(subject.chain.layers)
        self._model = modes.whole(subject.loaded.module)
        self._gradients = OutputGradients(subject.seed)
        self._context = partial(modes.forward_context, subject.device)
        self.leads = LeadTuner()
        self._used_leads = self.leads.leads
        """Of the last pass of the untouched model."""

    def run_layers(self, watcher: Watcher, loss: Loss | None = None) -> None:
        """One layer after another, forward and backward."""
        inputs = self._fresh_input().layer_input
        self._subject.clock.settle()
        run_layers(self.layers, inputs, self._gradients, watcher, loss=loss, context=self._context)

    def time_layers(self) -> LayerTimes:
        """The seconds of each layer, and of the loss that ends the pass."""
        return stamped_layers(
            lambda stamps: self.run_layers(stamps, self._subject.loss),
            self._subject.clock,
            len(self.layers),
            self.leads,
        )

    def warm_up_layers(self) -> None:
        """A pass as `time_layers` makes it, without holding the device back: to warm up."""
        self.run_layers(LayerStamps(self._subject.clock, len(self.layers)), self._subject.loss)

    def time_whole(self) -> WholeTimes:
        """The seconds of the untouched model."""
        for _ in _tries(lambda: self.leads.has_whole_waited and self.leads.leads != self._used_leads):
            times = self._time_whole()
        self.leads.keep_whole()
        return times

    def _time_whole(self) -> WholeTimes:
        inputs, clock = self._fresh_input(), self._subject.clock
        clock.settle()
        leads = self._used_leads = self.leads.leads
        times = run_whole(self._model, inputs, self._gradients, clock, leads=leads, context=self._context)
        if times.forward_host is not None and times.backward_host is not None:
            self.leads.observe_whole(times.forward_host, times.backward_host)
        return times

    def time_parts(self) -> PartTimes:
        """The seconds of each layer's backward in two parts: gradients of the input, and of the weights."""
        for _ in _tries(lambda: self.leads.parts_can_wait_less):
            inputs, clock = self._fresh_input().layer_input, self._subject.clock
            clock.settle()
            times = run_parts(
                self.layers, inputs, self._gradients, clock, leads=self.leads, context=self._context
            )
        self.leads.keep_parts()
        return times

    def find_leads(self) -> None:
        """Passes that show how long the host takes to launch: the first without a lead."""
        self._subject.clock.calibrate()
        while not self.leads.is_settled:
            self.time_layers()

    def step_memory(self, saved: SavedBytes, operations: OperationCounter | None = None) -> StepMemory:
        """The memory of a pass without the loss, as the untouched model's pass is; and its operations."""
        module, device = self._subject.loaded.module, self._subject.device
        # Those that backward starts from are of the pass: they are drawn in it.
        self._gradients.forget()
        with build_meter(device, module) as meter:
            inputs = self._fresh_input().layer_input
            workspace = Workspace(module, len(self.layers), meter, tensors_in(inputs))
            with _watched(workspace, operations) as watcher:
                run_layers(self.layers, inputs, self._gradients, watcher, context=self._context)
        return workspace.memory(saved.saved_bytes)

    def loss_workspace(
        self, saved: SavedBytes, operations: OperationCounter | None = None
    ) -> LossWorkspace | None:
        """The bytes that the loss needs for itself; None without a loss. And the operations of the pass."""
        subject = self._subject
        if subject.loss is None:
            return None
        module, count = subject.loaded.module, len(self.layers)
        with build_meter(subject.device, module) as meter:
            inputs = self._fresh_input().layer_input
            workspace = Workspace(module, count, meter, tensors_in(inputs))
            # Its targets are of the pass.
            loss = subject.loss.without_targets()
            with _watched(workspace, operations) as watcher:
                run_layers(self.layers, inputs, self._gradients, watcher, loss=loss, context=self._context)
        return workspace.loss(saved.saved_bytes, saved.loss_saved_bytes)

    def peak_bytes(self) -> int:
        """Most bytes allocated in a step of the untouched model, gradients existing."""
        meter = build_meter(self._subject.device, self._subject.loaded.module)
        self._gradients.forget()
        release(self._subject.device)
        return peak_of_step(self.time_whole, meter)

    def free_inputs(self) -> None:
        """Frees the input and the gradients that backward starts from; the next pass makes them again."""
        self._input = None
        self._gradients.forget()

    def _fresh_input(self) -> ModelInput:
        """A clone, made before the time counts: the model may work in place."""
        if self._input is None:
            subject = self._subject
            example = ModelInput.of(subject.loaded.example_input_for(self._size))
            self._input = example.to(subject.device, subject.dtype, subject.modes.memory_format)
        return self._input.clone()


@contextmanager
def _watched(workspace: Workspace, operations: OperationCounter | None) -> Iterator[Watcher]:
    """The watcher of both. Operations are counted while it is entered."""
    if operations is None:
        yield workspace
        return
    with operations:
        yield CompositeWatcher(workspace, operations)


class VisitingWatcher:
    """Passes everything on to another watcher; calls `visit` before each layer, checks its output after."""

    def __init__(
        self, watcher: Watcher, layers: Sequence[Layer], size: int, visit: Callable[[Layer], None]
    ) -> None:
        self._watcher, self._layers, self._size, self._visit = watcher, layers, size, visit
        self.backward_starts = watcher.backward_starts
        self.gradient = watcher.gradient
        self.backward_ends = watcher.backward_ends

    def before(self, index: int, layer_input: object) -> None:
        if index < len(self._layers):
            self._visit(self._layers[index])
        self._watcher.before(index, layer_input)

    def after(self, index: int, output: object) -> None:
        if index < len(self._layers):
            self._layers[index].check_shapes(self._size, output)
        self._watcher.after(index, output)


def release(device: torch.device) -> None:
    """Frees the memory that a failed pass left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, Python's garbage collector is off: it would delay some passes and not others."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
