"""How many bytes of a device are allocated, now and at the most: by its allocator, or by the live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ..torch_internals import TorchDispatchMode, storage_key, tree_leaves


class Meter(Protocol):
    """Counts a device's bytes while it is entered (`with meter:`)."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any: ...

    def allocated(self) -> int:
        """Bytes held now."""

    def peak(self) -> int:
        """The most held since `reset_peak`."""

    def reset_peak(self) -> None:
        """The peak starts again from what is held now."""

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """What these tensors take of it, each storage once."""


class AllocatorBytes:
    """What CUDA's caching allocator says of `device`.

    It counts when the host asks, in the order of the calls, so nothing need be waited for. The peak that the
    user's own torch.cuda.max_memory_allocated gives starts again with `reset_peak`.
    """

    _BLOCK = 512
    """Every allocation is a multiple of it (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""

    def __init__(self, device: torch.device) -> None:
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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What an allocator that wastes nothing would hold: the storages of the live tensors on `device`.

    For devices whose allocator tells nothing (the CPU) or has nothing to tell (meta). A storage counts once,
    whole, from the end of the first operation that makes or is given it, until nothing refers to it; what was
    there before is told by `track`. Below autograd, so that the gradients inside a backward are seen. What an
    operation allocates and frees inside itself (a convolution's workspace) is not.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device | str, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = torch.device(device).type
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
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
        known = self._known.get(key)
        if known is None:
            # The storage's Python object lives as long as the storage itself, whoever refers to it.
            known = weakref.ref(storage, lambda _: self._forget(key)), 0
        if known[1] != size:
            self._now += size - known[1]
            self._most = max(self._most, self._now)
        self._known[key] = known[0], size

    def _forget(self, key: int) -> None:
        _, size = self._known.pop(key)
        self._now -= size


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of these tensors, each once."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return list({storage_key(storage): storage for storage in found}.values())


def lasting(model: nn.Module) -> list[Tensor]:
    """What a model holds between passes: parameters, buffers and gradients."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *model.buffers(), *gradients]


def build_meter(device: torch.device, model: nn.Module) -> Meter:
    """The meter for passes of `model` on `device`, which counts what the model holds already."""
    if device.type == "cuda":
        return AllocatorBytes(device)
    return LiveBytes(device, lasting(model))
