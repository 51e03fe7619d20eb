"""Layers of a model and their chain, and the nn.Sequential of them, which registers each parameter once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from ..cost_models.errors import ModelError
from .graph import graph_module
from .torch_private import child_modules, copy_registries, is_persistent, list_forward_pre_hooks, storage_key
from .user_model import flat

# Parameters and modules that several layers share: found in a model, and referred to by later layers.
#
# torchgpipe and FairScale refuse a parameter that two elements of an nn.Sequential register, and whatever
# converts or saves modules would do so twice. References are kept in tuples, where nn.Module does not look
# for modules and parameters; copy.deepcopy and pickle keep them references.

OWN_COPY = "own_copy"
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
        if module is None or name.startswith("__") or name == OWN_COPY:
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


class TensorUsers(NamedTuple):
    """A parameter or buffer, its name, and the positions of the modules that use it, ascending."""

    name: str
    tensor: Tensor
    layers: list[int]
    overlaps: bool
    """Whether another parameter or buffer lies in the same memory."""

    is_written: bool
    """Whether a run of the model changed it."""

    @property
    def is_tied(self) -> bool:
        """Whether each of several users may have a copy of its own, which trains like the others."""
        return len(self.layers) > 1 and isinstance(self.tensor, nn.Parameter) and not self.overlaps

    @property
    def is_read_only(self) -> bool:
        """Whether it is a buffer of which each of several users may have a copy of its own, which stays the
        same."""
        is_shared = len(self.layers) > 1 and not isinstance(self.tensor, nn.Parameter)
        return is_shared and not (self.overlaps or self.is_written or self.tensor.requires_grad)


def find_tensor_users(
    model: nn.Module,
    modules: Sequence[nn.Module],
    aliases: Sequence[Sequence[str]],
    written: Container[int] = (),
) -> list[TensorUsers]:
    """Of each parameter and buffer that modules use. Tensors that lie in the same memory are one, by the name
    of the first."""
    paths: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        paths.setdefault(id(tensor), name)
    first_of = {name: group[0] for group in aliases for name in group}
    users: dict[str | int, TensorUsers] = {}
    for index, module in enumerate(modules):
        for key, tensor in {id(tensor): tensor for tensor in tensors_used(module)}.items():
            path = paths.get(key)
            one = key if path is None else first_of.get(path, path)
            name = one if isinstance(one, str) else "a tensor"
            new = TensorUsers(name, tensor, [], path in first_of, key in written)
            positions = users.setdefault(one, new).layers
            positions.extend([index] if index not in positions else [])
    return list(users.values())


def list_unused(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Names of the model's parameters and buffers that none of the modules uses."""
    used = {id(tensor) for module in modules for tensor in tensors_used(module)}
    state = model.state_dict(keep_vars=True)
    own = (*model.named_parameters(), *model.named_buffers())
    return tuple(name for name, tensor in own if name in state and id(tensor) not in used)


# Shapes of what a layer hands on, at several batch sizes: whether only the batch changes them.
#
# A layer that drops the batch dimension of one sample (`x.squeeze()`), or whose other sizes depend on the
# number of samples, computes something else of a micro-batch than of the batch.

Shapes = tuple[tuple[int, ...], ...]
"""Shape of each tensor."""
KEEP_BATCH = (
    "Keep dimension 0 for the samples, as in squeeze(1) instead of squeeze(), and let no other size depend "
    "on their number: micro-batches have fewer samples."
)


class ShapeDependsOnBatch(ModelError):
    """A layer hands on another shape, apart from the batch, at one batch size than at others."""


@dataclass(frozen=True)
class BatchFaults:
    """Reasons why micro-batches compute something else than the batch. Empty for no fault."""

    single: str = ""
    """Reason against micro-batches of one sample."""
    any_size: str = ""
    """Reason against any micro-batches, such as samples that are compared with each other."""

    def of(self, samples: int) -> str:
        """Return the fault of micro-batches of this many samples."""
        return self.any_size or (self.single if samples == 1 else "")

    @property
    def note(self) -> str:
        """A warning for whoever makes micro-batches of these layers."""
        if self.any_size:
            return f"micro-batches compute something else than the batch: {self.any_size}"
        return f"give each micro-batch 2 samples or more: {self.single}" if self.single else ""


@dataclass(frozen=True)
class OutputShapes:
    """Shapes of the tensors that a layer hands on, at two or more batch sizes (ascending)."""

    layer: str
    by_size: tuple[tuple[int, Shapes], ...]

    def check(self, size: int, output: Any) -> None:
        """Raise ShapeDependsOnBatch unless `output`, of `size` samples, fits the shapes at other sizes."""
        leaves, _ = flat(output)
        what = self.difference(size, tuple(tuple(one.shape) for one in leaves if isinstance(one, Tensor)))
        if what:
            raise ShapeDependsOnBatch(what, KEEP_BATCH)

    def difference(self, size: int, shapes: Shapes) -> str:
        """Text on the first tensor of which more than one dimension changes with the batch; "" for none.

        Outputs of another number of tensors are not compared.
        """
        others = [own for other, own in self.by_size if other != size and len(own) == len(shapes)]
        largest = next((other for other, own in reversed(self.by_size) if own in others), 0)
        for number, shape in enumerate(shapes):
            every = [shape, *(own[number] for own in others)]
            if _has_one_batch_dimension(every):
                continue
            several = f"tensor {number} of " if len(shapes) > 1 else ""
            return (
                f"layer {self.layer} hands on {several}shape {shape} for {_samples(size)}, and {every[-1]} "
                f"for {_samples(largest)}: more than its batch dimension changes"
            )
        return ""


def _has_one_batch_dimension(shapes: Iterable[tuple[int, ...]]) -> bool:
    first, *others = shapes
    if any(len(shape) != len(first) for shape in others):
        return False
    return sum(len(set(sizes)) > 1 for sizes in zip(first, *others, strict=True)) <= 1


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count > 1)}"


@dataclass(frozen=True)
class OutputForm:
    """A tensor of the model's output. `shape` is that of one sample, or the whole where it holds none."""

    name: str
    """Its place in the output, as in Python: `['loss']`; empty where it is the output."""
    shape: tuple[int, ...]
    dtype: str
    has_samples: bool


# The layers of a model, in order, and what was found when it was taken apart.


@dataclass(frozen=True)
class Comparison:
    """What was found; a difference is an error instead."""

    batches: tuple[int, ...] = ()
    """Of the passes, in order: of the model, and each time of the layers."""
    why_not: str = ""
    rounding: float = 0.0
    """The largest difference, in parts of the largest value of its kind; 0: equal bit for bit."""
    not_finite: str = ""
    attributes: tuple[str, ...] = ()
    """Of modules, that forward changes at each call and the layers do not."""
    mixing: str = ""
    """A note where samples along dimension 0 change each other's outputs."""
    written: tuple[str, ...] = field(default=(), compare=False)
    """Buffers of the model that the passes changed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a profile is to say of it; nothing where all is equal."""
        lines = []
        if self.why_not:
            lines.append(f"layers and model were not compared by value: {self.why_not}")
        if self.rounding:
            lines.append(
                f"outputs and gradients of the layers are those of the model within rounding: they differ by "
                f"{self.rounding:.1g} of the largest"
            )
        if self.not_finite:
            lines.append(f"the model's own output holds {self.not_finite}, on the example input")
        if self.attributes:
            lines.append(
                f"forward changes {', '.join(self.attributes)} at each call, in Python, which the layers do "
                "not: where what it computes comes to depend on that, name the module a layer (`granularity`)"
            )
        return (*lines, *filter(None, [self.mixing]))


@dataclass(frozen=True, eq=False)
class ModeVariants:
    """Code that each layer runs in another mode than that of the trace."""

    modules: Mapping[bool, tuple[nn.Module | None, ...]]
    """By mode, for each layer; None: what it runs in the mode of the trace."""
    refusals: Mapping[bool, str]
    """By mode, why the layers cannot be switched to it."""
    places: tuple[bool, ...]
    """For each layer whether it holds code that reads the mode."""

    @property
    def all_modules(self) -> list[nn.Module]:
        """Layers of every mode."""
        return [module for each in self.modules.values() for module in each if module is not None]


@dataclass(frozen=True, eq=False)
class Layer:
    """The smallest thing that may sit alone on a stage.

    Takes one tensor or one tuple of tensors, and returns the same for the next; the last returns what the
    model does.
    """

    name: str
    kind: str
    module: nn.Module
    """Runs the layer with the model's own modules and parameters."""
    path: str | None
    """Where the model keeps `module`; None where it was put together from several or from functions."""
    parameters: tuple[nn.Parameter, ...]
    """Those that no earlier layer uses."""
    buffers: tuple[Tensor, ...]
    cut_reason: str | None
    """Why no stage may end with this layer."""
    crossing: int = 1
    """Tensors that it hands to the next layer, each once."""
    shapes: OutputShapes | None = None
    """Shapes of these, or of the model's output, at several batch sizes; None: not known."""

    def check_shapes(self, size: int, output: object) -> None:
        """Raise ShapeDependsOnBatch where the output of `size` samples has another shape than others."""
        if self.shapes is not None:
            self.shapes.check(size, output)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters if parameter.requires_grad)

    @property
    def largest_parameter_bytes(self) -> int:
        """Of the trainable ones."""
        return max((own.nbytes for own in self.parameters if own.requires_grad), default=0)

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, eq=False)
class LayerChain:
    """The layers in the order they run; each feeds the next."""

    model_name: str
    layers: tuple[Layer, ...]
    overwrites_input: bool
    """Whether a layer changes the model's input in place."""
    granularity: str = "block"
    edges: tuple[tuple[int, int], ...] = ()
    """Which layer makes a tensor, and which uses it: those of neighbours, and those that skip layers."""
    keep_together: tuple[str, ...] = ()
    """The user's pins: patterns of layer names."""
    aliases: tuple[tuple[str, ...], ...] = ()
    """Names of different parameters and buffers that lie in the same memory."""
    drops_checkpoints: bool = False
    """Whether the model recomputes parts of itself (torch.utils.checkpoint), which its layers do not."""
    tool: str = "torch.fx"
    """What drew the graph that was cut."""
    comparison: Comparison | None = None
    """The comparison with the model by value; None: not asked for."""
    unused: tuple[str, ...] = ()
    """Parameters and buffers of the model that no layer uses, by name."""
    users: tuple[TensorUsers, ...] = ()
    """The users of each parameter and buffer."""
    own_modes: tuple[str, ...] = ()
    """Modules with a `train` of their own, the model itself by its class."""
    faults: BatchFaults = BatchFaults()
    variants: ModeVariants | None = None
    """Code of the layers in other modes. None if it is the same, or was not asked for."""
    outputs: tuple[OutputForm, ...] = ()
    """The tensors that the model returns."""

    def __len__(self) -> int:
        return len(self.layers)


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
        for user, name, owner, owners_field in self._fields:
            user.__dict__[name] = getattr(owner, owners_field)


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
    for user, name, owner, owners_field in hook.fields:
        key = id(getattr(owner, owners_field))
        if key in owners:
            hook.follow(user, name, *owners[key])
        else:
            hook.register(user, name)
            owners[key] = (user, name)


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
        """Return whether an earlier layer holds `module`, and the module has tensors to register."""
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
        """Return a module with the same tensors, and references to parameters that earlier layers hold."""
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
        """Return the graph with modules that return what earlier layers hold.

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
