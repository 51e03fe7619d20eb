"""A model that was built, the input it is called with, and copies of the model on other devices."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...cost_models.errors import ModelError
from ..torch_internals import copy_as, tree_flatten, tree_map_only
from .failures import at_user_line, first_line, is_out_of_memory


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The arguments of one call of a model. Dimension 0 of its tensors is the batch.

    A tensor whose dimension 0 is not that of the first tensor (a table of positions, say) belongs to all
    samples, and is handed over as it is. One that all samples share and that happens to be as long as the
    batch cannot be told from samples, and is cut and repeated with them: give an example whose batch is a
    number that no other dimension 0 has.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: object, name: str = "the model") -> Self:
        """From a tensor, from a tuple or list of forward's arguments, or from a dict of keyword arguments.

        Raises ModelError where there is no tensor that holds a sample.
        """
        if isinstance(example, cls):
            return example
        if isinstance(example, Mapping):
            inputs = cls((), {str(key): value for key, value in example.items()})
        elif isinstance(example, tuple | list):
            inputs = cls(tuple(example), {})
        else:
            inputs = cls((example,), {})
        if not inputs.tensors:
            raise ModelError(
                f"{name}: the example input is {describe_type(example)}, and holds no tensor",
                "Give a tensor, a tuple of forward's arguments, or a dict of its keyword arguments; "
                "dimension 0 of the tensors is the batch.",
            )
        first = inputs.tensors[0]
        if first.dim() == 0 or len(first) == 0:
            raise ModelError(
                f"{name}: the example input has shape {tuple(first.shape)}, which holds no sample",
                "Dimension 0 is the batch and must be at least 1.",
            )
        return inputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the arguments."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    @property
    def batch(self) -> int:
        """Samples: dimension 0 of the first tensor."""
        return len(self.tensors[0])

    @property
    def layer_input(self) -> Tensor | tuple[Tensor, ...]:
        """What the first layer of the model's chain takes: the tensor, or the tuple of all."""
        tensors = self.tensors
        return tensors[0] if len(tensors) == 1 else tensors

    @property
    def bytes_per_sample(self) -> int:
        """Of the tensors that hold samples."""
        batched = [tensor for tensor in self.tensors if self._is_batched(tensor)]
        return sum(tensor.nbytes for tensor in batched) // self.batch

    @property
    def is_token_ids(self) -> bool:
        """Whether the first tensor holds whole numbers: indices, of words in a text for instance."""
        dtype = self.tensors[0].dtype
        return not (dtype.is_floating_point or dtype.is_complex)

    def repeated(self, samples: int) -> ModelInput:
        """An input of `samples` samples, which repeats those there are."""
        index = torch.arange(samples) % self.batch

        def pick(tensor: Tensor) -> Tensor:
            return tensor.detach()[index.to(tensor.device)] if self._is_batched(tensor) else tensor.detach()

        return self.mapped(pick)

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> ModelInput:
        """Moved; floating tensors converted to `dtype`.

        `memory_format`: of those of four dimensions; torch.channels_last means those of five (clips) too.
        """

        def moved(tensor: Tensor) -> Tensor:
            kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
            layout = choose_layout(tensor, memory_format)
            return tensor.to(device=device or tensor.device, dtype=kind, memory_format=layout)

        return self.mapped(moved)

    def clone(self) -> ModelInput:
        """The same values in memory of their own: a model may work on its input in place."""
        return self.mapped(lambda tensor: tensor.detach().clone())

    def call(self, model: nn.Module) -> Any:
        """What `model` makes of it."""
        return model(*self.args, **self.kwargs)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelInput:
        """`change` of every tensor, everything else as it is."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        return ModelInput(args, kwargs)

    def _is_batched(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == self.batch


def choose_layout(tensor: Tensor, layout: torch.memory_format) -> torch.memory_format:
    """What `layout` is for a tensor of so many dimensions; torch.preserve_format where it says nothing."""
    if tensor.dim() == 4:
        return layout
    if tensor.dim() == 5 and layout is torch.channels_last:
        return torch.channels_last_3d
    return torch.preserve_format


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A module, and what it is called with."""

    module: nn.Module
    name: str
    example: ModelInput
    """At least one sample; inputs of other sizes repeat them."""
    classes: int | None = None
    loss: str = "none"
    """The usual one for such a model, as `losses.load_loss` knows it."""
    granularity: str = "block"
    """The usual one for such a model."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """What its factory or configuration was given."""
    input_like: str | None = None
    """The user's function that made the example, by name."""
    notes: tuple[str, ...] = ()
    loading_seconds: float = 0.0
    """What building it took."""

    @property
    def settings_in_json(self) -> dict[str, Any]:
        """Those whose values JSON can say."""
        return {name: value for name, value in self.settings.items() if _is_json(value)}

    def example_input_for(self, batch: int) -> ModelInput:
        """An input of `batch` samples, in memory of its own, the same at every call."""
        return self.example.repeated(batch)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample of the first tensor."""
        return tuple(self.example.tensors[0].shape[1:])


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of torch, which imports them only where they are used."""


def describe_type(value: object) -> str:
    """What somebody returned instead of what was expected."""
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def refuse_unusable(name: str, module: nn.Module) -> None:
    """Raises ModelError where a parameter or buffer has no shape yet, no memory of its own, or lies in
    several processes, and for wrappers whose forward or backward is of several processes."""
    for path, part in module.named_modules():
        if type(part).__name__ in _PARALLEL:
            raise ModelError(
                f"{name}: {path or 'it'} is a {type(part).__name__}, which runs in several processes",
                "Give the module inside, `.module`: replicas of stages are made by pplan's `build`.",
            )
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor).__name__ == "DTensor":
            raise ModelError(
                f"{name}: {path} is a DTensor, of which each process has a part",
                "Give the module as it was before fully_shard or parallelize_module.",
            )
        if is_lazy(tensor):
            raise ModelError(
                f"{name}: {path} is lazy and has no shape yet", "Run it once first, on an input of its own."
            )
        if tensor.layout is not torch.strided:
            raise ModelError(
                f"{name}: {path} is a sparse tensor ({tensor.layout}), whose bytes pplan cannot count",
                "Keep its indices and values in buffers, and make the sparse tensor in forward.",
            )


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """That of all floating parameters (of buffers, where there are none); None: several, or none at all."""
    for tensors in (module.parameters(), module.buffers()):
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        if dtypes:
            return dtypes.pop() if len(dtypes) == 1 else None
    return None


def copy_model(model: nn.Module, name: str) -> nn.Module:
    """A copy, where the model is. Raises ModelError; where memory runs out, what the allocator raises."""
    return _copy(model, name, {})


def copy_modules(model: nn.Module, name: str) -> nn.Module:
    """Copy the modules, with the parameters and buffers of the model itself. Raises as `copy_model` does."""
    return _copy(model, name, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def copy_to_host(model: nn.Module, name: str) -> nn.Module:
    """A copy on the CPU; nothing is allocated where the model is. Raises as `copy_model` does."""
    tensors = (*model.parameters(), *model.buffers())
    return _copy(model, name, {id(tensor): _on_the_host(tensor) for tensor in tensors}, "cpu")


def copy_to_meta(model: nn.Module, name: str) -> nn.Module:
    """A copy on the meta device: parameters and buffers without values. Raises as `copy_model` does.

    Nothing is allocated where the model is: copying first and moving then would hold the weights twice.
    """
    tensors = (*model.parameters(), *model.buffers())
    return _copy(model, name, {id(tensor): _without_values(tensor) for tensor in tensors}, "meta")


def _copy(model: nn.Module, name: str, memo: dict[int, object], device: str | None = None) -> nn.Module:
    """Also moved to `device`."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} was made by torch.jit as a whole: it is one layer, and no cut is left to be planned",
            "Give the module as it was before torch.jit.script or torch.jit.trace.",
        )
    try:
        memo |= {id(part): _copy_of_scripted(part, device) for part in scripted_parts(model).values()}
        memo |= {id(tensor): tensor.detach().clone() for tensor in _results_kept(model)}
        copied = copy.deepcopy(model, memo)
        return copied if device is None else copied.to(device)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{name} cannot be copied: {first_line(error)}{at_user_line(error)}",
            "It is measured on a copy; keep only parameters, buffers and plain values in its attributes.",
        ) from error


def scripted_parts(model: nn.Module) -> dict[str, nn.Module]:
    """What torch.jit made, by dotted name; outermost ones only."""
    parts = dict[str, nn.Module]()
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and not any(path.startswith(f"{own}.") for own in parts):
            parts[path] = part
    return parts


def _copy_of_scripted(part: nn.Module, device: str | None) -> nn.Module:
    """Written and read: copy.deepcopy gives a module that computes with the parameters of the original."""
    file = io.BytesIO()
    torch.jit.save(part, file)
    file.seek(0)
    copied: nn.Module = torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call]
    return copied


def _results_kept(model: nn.Module) -> Iterator[Tensor]:
    """Attributes that were computed of parameters, as hooks that prune weights keep them."""
    for part in model.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value


def _without_values(tensor: Tensor) -> Tensor:
    return copy_as(tensor, torch.empty_like(tensor.detach(), device="meta"))


def _on_the_host(tensor: Tensor) -> Tensor:
    return copy_as(tensor, tensor.detach().to("cpu", copy=True))
