"""What a stage saves for backward, kept in the host's memory until its backward.

As torch.autograd.graph.save_on_cpu does it, and unlike it each storage once, however many operations save it
or views of it; parameters and buffers not at all, nor what the stage is handed, which PyTorch's pipelining
keeps on the device anyway. (Of two linear layers with a ReLU between them save_on_cpu copies the weights,
too, and what the ReLU hands on twice.)

Copies run on the stream that computes, so that a forward waits for what it saves and a backward for what it
needs, and nothing else has to be made safe. On a GPU the host's memory is pinned: there PyTorch's allocator
rounds each storage up to a power of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...profiler.torch_internals import storage_key, version


class HostCopy:
    """The bytes of a storage of `device` on its host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        pinned = storage.device.type == "cuda"
        self.bytes = allocate_on_host(storage.nbytes(), pinned=pinned)
        self.bytes.copy_(_as_bytes(storage), non_blocking=pinned)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def on_device(self) -> torch.UntypedStorage:
        """They on the device again: one copy, while somebody needs it."""
        storage = None if self._back is None else self._back()
        if storage is None:
            own = torch.empty_like(self.bytes, device=self.device, pin_memory=False)
            storage = own.copy_(self.bytes, non_blocking=True).untyped_storage()
            self._back = weakref.ref(storage)
        return storage


def allocate_on_host(size: int, *, pinned: bool) -> Tensor:
    """So many bytes."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class HostTensor(NamedTuple):
    """A saved tensor: what it is a view of."""

    copy: HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def on_device(self) -> Tensor:
        """The tensor, as it was saved."""
        empty = torch.empty(0, dtype=self.dtype, device=self.copy.device)
        return empty.set_(self.copy.on_device(), self.offset, self.size, self.stride)


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd saves on `device` goes to its host's memory, but the storages of the tensors that
    `stay`. For one forward: storages are told apart while it runs.

    A tensor of a class of its own (DTensor), without strides, or conjugated, stays, too. The copy is of the
    values as they are saved: an operation that overwrites them later does no harm.
    """

    def __init__(self, device: torch.device, stay: Iterable[Tensor]) -> None:
        self._device = device
        self._stay = {storage_key(tensor) for tensor in stay if _is_plain(tensor)}
        self._copies: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], HostCopy]] = {}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | HostTensor:
        if not _is_plain(tensor) or tensor.device != self._device or storage_key(tensor) in self._stay:
            # Detached: a saved output would otherwise hold its own graph alive in a circle.
            return tensor.detach()
        storage, key = tensor.untyped_storage(), (storage_key(tensor), version(tensor))
        alive, copy = self._copies.get(key, (None, None))
        if copy is None or alive is None or alive() is None:  # another one may have taken its place
            copy = HostCopy(storage)
            self._copies[key] = weakref.ref(storage), copy
        return HostTensor(copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def __exit__(self, *details: Any) -> None:
        self._copies.clear()
        super().__exit__(*details)


def _unpack(packed: Tensor | HostTensor) -> Tensor:
    return packed.on_device() if isinstance(packed, HostTensor) else packed


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a view of bytes that can be copied and told by their storage."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)
