"""The user's model: its input, output, copies and random numbers, and what may fail in its code."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import io
import json
import random
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..cost_models.errors import MachineError, ModelError, UsageError
from .torch_private import TreeSpec, copy_as, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# Errors of the user's model and of allocators: what failed, and at which line of the user's code.

_OURS = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = (
    Path(torch.__file__).resolve().parent,
    Path(sysconfig.get_path("stdlib")).resolve(),
    *(_OURS / folder for folder in ("pplan", "profiler", "runtimes", "cli")),
)
_PACKAGES = tuple(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib"))


def user_line(error: BaseException) -> str:
    """`file:line, in function: code` of the innermost frame outside torch, pplan and the standard library.

    Empty where no such frame is in the traceback. A syntax error names the line that does not parse.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_filename(error.filename)}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{short_filename(last.filename)}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


def first_line(error: BaseException) -> str:
    """`Type: message`, the message cut to its first line and 200 characters."""
    text = str(error).strip().split("\n", 1)[0].strip()
    text = text[:200] + ("…" if len(text) > 200 else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_user_line(error: BaseException) -> str:
    """` (file:line, in function: code)`, or nothing: to be put behind a message."""
    line = user_line(error)
    return f" ({line})" if line else ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if any(path.is_relative_to(folder) for folder in _PACKAGES):
        return not any(path.is_relative_to(folder) for folder in (_NOT_THE_USERS[0], *_NOT_THE_USERS[2:]))
    return not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def short_filename(filename: str) -> str:
    """The path, relative to the working directory where it lies in that."""
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


OTHER_SHAPE = "Give the shape of one sample, without the batch, as in input_shape=(3, 224, 224)."
OTHER_INPUT = "Give an input that the model takes."
"""Hints where the input may be at fault."""
_OTHER_DTYPE = r"dtype|scalar type|Input type .* should be the same|not implemented for '|desired output type"
"""How torch says that a layer takes another dtype."""


def layer_failure(name: str, kind: str, inputs: object, error: BaseException) -> ModelError:
    """The error that says which layer failed on what: a tensor, or a tuple of them."""
    several = isinstance(inputs, tuple)
    shapes = (
        ", ".join(_described(part) for part in inputs) if isinstance(inputs, tuple) else _described(inputs)
    )
    return ModelError(
        f"layer {name} ({kind}) failed on {'inputs of shapes' if several else 'an input of shape'} {shapes}, "
        f"batch first: {first_line(error)}{at_user_line(error)}",
        _hint(str(error)),
    )


def _described(inputs: Any) -> str:
    if not isinstance(inputs, Tensor):
        return type(inputs).__name__
    shape = "x".join(str(side) for side in inputs.shape)
    return f"{shape} ({str(inputs.dtype).removeprefix('torch.')})"


def _hint(message: str) -> str:
    """What may mend a layer's failure, by torch's words."""
    if "more than 1 value per channel" in message:
        return "Name micro-batch sizes of 2 or more, as in micro_batch_sizes=(2, 4, 8)."
    if "device meta" in message or "register_meta function" in message or "on meta tensors" in message:
        return (
            "The meta device has shapes and no values: measure for real, as in device='cpu'; a tensor that "
            "forward reads must be a parameter or a registered buffer."
        )
    if re.search(_OTHER_DTYPE, message):
        return (
            "Give an input of the dtype that the layer takes (a factory may return one with its module), "
            "or name another `dtype`."
        )
    return OTHER_SHAPE


class DoesNotFit(MachineError):
    """The model, or its smallest micro-batch, is too large for the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the CPU's allocator refused."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text
        or "not enough memory" in text
        or "out of memory" in text
        or "STATUS_ALLOC_FAILED" in text
    )


@contextlib.contextmanager
def failing_as(
    describe: Callable[[Exception], Exception], through: type[Exception] | tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise the error that `describe` makes of what fails inside.

    What allocators raise, and errors of the types in `through`, are raised as they are.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, through):
            raise
        raise describe(error) from error


@contextlib.contextmanager
def ignoring_failures() -> Iterator[None]:
    """Go on behind this where the model fails inside; what allocators raise is raised."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise


def refusal(error: BaseException) -> str:
    """What the allocator said first: which memory ran out, and what it was asked for."""
    return str(error).split("\n", 1)[0].split(" GPU ", 1)[0][:300] or type(error).__name__


# A model's output as a flat tuple, and back; also dataclasses, which torch's pytrees do not know.


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


# `package.module:function`, of the user's: the module is imported, and what goes wrong is told.


def import_named(what: str, name: str) -> Any:
    """Import the object `package.module:attribute` that the user names.

    The working directory is put on the import path, as `python -m` does.

    Args:
        what: Words for the object in errors, as "model 'package.module:factory'".
        name: The module and, behind the colon, the attribute.

    Raises:
        ModelError: There is no such module or attribute, or importing the module failed.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ModelError(
                f"{what}: there is no module {missing!r}",
                f"Run pplan where {module_name.split('.')[0]} can be imported from; looked in {here} "
                "and the installed packages.",
            ) from None
        raise ModelError(
            f"importing {module_name} failed: {first_line(error)}{at_user_line(error)}",
            f'Mend it; python -c "import {module_name}" shows the same.',
        ) from error
    file = getattr(target, "__file__", None)
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=3)
            raise ModelError(
                f"{what}: {module_name} has no {attribute!r}",
                f"Nearest: {', '.join(near)}." if near else f"Define {attribute} in {file}.",
            )
        target = getattr(target, part)
    return target


# Random numbers that are the same at every run, and leave the caller's as they were.

_SEEDS = 2**63


def check_seed(seed: int) -> int:
    """Raises UsageError where torch, or the file of a profile, could not hold it."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < _SEEDS:
        raise UsageError(f"seed {seed!r}: must be a whole number from 0 to 2**63 - 1", "As in seed=0.")
    return int(seed)


def normal_like(tensor: Tensor, seed: int) -> Tensor:
    """Unit normal values of its shape and dtype, drawn where it is; on meta there is nothing to draw."""
    if tensor.device.type == "meta":
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)


def whole_numbers(shape: Sequence[int], below: int, device: torch.device, seed: int) -> Tensor:
    """Of 0 to `below` - 1, drawn on `device`; on meta there is nothing to draw."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=torch.long, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(below, tuple(shape), generator=generator, device=device)


@contextlib.contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Inside, torch, `random` and numpy draw from `seed`; afterwards the caller's random state is as it was.

    CUDA's, too, where CUDA has been initialised by now: whoever computes there enters the device first.
    """
    numbers, python = sys.modules.get("numpy"), random.getstate()
    arrays = numbers.random.get_state() if numbers else None
    try:
        with torch.random.fork_rng(devices=_cuda_devices()):
            reseed(seed)
            yield
    finally:
        random.setstate(python)
        if numbers and arrays is not None:
            numbers.random.set_state(arrays)


def reseed(seed: int) -> None:
    """For good: torch on all devices, `random`, and numpy where it is loaded. See `fixed_seed`."""
    torch.default_generator.manual_seed(seed)
    if _cuda_devices():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def repeatable_seeds() -> Iterator[None]:
    """Inside, torch.seed(), which takes its seed from the system, takes it from torch's random state."""

    def seed() -> int:
        number = int(torch.randint(2**62, (), device="cpu"))
        torch.manual_seed(number)
        return number

    with mock.patch.object(torch, "seed", seed):
        yield


def random_states() -> dict[str, Any]:
    """By who draws, a value that is another after a draw."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    for index in _cuda_devices():
        states[f"torch on cuda:{index}"] = torch.cuda.get_rng_state(index).numpy().tobytes()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def noise(shape: Sequence[int], seed: int, samples: int = 2) -> Tensor:
    """Random samples of this shape, the same for the same seed; the caller's random state is left alone, and
    so is the default device: they are on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((samples, *shape), generator=generator, device="cpu")


# A model that was built, the input it is called with, and copies of the model on other devices.


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
        if tensor.layout is not torch.strided and isinstance(tensor, nn.Parameter):
            raise _sparse_error(name, path, tensor)


def refuse_reading_sparse(name: str, module: nn.Module, message: str) -> None:
    """Raises ModelError where the message of a failure says that forward reads a sparse buffer."""
    for path, buffer in module.named_buffers():
        if buffer.layout is not torch.strided and f"no attribute '{path.rpartition('.')[2]}'" in message:
            raise _sparse_error(name, path, buffer)


def _sparse_error(name: str, path: str, tensor: Tensor) -> ModelError:
    return ModelError(
        f"{name}: {path} is a sparse tensor ({tensor.layout}), whose bytes pplan cannot count",
        "Keep its indices and values in buffers, and make the sparse tensor in forward.",
    )


def strided_buffers(module: nn.Module) -> list[Tensor]:
    """Those that copies of it have: sparse ones are left out, and no forward may read them."""
    return [buffer for buffer in module.buffers() if buffer.layout is torch.strided]


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

    def refused(error: Exception) -> ModelError:
        return ModelError(
            f"{name} cannot be copied: {first_line(error)}{at_user_line(error)}",
            "It is measured on a copy; keep only parameters, buffers and plain values in its attributes.",
        )

    with failing_as(refused):
        memo |= {id(part): _copy_of_scripted(part, device) for part in scripted_parts(model).values()}
        memo |= {id(tensor): tensor.detach().clone() for tensor in _results_kept(model)}
        copied = copy.deepcopy(model, memo)
        for path, buffer in list(copied.named_buffers(remove_duplicate=False)):
            if buffer.layout is not torch.strided:
                owner, _, field = path.rpartition(".")
                delattr(copied.get_submodule(owner), field)
        return copied if device is None else copied.to(device)


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
