"""What parts of a model run, described so that parts which are equal have equal descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import TorchDispatchMode, storage_key, tree_leaves

Description = tuple[object, ...]
"""Two parts have the same one where they run the same operations on tensors of the same shapes, dtypes and
storages, in modules of the same classes with parameters of the same shapes."""


class OperationRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Describes each part of what runs while this is entered."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.descriptions: list[Description] = []
        """By part, in the order in which they ended."""
        self._lines: list[Description] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._new_storages: dict[int, torch.UntypedStorage] = {}
        self._is_inside = False

    def begin(self, module: nn.Module | None, inputs: object, origins: Sequence[object] = ()) -> None:
        """The next part begins: the call of a module (None: what runs between two of them). `origins`: where
        its inputs come from."""
        self._storages.clear()
        self._new_storages.clear()
        self._is_inside = True
        weights = [] if module is None else [*module.parameters(), *module.buffers()]
        self._lines = [
            () if module is None else _class_names(module),
            *((own.requires_grad, *self._describe(own)) for own in weights),
            tuple(
                (leaf.requires_grad, *self._describe(leaf)) if isinstance(leaf, Tensor) else ()
                for leaf in tree_leaves(inputs)
            ),
            tuple(origins),
        ]

    def end(self, output: object) -> None:
        """The part has returned this."""
        self._is_inside = False
        self._lines.append(tuple(map(self._describe, tree_leaves(output))))
        self.descriptions.append(tuple(self._lines))
        self._lines = []

    def has_allocated(self, tensor: Tensor) -> bool:
        """Whether the part, or the last, allocated the memory that the tensor lies in."""
        return storage_key(tensor) in self._new_storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_inside:
            line: list[object] = [func, torch.is_grad_enabled()]
            read = {self._note(leaf, line) for leaf in tree_leaves((args, kwargs or {}))}
            for leaf in tree_leaves(result):
                key = self._note(leaf, line)
                if key is not None and key not in read:
                    self._new_storages[key] = leaf.untyped_storage()
            self._lines.append(tuple(line))
        return result

    def _describe(self, leaf: Any) -> Description:
        line: list[object] = []
        self._note(leaf, line)
        return tuple(line)

    def _note(self, leaf: Any, line: list[object]) -> int | None:
        """Appends of a tensor its layout, and which storage of the part's it lies in, by order of appearance;
        of anything else what it is. The key of that storage."""
        if not isinstance(leaf, Tensor):
            # 1, 1.0 and True are equal, and nan is not.
            line.append((type(leaf), leaf) if type(leaf) in _COMPARED else repr(leaf))
            return None
        storage = leaf.untyped_storage()
        key = storage_key(storage)
        # Kept, so that no other storage takes its identity.
        number, _ = self._storages.setdefault(key, (len(self._storages), storage))
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        line.append((number, storage.nbytes(), leaf.dtype, leaf.shape, strides, leaf.storage_offset()))
        return key


_COMPARED = (int, bool, str, type(None), torch.dtype)


def _class_names(module: nn.Module) -> Description:
    return tuple(f"{type(own).__module__}.{type(own).__qualname__}" for own in module.modules())
