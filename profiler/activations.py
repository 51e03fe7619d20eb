"""Bytes: what autograd keeps for backward, what a layer hands on, and what it needs besides while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """The watcher that counts saved bytes, for a pass run inside `hooks()`.

    Each storage is counted once, whole, for the first layer that saves it or a view of it; those of
    parameters and buffers are not. `saved_input_bytes` is a layer's input where an earlier layer already
    counted it and this layer or a later one needs it. A storage is told by its identity, and kept alive
    until backward starts, so that no other can take its place; the counts are whole from then on.
    """

    def __init__(self, model: nn.Module, layers: int) -> None:
        self.saved_bytes = [0] * layers
        self.saved_input_bytes = [0] * layers
        self.output_bytes = [0] * layers
        self._weights = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._not_counted = {storage._cdata for storage in self._weights}
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._last_user: dict[int, int] = {}
        self._inputs: dict[int, int] = {}
        self._layer = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Has autograd report what it saves."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def before(self, index: int, given: Any) -> None:
        self._layer = index
        if isinstance(given, Tensor) and given.untyped_storage()._cdata in self._alive:
            self._inputs[index] = given.untyped_storage()._cdata

    def after(self, index: int, output: Any) -> None:
        self.output_bytes[index] = sum(
            leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
        )

    def backward_starts(self) -> None:
        for layer, key in self._inputs.items():
            if self._last_user[key] >= layer:
                self.saved_input_bytes[layer] = self._alive[key].nbytes()
        self._alive.clear()

    def gradient(self, index: int, gradient: Tensor) -> None:
        pass

    def backward_ends(self) -> None:
        pass

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._not_counted:
            if key not in self._alive:
                self._alive[key] = storage
                self.saved_bytes[self._layer] += storage.nbytes()
            self._last_user[key] = self._layer
        # Detached: a saved output would otherwise hold its own graph alive in a circle.
        return tensor.detach()


class Workspace:
    """The watcher that finds what each layer needs for itself on a CUDA device, in an untimed pass.

    `bytes`: the allocator's peak while the layer runs, above what is held before or after (whichever is
    more), the larger of forward and backward. The allocator counts when the host asks, in the order of the
    calls, so nothing need be waited for.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.bytes = [0] * layers
        self._device = device
        self._held = 0
        self._current = layers - 1
        """The layer whose backward runs."""

    def before(self, index: int, given: Any) -> None:  # noqa: ARG002
        self._restart()

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._note(index)

    def backward_starts(self) -> None:
        self._restart()

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._note(self._current)
        self._current = min(self._current, index)
        self._restart()

    def backward_ends(self) -> None:
        self._note(self._current)

    def _restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held = torch.cuda.memory_allocated(self._device)

    def _note(self, layer: int) -> None:
        held = max(self._held, torch.cuda.memory_allocated(self._device))
        above = torch.cuda.max_memory_allocated(self._device) - held
        self.bytes[layer] = max(self.bytes[layer], above)
