"""A model that is on the device whole, at one micro-batch size: its bytes, and its rounds of timed passes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..cost_models.errors import PplanError
from .clocks import LeadTuner
from .journal import Journal, PassKind
from .layer import Layer
from .losses import Loss
from .memory import Workspace, build_meter, peak_of_step, sees_kernels
from .modes import MeasurementTarget
from .operations import OperationCounter
from .passes import (
    AGAIN,
    CompositeWatcher,
    CountedBytes,
    LayerStamps,
    LayerTimes,
    OutputGradients,
    PassTimes,
    SavedBytes,
    Watcher,
    run_layers,
    run_whole,
    stamped_layers,
    warm_until_stable,
)
from .profile_file import WAITED
from .timed_passes import PartTimes, SizeResult, TimedPasses, run_parts
from .user_model import ModelInput, first_line, is_out_of_memory, refusal, tensors_in

# Passes at one micro-batch size: of the layers, of the whole model, and with backward in two parts.


def _tries(may_do_better: Callable[[], bool]) -> Iterator[None]:
    """A pass, and further ones while another may do better: a few at the most, of which the last counts."""
    for _ in range(AGAIN):
        yield
        if not may_do_better():
            break


class LayerPasses:
    """Runs layers that follow each other at one micro-batch size: those of a whole model, or some of them.

    `model` holds the parameters and buffers that they use. `leads`: how long a device is held back before
    each pass, so that its host is ahead; the passes tell.
    """

    def __init__(
        self,
        subject: MeasurementTarget,
        layers: Sequence[Layer],
        model: nn.Module,
        gradients: OutputGradients,
        loss: Loss | None,
    ) -> None:
        self._subject, self._gradients = subject, gradients
        self.layers, self._holder, self.loss = layers, model, loss
        self._context = partial(subject.modes.forward_context, subject.device)
        self.leads = LeadTuner()

    def feed(self) -> Any:
        """The input of the first layer, which may work on it in place."""
        raise NotImplementedError

    def passing(self, inputs: Any) -> list[Tensor]:
        """The tensors of `inputs` whose memory the passes hold, and nothing before them."""
        return tensors_in(inputs)

    def saved_bytes(self, inputs: Any) -> SavedBytes:  # noqa: ARG002
        """A watcher that counts what a pass on `inputs` saves."""
        return SavedBytes(self._holder, len(self.layers))

    def run(self, watcher: Watcher, loss: Loss | None = None) -> None:
        """One layer after another, forward and backward."""
        self._run(self.feed(), watcher, loss)

    def _run(self, inputs: Any, watcher: Watcher, loss: Loss | None) -> None:
        self._subject.clock.settle()
        run_layers(self.layers, inputs, self._gradients, watcher, loss=loss, context=self._context)

    def time_layers(self) -> LayerTimes:
        """The seconds of each layer, and of the loss that ends the pass."""
        run = partial(self.run, loss=self.loss)
        return stamped_layers(run, self._subject.clock, len(self.layers), self.leads)

    def find_leads(self) -> None:
        """Passes that show how long the host takes to launch: the first without a lead."""
        self._subject.clock.calibrate()
        while not self.leads.is_settled:
            self.time_layers()

    def count_saved(self, visit: Callable[[Layer], None], size: int) -> CountedBytes:
        """A first pass, which counts what is saved. `visit`: is told each layer before it runs."""
        inputs = self.feed()
        saved = self.saved_bytes(inputs)
        with saved.hooks():
            self._run(inputs, VisitingWatcher(saved, self.layers, size, visit), self.loss)
        return saved.counted

    def count_memory(self, counted: CountedBytes, operations: OperationCounter | None = None) -> None:
        """The memory of a pass without the loss, as the untouched model's pass is; and its operations."""
        # Those that backward starts from are of the pass: they are drawn in it.
        self._gradients.forget()
        counted.memory = self._workspace(operations).memory(counted.saved_bytes)

    def count_loss(self, counted: CountedBytes, operations: OperationCounter | None = None) -> None:
        """The bytes that the loss needs for itself, if there is one; and the operations of the pass."""
        if self.loss is not None:
            # Its targets are of the pass.
            workspace = self._workspace(operations, self.loss.without_targets())
            counted.loss_workspace = workspace.loss(counted.saved_bytes, counted.loss_saved_bytes)

    def _workspace(self, operations: OperationCounter | None, loss: Loss | None = None) -> Workspace:
        """The watcher of a pass, which a loss may end, when its meter can be read."""
        with build_meter(self._subject.device, self._holder) as meter:
            inputs = self.feed()
            workspace = Workspace(self._holder, len(self.layers), meter, self.passing(inputs))
            with _watched(workspace, operations) as watcher:
                self._run(inputs, watcher, loss)
        return workspace


class SizePasses(LayerPasses):
    """Runs the model that is measured, and its layers, at one micro-batch size.

    The input, and the gradients that backward starts from, are made for the first pass and used by all.
    """

    def __init__(self, subject: MeasurementTarget, size: int) -> None:
        modes, module = subject.modes, subject.loaded.module
        modes.forget_compiled()
        layers = modes.layers(subject.chain.layers)
        super().__init__(subject, layers, module, OutputGradients(subject.seed), subject.loss)
        self._size = size
        self._input: ModelInput | None = None
        self._model = modes.whole(module)
        self._used_leads = self.leads.leads
        """Of the last pass of the untouched model."""

    def feed(self) -> Any:
        return self._fresh_input().layer_input

    def warm_up_layers(self) -> None:
        """A pass as `time_layers` makes it, without holding the device back: to warm up."""
        self.run(LayerStamps(self._subject.clock, len(self.layers)), self.loss)

    def time_whole(self) -> PassTimes:
        """The seconds of the untouched model."""
        for _ in _tries(lambda: self.leads.has_whole_waited and self.leads.leads != self._used_leads):
            times = self._time_whole()
        self.leads.keep_whole()
        return times

    def _time_whole(self) -> PassTimes:
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
            inputs, clock = self.feed(), self._subject.clock
            clock.settle()
            times = run_parts(
                self.layers, inputs, self._gradients, clock, leads=self.leads, context=self._context
            )
        self.leads.keep_parts()
        return times

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


# A model that is on the device whole, at one micro-batch size: its bytes, and its rounds of timed passes.

PARTS_ROUNDS = 3
FIRST_PASSES = 3
HasTime = Callable[[float], bool]
"""Whether so many seconds are left."""
LATER_PASSES = 4
"""Of a size after those that count what plans need: two that count the rest, and one round."""
FEWEST_PASSES = 4
"""Of the smallest size: two that count what plans need, and one round."""
PLAIN_AND_HELD = 3
"""Passes that find a lead, mostly: one without, and two with it."""


class SizeRun:
    """One micro-batch size: its warm-up, its bytes, and its rounds so far, which are in `result`.

    Where it is compiled for a device whose allocator tells nothing, the memory of a step is not counted.
    `counts_less`: without the peak and the loss' workspace, for which there was no time. `journal`: is told
    of every timed pass. `operations`: counts those of a pass with the loss, if there is one.
    """

    def __init__(
        self,
        subject: MeasurementTarget,
        size: int,
        *,
        parts: bool = False,
        journal: Journal | None = None,
        operations: OperationCounter | None = None,
    ) -> None:
        self._subject = subject
        self.size = size
        self._passes = SizePasses(subject, size)
        self.result = SizeResult(size, CountedBytes([], [], []))
        self.counts_less = False
        self._parts = parts
        self._journal = journal
        self._operations = operations
        self._is_warm = True

    @property
    def rounds(self) -> TimedPasses:
        """The timed passes so far."""
        return self.result.rounds

    @property
    def counted(self) -> CountedBytes:
        """The bytes, after the warm-up."""
        return self.result.counted

    def count(
        self,
        visit: Callable[[Layer], None],
        has_time: HasTime = lambda _: True,
        tell_pass: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Untimed passes that count the bytes; gradients exist afterwards.

        On meta the whole is left out: models that look at values while they run do not run there. Where there
        is no time for all, what no plan needs is left out: the peak of a step, what the loss allocates.
        `tell_pass`: is told the seconds of the first pass, when it is done.
        """
        begun = self._subject.clock.now()
        counted = self.result.counted = self._passes.count_saved(visit, self.size)
        a_pass = self._subject.clock.now() - begun
        tell_pass(a_pass)
        if self._subject.modes.compile and not sees_kernels(self._subject.device):
            return
        if self._subject.device.type == "cuda":
            # What the libraries allocate once and keep (cuBLAS' workspaces, cuDNN's plans) is no layer's.
            self._passes.warm_up_layers()
            self._passes.time_whole()
            # What is only waiting for Python's collector (a copy that was compared) is nothing static.
            release(self._subject.device)
        with_loss = self._subject.loss is not None
        self._passes.count_memory(counted, None if with_loss else self._operations)
        if not has_time(LATER_PASSES * a_pass):
            self.counts_less = True
            return
        self._passes.count_loss(counted, self._operations)
        if self._operations is not None:
            self.result.operations = self._operations.layers
        if self._subject.device.type == "meta":
            self.result.pending_gradient_bytes = self._count_pending()
            return
        counted.peak_bytes = self._passes.peak_bytes()
        if self._subject.device.type == "cuda":
            self.result.reserved_bytes = torch.cuda.max_memory_reserved(self._subject.device)

    def warm_up(
        self,
        visit: Callable[[Layer], None],
        has_time: HasTime = lambda _: True,
        tell_pass: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Untimed passes of the layers and of the whole, which also count the bytes; `has_time` for so many
        seconds more; `tell_pass` as in `count`."""
        self.count(visit, has_time, tell_pass)
        if self.counted.peak_bytes is None and not self.counts_less:
            self._passes.time_whole()
        if self._subject.clock.has_host:
            self._passes.find_leads()
        if self._journal is not None:
            self._journal.write_counts(self.size, self.counted)

    def warm_until_stable(self, seconds: float) -> None:
        """Passes of the whole; see `warm_until_stable` of passes.py."""

        def one_pass() -> float:
            times = self._passes.time_whole()
            return times.forward + times.backward

        warm_until_stable(one_pass, self._subject.clock, seconds)

    def resume(self, earlier: SizeResult) -> None:
        """Takes over what a journal holds of this size; it is warmed up when its next round comes."""
        self.result = copy.deepcopy(earlier)
        self._is_warm = False
        if not self._parts:
            self.rounds.parts.clear()
            self.result.parts_left_out = ""
        elif earlier.parts_left_out:
            self._parts = False

    def warm_up_parts(self) -> None:
        """An untimed pass in two parts; on a device, those that show how far it must be held back."""
        if not self._parts:
            return
        self._timed_parts()
        while self._parts and self._subject.clock.has_host and not self._passes.leads.has_settled_parts:
            self._timed_parts()
        self.rounds.parts.clear()

    def free_inputs(self) -> None:
        """Frees its input and the gradients it starts from, while other sizes run; they are made again."""
        self._passes.free_inputs()

    def round(self) -> None:
        """One timed pass of the layers, one of the whole and, in the first rounds, one in parts.

        Each round begins with another. The parts tell how to divide what the other passes measure, so a few
        do, and the time is left to the others.
        """
        if not self._is_warm:
            self._warm_up_again()
        clock = self._subject.clock
        begun = clock.now()
        passes = self._due()
        first = len(self.result.round_seconds) % len(passes)
        with no_collection():
            for kind, one in passes[first:] + passes[:first]:
                one()
                self._write_pass(kind)
        self.result.round_seconds.append(clock.now() - begun)
        if self._journal is not None:
            self._journal.write_round(self.size, self.result.round_seconds[-1])

    def time_first_backward(self, passes: int) -> None:
        """Of the whole without gradients to add to, as a step's first micro-batch after `zero_grad()`."""
        if len(self.rounds.first) < passes and not self._is_warm:
            self._warm_up_again()
        with no_collection():
            while len(self.rounds.first) < passes:
                for parameter in self._subject.loaded.module.parameters():
                    parameter.grad = None
                self.rounds.first.append(self._passes.time_whole())
                self._write_pass("first")

    @property
    def rounds_done(self) -> int:
        """Whole rounds: of one that was interrupted, a pass may be there already."""
        return min(len(self.rounds.layers), len(self.rounds.whole), len(self.result.round_seconds))

    @property
    def is_measured(self) -> bool:
        """Whether there is enough for figures."""
        return bool(self.rounds.layers and self.rounds.whole)

    @property
    def round_seconds(self) -> float:
        """Host seconds that a round takes, everything included: the median so far."""
        return median(self.result.round_seconds)

    @property
    def counting_passes(self) -> int:
        """Of the warm-up, before those in two parts."""
        is_counted = (
            not self.counts_less,
            self.counted.memory is not None,
            self.counted.loss_workspace is not None,
        )
        return 1 + sum(is_counted) + PLAIN_AND_HELD * self._subject.clock.has_host

    @property
    def parts_passes(self) -> int:
        """Of the warm-up, in two parts."""
        return self._parts * (PLAIN_AND_HELD if self._subject.clock.has_host else 1)

    @property
    def warm_up_rounds(self) -> float:
        """So many rounds have as many passes as the warm-up."""
        return (self.counting_passes + self.parts_passes) / (2 + self._parts)

    @property
    def lead_note(self) -> str | None:
        """What to say where the device could not be held back for as long as its host needs."""
        leads = self._passes.leads
        if leads.short:
            return (
                f"micro-batch size {self.size}: {WAITED} in "
                f"{' and '.join(leads.short)}, whose seconds hold some of that"
            )
        if leads.is_whole_short:
            return (
                f"micro-batch size {self.size}: {WAITED} in the untouched model, whose "
                "seconds hold some of that; the layers did not wait, and add up to less"
            )
        return None

    def leave_parts_out(self, why: str) -> None:
        """From now on there is no pass in two parts, and what was measured of them is forgotten."""
        if not self._parts:
            return
        self._parts = False
        self.result.parts_left_out = why
        self.rounds.parts.clear()
        if self._journal is not None:
            self._journal.write_parts_left_out(self.size, why)

    def _count_pending(self) -> list[int] | None:
        """What a backward in two parts leaves for its second; None where the model does not run so."""
        try:
            return TimedPasses(parts=[self._passes.time_parts()]).pending_bytes()
        except Exception:  # as in `_timed_parts`: whatever a model does
            return None

    def _warm_up_again(self) -> None:
        """As `warm_up`, for a size whose bytes are known."""
        self._is_warm = True
        self._passes.warm_up_layers()
        self._passes.time_whole()
        if self._subject.clock.has_host:
            self._passes.find_leads()
        earlier = list(self.rounds.parts)
        if len(earlier) < PARTS_ROUNDS:
            self.warm_up_parts()
            self.rounds.parts[:] = earlier if self._parts else []

    def _due(self) -> list[tuple[PassKind, Callable[[], None]]]:
        """The passes of a round, but for those that an interrupted one has had."""
        layers, whole = len(self.rounds.layers), len(self.rounds.whole)
        passes: list[tuple[PassKind, Callable[[], None]]] = []
        if layers <= whole:
            passes.append(("layers", self._timed_layers))
        if whole <= layers:
            passes.append(("whole", self._timed_whole))
        if self._parts and len(self.rounds.parts) < PARTS_ROUNDS:
            passes.append(("parts", self._timed_parts))
        return passes

    def _write_pass(self, kind: PassKind) -> None:
        """In the journal. Parts that were left out have told so themselves."""
        if self._journal is not None and (kind != "parts" or self._parts):
            self._journal.write_pass(self.size, kind, getattr(self.rounds, kind)[-1])

    def _timed_layers(self) -> None:
        self.rounds.layers.append(self._passes.time_layers())

    def _timed_whole(self) -> None:
        self.rounds.whole.append(self._passes.time_whole())

    def _timed_parts(self) -> None:
        """A size that fits otherwise need not fit so: gradients of all layers' outputs are held at once."""
        try:
            self.rounds.parts.append(self._passes.time_parts())
            return
        except Exception as error:
            reason = error.what if isinstance(error, PplanError) else first_line(error)
            reason = refusal(error) if is_out_of_memory(error) else reason
        self.leave_parts_out(reason)
        # Only here, behind the except block, is nothing held by the traceback any more.
        release(self._subject.device)
