"""Models that do not fit on a device: measured segment by segment, with one segment's weights on it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..cost_models.errors import MachineError, ModelError, PplanError
from ..cost_models.memory import FRAGMENTATION_RESERVE, workspace_before_loss
from ..cost_models.quantities import format_bytes
from .clocks import Clock, LeadTuner
from .layer import Layer, LayerChain, modules_used, tensors_used
from .layer_sequential import LayerSequential
from .layers import build_chain
from .losses import Loss
from .memory import LiveBytes, Meter, Workspace, build_meter, lasting, storages
from .meta_device import attention_as_on_the_cpu, kernels_on
from .passes import (
    CompositeWatcher,
    Context,
    IdleWatcher,
    LayerTimes,
    OutputGradients,
    SavedBytes,
    Watcher,
    run_layers,
    stamped_layers,
    warm_until_stable,
)
from .size_run import SizeResult, no_collection, release
from .size_sweep import SizeSweep
from .torch_private import storage_key, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from .user_model import (
    DoesNotFit,
    ModelInput,
    copy_to_meta,
    is_out_of_memory,
    layer_failure,
    refusal,
    tensors_in,
)

# The input and the gradients of a segment that runs without the rest of its model.


@dataclass(frozen=True)
class Boundary:
    """What crosses from one segment to the next, on the host; a tensor or several, and facts of each."""

    value: Any
    needs_gradient: tuple[bool, ...]
    is_counted: tuple[bool, ...]
    """Whether an earlier segment counts it as saved."""

    @classmethod
    def of_input(cls, inputs: Any) -> Boundary:
        """Of the first segment, which is fed the model's own input."""
        leaves = tree_leaves(inputs)
        return cls(inputs, (False,) * len(leaves), (False,) * len(leaves))

    def on(self, device: torch.device) -> Any:
        """A copy on `device`, which a layer may work on in place, as if operations before had made it."""
        leaves, form = tree_flatten(self.value)
        tensors = [
            _as_if_made(leaf.to(device, copy=True), needs) if isinstance(leaf, Tensor) else leaf
            for leaf, needs in zip(leaves, self.needs_gradient, strict=True)
        ]
        return tree_unflatten(tensors, form)

    def counted_tensors(self, inputs: Any, *, whether: bool = True) -> list[Tensor]:
        """The tensors of `inputs`, made by `on`, that an earlier segment counts as saved; or the others."""
        return [
            leaf
            for leaf, counted in zip(tree_leaves(inputs), self.is_counted, strict=True)
            if isinstance(leaf, Tensor) and counted == whether
        ]

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that come back through it."""
        pairs = zip(tree_leaves(self.value), self.needs_gradient, strict=True)
        return sum(leaf.nbytes for leaf, needs in pairs if needs)


def _as_if_made(value: Tensor, needs_gradient: bool) -> Tensor:
    if not needs_gradient:
        return value
    output: Tensor = _LeafAsResult.apply(torch.ones((), requires_grad=True), value)
    return output


class _LeafAsResult(torch.autograd.Function):
    """Returns `value` as the result of an operation, whose gradient ends here.

    Unlike a leaf it may be overwritten, and unlike a copy of a leaf it takes no memory twice, nor keeps its
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, switch: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        # The same memory, but no view: views made in here could not be overwritten.
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(value)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


class InnerGradients(OutputGradients):
    """The gradients that backward starts from in a segment that others follow.

    None where all weights so far are frozen: there is no backward. It starts behind the output, not at it, so
    that the output's memory is free as soon as it is in the whole, where the layers behind hold it no longer.
    """

    def of(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            return [], []
        tensors, starts = super().of(output)
        ends: list[Tensor] = [
            _Behind.apply(tensor, start) for tensor, start in zip(tensors, starts, strict=True)
        ]
        return ends, [torch.zeros_like(end) for end in ends]


class _Behind(torch.autograd.Function):
    """A number made of a tensor, whose gradient is `start` whatever the number's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, start: Tensor) -> Tensor:
        ctx.start = start
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return ctx.start, None


# Divides a model that does not fit on a device into segments of consecutive layers that do.


@dataclass(frozen=True)
class LayerNeeds:
    """Bytes of one layer on a device, at one micro-batch size.

    `storages`: bytes between passes by storage: weights with their gradients, and buffers; a storage that
    several layers use has the same key in each. `saved`, `workspace`, `output`: as in the profile.
    """

    name: str
    storages: Mapping[int, int]
    saved: int
    workspace: int
    output: int


def layer_needs(
    layers: Sequence[Layer],
    saved_bytes: Sequence[int],
    workspace_bytes: Sequence[int],
    output_bytes: Sequence[int],
    *,
    amp: bool = False,
) -> tuple[LayerNeeds, ...]:
    """The needs of each layer, from its bytes at that size. `amp`: with what autocast converts."""
    return tuple(
        LayerNeeds(layer.name, _storage_bytes(layer.module, amp=amp), saved, workspace, output)
        for layer, saved, workspace, output in zip(
            layers, saved_bytes, workspace_bytes, output_bytes, strict=True
        )
    )


def count_needs(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    loss: Loss | None = None,
    *,
    amp: bool = False,
    kernels: Callable[[], AbstractContextManager[Any]] = attention_as_on_the_cpu,
) -> tuple[LayerNeeds, ...]:
    """The needs of each layer, from passes through the layers: on the meta device, where they cost no memory.

    `inputs`: the first layer's input, a tensor or several, where the model is. What an operation needs inside
    itself (a convolution's workspace) is not seen there. `kernels`: entered, attention on meta is as on the
    device that will run it. The last layer's are with `loss`, unless that does not run there. `amp`: autocast
    is not possible there, so activations count in their full size, and converted weights are added.
    """
    gradients = OutputGradients(0)
    device = tensors_in(inputs)[0].device
    attention = kernels() if device.type == "meta" else nullcontext()
    with attention, LiveBytes(device, lasting(model)) as meter:
        # The first makes the gradients.
        count_pass(model, layers, inputs, gradients, meter)
        saved, counted = count_pass(model, layers, inputs, gradients, meter)
        behind = _loss_counted(model, layers, inputs, gradients, meter, loss)
    saved_bytes, workspace = list(saved.saved_bytes), list(counted.memory(saved.saved_bytes).workspace)
    if behind is not None:
        loss_saved = behind[0].loss_saved_bytes
        of_loss = behind[1].loss(behind[0].saved_bytes, loss_saved)
        saved_bytes[-1] += loss_saved
        workspace[-1] = int(workspace_before_loss(workspace[-1], loss_saved, of_loss.larger))
    return layer_needs(layers, saved_bytes, workspace, saved.output_bytes, amp=amp)


def _loss_counted(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    gradients: OutputGradients,
    meter: Meter,
    loss: Loss | None,
) -> tuple[SavedBytes, Workspace] | None:
    """None without a loss, and for one that does not run here: the user's may make its targets elsewhere."""
    if loss is None:
        return None
    try:
        return count_pass(model, layers, inputs, gradients, meter, loss)
    except ModelError:
        return None


def _storage_bytes(module: nn.Module, *, amp: bool = False) -> dict[int, int]:
    """Also what an earlier layer registers. Under autocast a copy of the parameters in half size besides.

    That copy is an estimate: autocast converts what its operations take, and all of it lives to the end of
    the forward at least.
    """
    tensors = list({id(tensor): tensor for tensor in tensors_used(module)}.values())
    sizes = {storage_key(storage): storage.nbytes() for storage in storages(tensors)}
    for tensor in tensors:
        key = storage_key(tensor)
        if tensor.requires_grad:
            sizes[key] += tensor.nbytes
        if amp and isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32:
            sizes[key] += tensor.nbytes // 2
    return sizes


def plan_segments(
    layers: Sequence[LayerNeeds], input_bytes: int, free_bytes: int, device: str = "the device"
) -> tuple[range, ...]:
    """The fewest runs of consecutive layers that each fit into `free_bytes` by themselves.

    A run needs its weights, gradients and buffers, its input, the gradient of its output, what it saves and
    its workspace, and the reserve of the ledger. `input_bytes`: of the first layer's input.

    Raises MachineError where a single layer does not fit.
    """
    count = len(layers)
    for index in range(count):
        alone = next(_needs_from(index, layers, input_bytes))
        if alone > free_bytes:
            raise MachineError(
                f"layer {layers[index].name} does not fit on {device} even alone: it needs "
                f"{format_bytes(alone)}, {format_bytes(free_bytes)} are free",
                "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
            )
    # By number of layers from the front: the fewest segments, and where the last of them starts.
    fewest, start = [0, *[count + 1] * count], [0] * (count + 1)
    for first in range(count):
        for last, needed in enumerate(_needs_from(first, layers, input_bytes), first):
            if needed <= free_bytes and fewest[first] + 1 < fewest[last + 1]:
                fewest[last + 1], start[last + 1] = fewest[first] + 1, first
    segments, end = [], count
    while end:
        segments.append(range(start[end], end))
        end = start[end]
    return tuple(reversed(segments))


def _needs_from(first: int, layers: Sequence[LayerNeeds], input_bytes: int) -> Iterator[int]:
    """What layers `first` to `first`, to `first + 1`, ... need."""
    storages_so_far: set[int] = set()
    weights = saved = peak = 0
    input_bytes_here = layers[first - 1].output if first else input_bytes
    for layer in layers[first:]:
        weights += sum(size for key, size in layer.storages.items() if key not in storages_so_far)
        storages_so_far.update(layer.storages)
        saved += layer.saved
        peak = max(peak, saved + layer.workspace)
        yield round((weights + input_bytes_here + layer.output + peak) * (1 + FRAGMENTATION_RESERVE))


def count_pass(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    gradients: OutputGradients,
    meter: Meter,
    loss: Loss | None = None,
) -> tuple[SavedBytes, Workspace]:
    """Saved and output bytes, and what tells those of the step when `meter` can be read, from one untimed
    pass, forward and backward.

    `meter` has been counting since before an earlier pass, which made the weights' gradients and what the
    libraries allocate once. `inputs`: the first layer's input, a tensor or several. A `loss` ends the pass;
    its targets are made in it, and belong to its workspace.
    """
    own = None if loss is None else loss.without_targets()
    saved = SavedBytes(model, len(layers))
    workspace = Workspace(model, len(layers), meter, tensors_in(inputs))
    with saved.hooks():
        run_layers(layers, inputs, gradients, CompositeWatcher(saved, workspace), loss=own)
    return saved, workspace


# Models that do not fit on a device: measured segment by segment, with only one segment's weights on it.


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
    size: int = 0
    """Number of samples; what the layers hand on is checked where it is known."""

    @property
    def note(self) -> str:
        """What a profile says of a model that was measured so."""
        count = len(self.segments)
        return (
            f"does not fit on {self.device} whole: measured in {count} segment{'s' * (count > 1)}, "
            "and the layers' seconds were not held against the whole model's"
        )

    def measure(self, inputs: Any, rounds: int) -> SizeResult:
        """`rounds` timed passes of every segment. `inputs`: the first layer's input, a tensor or several.

        Raises ModelError as `run_layers` does, and what the allocator raises where a segment does not fit.
        """
        run = SizeResult(self.size)
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
        run.rounds.layers = [_join_segments(of_round) for of_round in zip(*times, strict=True)]
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

    def count_bytes(self, run: SizeResult) -> Boundary:
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


class _LastOutput(IdleWatcher):
    """Keeps on the host what the last layer returns; says before each layer which it is, and checks what it
    hands on."""

    def __init__(self, layers: Sequence[Layer], visit: Callable[[Layer], None] | None, size: int) -> None:
        self._layers, self._visit, self._size = layers, visit, size
        self.value: Any = None

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        if self._visit is not None and index < len(self._layers):
            self._visit(self._layers[index])

    def after(self, index: int, output: Any) -> None:
        if self._size and index < len(self._layers):
            self._layers[index].check_shapes(self._size, output)
        if index == len(self._layers) - 1:
            self.value = tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), output)


class _CrossingTensors(IdleWatcher):
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


# Sizes of a model that does not fit on its device whole, each measured segment by segment.

_ROUNDS = 3
_SHARES = (1.0, 0.7, 0.5)
"""Of the free bytes, to plan with in turn where memory runs out: counting does not see everything."""


@dataclass
class SegmentedSweep(SizeSweep[SizeResult]):
    """The subject's working copy lies on the host. `free_bytes` says what the device has left when asked.

    What fits together is planned from bytes counted on the meta device, with the loss, and with an estimate
    of what autocast converts.
    """

    _: KW_ONLY
    free_bytes: Callable[[], int]
    mover: Mover | None = None
    _last_segments: int = field(default=0, init=False)

    @property
    def results(self) -> list[SizeResult]:
        return self.runs

    def segments(self, size: int, share: float = 1.0) -> tuple[range, ...]:
        """What would run together in `share` of what is free. Raises DoesNotFit, ModelError."""
        model, chain = self._counted
        example = self._example(size)
        inputs, amp = example.to("meta").layer_input, self.subject.modes.amp is not None
        needs = count_needs(
            model, chain.layers, inputs, self.subject.loss, amp=amp, kernels=kernels_on(self.subject.device)
        )
        entering = sum(tensor.nbytes for tensor in example.tensors)
        try:
            return plan_segments(needs, entering, int(share * self.free_bytes()), str(self.subject.device))
        except MachineError as error:
            raise DoesNotFit(f"{self._of(size)}: {error.what}", error.hint) from error

    @cached_property
    def _counted(self) -> tuple[torch.nn.Module, LayerChain]:
        """The same layers, on the meta device."""
        loaded, chain = self.subject.loaded, self.subject.chain
        module, granularity = loaded.module, chain.granularity
        if isinstance(module, LayerSequential) and len(module.layer_names) == len(chain):
            # Its granularity is that of the model it was made of; the layers are its elements.
            granularity = "block"
        model = copy_to_meta(module, loaded.name)
        example = loaded.example_input_for(2).to("meta", self.subject.dtype)
        return model, build_chain(model, example, name=loaded.name, granularity=granularity, tool=chain.tool)

    def _example(self, size: int) -> ModelInput:
        subject = self.subject
        example = subject.loaded.example_input_for(size)
        return example.to(dtype=subject.dtype, memory_format=subject.modes.memory_format)

    def measure_size(self, size: int) -> SizeResult:
        """In more segments where memory runs out."""
        reason, attempts = "", 0
        for share in _SHARES:
            try:
                segments = self.segments(size, share)
            except DoesNotFit:
                if not attempts:
                    raise
                break
            if len(segments) == attempts:
                continue
            attempts = len(segments)
            try:
                return self._measure_segments(size, segments)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = refusal(error)
            # Only here, behind the except block, is nothing held by the traceback any more.
            release(self.subject.device)
        raise DoesNotFit(
            f"{self._of(size)} does not fit even in segments: {reason}",
            "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
        )

    def _measure_segments(self, size: int, segments: Sequence[range]) -> SizeResult:
        subject = self.subject
        subject.modes.forget_compiled()
        with no_collection():
            measurement = SegmentedMeasurement(
                subject.chain.layers,
                segments,
                subject.device,
                subject.clock,
                subject.seed,
                subject.loss,
                partial(subject.modes.forward_context, subject.device),
                self.mover,
                visit=lambda layer: self.tell("in segments", size, layer.name),
                running=subject.modes.layers(subject.chain.layers),
                warm_up_seconds=0.0 if self.runs else self.warm_up_seconds,
                on_warm=self.note_warm_device,
                size=size,
            )
            result = measurement.measure(self._example(size).layer_input, self.rounds or _ROUNDS)
        self._note(size, measurement.note, len(segments))
        return result

    def _note(self, size: int, note: str, segments: int) -> None:
        """The first size's note, and where a later one is measured in another number of segments."""
        if not self.runs:
            self.notes.append(note)
        elif segments != self._last_segments:
            self.notes.append(f"from micro-batch size {size} on: measured in {segments} segments")
        self._last_segments = segments

    def _of(self, size: int) -> str:
        return f"{self.subject.loaded.name}: micro-batch size {size}"
