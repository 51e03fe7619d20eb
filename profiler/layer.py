"""Layers of a model and their chain: what they are, what they share, and what is known of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..cost_models.errors import ModelError
from .torch_private import storage_key
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
