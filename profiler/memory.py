"""Bytes of a device: what is allocated, now and at the most, and what a layer needs while it runs."""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from .torch_private import (
    ALLOCATION_RECORDS,
    TorchDispatchMode,
    start_allocation_records,
    stop_allocation_records,
    storage_key,
    tree_leaves,
)

# How many bytes of a device are allocated, now and at the most: by its allocator, or by the live tensors.


class Meter(Protocol):
    """Counts a device's bytes while it is entered (`with meter:`), by intervals between marks."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any: ...

    def mark(self) -> int:
        """Ends an interval and begins the next; the number of the one that ended."""

    def peak_in(self, interval: int) -> int:
        """The most held during that interval. Some meters know it only when they are left."""

    def held_after(self, interval: int) -> int:
        """Bytes held when it ended. Some meters know it only when they are left."""

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """What these tensors take of it, each storage once."""


class _OnlineMeter(ABC):
    """A meter that can be read at any time."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []

    @abstractmethod
    def allocated(self) -> int:
        """Bytes held now."""

    @abstractmethod
    def peak(self) -> int:
        """The most held since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """The peak starts again from what is held now."""

    def mark(self) -> int:
        self._intervals.append((self.peak(), self.allocated()))
        self.reset_peak()
        return len(self._intervals) - 1

    def peak_in(self, interval: int) -> int:
        return self._intervals[interval][0]

    def held_after(self, interval: int) -> int:
        return self._intervals[interval][1]


class AllocatorBytes(_OnlineMeter):
    """What CUDA's caching allocator says of `device`.

    It counts when the host asks, in the order of the calls, so nothing need be waited for. The peak that the
    user's own torch.cuda.max_memory_allocated gives starts again with `reset_peak`.
    """

    _BLOCK = 512
    """Every allocation is a multiple of it (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        return sum(
            -(-storage.nbytes() // self._BLOCK) * self._BLOCK
            for storage in storages(tensors)
            if storage.device.type == self._device.type
        )


class LiveBytes(_OnlineMeter, TorchDispatchMode):
    """What an allocator that wastes nothing would hold: the storages of the live tensors on `device`.

    For the meta device, where nothing is allocated, and wherever an allocator cannot be asked. A storage
    counts once, whole, from the end of the first operation that makes or is given it, until nothing refers
    to it; `track` tells what was there before. Below autograd, so that the gradients inside a backward are
    seen. What an operation allocates and frees inside itself (a convolution's workspace) is not.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device | str, tensors: Iterable[Tensor] = ()) -> None:
        _OnlineMeter.__init__(self)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self._type = torch.device(device).type
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._now = self._most = 0
        self.track(tensors)

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made before."""
        for tensor in tensors:
            self._note(tensor)

    def allocated(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._most

    def reset_peak(self) -> None:
        self._most = self._now

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        return sum(storage.nbytes() for storage in storages(t for t in tensors if self._is_here(t)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._type and tensor.layout is torch.strided

    def _note(self, tensor: Tensor) -> None:
        if not self._is_here(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        entry = self._storages.get(key)
        if entry is None:
            # The storage's Python object lives as long as the storage itself, whoever refers to it.
            entry = weakref.ref(storage, lambda _: self._forget(key)), 0
        if entry[1] != size:
            self._now += size - entry[1]
            self._most = max(self._most, self._now)
        self._storages[key] = entry[0], size

    def _forget(self, key: int) -> None:
        _, size = self._storages.pop(key)
        self._now -= size


class CpuAllocations:
    """What PyTorch's allocator of the CPU gives out and takes back, in the order in which it does.

    Unlike LiveBytes it sees what operators allocate for themselves and free again: oneDNN's scratch memory,
    copies in another layout, what a convolution unfolds. What was held before counts with `held`. Raises
    RuntimeError while a profiler of PyTorch runs in this thread. It can be read when it is left.
    """

    _MARK = "pplan::mark"

    def __init__(self, allocated: Iterable[Tensor]) -> None:
        self._before = self.bytes_of(allocated)
        self._marks = 0
        self._intervals: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        self._marks = 0
        start_allocation_records()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._intervals = []
        now = most = self._before
        for change in stop_allocation_records(self._MARK):
            if change is None:
                self._intervals.append((most, now))
                most = now
            else:
                now += change
                most = max(most, now)

    def mark(self) -> int:
        with record_function(self._MARK):
            self._marks += 1
        return self._marks - 1

    def peak_in(self, interval: int) -> int:
        return self._intervals[interval][0]

    def held_after(self, interval: int) -> int:
        return self._intervals[interval][1]

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        return sum(storage.nbytes() for storage in storages(tensors) if storage.device.type == "cpu")


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of these tensors, each once."""
    all_storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return list({storage_key(storage): storage for storage in all_storages}.values())


def lasting(model: nn.Module) -> list[Tensor]:
    """What a model holds between passes: parameters, buffers and gradients."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *model.buffers(), *gradients]


def build_meter(device: torch.device, model: nn.Module) -> Meter:
    """The meter for passes of `model` on `device`, which counts what the model holds already."""
    if device.type == "cuda":
        return AllocatorBytes(device)
    if device.type == "cpu" and sees_kernels(device):
        return CpuAllocations(lasting(model))
    return LiveBytes(device, lasting(model))


def sees_kernels(device: torch.device) -> bool:
    """Whether what kernels allocate is seen, besides tensors: an allocator can be asked. That of the CPU can
    where PyTorch has its records and no profiler of PyTorch runs in this thread."""
    if device.type != "cpu" or not ALLOCATION_RECORDS.exists:
        return device.type == "cuda"
    try:
        with CpuAllocations(()):
            return True
    except RuntimeError:
        return False


# What a layer needs besides what is kept, while it runs; and the peak of a whole step.


@dataclass(frozen=True)
class LossWorkspace:
    """Bytes that the loss needs for itself, targets included, above what all layers and it save."""

    forward: int
    backward: int

    @property
    def larger(self) -> int:
        """Of forward and backward."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one pass through the layers; an entry for each layer.

    `static`: held before the pass and after it: parameters, buffers, gradients and `other` (a library's own
    memory; what the allocator rounds up). `forward`, `backward`: workspace. `saved`: for backward.
    """

    static: int
    other: int
    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def workspace(self) -> tuple[int, ...]:
        """The larger of forward and backward."""
        return tuple(map(max, self.forward, self.backward))

    @property
    def predicted_peak(self) -> int:
        """static + the largest over all layers i of (what layers 0 to i saved + workspace of i)."""
        saved = accumulate(self.saved)
        return self.static + max(before + own for before, own in zip(saved, self.workspace, strict=True))


class Workspace:
    """The watcher that finds what each layer needs for itself, in an untimed pass while `meter` counts.

    The workspace of layer i is the peak while it runs, above what is kept then: the static bytes, and what
    layers 0 to i save for backward. So it holds what the layer hands on where nobody saves that, gradients on
    their way, and temporaries; and static + saved + workspace is the peak of the pass, with no byte twice.

    Made right before the pass, when gradients exist and the libraries have what they allocate once.
    `passing`: tensors that exist by now and belong to the pass, so not to what is static: the input (which
    counts as saved, where it is) and the gradients that backward starts from. `memory` and `loss` are called
    when `meter` can be read: some only when they are left.
    """

    def __init__(self, model: nn.Module, layers: int, meter: Meter, passing: Iterable[Tensor] = ()) -> None:
        self._meter = meter
        self._layers = layers
        self._passing_bytes = meter.bytes_of(passing)
        self._lasting_bytes = meter.bytes_of(lasting(model))
        # By layer the intervals between marks in which it ran; one more, where a loss ends the pass: its own
        # bytes are not the layers'.
        self._forward: list[list[int]] = [[] for _ in range(layers + 1)]
        self._backward: list[list[int]] = [[] for _ in range(layers + 1)]
        self._current = 0
        """The layer whose forward or backward ran last."""
        self._start = meter.mark()

    @property
    def static_bytes(self) -> int:
        """Held before the pass and after it."""
        return self._meter.held_after(self._start) - self._passing_bytes

    def memory(self, saved_bytes: Sequence[int]) -> StepMemory:
        """After the pass: what was found, above `saved_bytes`, which SavedBytes counted in a pass like it."""
        return StepMemory(
            static=self.static_bytes,
            other=max(self.static_bytes - self._lasting_bytes, 0),
            saved=tuple(saved_bytes),
            forward=self._above(self._forward, saved_bytes),
            backward=self._above(self._backward, saved_bytes),
        )

    def loss(self, saved_bytes: Sequence[int], loss_saved_bytes: int) -> LossWorkspace:
        """After a pass that a loss ended: what that needed, above all that was saved until then."""
        allocated = self.static_bytes + sum(saved_bytes) + loss_saved_bytes
        forward, backward = (self._peak(passes[-1]) for passes in (self._forward, self._backward))
        return LossWorkspace(max(forward - allocated, 0), max(backward - allocated, 0))

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        self._meter.mark()

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._forward[index].append(self._meter.mark())
        self._current = index

    def backward_starts(self) -> None:
        self._meter.mark()

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._backward[self._current].append(self._meter.mark())
        self._current = min(self._current, index)

    def backward_ends(self) -> None:
        self._backward[self._current].append(self._meter.mark())

    def _peak(self, intervals: Iterable[int]) -> int:
        return max(map(self._meter.peak_in, intervals), default=0)

    def _above(self, passes: Sequence[Sequence[int]], saved_bytes: Sequence[int]) -> tuple[int, ...]:
        allocated = (self.static_bytes + saved for saved in accumulate(saved_bytes))
        peaks = map(self._peak, passes[: self._layers])
        return tuple(max(peak - before, 0) for peak, before in zip(peaks, allocated, strict=True))


def peak_of_step(step: Callable[[], object], meter: Meter) -> int:
    """The most bytes held while `step` runs: forward and backward of the untouched model, say."""
    gc.collect()
    with meter:
        meter.mark()
        step()
        interval = meter.mark()
    return meter.peak_in(interval)
