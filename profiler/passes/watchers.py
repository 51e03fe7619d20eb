"""Watchers of a pass: what a pass tells them, several at once, and the one that counts saved bytes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..torch_internals import storage_key
from ..user_model.flat_output import tensors_in


class Watcher(Protocol):
    """What a pass tells: where it is, forwards and, as gradients arrive, backwards."""

    def before(self, index: int, layer_input: Any) -> None:
        """Layer `index` runs next, on `layer_input`."""

    def after(self, index: int, output: Any) -> None:
        """Layer `index` has run."""

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None:
        """The gradient of layer `index`'s output is complete; the layer's own backward comes next."""

    def backward_ends(self) -> None: ...


class CompositeWatcher:
    """Tells several watchers of the same pass, each in the order given."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def before(self, index: int, layer_input: Any) -> None:
        for watcher in self._watchers:
            watcher.before(index, layer_input)

    def after(self, index: int, output: Any) -> None:
        for watcher in self._watchers:
            watcher.after(index, output)

    def backward_starts(self) -> None:
        for watcher in self._watchers:
            watcher.backward_starts()

    def gradient(self, index: int, gradient: Tensor) -> None:
        for watcher in self._watchers:
            watcher.gradient(index, gradient)

    def backward_ends(self) -> None:
        for watcher in self._watchers:
            watcher.backward_ends()


class SavedBytes:
    """The watcher that counts saved bytes, for a pass run inside `hooks()`.

    Each storage is counted once, whole, for the first layer that saves it or a view of it; those of
    parameters and buffers are not. `saved_input_bytes` are a layer's inputs where an earlier layer already
    counted them and this layer or a later one needs them, each storage once. `output_bytes`: each tensor that
    the layer hands on once. A loss that ends the pass has figures of its own. A storage is told by its
    identity, and kept alive until backward starts, so that no other can take its place; the counts are whole
    from then on. Tensors that an autograd.Function keeps as attributes of its context are saved, too, though
    autograd does not report them (the counts of tokens of transformers' experts in float32).
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
        self._nodes: set[Any] = set()
        self._layer = 0
        self._is_forward = True

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Has autograd report what it saves."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def before(self, index: int, layer_input: Any) -> None:
        self._layer = index
        if index < len(self.saved_bytes):
            keys = {storage_key(tensor) for tensor in tensors_in(layer_input)}
            self._inputs[index] = keys & self._alive.keys()

    def after(self, index: int, output: Any) -> None:
        outputs = list(tensors_in(output))
        self._pack_attributes([tensor.grad_fn for tensor in outputs])
        handed_on = sum(tensor.nbytes for tensor in outputs)
        if index < len(self.output_bytes):
            self.output_bytes[index] = handed_on
        else:
            self.loss_output_bytes = handed_on

    def backward_starts(self) -> None:
        for layer, keys in self._inputs.items():
            needed = [self._alive[key].nbytes() for key in keys if self._last_user[key] >= layer]
            self.saved_input_bytes[layer] = sum(needed)
        self._alive.clear()
        self._nodes.clear()
        self._is_forward = False

    def gradient(self, index: int, gradient: Tensor) -> None:
        pass

    def backward_ends(self) -> None:
        pass

    def _pack_attributes(self, nodes: list[Any]) -> None:
        """Of the nodes of the graph that were made since the last call."""
        while nodes:
            node = nodes.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            for tensor in tensors_in(list(getattr(node, "__dict__", {}).values())):
                self._pack(tensor)
            nodes += [own for own, _ in node.next_functions]

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        # What a backward of the user's saves for itself is gone when it ends: it is no layer's.
        if self._is_forward and key not in self._not_counted:
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
