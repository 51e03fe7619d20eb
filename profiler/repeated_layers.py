"""Blocks that a model repeats: on the meta device a model of few of them is traced in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cutting import Granularity
from .layer import Layer, LayerChain, find_tensor_users, list_unused, registered, tensors_used
from .torch_private import TorchDispatchMode, storage_key, tree_leaves
from .tracing import MANY
from .trial import masks_as_in_training, trial_run
from .user_model import ModelInput, is_out_of_memory

# What parts of a model run, described so that parts which are equal have equal descriptions.

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


# Rows of layers whose kinds repeat: one kind, or several in turn (local and global attention).
#
# What a layer saves and needs depends on the layers around it, too: on its neighbours, and on which of the
# tensors that are handed on it is the first or the last to use. So a period and one more at each end of a row
# stand for themselves, and of the others one period for all.

_LONGEST = 100
"""Kinds that take turns."""


class RepeatingRow(NamedTuple):
    """From `start` to before `stop` each kind is that of `period` places before."""

    start: int
    stop: int
    period: int

    @property
    def end(self) -> int:
        """So many at each end stand for themselves."""
        return self.period + 1

    def repeated(self, behind: int = 0) -> range:
        """Whole periods that the one before them stands for; at least `behind` more than the end stay."""
        start = self.start + self.end + self.period
        room = max(0, self.stop - self.end - behind - start)
        return range(start, start + room // self.period * self.period)

    def between(self, start: int, stop: int) -> RepeatingRow:
        """Its part there."""
        return RepeatingRow(max(self.start, start), min(self.stop, stop), self.period)


def find_rows(kinds: Sequence[Hashable]) -> list[RepeatingRow]:
    """All that are as long as they can be and have places that others stand for, of short periods first."""
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    rows = [
        row
        for period in range(1, min(_LONGEST, len(places) // 4) + 1)
        for row in _rows_of_period(places, period)
    ]
    return [row for row in rows if row.repeated()]


def disjoint_rows(kinds: Sequence[Hashable]) -> list[RepeatingRow]:
    """Rows that do not overlap, first that in which most is repeated, in their order."""
    rows = find_rows(kinds)
    apart: list[RepeatingRow] = []
    free = [(0, len(kinds))]
    while free and rows:
        start, stop = free.pop()
        parts = [row.between(start, stop) for row in rows]
        best = max(parts, key=lambda row: len(row.repeated()))
        if best.repeated():
            apart.append(best)
            free += [(start, best.start), (best.stop, stop)]
    return sorted(apart)


def _rows_of_period(places: Sequence[int], period: int) -> Iterator[RepeatingRow]:
    start = None
    for place in range(len(places) - period + 1):
        is_same = place + period < len(places) and places[place] == places[place + period]
        if is_same and start is None:
            start = place
        elif not is_same and start is not None:
            yield RepeatingRow(start, place + period, period)
            start = None


# Blocks that a model repeats: on the meta device a model of few of them is traced in its place.
#
# The blocks of an nn.ModuleList that are layers by themselves are dropped, but for some at each end of a row
# of
# blocks whose kinds repeat (equal ones, or local and global attention in turn); what they run tells, of the
# whole model and of the shortened one, which has to run the same besides.
# The chain of the shortened model then gets them back. Where anything else leads from layer to layer than
# what
# each block returns to the next, another layer reads a block's weight, or something forbids a cut, the model
# is
# traced whole.

_WORTH_IT = 8
"""From so many that can be dropped on."""


@dataclass(frozen=True, eq=False)
class BlockRow:
    """The blocks of the list at `path`; those of `dropped` are equal to those `period` places before them."""

    path: str
    blocks: tuple[nn.Module, ...]
    dropped: range
    period: int = 1

    @property
    def left(self) -> list[int]:
        """The blocks that stay."""
        return [index for index in range(len(self.blocks)) if index not in self.dropped]

    def representative(self, dropped: int) -> int:
        """The block that is looked at for one that is dropped: of the last period before all of these."""
        return self.dropped.start - self.period + (dropped - self.dropped.start) % self.period

    def complete(self, chain: LayerChain, model: nn.Module) -> tuple[LayerChain, tuple[int, ...]] | None:
        """The chain of the whole model from the shortened one's, and of each layer the one that is looked at
        for it; None where the layers hang together otherwise than each with the next."""
        if any(layer.cut_reason for layer in chain.layers):
            return None
        if list(chain.edges) != list(pairwise(range(len(chain)))):
            return None
        names = {f"{self.path}.{place}": index for place, index in enumerate(self.left)}
        if [names[layer.name] for layer in chain.layers if layer.name in names] != self.left:
            return None
        places = {names[layer.name]: place for place, layer in enumerate(chain.layers) if layer.name in names}
        last = self.dropped.start - 1
        around = [*range(last + 1 - self.period, last + 1), self.dropped.stop]
        if [places[index] for index in around] != list(
            range(places[last] + 1 - self.period, places[last] + 2)
        ):
            return None  # a layer that is no block stands between two
        if self._is_read_elsewhere(chain, names):
            return None
        layers: list[Layer] = []
        origins: list[int] = []
        for place, layer in enumerate(chain.layers):
            index = names.get(layer.name)
            layers.append(layer if index is None else self._renamed(layer, index))
            origins.append(place)
            if index == last:
                own = [places[self.representative(dropped)] for dropped in self.dropped]
                layers += [
                    self._copied(chain.layers[origin], dropped)
                    for origin, dropped in zip(own, self.dropped, strict=True)
                ]
                origins += own
        positions = {origin: position for position, origin in reversed(list(enumerate(origins)))}
        modules = [layer.module for layer in layers]
        written = {id(user.tensor) for user in chain.users if user.is_written}
        whole = replace(
            chain,
            layers=tuple(layers),
            edges=tuple(pairwise(range(len(layers)))),
            users=tuple(find_tensor_users(model, modules, (), written)),
            unused=list_unused(model, modules),
        )
        return whole, tuple(positions[origin] for origin in origins)

    def _is_read_elsewhere(self, chain: LayerChain, names: dict[str, int]) -> bool:
        """Whether a layer uses a tensor of another block: by its number in the list, it would be another one
        in the whole model."""
        owners = {id(tensor): index for index in self.left for tensor in tensors_used(self.blocks[index])}
        return any(
            owners.get(id(tensor), names.get(layer.name)) != names.get(layer.name)
            for layer in chain.layers
            for tensor in tensors_used(layer.module)
        )

    def _renamed(self, layer: Layer, index: int) -> Layer:
        name = f"{self.path}.{index}"
        shapes = None if layer.shapes is None else replace(layer.shapes, layer=name)
        return replace(layer, name=name, path=None if layer.path is None else name, shapes=shapes)

    def _copied(self, layer: Layer, index: int) -> Layer:
        """The layer of a dropped block, as that of the `layer` that is equal. It cannot be run."""
        block, own = self.blocks[index], self.blocks[self.representative(index)]
        inside = {id(tensor) for tensor in tensors_used(own)}
        outside = [tensor for tensor in tensors_used(layer.module) if id(tensor) not in inside]
        module = block if layer.path is not None else _BlockWithTensors(block, outside)
        parameters, buffers = tuple(block.parameters()), tuple(block.buffers())
        return replace(self._renamed(layer, index), module=module, parameters=parameters, buffers=buffers)


class _BlockWithTensors(nn.Module):
    """A block and the tensors of the model that its layer uses besides."""

    def __init__(self, block: nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.block = block
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"parameter_{number}", tensor)
            else:
                self.register_buffer(f"buffer_{number}", tensor)


@contextmanager
def shorten(model: nn.Module, example: ModelInput, granularity: str) -> Iterator[BlockRow | None]:
    """While entered, `model`, on the meta device, has few blocks; yields what it lacks, or None where it
    lacks nothing."""
    row = _find_row(model, example.to("meta"), Granularity.parse(granularity))
    if row is None:
        yield None
        return
    _set_entries(model, row.path, [row.blocks[index] for index in row.left])
    try:
        yield row
    finally:
        _set_entries(model, row.path, row.blocks)


def _find_row(model: nn.Module, example: ModelInput, granularity: Granularity) -> BlockRow | None:
    for path in _long_lists(model, granularity):
        blocks = tuple(model.get_submodule(path).children())
        record = _run(model, blocks, example)
        row = None if record is None else _longest_row(path, blocks, record, _taken_whole(model, granularity))
        if row is None or _has_tensors_of_others(model, row):
            continue
        _set_entries(model, path, [blocks[index] for index in row.left])
        try:
            short = _run(model, [blocks[index] for index in row.left], example)
        finally:
            _set_entries(model, path, blocks)
        if short is not None and short == _without(record or [], row):
            return row
    return None


def _long_lists(model: nn.Module, granularity: Granularity) -> Iterator[str]:
    """Of blocks each of which is a layer."""
    if granularity.kind != "module":
        return
    for path, module in model.named_modules():
        if type(module) is nn.ModuleList and len(module) >= MANY + _WORTH_IT:
            entries = [f"{path}.{index}" for index in range(len(module))]
            if len(set(map(id, module))) == len(module) and all(
                granularity.outermost(e) == e for e in entries
            ):
                yield path


def _has_tensors_of_others(model: nn.Module, row: BlockRow) -> bool:
    """Whether what is dropped uses a parameter or buffer that something else uses, too."""
    dropped = [row.blocks[index] for index in row.dropped]
    own = {id(tensor) for block in dropped for tensor in tensors_used(block)}
    users = Counter(
        id(tensor)
        for _, module in model.named_modules(remove_duplicate=False)
        for _, tensor in registered(module)
    )
    return any(users[tensor] != 1 for tensor in own)


def _set_entries(model: nn.Module, path: str, entries: Sequence[nn.Module]) -> None:
    blocks = model.get_submodule(path)
    if isinstance(blocks, nn.ModuleList):
        del blocks[:]
        blocks.extend(entries)


def _run(model: nn.Module, blocks: Sequence[nn.Module], example: ModelInput) -> list[Description] | None:
    """What runs before the first block, in it, between it and the second, and so on to what runs behind the
    last; None where the blocks do not run once each in their order, or the model fails. Raises what its own
    hooks do."""
    record, order = OperationRecord(), list[int]()
    returned: dict[int, Tensor] = {}
    tables: dict[int, tuple[int, Tensor]] = {}

    def origin(leaf: object) -> object:
        """Where a tensor comes from: None for what the block before returns or what is made behind it; of
        others the same for the same memory, and nothing is equal to one that may skip layers."""
        if not isinstance(leaf, Tensor) or storage_key(leaf) in returned:
            return None
        if record.has_allocated(leaf) and (returned or leaf.requires_grad):
            return None  # before the first block tables are made, which others are handed, too
        if leaf.requires_grad:
            return object()
        return tables.setdefault(storage_key(leaf), (len(tables), leaf))[0]

    def begin(index: int, _module: nn.Module, args: object, kwargs: object) -> None:
        record.end(())
        order.append(index)
        inputs = args, kwargs
        record.begin(blocks[index], inputs, list(map(origin, tree_leaves(inputs))))

    def end(_module: nn.Module, _args: object, output: object) -> None:
        returned.clear()
        returned.update({storage_key(own): own for own in tree_leaves(output) if isinstance(own, Tensor)})
        record.end(output)
        record.begin(None, ())

    failures = list[Exception]()

    def telling(hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, whose failure is not taken for one of the model: but for NotImplementedError, which torch
        raises for tensors without a storage."""

        def call(*args: object) -> None:
            try:
                hook(*args)
            except NotImplementedError:
                raise
            except Exception as error:
                failures.append(error)
                raise

        return call

    hooks = []
    for index, block in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(telling(partial(begin, index)), with_kwargs=True))
        hooks.append(block.register_forward_hook(telling(end)))
    try:
        masks = masks_as_in_training(one_text_a_row="position_ids" not in example.kwargs)
        with trial_run(example, gradients=True), masks, record:
            telling(record.begin)(None, ())
            telling(record.end)(example.clone().call(model))
    except Exception as error:
        if is_out_of_memory(error) or error in failures:
            raise
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return record.descriptions if order == list(range(len(blocks))) else None


def _taken_whole(model: nn.Module, granularity: Granularity) -> Counter[type]:
    """The modules that are layers, by class, of the classes of which there are too many to be looked into."""
    paths = (path for path, _ in model.named_modules() if path and granularity.outermost(path) == path)
    counts = Counter(type(model.get_submodule(path)) for path in paths)
    return Counter({kind: count for kind, count in counts.items() if count >= MANY})


def _longest_row(
    path: str, blocks: tuple[nn.Module, ...], record: Sequence[Description], whole: Counter[type]
) -> BlockRow | None:
    """Of blocks that repeat, with what runs behind each, that of which most can be dropped; None where those
    are too few. A period and one more at each end are counted by themselves (structure.py), and one period
    besides tells there, too, that they are equal. Of the classes in `whole` enough stay to be taken whole."""
    units = [tuple(record[place : place + 2]) for place in range(1, len(record) - 1, 2)]
    rows = [
        BlockRow(path, blocks, _enough_left(row.repeated(row.period), row.period, blocks, whole), row.period)
        for row in find_rows(units)
    ]
    longest = max(rows, key=lambda row: len(row.dropped), default=None)
    return longest if longest is not None and len(longest.dropped) >= _WORTH_IT else None


def _enough_left(dropped: range, period: int, blocks: Sequence[nn.Module], whole: Counter[type]) -> range:
    """The most of the periods `dropped` with which of each class that is taken whole still `MANY` stay."""
    turn = Counter(type(blocks[index]) for index in dropped[:period])
    most = (max(0, whole[kind] - MANY) // count for kind, count in turn.items() if kind in whole)
    return dropped[: min(most, default=len(dropped)) * period]


def _without(record: Sequence[Description], row: BlockRow) -> list[Description]:
    """What the shortened model has to run."""
    gone = range(1 + 2 * row.dropped.start, 1 + 2 * row.dropped.stop)
    return [description for place, description in enumerate(record) if place not in gone]
