"""Models that do not fit on a device: measured segment by segment, with only one segment's weights on it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...cost_models.errors import PplanError
from ..chain.layers import Layer
from ..memory.live_bytes import Meter, build_meter, storages
from ..memory.workspace import LossWorkspace, Workspace
from ..passes.clocks import Clock
from ..passes.launch_lead import LeadTuner
from ..passes.layer_stamps import LayerTimes, stamped_layers
from ..passes.timing import Context, OutputGradients, run_layers, warm_until_stable
from ..passes.watchers import CompositeWatcher, SavedBytes, Watcher
from ..torch_internals import storage_key, tree_leaves, tree_map_only
from ..user_model.failures import is_out_of_memory, layer_failure
from ..user_model.losses import Loss
from ..user_model.shared_parameters import modules_used, tensors_used
from .boundary import Boundary, InnerGradients


class Mover(Protocol):
    """Puts tensors on the device for a while."""

    def holding(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Inside, these tensors lie on the device; behind, where they lay before, and without gradients."""


class DeviceMover:
    """Moves the tensors' data and leaves the tensors themselves, so that every module that has one has it.

    Nothing is copied back: what a pass changes (running statistics) is of no interest afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        homes = [tensor.data for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data = tensor.data.to(self._device, copy=True)
            yield
        finally:
            for tensor, home in zip(tensors, homes, strict=True):
                tensor.grad = None
                tensor.data = home
            # A pass that failed leaves tensors in the circles of its traceback.
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()


@dataclass
class SegmentedRun:
    """What was measured of all layers, as if in one run: entries by layer.

    `times`: one for each timed pass. `forward_workspace_bytes`, `backward_workspace_bytes`: as in StepMemory.
    """

    note: str
    times: list[LayerTimes] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    saved_input_bytes: list[int] = field(default_factory=list)
    output_bytes: list[int] = field(default_factory=list)
    forward_workspace_bytes: list[int] = field(default_factory=list)
    backward_workspace_bytes: list[int] = field(default_factory=list)
    loss_saved_bytes: int = 0
    loss_output_bytes: int = 0
    loss_workspace: LossWorkspace | None = None


@dataclass(frozen=True)
class SegmentedMeasurement:
    """Measures layers whose weights lie on the host, segment by segment.

    Each segment runs forward and backward by itself: fed what the segment before returned (kept on the host
    between), and, backwards, unit normal gradients; the last may end with a `loss` instead. There is no whole
    pass to hold the layers against. `context`: what every forward runs in. `running`: the layers as they run,
    compiled for instance; `layers` are asked for their tensors. `visit` is told each layer of the first
    passes. With `warm_up_seconds` the first segment computes for so long at the most before it is timed, and
    `on_warm` is called then. As with all timed passes, the caller switches the garbage collector off.
    """

    layers: Sequence[Layer]
    segments: Sequence[range]
    device: torch.device
    clock: Clock
    seed: int
    loss: Loss | None = None
    context: Context = nullcontext
    mover: Mover | None = None
    visit: Callable[[Layer], None] | None = None
    running: Sequence[Layer] | None = None
    warm_up_seconds: float = 0.0
    on_warm: Callable[[], None] = lambda: None
    size: int | None = None
    """Number of samples; what the layers hand on is checked where it is known."""

    def measure(self, inputs: Any, rounds: int) -> SegmentedRun:
        """`rounds` timed passes of every segment. `inputs`: the first layer's input, a tensor or several.

        Raises ModelError as `run_layers` does, and what the allocator raises where a segment does not fit.
        """
        count = len(self.segments)
        run = SegmentedRun(
            f"does not fit on {self.device} whole: measured in {count} segment{'s' * (count > 1)}, "
            "and the layers' seconds were not held against the whole model's"
        )
        mover = self.mover or DeviceMover(self.device)
        boundary = Boundary.of_input(inputs)
        times: list[list[LayerTimes]] = []
        for segment in self.segments:
            modules = [self.layers[index].module for index in segment]
            with mover.holding(_tensors(modules)):
                _flatten(modules)
                part = _Segment(self, segment, boundary)
                boundary = part.count_bytes(run)
                if self.warm_up_seconds and not times:
                    part.warm_up(self.warm_up_seconds)
                    self.on_warm()
                times.append(part.timed(rounds))
                # What it holds on the device goes before the weights do.
                del part
        run.times = [_join_segments(of_round) for of_round in zip(*times, strict=True)]
        return run


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers that they use, each once; an earlier segment's layer may register them."""
    tensors = (tensor for module in modules for tensor in tensors_used(module))
    return list({id(tensor): tensor for tensor in tensors}.values())


def _flatten(modules: Iterable[nn.Module]) -> None:
    """Recurrent layers' weights lie in one piece again, as cuDNN wants them, after each was moved."""
    for module in modules:
        for part in modules_used(module):
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()


def _join_segments(parts: Sequence[LayerTimes]) -> LayerTimes:
    """One pass of all segments; the loss is the last one's."""

    def join(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    whole = replace(parts[-1], forward=join("forward"), backward=join("backward"))
    if whole.forward_host is None:
        return whole
    return replace(whole, forward_host=join("forward_host"), backward_host=join("backward_host"))


class _Segment:
    """The passes of one segment, whose weights lie on the device."""

    def __init__(self, whole: SegmentedMeasurement, segment: range, boundary: Boundary) -> None:
        self._whole, self._boundary = whole, boundary
        self._layers = whole.layers[segment.start : segment.stop]
        self._running = (whole.running or whole.layers)[segment.start : segment.stop]
        self._model = _TensorHolder(_tensors(layer.module for layer in self._layers))
        self._is_last = segment.stop == len(whole.layers)
        self._loss = whole.loss if self._is_last else None
        self._gradients = (OutputGradients if self._is_last else InnerGradients)(whole.seed)
        self._ahead = LeadTuner()

    def count_bytes(self, run: SegmentedRun) -> Boundary:
        """A warm-up pass, and two that count into `run`; returns what the next segment is fed."""
        count = len(self._layers)
        with build_meter(self._whole.device, self._model) as meter:
            end = _LastOutput(self._layers, self._whole.visit, self._whole.size)
            self._pass([self._fresh()], end, loss=self._loss)
            inputs = [self._fresh()]
            saved = _SavedBytes(self._model, count, self._boundary.counted_tensors(inputs))
            crossing = _CrossingTensors(count - 1, saved)
            workspace = self._workspace(meter, inputs)
            with saved.hooks():
                self._pass(inputs, CompositeWatcher(saved, workspace, crossing), loss=self._loss_to_count())
            bare = self._pass_without_loss(meter)
        memory = bare.memory(saved.saved_bytes)
        run.saved_bytes += saved.saved_bytes
        run.saved_input_bytes += saved.saved_input_bytes
        run.output_bytes += saved.output_bytes
        run.forward_workspace_bytes += memory.forward
        run.backward_workspace_bytes += memory.backward
        run.loss_saved_bytes, run.loss_output_bytes = saved.loss_saved_bytes, saved.loss_output_bytes
        if self._loss is not None:
            run.loss_workspace = workspace.loss(saved.saved_bytes, saved.loss_saved_bytes)
        boundary = Boundary(end.value, crossing.needs_gradient, crossing.is_counted)
        # Backward's first gradients are made by the layers behind; here they were there before the pass.
        run.backward_workspace_bytes[-1] += 0 if self._is_last else boundary.gradient_bytes
        return boundary

    def _pass_without_loss(self, meter: Meter) -> Workspace:
        """As SizePasses counts it: without the loss, and with the making of what backward starts from."""
        if self._is_last:
            self._gradients = OutputGradients(self._whole.seed)
        inputs = [self._fresh()]
        workspace = self._workspace(meter, inputs)
        self._pass(inputs, workspace)
        return workspace

    def _workspace(self, meter: Meter, inputs: list[Any]) -> Workspace:
        passing = self._boundary.counted_tensors(inputs, whether=False)
        return Workspace(self._model, len(self._layers), meter, passing)

    def _loss_to_count(self) -> Loss | None:
        """Its targets are of the pass."""
        return None if self._loss is None else self._loss.without_targets()

    def warm_up(self, seconds: float) -> None:
        """Until its passes take as long as before; so long at the most."""

        def one_pass() -> float:
            times = self._stamped()
            return float(times.forward.sum() + times.backward.sum())

        warm_until_stable(one_pass, self._whole.clock, seconds)

    def timed(self, rounds: int) -> list[LayerTimes]:
        """So many timed passes; before them those that show how far the device must be held back."""
        if self._whole.clock.has_host:
            self._whole.clock.calibrate()
            while not self._ahead.is_settled:
                self._stamped()
        return [self._stamped() for _ in range(rounds)]

    def _stamped(self) -> LayerTimes:
        return stamped_layers(
            lambda stamps: self._pass([self._fresh()], stamps, loss=self._loss),
            self._whole.clock,
            len(self._layers),
            self._ahead,
        )

    def _fresh(self) -> Any:
        return self._boundary.on(self._whole.device)

    def _pass(self, inputs: list[Any], watcher: Watcher, *, loss: Loss | None = None) -> None:
        """`inputs` is taken out of its list."""
        whole = self._whole
        first, *others = self._running
        layers = [replace(first, module=_InputTaker(first)), *others]
        whole.clock.settle()
        run_layers(layers, inputs, self._gradients, watcher, loss=loss, context=whole.context)


class _TensorHolder(nn.Module):
    """Has these parameters and buffers, whoever registers them: layers may use those of earlier ones."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"parameter_{index}", tensor)
            else:
                self.register_buffer(f"buffer_{index}", tensor)


class _InputTaker(nn.Module):
    """Runs a layer on what it takes out of a list: nobody holds that behind the layer, as in the whole.

    An argument itself may be held by the stack of whoever calls, until backward has ended; so it is where
    torch.compile, having failed, has left its hook in the interpreter.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, inputs: list[Any]) -> Any:
        layer_input, layer = inputs.pop(), self._layer
        try:
            return layer.module(layer_input)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, PplanError):
                raise
            raise layer_failure(layer.name, layer.kind, layer_input, error) from error


class _SavedBytes(SavedBytes):
    """Counts a segment as it counts in the whole. `counted`: tensors that an earlier segment counts."""

    def __init__(self, model: nn.Module, layers: int, counted: Sequence[Tensor]) -> None:
        super().__init__(model, layers)
        for storage in storages(counted):
            self._alive[storage_key(storage)] = storage
            self._last_user[storage_key(storage)] = -1

    def has_counted(self, tensor: Tensor) -> bool:
        """Until backward starts: whether this segment or an earlier one counts it."""
        return storage_key(tensor) in self._alive


class _IdleWatcher:
    """Watches nothing."""

    def before(self, index: int, layer_input: Any) -> None: ...

    def after(self, index: int, output: Any) -> None: ...

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None: ...

    def backward_ends(self) -> None: ...


class _LastOutput(_IdleWatcher):
    """Keeps on the host what the last layer returns; says before each layer which it is, and checks what it
    hands on."""

    def __init__(
        self, layers: Sequence[Layer], visit: Callable[[Layer], None] | None, size: int | None
    ) -> None:
        self._layers, self._visit, self._size = layers, visit, size
        self.value: Any = None

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        if self._visit is not None and index < len(self._layers):
            self._visit(self._layers[index])

    def after(self, index: int, output: Any) -> None:
        if self._size is not None and index < len(self._layers):
            self._layers[index].check_shapes(self._size, output)
        if index == len(self._layers) - 1:
            self.value = tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), output)


class _CrossingTensors(_IdleWatcher):
    """Asks of each tensor that the last layer returns what the next segment has to know."""

    def __init__(self, last: int, saved: _SavedBytes) -> None:
        self._last, self._saved = last, saved
        self.needs_gradient: tuple[bool, ...] = ()
        self.is_counted: tuple[bool, ...] = ()

    def after(self, index: int, output: Any) -> None:
        if index == self._last:
            leaves = tree_leaves(output)
            self.needs_gradient = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
            self.is_counted = tuple(
                isinstance(leaf, Tensor) and self._saved.has_counted(leaf) for leaf in leaves
            )
