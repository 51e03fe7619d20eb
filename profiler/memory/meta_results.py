"""What an operation returns for meta tensors, without the operation where it ran before on the like.

For meta tensors PyTorch works shapes, strides and dtypes out in Python, about 90 µs for an addition, and the
blocks of a model run the same operations in every pass. So what was returned is remembered by the operation,
the layouts of its tensors and its other arguments, as PyTorch's own tracing does with stand-ins
(torch/_subclasses/fake_tensor.py). Operations that return a view, write into what they are given, or return
memory of other sizes than their tensors need are run each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..operator_internals import OpOverload, writes_arguments
from ..torch_internals import TorchDispatchMode, storage_key

_MOST = 20_000
"""Results that are kept; then it begins anew."""
_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_Recipe = tuple[type | None, tuple[Any, ...]]
"""Whether a tuple or a list is returned, or one value (None); of each tensor its shape, strides and dtype."""

_recipes: dict[tuple[Any, ...], _Recipe | None] = {}
"""None: it cannot be made from a recipe."""


class MetaResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, below autograd, what runs on meta tensors returns what it returned before."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_on_meta(func, args, kwargs or {})


def run_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func(*args, **kwargs)` returns, from the recipe of an earlier call, where one was alike."""
    key = _key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    recipe = _recipes.get(key)
    if recipe is not None:
        return _build(recipe)
    result = func(*args, **kwargs)
    if key not in _recipes:
        if len(_recipes) >= _MOST:
            _recipes.clear()
        _recipes[key] = _recipe(result, [*args, *kwargs.values()])
    return result


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells the call from others; None where it is run in any case."""
    if not isinstance(func, OpOverload) or func.is_view or writes_arguments(func):
        return None
    # A quotient of whole numbers has the default dtype.
    parts: list[Any] = [func, torch.get_default_dtype()]
    if not all(_append(value, parts) for value in args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _append(value, parts):
            return None
    return tuple(parts)


def _append(value: Any, parts: list[Any]) -> bool:
    """Whether the argument can be told from others, whose description is appended."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if not value.is_meta or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return False
        parts.append((value.dtype, value.shape, value.stride(), value.storage_offset()))
        return True
    if kind is list or kind is tuple:
        parts.append((kind, len(value)))
        return all(_append(own, parts) for own in value)
    # 1, 1.0 and True are equal.
    parts.append((kind, value))
    return kind in _PLAIN


def _recipe(result: Any, arguments: Sequence[Any]) -> _Recipe | None:
    kind = type(result) if type(result) in (tuple, list) else None
    values = (result,) if kind is None else tuple(result)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or not all(type(value) is Tensor or type(value) in _PLAIN for value in values):
        return None
    storages = {storage_key(tensor) for tensor in tensors}
    inputs = {storage_key(own) for own in _tensors(arguments)}
    if len(storages) < len(tensors) or storages & inputs or not all(map(_is_plain, tensors)):
        return None
    parts = [(own.shape, own.stride(), own.dtype) if isinstance(own, Tensor) else own for own in values]
    return kind, tuple(parts)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    own = [value for value in values if isinstance(value, Tensor)]
    inner = [_tensors(value) for value in values if isinstance(value, list | tuple)]
    return [*own, *(tensor for each in inner for tensor in each)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is one that `torch.empty_strided` makes."""
    if not tensor.is_meta or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    sizes = {own.untyped_storage().nbytes() for own in (same, tensor)}
    return not tensor.storage_offset() and len(sizes) == 1


def _build(recipe: _Recipe) -> Any:
    kind, parts = recipe
    values = [
        torch.empty_strided(own[0], own[1], dtype=own[2], device="meta") if type(own) is tuple else own
        for own in parts
    ]
    return values[0] if kind is None else kind(values)
