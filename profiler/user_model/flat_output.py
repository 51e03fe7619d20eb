"""A model's output as a flat tuple, and back; also dataclasses, which torch's pytrees do not know."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..torch_internals import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


@dataclasses.dataclass(frozen=True)
class Structure:
    """Makes a value of its leaves."""

    spec: TreeSpec
    objects: tuple[_Fields | None, ...]
    """What the leaves of `spec` are; None: themselves."""

    def __call__(self, leaves: Iterable[Any]) -> Any:
        return self.build_from(iter(leaves))

    def build_from(self, leaves: Iterator[Any]) -> Any:
        """Takes as many as it needs."""
        parts = [next(leaves) if fields is None else fields.build_from(leaves) for fields in self.objects]
        return tree_unflatten(parts, self.spec)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Of a dataclass."""

    kind: type
    names: tuple[str, ...]
    values: Structure

    def build_from(self, leaves: Iterator[Any]) -> Any:
        instance: Any = object.__new__(self.kind)
        for name, value in zip(self.names, self.values.build_from(leaves), strict=True):
            # A frozen dataclass refuses the plain way; __init__ may want, or do, something else.
            object.__setattr__(instance, name, value)
        return instance


def flat(value: Any) -> tuple[list[Any], Structure]:
    """The leaves, and what makes the value of others like them."""
    leaves: list[Any] = []
    objects: list[_Fields | None] = []
    parts, spec = tree_flatten(value)
    for part in parts:
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = tuple(field.name for field in dataclasses.fields(part))
            inner, values = flat([getattr(part, name) for name in names])
            leaves += inner
            objects.append(_Fields(type(part), names, values))
        else:
            leaves.append(part)
            objects.append(None)
    return leaves, Structure(spec, tuple(objects))


class FlatOutput:
    """While `flattened` lasts, `model` returns the leaves of its output; `finish` turns them back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure: Structure | None = None

    @property
    def finish(self) -> Callable[[Any], Any] | None:
        """Makes what the model returns of the leaves; None where it returns one leaf itself."""
        structure = self._structure
        is_leaf = structure is None or (structure.spec.is_leaf() and structure.objects == (None,))
        return None if is_leaf else structure

    @contextlib.contextmanager
    def flattened(self) -> Iterator[None]:
        forward = self._model.forward

        @functools.wraps(forward)
        def flattening(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            leaves, self._structure = flat(forward(*args, **kwargs))
            return tuple(leaves)

        self._model.forward = flattening
        try:
            yield
        finally:
            self._model.forward = forward


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a tensor, tuple, list, dict or dataclass, each once."""
    if isinstance(value, Tensor):
        return [value]
    leaves = value if type(value) is tuple else tree_leaves(value)
    flat = leaves if all(isinstance(leaf, Tensor) for leaf in leaves) else tree_leaves(value)
    return list({id(leaf): leaf for leaf in flat if isinstance(leaf, Tensor)}.values())
