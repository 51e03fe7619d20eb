"""Bytes: what autograd keeps for backward, and what a layer hands on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import storage_key
from .timing import tensors_in


class SavedBytes:
    """The watcher that counts saved bytes, for a pass run inside `hooks()`.

    Each storage is counted once, whole, for the first layer that saves it or a view of it; those of
    parameters and buffers are not. `saved_input_bytes` are a layer's inputs where an earlier layer already
    counted them and this layer or a later one needs them, each storage once. `output_bytes`: each tensor that
    the layer hands on once. A loss that ends the pass has figures of its own. A storage is told by its
    identity, and kept alive until backward starts, so that no other can take its place; the counts are whole
    from then on.
    """

    def __init__(self, model: nn.Module, layers: int) -> None:
        self.saved_bytes = [0] * layers
        self.saved_input_bytes = [0] * layers
        self.output_bytes = [0] * layers
        self.loss_saved_bytes = 0
        self.loss_output_bytes = 0
        self._weights = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._not_counted = {storage_key(storage) for storage in self._weights}
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._last_user: dict[int, int] = {}
        self._inputs: dict[int, set[int]] = {}
        self._layer = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Has autograd report what it saves."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def before(self, index: int, given: Any) -> None:
        self._layer = index
        if index < len(self.saved_bytes):
            keys = {storage_key(tensor) for tensor in tensors_in(given)}
            self._inputs[index] = keys & self._alive.keys()

    def after(self, index: int, output: Any) -> None:
        handed_on = sum(tensor.nbytes for tensor in tensors_in(output))
        if index < len(self.output_bytes):
            self.output_bytes[index] = handed_on
        else:
            self.loss_output_bytes = handed_on

    def backward_starts(self) -> None:
        for layer, keys in self._inputs.items():
            needed = [self._alive[key].nbytes() for key in keys if self._last_user[key] >= layer]
            self.saved_input_bytes[layer] = sum(needed)
        self._alive.clear()

    def gradient(self, index: int, gradient: Tensor) -> None:
        pass

    def backward_ends(self) -> None:
        pass

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._not_counted:
            if key not in self._alive:
                self._alive[key] = storage
                self._count(storage.nbytes())
            self._last_user[key] = self._layer
        # Detached: a saved output would otherwise hold its own graph alive in a circle.
        return tensor.detach()

    def _count(self, saved: int) -> None:
        if self._layer < len(self.saved_bytes):
            self.saved_bytes[self._layer] += saved
        else:
            self.loss_saved_bytes += saved
