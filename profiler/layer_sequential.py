"""The nn.Sequential that `pplan.sequential` makes: its elements share parameters, each registered once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from ..cost_models.errors import ModelError
from .graph import graph_module
from .layer import OWN_COPY, BatchFaults, BorrowedTensor, ReusedModule, registered
from .torch_private import child_modules, copy_registries, is_persistent, list_forward_pre_hooks


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
        part.add_module(OWN_COPY, part.module)
        for inner in list(part.module.modules()):
            owned.add(id(inner))
            for name, own in registered(inner):
                owners.setdefault(id(own), (inner, name))
            _register_in(inner, owners, owned)
    elif isinstance(part, BorrowedTensor):
        value = part()
        if id(value) not in owners:
            if isinstance(value, nn.Parameter):
                part.register_parameter(OWN_COPY, value)
            else:
                owner, name = part._held_earlier
                part.register_buffer(OWN_COPY, value, is_persistent(owner, name))
            owners[id(value)] = (part, OWN_COPY)
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


# A layer that was traced in both modes, as its code differs between them (`if self.training:`).

TRACE_AGAIN = (
    "Make the layers anew from the model in that mode (pplan.sequential), or name the module around that "
    "line a layer: granularity='module:PATTERN'."
)


class ModeLayer(nn.Module):
    """Runs `layer`, or what was traced in the mode that it is switched to.

    `training`: the mode of the trace. `in_training`, `in_evaluation`: what runs in these modes; None:
    `layer`. They borrow what `layer` registers. `refusals`: by mode, why it cannot be switched to.
    """

    def __init__(
        self,
        layer: nn.Module,
        in_training: nn.Module | None = None,
        in_evaluation: nn.Module | None = None,
        refusals: Mapping[bool, str] | None = None,
        *,
        training: bool = True,
    ) -> None:
        super().__init__()
        self.layer, self.in_training, self.in_evaluation = layer, in_training, in_evaluation
        self.refusals = dict(refusals or {})
        self.training = training
        self.is_switched = (in_training if training else in_evaluation) is None
        """Return whether all its code is in one mode. Parts of a model may have had another."""

    def refuse(self, mode: bool) -> None:
        """Raise ModelError where the code of that mode could not be traced."""
        if mode in self.refusals:
            raise ModelError(self.refusals[mode], TRACE_AGAIN)

    def train(self, mode: bool = True) -> Self:
        """Switch to the code of that mode.

        Raises:
            ModelError: The code of that mode could not be traced.
        """
        self.refuse(mode)
        self.is_switched = True
        return super().train(mode)

    def forward(self, inputs: Any) -> Any:
        other = self.in_training if self.training else self.in_evaluation
        return self.layer(inputs) if other is None or not self.is_switched else other(inputs)


# The nn.Sequential that `pplan.sequential` makes: its elements share parameters, each registered once.

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class LayerSequential(nn.Sequential):
    """One element a layer, which remembers of which model and by which names a profile calls them.

    Parts of it (`layers[:3]`) are of the same class and have no names.
    """

    model_name: str = ""
    layer_names: tuple[str, ...] = ()
    """Void where their number is not that of the elements: some were added or removed."""
    granularity: str = "block"
    """How finely the model was cut; its elements are taken for its layers whatever is asked for."""
    keep_together: tuple[str, ...] = ()
    """The user's pins: patterns of layer names."""
    faults: BatchFaults = BatchFaults()
    unused_names: tuple[str, ...] = ()
    """What the state dict of the model has and this one lacks: parameters and buffers that forward does not
    use."""
    read_only_buffers: tuple[str, ...] = ()
    """Names of buffers that several layers use and none writes: stages may have copies of these."""
    written_buffers: tuple[str, ...] | None = None
    """Names of buffers that forward changes, as statistics of batch norms; None: not known."""
    own_modes: tuple[str, ...] = ()
    """Modules of the model whose class has a `train` of its own, which the layers do not call."""

    def train(self, mode: bool = True) -> Self:
        """Switch all layers to that mode.

        Raises:
            ModelError: The code of that mode could not be traced; no layer is switched then.
        """
        for part in self.modules():
            if isinstance(part, ModeLayer):
                part.refuse(mode)
        if self.own_modes:
            warnings.warn(
                f"{', '.join(self.own_modes)} of {self.model_name} override train(), which the layers do not "
                "call: afterwards call train() or eval() of the model, too, whose modules the layers run",
                UserWarning,
                stacklevel=2,
            )
        return super().train(mode)


def model_name(module: nn.Module) -> str:
    """Its class, or the model it was made of."""
    own = module.model_name if isinstance(module, LayerSequential) else ""
    return own or type(module).__name__


def register_once(
    modules: Sequence[nn.Module],
    *,
    on_clone: bool,
    with_modes: Callable[[list[nn.Module], Sharing], list[nn.Module]] = lambda children, _: children,
) -> list[nn.Module]:
    """The elements of an nn.Sequential of these layers; `on_clone`: the first overwrites its input.

    `with_modes`: adds what they run in other modes.
    """
    sharing = Sharing()
    children = with_modes([sharing.own(module) for module in modules], sharing)
    return [CloneInput(children[0]), *children[1:]] if on_clone else children


class Sharing:
    """Goes through the layers of a chain in order; see `own`."""

    def __init__(self) -> None:
        self._layers: set[int] = set()
        """Identities of those given; torchgpipe and FairScale refuse the same one twice."""
        self._earlier: dict[int, nn.Module] = {}
        """By the identity of a module of the model: what stands for it in an earlier layer."""
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        """By the identity of a tensor: the module of an earlier layer that registers it, and as what."""
        self._replacements: dict[int, nn.Module] = {}
        """As `_earlier`, of the layer in hand."""

    def own(self, layer: nn.Module) -> nn.Module:
        """`layer` itself where it holds nothing that an earlier layer does, else what runs the same.

        The model's own modules are not changed. All layers must stay alive until the last call.
        """
        if id(layer) in self._layers or self._is_held(layer):
            return ReusedModule(self._earlier[id(layer)])
        self._layers.add(id(layer))
        self._replacements = {}
        result = self._without_earlier(layer)
        self._earlier |= self._replacements
        for part in result.modules():
            for name, tensor in registered(part):
                self._owners.setdefault(id(tensor), (part, name))
        return result

    def _without_earlier(self, module: nn.Module, borrows: BorrowedFields | None = None) -> nn.Module:
        """`borrows`: of the module around, where `module` belongs to one that is copied too."""
        if id(module) in self._replacements:
            return self._replacements[id(module)]
        if not self._shares(module):
            self._replacements.update((id(part), part) for part in module.modules())
            return module
        if isinstance(module, fx.GraphModule):
            copied: nn.Module = self._graph_copy(module)
        else:
            copied = self._shallow_copy(module, borrows)
        self._replacements[id(module)] = copied
        return copied

    def _shares(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._owners for parameter in module.parameters()) or any(
            self._is_held(part) or (isinstance(part, fx.GraphModule) and self._reads_owned(part))
            for part in module.modules()
        )

    def _is_held(self, module: nn.Module) -> bool:
        """Whether an earlier layer has `module`, and it matters where its tensors are registered."""
        has_tensors = any(True for _ in (*module.parameters(), *module.buffers()))
        return has_tensors and id(module) in self._earlier

    def _reads_owned(self, module: fx.GraphModule) -> bool:
        return any(id(_attribute(module, node)) in self._owners for node in module.graph.nodes)

    def _part(self, module: nn.Module, borrows: BorrowedFields | None) -> nn.Module:
        """What stands for a part of a layer. A container may be indexed: its elements are stood in for."""
        if self._is_held(module) and not isinstance(module, _CONTAINERS):
            return ReusedModule(self._earlier[id(module)])
        return self._without_earlier(module, borrows)

    def _shallow_copy(self, module: nn.Module, outer: BorrowedFields | None) -> nn.Module:
        """The same tensors; of the parameters that earlier layers hold only references."""
        twin = _second_object(module)
        copy_registries(twin)
        borrows = BorrowedFields() if outer is None else outer
        for name, child in child_modules(module).items():
            child_modules(twin)[name] = None if child is None else self._part(child, borrows)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in self._owners:
                borrows.add(twin, name, *self._owners[id(parameter)])
        if outer is None and len(borrows):
            # Only here: what is inside may be read without being called, as nn.MultiheadAttention does.
            twin.register_forward_pre_hook(borrows)
        return twin

    def _graph_copy(self, module: fx.GraphModule) -> fx.GraphModule:
        """The same graph, in which modules return what earlier layers hold.

        References as attributes would not do: GraphModule registers them anew whenever it is copied.
        """
        graph = copy.deepcopy(module.graph)
        root = nn.Module()
        root.training = module.training
        for node in graph.nodes:
            place = f"{node.target}_held".replace(".", "_")
            if node.op == "call_module":
                part = module.get_submodule(node.target)
                other = self._part(part, None)
                if other is not part:
                    node.target = place
                    setattr(root, place, other)
            elif id(_attribute(module, node)) in self._owners:
                setattr(root, place, BorrowedTensor(*self._owners[id(_attribute(module, node))]))
                with graph.inserting_before(node):
                    node.replace_all_uses_with(graph.call_module(place))
                graph.erase_node(node)
        copied = graph_module(graph, root, module, name=type(module).__name__)
        return _with_hooks_of(module, copied)


def _second_object(module: nn.Module) -> nn.Module:
    """With the same attributes. torch refuses copy.copy of parametrized modules, whose class it makes."""
    if not parametrize.is_parametrized(module):
        return copy.copy(module)
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update(vars(module))
    return twin


def _attribute(module: fx.GraphModule, node: fx.Node) -> object:
    """What the node reads of the module; None for a node of another kind."""
    if node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _with_hooks_of(source: fx.GraphModule, target: fx.GraphModule) -> fx.GraphModule:
    target.meta = source.meta
    for name, value in vars(source).items():
        if "hooks" in name:
            target.__dict__[name] = copy.copy(value)
    return target
