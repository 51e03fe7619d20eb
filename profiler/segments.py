"""Models that do not fit on a device: measured segment by segment, with one segment's weights on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cost_models.errors import MachineError, ModelError, PplanError
from ..cost_models.memory import FRAGMENTATION_RESERVE, workspace_before_loss
from ..cost_models.quantities import format_bytes
from .layer import Layer, LayerSequential, modules_used, tensors_used
from .layers import build_chain
from .memory import StepMemory, storages
from .meta_device import kernels_on
from .modes import MeasurementTarget
from .passes import CountedBytes, LayerTimes, OutputGradients, SavedBytes, warm_until_stable
from .size_run import LayerPasses, SizeRun, no_collection, release
from .size_sweep import SizeSweep
from .timed_passes import SizeResult, TimedPasses
from .torch_private import storage_key, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from .user_model import DoesNotFit, ModelInput, copy_to_meta, is_out_of_memory, layer_failure, refusal

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

    def forget(self) -> None:
        """Keeps them: layers behind make them, so that they are there before a pass of the segment."""


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


def layer_needs(layers: Sequence[Layer], counted: CountedBytes) -> tuple[LayerNeeds, ...]:
    """The needs of each layer; the last one's are with the loss, where that was counted."""
    memory, loss = counted.memory, counted.loss_workspace
    saved, workspace = list(counted.saved_bytes), list(memory.workspace if memory else [0] * len(layers))
    saved[-1] += counted.loss_saved_bytes
    if loss is not None:
        workspace[-1] = int(workspace_before_loss(workspace[-1], counted.loss_saved_bytes, loss.larger))
    rows = zip(layers, saved, workspace, counted.output_bytes, strict=True)
    return tuple(LayerNeeds(layer.name, _storage_bytes(layer.module), *row) for layer, *row in rows)


def _storage_bytes(module: nn.Module) -> dict[int, int]:
    """Also what an earlier layer registers."""
    tensors = list({id(tensor): tensor for tensor in tensors_used(module)}.values())
    sizes = {storage_key(storage): storage.nbytes() for storage in storages(tensors)}
    for tensor in tensors:
        if tensor.requires_grad:
            sizes[storage_key(tensor)] += tensor.nbytes
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


# One segment at a time has its weights on the device.
#
# Each runs forward and backward by itself: fed what the segment before returned (kept on the host between),
# and, backwards, unit normal gradients; the last may end with a loss instead. There is no whole pass to hold
# the layers against.


@contextmanager
def _on_device(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, these tensors lie on the device; behind, where they lay before, and without gradients.

    Their data is moved and the tensors are left, so that every module that has one has it. Nothing is copied
    back: what a pass changes (running statistics) is of no interest afterwards.
    """
    homes = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, copy=True)
        yield
    finally:
        for tensor, home in zip(tensors, homes, strict=True):
            tensor.grad = None
            tensor.data = home
        # A pass that failed leaves tensors in the circles of its traceback.
        release(device)


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


class SegmentPasses(LayerPasses):
    """The passes of one segment, whose weights lie on the device. `running`: its layers as they run."""

    def __init__(
        self, subject: MeasurementTarget, segment: range, running: Sequence[Layer], boundary: Boundary
    ) -> None:
        is_last = segment.stop == len(subject.chain)
        first, *others = running
        layers = subject.chain.layers[segment.start : segment.stop]
        super().__init__(
            subject,
            [replace(first, module=_InputTaker(first)), *others],
            _TensorHolder(_tensors(layer.module for layer in layers)),
            (OutputGradients if is_last else InnerGradients)(subject.seed),
            subject.loss if is_last else None,
        )
        self._boundary, self._is_last = boundary, is_last

    def feed(self) -> Any:
        return [self._boundary.on(self._subject.device)]

    def passing(self, inputs: Any) -> list[Tensor]:
        return self._boundary.counted_tensors(inputs, whether=False)

    def saved_bytes(self, inputs: Any) -> SavedBytes:
        self._saved = _SavedAndCrossing(
            self._holder, len(self.layers), self._boundary.counted_tensors(inputs)
        )
        return self._saved

    def count(self, visit: Callable[[Layer], None], size: int) -> tuple[CountedBytes, Boundary]:
        """Untimed passes that count the bytes; and what the next segment is fed."""
        counted = self.count_saved(visit, size)
        boundary = self._saved.boundary
        self.count_memory(counted)
        self.count_loss(counted)
        if not self._is_last and counted.memory is not None:
            # Backward's first gradients are made by the layers behind; here they were there before the pass.
            *backward, last = counted.memory.backward
            whole = (*backward, last + boundary.gradient_bytes)
            counted.memory = replace(counted.memory, backward=whole)
        return counted, boundary

    def warm_up(self, seconds: float) -> None:
        """Until its passes take as long as before; so long at the most."""

        def one_pass() -> float:
            times = self.time_layers()
            return float(times.forward.sum() + times.backward.sum())

        warm_until_stable(one_pass, self._subject.clock, seconds)

    def timed(self, rounds: int) -> list[LayerTimes]:
        """So many timed passes; before them those that show how far the device must be held back."""
        if self._subject.clock.has_host:
            self.find_leads()
        return [self.time_layers() for _ in range(rounds)]


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


class _SavedAndCrossing(SavedBytes):
    """Keeps on the host what the last layer returns, too, with what the next segment has to know of it."""

    boundary: Boundary

    def after(self, index: int, output: Any) -> None:
        super().after(index, output)
        if index == self._layers - 1:
            leaves = tree_leaves(output)
            self.boundary = Boundary(
                tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), output),
                tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves),
                tuple(isinstance(leaf, Tensor) and self.has_counted(leaf) for leaf in leaves),
            )


# Sizes of a model that does not fit on its device whole, each measured segment by segment.

_ROUNDS = 3
_SHARES = (1.0, 0.7, 0.5)
"""Of the free bytes, to plan with in turn where memory runs out: counting does not see everything."""


@dataclass
class SegmentedSweep(SizeSweep[SizeResult]):
    """The subject's working copy lies on the host. `free_bytes` says what the device has left when asked.

    What fits together is planned from bytes counted on the meta device.
    """

    _: KW_ONLY
    free_bytes: Callable[[], int]
    _last_segments: int = field(default=0, init=False)

    @property
    def results(self) -> list[SizeResult]:
        return self.runs

    def segments(self, size: int, share: float = 1.0) -> tuple[range, ...]:
        """What would run together in `share` of what is free. Raises DoesNotFit, ModelError."""
        needs = layer_needs(self._on_meta.chain.layers, self._count(size))
        entering = sum(tensor.nbytes for tensor in self._example(size).tensors)
        try:
            return plan_segments(needs, entering, int(share * self.free_bytes()), str(self.subject.device))
        except MachineError as error:
            raise DoesNotFit(f"{self._of(size)}: {error.what}", error.hint) from error

    def _count(self, size: int) -> CountedBytes:
        """Without the loss, where that does not run on meta: the user's may make its targets elsewhere."""
        with kernels_on(self.subject.device)():
            for target in (self._on_meta, replace(self._on_meta, loss=None)):
                run = SizeRun(target, size)
                try:
                    run.count(lambda _: None)
                    break
                except ModelError:
                    if target.loss is None:
                        raise
        return run.counted

    @cached_property
    def _on_meta(self) -> MeasurementTarget:
        """The same layers, on the meta device."""
        loaded, chain = self.subject.loaded, self.subject.chain
        module, granularity = loaded.module, chain.granularity
        if isinstance(module, LayerSequential) and len(module.layer_names) == len(chain):
            # Its granularity is that of the model it was made of; the layers are its elements.
            granularity = "block"
        model = copy_to_meta(module, loaded.name)
        example = loaded.example_input_for(2).to("meta", self.subject.dtype)
        chain = build_chain(model, example, name=loaded.name, granularity=granularity, tool=chain.tool)
        return replace(
            self.subject,
            loaded=replace(loaded, module=model),
            chain=chain,
            device=torch.device("meta"),
            modes=replace(self.subject.modes, compile=False),
        )

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
        running = subject.modes.layers(subject.chain.layers)
        boundary = Boundary.of_input(self._example(size).layer_input)
        counts: list[CountedBytes] = []
        times: list[list[LayerTimes]] = []
        with no_collection():
            for segment in segments:
                modules = [subject.chain.layers[index].module for index in segment]
                with _on_device(_tensors(modules), subject.device):
                    _flatten(modules)
                    passes = SegmentPasses(subject, segment, running[segment.start : segment.stop], boundary)
                    counted, boundary = passes.count(
                        lambda layer: self.tell("in segments", size, layer.name), size
                    )
                    counts.append(counted)
                    if self.warm_up_seconds and not times and not self.runs:
                        passes.warm_up(self.warm_up_seconds)
                        self.note_warm_device()
                    times.append(passes.timed(self.rounds or _ROUNDS))
                    # What it holds on the device goes before the weights do.
                    del passes
        self._note(size, len(segments))
        rounds = TimedPasses([_join_times(of_round) for of_round in zip(*times, strict=True)])
        return SizeResult(size, _join_counts(counts), rounds)

    def _note(self, size: int, segments: int) -> None:
        """How the first size was measured, and where a later one is in another number of segments."""
        if not self.runs:
            self.notes.append(
                f"does not fit on {self.subject.device} whole: measured in {segments} "
                f"segment{'s' * (segments > 1)}, and the layers' seconds were not held against the whole "
                "model's"
            )
        elif segments != self._last_segments:
            self.notes.append(f"from micro-batch size {size} on: measured in {segments} segments")
        self._last_segments = segments

    def _of(self, size: int) -> str:
        return f"{self.subject.loaded.name}: micro-batch size {size}"


def _join_counts(parts: Sequence[CountedBytes]) -> CountedBytes:
    """The bytes of all segments; those of the loss are the last one's."""

    def join(owners: Sequence[Any], name: str) -> list[int]:
        return [value for owner in owners for value in getattr(owner, name)]

    whole = replace(
        parts[-1],
        saved_bytes=join(parts, "saved_bytes"),
        saved_input_bytes=join(parts, "saved_input_bytes"),
        output_bytes=join(parts, "output_bytes"),
    )
    memories = [part.memory for part in parts if part.memory is not None]
    if not memories:
        return whole
    rows = (tuple(join(memories, name)) for name in ("saved", "forward", "backward"))
    return replace(whole, memory=StepMemory(0, 0, *rows))


def _join_times(parts: Sequence[LayerTimes]) -> LayerTimes:
    """One pass of all segments; the loss is the last one's."""

    def join(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    whole = replace(parts[-1], forward=join("forward"), backward=join("backward"))
    if whole.forward_host is None:
        return whole
    return replace(whole, forward_host=join("forward_host"), backward_host=join("backward_host"))
