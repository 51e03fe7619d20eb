"""The blocks that a model repeats, and what comes after them: the layers its authors think in.

An nn.ModuleList holds blocks; what runs before the first is the embedding, and what runs after the last are
the final norm and the head. Registration order is not the order of running (OPT registers its last norm
first), so a short run tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from ..torch_internals import child_modules

_COMPARABLE = 4
"""A list whose entries are smaller than this part of the largest list's entries is no list of blocks."""
_MOST_OF_IT = 0.5
"""Of the parameters of a stage its blocks have."""
_WIDER = 3
"""Times the parameters of the first stage's blocks, those of the last."""


def record_call_order(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Dotted name -> place among the first calls of all modules, while `run` runs (in eval mode)."""
    order: dict[str, int] = {}
    training = {module: module.training for module in model.modules()}
    hooks = [
        module.register_forward_pre_hook(partial(_note_call, order, name))
        for name, module in model.named_modules()
    ]
    model.eval()
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
        for module, before in training.items():
            module.training = before
    return order


def registration_order(model: nn.Module) -> dict[str, int]:
    """For a model that cannot be run: the order in which its modules are registered."""
    return {name: place for place, (name, _) in enumerate(model.named_modules())}


def block_patterns(model: nn.Module, order: dict[str, int]) -> list[str]:
    """`list.*` for every list of blocks, and the name of each module with parameters that runs after one.

    `order` places the dotted names of the modules that run. Empty where the model repeats nothing.
    """
    lists = [path for path, each in _lists(model, "") if any(name.startswith(f"{path}.") for name in order)]
    sizes = {path: _size(model.get_submodule(path)) / len(list(_children(model, path))) for path in lists}
    blocks = {path for path in lists if sizes[path] * _COMPARABLE >= max(sizes.values())}
    inside = {path: _lists_of_stages(model, path) for path in blocks}
    blocks = {own for path in blocks for own in inside[path] or [path]}
    return list(_patterns(model, "", blocks, order))


def _note_call(order: dict[str, int], name: str, *_: object) -> None:
    order.setdefault(name, len(order))


def _lists(
    model: nn.Module, path: str, kinds: tuple[type[nn.Module], ...] = (nn.ModuleList,)
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists whose entries all have parameters."""
    for name, child in _children(model, path):
        # An entry may be None, as behind the last of Informer's blocks.
        parts = child_modules(child).values() if isinstance(child, kinds) else ()
        if parts and all(part and _size(part) for part in parts):
            yield name, child
        else:
            yield from _lists(model, name, kinds)


def _lists_of_stages(model: nn.Module, path: str) -> list[str]:
    """The lists of blocks of which the entries of a list are made, of wider blocks from stage to stage; none
    where the entries are blocks: the experts of a block are as wide in all."""
    kinds = (nn.ModuleList, nn.Sequential)
    lists = [[own for own, _ in _lists(model, entry, kinds)] for entry, _ in _children(model, path)]
    if not all(len(own) == 1 for own in lists):
        return []
    stages = [own[0] for own in lists]
    shares = [
        _size(model.get_submodule(own)) / _size(model.get_submodule(own.rpartition(".")[0])) for own in stages
    ]
    sizes = [_size(model.get_submodule(own)) / len(list(_children(model, own))) for own in stages]
    return stages if min(shares) > _MOST_OF_IT and max(sizes) > _WIDER * min(sizes) else []


def _patterns(
    model: nn.Module, path: str, blocks: set[str], order: dict[str, int], *, after: bool = False
) -> Iterator[str]:
    is_list = bool(path) and isinstance(model.get_submodule(path), nn.ModuleList)
    for name, child in sorted(_children(model, path), key=lambda pair: _first_call(pair[0], order)):
        if name in blocks:
            after = True
            yield f"{name}.*"
        elif any(block.startswith(f"{name}.") for block in blocks):
            # What leads into a stage behind another is a layer, and what leads into the first is not.
            yield from _patterns(model, name, blocks, order, after=after and is_list)
            after = True
        elif after and _size(child) and _first_call(name, order) < len(order):
            yield name


def _first_call(path: str, order: dict[str, int]) -> int:
    """The first call of the module itself or, where a list or a dict is never called, of what it holds."""
    calls = (place for name, place in order.items() if name == path or name.startswith(f"{path}."))
    return min(calls, default=len(order))


def _children(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.get_submodule(path).named_children():
        yield f"{path}.{name}" if path else name, child


def _size(module: nn.Module) -> int:
    """Elements of its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
