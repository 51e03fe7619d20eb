"""Parameters and modules that several layers share: found in a model, and referred to by later layers.

torchgpipe and FairScale refuse a parameter that two elements of an nn.Sequential register, and whatever
converts or saves modules would do so twice. References are kept in tuples, where nn.Module does not look for
modules and parameters; copy.deepcopy and pickle keep them references.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..torch_internals import is_persistent, list_forward_pre_hooks, storage_key

_COPY = "own_copy"
"""What a stand-in registers where no earlier layer does."""


class ReusedModule(nn.Module):
    """Runs a module that an earlier layer holds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._held_earlier = (module,)

    @property
    def module(self) -> nn.Module:
        return self._held_earlier[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The module's own attributes, for code that reads its weight, say, without running it."""
        module = self.__dict__.get("_held_earlier")
        if module is None or name.startswith("__") or name == _COPY:
            return super().__getattr__(name)
        return getattr(module[0], name)

    def extra_repr(self) -> str:
        return f"{type(self.module).__name__} of an earlier layer"


class BorrowedTensor(nn.Module):
    """Returns a parameter or buffer that a module of an earlier layer holds."""

    def __init__(self, owner: nn.Module, field: str) -> None:
        super().__init__()
        self._held_earlier = (owner, field)

    def forward(self) -> Tensor:
        owner, field = self._held_earlier
        value: Tensor = getattr(owner, field)
        return value

    def extra_repr(self) -> str:
        return f"{self._held_earlier[1]} of an earlier layer"


class BorrowedFields:
    """The forward pre-hook of a module that uses parameters of an earlier layer as plain attributes.

    They follow a conversion in place by themselves; the hook is for what puts another tensor into the owner's
    place (`load_state_dict(assign=True)`, `to_empty`, `to("meta")`).
    """

    def __init__(self) -> None:
        self._fields: list[tuple[nn.Module, str, nn.Module, str]] = []

    def __len__(self) -> int:
        return len(self._fields)

    @property
    def fields(self) -> tuple[tuple[nn.Module, str, nn.Module, str], ...]:
        """By parameter: who uses it under which name, and whose it is under which."""
        return tuple(self._fields)

    def register(self, user: nn.Module, field: str) -> None:
        """`user` registers the parameter from now on."""
        self._fields = [own for own in self._fields if own[:2] != (user, field)]
        user.register_parameter(field, user.__dict__.pop(field))

    def follow(self, user: nn.Module, field: str, owner: nn.Module, owners_field: str) -> None:
        """`user.field` is to be that of another owner from now on."""
        self._fields = [own for own in self._fields if own[:2] != (user, field)]
        self._fields.append((user, field, owner, owners_field))

    def add(self, user: nn.Module, field: str, owner: nn.Module, owners_field: str) -> None:
        """`user.field` is to be `owner.owners_field` from now on, and no parameter of `user`."""
        delattr(user, field)
        self._fields.append((user, field, owner, owners_field))
        user.__dict__[field] = getattr(owner, owners_field)

    def __call__(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002
        for user, field, owner, owners_field in self._fields:
            user.__dict__[field] = getattr(owner, owners_field)


class CloneInput(nn.Module):
    """Runs a layer that overwrites its input, a tensor or a tuple of them, on a clone of it.

    Micro-batches are views of one global batch, and a checkpointed stage's input is a leaf that needs a
    gradient: PyTorch lets neither be overwritten.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        own = inputs.clone() if isinstance(inputs, Tensor) else tuple(tensor.clone() for tensor in inputs)
        return self.layer(own)


def register_references(layers: nn.Sequential) -> None:
    """Changes layers that refer to modules, parameters and buffers of none of them so that each is registered
    where it is used first, as if no earlier layer held it. For a stage with copies of what earlier stages
    hold."""
    owners = {id(own): (part, name) for part in layers.modules() for name, own in registered(part)}
    owned = {id(part) for part in layers.modules()}
    for part in list(layers.modules()):
        _register_in(part, owners, owned)


_Owners = dict[int, tuple[nn.Module, str]]


def _register_in(part: nn.Module, owners: _Owners, owned: set[int]) -> None:
    if isinstance(part, ReusedModule) and id(part.module) not in owned:
        part.add_module(_COPY, part.module)
        for inner in list(part.module.modules()):
            owned.add(id(inner))
            for name, own in registered(inner):
                owners.setdefault(id(own), (inner, name))
            _register_in(inner, owners, owned)
    elif isinstance(part, BorrowedTensor):
        value = part()
        if id(value) not in owners:
            if isinstance(value, nn.Parameter):
                part.register_parameter(_COPY, value)
            else:
                owner, name = part._held_earlier
                part.register_buffer(_COPY, value, is_persistent(owner, name))
            owners[id(value)] = (part, _COPY)
        part._held_earlier = owners.get(id(value), part._held_earlier)
    for hook in list_forward_pre_hooks(part):
        if isinstance(hook, BorrowedFields):
            _register_fields(hook, owners)


def _register_fields(hook: BorrowedFields, owners: _Owners) -> None:
    for user, field, owner, owners_field in hook.fields:
        key = id(getattr(owner, owners_field))
        if key in owners:
            hook.follow(user, field, *owners[key])
        else:
            hook.register(user, field)
            owners[key] = (user, field)


def registered(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of its own."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def modules_used(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, all those inside it, and those that it runs again."""
    for part in module.modules():
        yield part
        if isinstance(part, ReusedModule):
            yield from modules_used(part.module)


def tensors_used(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers that `module` registers, and those it borrows."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        if isinstance(part, ReusedModule):
            yield from tensors_used(part.module)
        elif isinstance(part, BorrowedTensor):
            yield part()
        else:
            yield from (value for value in vars(part).values() if isinstance(value, nn.Parameter))


def storage_aliases(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names whose tensors overlap in memory (`c.weight.data = a.weight.data`).

    Views of one flat buffer that lie beside each other are no group, and a tensor that several modules
    register is in one under its first name only. Copies and conversions of a model part what overlaps, so the
    user's own model is to be asked.
    """
    places = [(name, _place(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    groups: list[list[str]] = []
    storage, reach = -1, 0
    for name, (key, first, end) in sorted(
        ((name, place) for name, place in places if place is not None), key=lambda pair: pair[1]
    ):
        if key != storage or first >= reach:
            groups.append([])
            storage, reach = key, 0
        groups[-1].append(name)
        reach = max(reach, end)
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _place(tensor: Tensor) -> tuple[int, int, int] | None:
    """Its storage, and the bytes of that from the first to behind the last that it uses; None: unknown."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        # Sparse tensors and some wrappers have none.
        return None
    if not tensor.numel() or not storage.nbytes():
        return None
    size = tensor.element_size()
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((int(length) - 1) * int(stride) for length, stride in spans)
    first = int(tensor.storage_offset()) * size
    return storage_key(storage), first, first + (last + 1) * size
