"""One stage of torch.distributed.pipelining: what crosses its cuts, its input, what it recomputes or
offloads.

Tensors that cross a cut between processes are contiguous, of floating point, and have a gradient coming back.
PyTorch 2.11 asks a gradient of everything that a stage is handed, so masks and indices cannot cross as they
are: they travel as floating-point numbers of the same bits, and their gradient is zero.

Layers that run again in backward run in the state in which they ran first. Forward may change buffers: the
statistics of a batch norm, the vectors of a spectral norm, a queue. To run it again as torch.utils.checkpoint
does changes them twice, and another state gives other activations than those whose gradient is asked for.
Here the second run works on copies of the buffers as the first one found them, which every micro-batch in
flight keeps. Buffers of modules made by torch.jit cannot be replaced: their values are put back.

Offloading keeps what a stage saves for backward in the host's memory until its backward, as
torch.autograd.graph.save_on_cpu does. Unlike it, each storage is copied once, however many operations save it
or views of it; parameters, buffers and the stage's inputs, which PyTorch's pipelining keeps on the device
anyway, are not copied. Copies run on the stream that computes, so a forward waits for what it saves and a
backward for what it needs. On a GPU the host's memory is pinned: there PyTorch's allocator rounds each
storage up to a power of two.

The shapes at the cuts are found without a byte. PyTorch then does not run the stages to find out, which would
cost the first step a fraction of a second and, in PyTorch 2.11, count a batch in the statistics of batch
norm.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import NoneType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...cost_models.errors import ExportError, UsageError
from ...cost_models.quantities import format_count
from ...profiler.layer import LayerSequential
from ...profiler.torch_private import (
    TreeSpec,
    backward_parts,
    name_leaves,
    storage_key,
    tensor_version,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from ...profiler.user_model import ModelInput, copy_model, copy_to_meta, fixed_seed, scripted_parts

_CARRIERS = {torch.int16: torch.float16, torch.int32: torch.float32, torch.int64: torch.float64}
"""Of the same size; what takes one byte goes by value, which float16 holds exactly."""
_ASKS_FOR_ALL = "output_grads" not in inspect.signature(PipelineStage).parameters
"""Whether this PyTorch asks a gradient of every tensor that crosses a cut: 2.11 does, 2.15 does not."""


@dataclass(frozen=True)
class CutTensor:
    """A tensor at a cut: whether a gradient comes back for it, whether the stage behind overwrites it, and
    whether it crosses alone in a tuple, which that stage's first layer takes apart."""

    dtype: torch.dtype
    has_gradient: bool
    is_overwritten: bool = False
    in_tuple: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, in_tuple: bool = False) -> CutTensor:
        """The description of a tensor that the stage before hands out."""
        return cls(tensor.dtype, tensor.requires_grad, in_tuple=in_tuple)

    def receive(self, sent: Tensor) -> Tensor:
        """The tensor for the stage's layers, from what crossed the cut."""
        if self.has_gradient:
            return pass_on(sent)
        return _unpack(sent.detach(), self.dtype)


def as_layer_input(tensors: Sequence[Tensor], crossings: Sequence[CutTensor] | None) -> Any:
    """A tensor, or the tuple of several; also of one where it was in one."""
    in_tuple = crossings is not None and any(about.in_tuple for about in crossings)
    return tensors[0] if len(tensors) == 1 and not in_tuple else tuple(tensors)


def as_tuple(tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A tensor, or several, as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def pack_tensor(tensor: Tensor) -> Tensor:
    """The tensor as it crosses the cut: itself, or its bits in floating point; contiguous."""
    if tensor.is_floating_point() or tensor.is_complex():
        contiguous = tensor.contiguous()
        return pass_on(contiguous) if contiguous.requires_grad else contiguous
    if tensor.dtype in _CARRIERS:
        return tensor.contiguous().view(_CARRIERS[tensor.dtype])
    return tensor.to(torch.float16).contiguous()


def attach_all(tensors: list[Tensor], *, always: bool = False) -> list[Tensor]:
    """`tensors`, those without a gradient attached to one that has one, where PyTorch asks that of all (or
    another runtime does, `always`)."""
    anchor = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if anchor is None or not (always or _ASKS_FOR_ALL):
        return tensors
    return [tensor if tensor.requires_grad else _attach(tensor, anchor) for tensor in tensors]


def add_zero_gradients(output: Tensor, carried: tuple[Tensor, ...]) -> Tensor:
    """`output`, whose backward gives zeros for `carried`: the sum of none of their elements is added.

    An operation of PyTorch's own, for from those of others 2.11 does not compute weight gradients apart.
    """
    for tensor in carried:
        output = output + tensor.reshape(-1)[:0].sum().to(output.dtype)
    return output


def _unpack(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    return tensor.view(dtype) if dtype in _CARRIERS else tensor.to(dtype)


def pass_on(tensor: Tensor, share: float | Tensor = 1.0) -> Tensor:
    """`tensor`, in the same memory, as one that is neither a leaf nor a view, and that no operation saved;
    its gradient is multiplied by `share` on the way back.

    PyTorch detaches the outputs of a stage in place, before it computes weight gradients from what was saved.
    """
    tensor_on: Tensor = _PassOn.apply(tensor, share)
    return tensor_on


class _PassOn(torch.autograd.Function):
    """The gradient of what a stage was handed is sent back, and so must be contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: float | Tensor) -> Tensor:
        ctx.share = share
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.contiguous()
        return own if isinstance(ctx.share, float) and ctx.share == 1 else own * ctx.share, None


def _attach(tensor: Tensor, anchor: Tensor) -> Tensor:
    attached: Tensor = _Attach.apply(tensor, anchor)
    return attached


class _Attach(torch.autograd.Function):
    """Hands its first argument on, as if it had been computed from the second."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


CONSTANTS = (NoneType, bool, int, float, str)
"""Types of arguments that hold no samples."""


@dataclass(frozen=True)
class InputForm:
    """The tensors of the model's input in order, by their names in the arguments.

    `shared` tells which of them belong to all samples and are not cut. `constants` are the arguments that
    are no tensors: the layers were traced with them.
    """

    names: tuple[str, ...]
    shared: tuple[bool, ...]
    constants: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, example: ModelInput) -> InputForm:
        """The form of an example."""
        leaves = _arguments(example)
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        shared = tuple(own.dim() == 0 or len(own) != example.batch for own in tensors.values())
        constants = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, CONSTANTS)}
        return cls(tuple(tensors), shared, constants)

    def samples(self, batch: object) -> int:
        """Return the number of samples of a batch.

        Raises:
            UsageError: It has other arguments than the example input.
        """
        leaves = _arguments(ModelInput.of(batch, "the global batch"))
        self._check_arguments(leaves)
        return len(leaves[self.names[self.shared.index(False)]])

    def tensors(self, batch: object, samples: int) -> tuple[Tensor, ...]:
        """Return the tensors of a batch in the order of the example input.

        Raises:
            UsageError: It has another number of samples or other arguments than the example input.
        """
        leaves = _arguments(ModelInput.of(batch, "the global batch"))
        self._check_arguments(leaves)
        tensors = [leaves[name] for name in self.names]
        for name, tensor, shared in zip(self.names, tensors, self.shared, strict=True):
            if not shared:
                what = "the input" if len(self.names) == 1 else f"the input's {name}"
                Samples.of_process(samples).check(what, tensor)
        return tuple(tensors)

    def repeat_shared(self, batch: object, samples: int, micro_batches: int) -> tuple[Tensor, ...]:
        """The tensors of a global batch; those that are shared once for every micro-batch.

        Raises UsageError where it has another number of samples or other arguments than the example input.
        """
        tensors = self.tensors(batch, samples)
        return tuple(
            torch.stack([tensor] * micro_batches) if shared else tensor.contiguous()
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def _check_arguments(self, leaves: Mapping[str, object]) -> None:
        """Raises UsageError where these are not the arguments of the example input."""
        hint = "Give the arguments of the model's forward as in the example input."
        for name in self.names:
            if name not in leaves:
                raise UsageError(f"the input lacks {name}, which the example input has", hint)
            if not isinstance(leaves[name], Tensor):
                kind = type(leaves[name]).__name__
                raise UsageError(
                    f"the input's {name} is of type {kind}, in the example input it is a tensor", hint
                )
        for name in sorted(leaves.keys() - set(self.names)):
            leaf, traced = leaves[name], self.constants.get(name)
            if isinstance(leaf, Tensor) or (isinstance(leaf, CONSTANTS) and leaf != traced):
                what = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
                other = repr(traced) if name in self.constants else "not there"
                raise UsageError(f"the input's {name} is {what}, in the example input it is {other}", hint)

    def micro_batch(self, example: ModelInput, samples: int) -> tuple[Tensor, ...]:
        """One of `samples` samples as the first stage is handed it."""
        tensors = example.repeated(samples).tensors
        return tuple(
            tensor.contiguous().unsqueeze(0) if shared else tensor.contiguous()
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def drop_repeats(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The model's input, from what the first stage is handed."""
        return tuple(
            tensor.squeeze(0) if shared else tensor
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def shared_names(self, names: Collection[str]) -> set[str]:
        """The names of shared tensors, where these are the arguments of the example input; else none."""
        if not set(self.names) <= set(names):
            return set()
        return {name for name, shared in zip(self.names, self.shared, strict=True) if shared}


def _arguments(inputs: ModelInput) -> dict[str, Any]:
    """The leaves of the arguments by name: `[1]` is positional, `['mask']` a keyword argument."""
    return dict([*name_leaves(inputs.args)[0], *name_leaves(inputs.kwargs)[0]])


class Samples(NamedTuple):
    """The length that dimension 0 of a batch must have, and what to say where it has another."""

    number: int
    reason: str
    hint: str

    @classmethod
    def of_plan(cls, count: int) -> Samples:
        """The global batch."""
        return cls(count, f"the plan's holds {count}", f"Give the DataLoader batch_size={count}.")

    @classmethod
    def of_process(cls, count: int) -> Samples:
        """A replica's part of the global batch."""
        hint = "Give each process its replica's samples of the global batch: `share` picks them."
        return cls(count, f"a step of this process takes {count}", hint)

    def check(self, what: str, tensor: Tensor) -> None:
        """Raises UsageError where `tensor`, called `what`, holds another number of samples."""
        count = 0 if tensor.dim() == 0 else len(tensor)
        if count != self.number:
            smaller = "Leave out a smaller last batch: give the DataLoader drop_last=True."
            raise UsageError(
                f"{what} holds {count} samples, {self.reason}", smaller if count < self.number else self.hint
            )


def map_samples(
    change: Callable[[Tensor], Tensor],
    value: Any,
    what: str,
    samples: Samples,
    *,
    form: InputForm | None = None,
    constants: tuple[type, ...] = (NoneType,),
) -> Any:
    """Apply `change` to the tensors of samples in a tensor, tuple, list, dict, or any nesting of these.

    Args:
        change: Called with each tensor of samples.
        value: The structure. It is not changed.
        what: Its name in messages.
        samples: How many of them every tensor must hold.
        form: The model's input. Where `value` has its arguments, tensors that all samples share stay.
        constants: Types of other leaves, which stay as they are.

    Raises:
        UsageError: A leaf is of another type, there is no tensor, or one holds another number of samples.
    """
    leaves, spec = name_leaves(dict(value) if isinstance(value, Mapping) else value)
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        raise UsageError(f"{what} is of type {type(value).__name__} and holds no tensor", _SUPPORTED)
    shared = set() if form is None else form.shared_names([name for name, _ in leaves])
    changed: list[object] = []
    for name, leaf in leaves:
        label = f"{what}'s {name}" if name else what
        if not isinstance(leaf, (Tensor, *constants)):
            raise UsageError(f"{label} is of type {type(leaf).__name__}, which is not supported", _SUPPORTED)
        if isinstance(leaf, Tensor) and name not in shared:
            samples.check(label, leaf)
            changed.append(change(leaf))
        else:
            changed.append(leaf)
    return tree_unflatten(changed, spec)


_SUPPORTED = (
    "Give a tensor, or tuples, lists and dicts of tensors, nested as you like; dimension 0 is the batch."
)


def written_buffers(layers: nn.Sequential) -> list[Tensor]:
    """Buffers that forward changes, where the layers were made of a model and know it; else all of them."""
    names = layers.written_buffers if isinstance(layers, LayerSequential) else None
    return [buffer for name, buffer in layers.named_buffers() if names is None or name in names]


def names_in_stage(layers: nn.Sequential, written: Sequence[Tensor]) -> tuple[str, ...]:
    """Names in a stage's layers of the buffers that are `written`."""
    identities = {id(buffer) for buffer in written}
    return tuple(name for name, own in layers.named_buffers() if id(own) in identities)


def run_recomputed(
    layers: nn.Sequential,
    make_input: Callable[..., Any],
    tensors: Sequence[Tensor],
    written: Sequence[str],
    scripted: Sequence[str] = (),
) -> Any:
    """What `layers` make of `make_input(*tensors)`, without keeping their activations.

    `written`: names of the buffers that they change. `scripted`: of the modules that torch.jit made: they do
    not let the exception through by which torch.utils.checkpoint ends the second run early.
    """
    buffers = dict(layers.named_buffers())
    before = {name: buffers[name].clone() for name in written if name in buffers}
    runs = 0

    def run(*own: Tensor) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1 or not before:
            return layers(make_input(*own))
        inside = tuple(f"{path}." for path in scripted)
        state = {name: buffer.clone() for name, buffer in before.items() if not name.startswith(inside)}
        fixed = [(buffers[name], buffer) for name, buffer in before.items() if name.startswith(inside)]
        with _put_back(fixed):
            return functional_call(layers, state, (make_input(*own),))

    call: Callable[..., Any] = checkpoint
    with set_checkpoint_early_stop(False) if scripted else nullcontext():
        return call(run, *tensors, use_reentrant=False)


@contextmanager
def _put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, each of these buffers has the values that stand beside it."""
    values = [(buffer, buffer.detach().clone()) for buffer, _ in buffers]
    _assign(buffers)
    try:
        yield
    finally:
        _assign(values)


def _assign(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)


_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def warn_of_second_runs(layers: nn.Sequential, runtime: str) -> None:
    """A UserWarning where a runtime that recomputes by itself finds other buffers in a layer's second run.

    Statistics of norms are no such buffers: in training a norm only writes them.
    """
    written = (layers.written_buffers or ()) if isinstance(layers, LayerSequential) else ()
    names = [name for name in written if not isinstance(_owner(layers, name), _NORMS)]
    if not names:
        return
    others = f" and {format_count(len(names) - 1, 'more buffer')}" if len(names) > 1 else ""
    warnings.warn(
        f"forward changes {_in_model(layers, names[0])}{others}: {runtime}, which recomputes by running it "
        "again, then finds the changed values (pplan.runtimes.torch_pipelining does not)",
        UserWarning,
        stacklevel=4,
    )


def _owner(layers: nn.Sequential, buffer: str) -> nn.Module:
    return layers.get_submodule(buffer.rpartition(".")[0])


def _in_model(layers: nn.Sequential, name: str) -> str:
    """A buffer of the layers by its layer's name, where that is known."""
    index, _, key = name.partition(".")
    names = layers.layer_names if isinstance(layers, LayerSequential) else ()
    return f"{names[int(index)]}.{key}" if names else name


class HostCopy:
    """The bytes of a storage of `device` on its host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        pinned = storage.device.type == "cuda"
        self.bytes = allocate_on_host(storage.nbytes(), pinned=pinned)
        self.bytes.copy_(_as_bytes(storage), non_blocking=pinned)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def on_device(self) -> torch.UntypedStorage:
        """They on the device again: one copy, while somebody needs it."""
        storage = None if self._back is None else self._back()
        if storage is None:
            own = torch.empty_like(self.bytes, device=self.device, pin_memory=False)
            storage = own.copy_(self.bytes, non_blocking=True).untyped_storage()
            self._back = weakref.ref(storage)
        return storage


def allocate_on_host(size: int, *, pinned: bool) -> Tensor:
    """So many bytes."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class HostTensor(NamedTuple):
    """A saved tensor: what it is a view of."""

    copy: HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def on_device(self) -> Tensor:
        """The tensor, as it was saved."""
        empty = torch.empty(0, dtype=self.dtype, device=self.copy.device)
        return empty.set_(self.copy.on_device(), self.offset, self.size, self.stride)


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd saves on `device` goes to its host's memory, but the storages of the tensors that
    `stay`. For one forward: storages are told apart while it runs.

    A tensor of a class of its own (DTensor), without strides, or conjugated, stays, too. The copy is of the
    values as they are saved: an operation that overwrites them later does no harm.
    """

    def __init__(self, device: torch.device, stay: Iterable[Tensor]) -> None:
        self._device = device
        self._stay = {storage_key(tensor) for tensor in stay if _is_plain(tensor)}
        self._copies: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], HostCopy]] = {}
        super().__init__(self._pack, _unpack_from_host)

    def _pack(self, tensor: Tensor) -> Tensor | HostTensor:
        if not _is_plain(tensor) or tensor.device != self._device or storage_key(tensor) in self._stay:
            # Detached: a saved output would otherwise hold its own graph alive in a circle.
            return tensor.detach()
        storage, key = tensor.untyped_storage(), (storage_key(tensor), tensor_version(tensor))
        alive, copy = self._copies.get(key, (None, None))
        if copy is None or alive is None or alive() is None:  # another one may have taken its place
            copy = HostCopy(storage)
            self._copies[key] = weakref.ref(storage), copy
        return HostTensor(copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def __exit__(self, *details: Any) -> None:
        self._copies.clear()
        super().__exit__(*details)


def _unpack_from_host(packed: Tensor | HostTensor) -> Tensor:
    return packed.on_device() if isinstance(packed, HostTensor) else packed


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a view of bytes that can be copied and told by their storage."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


class StageModule(nn.Module):
    """Runs `layers` on what the stage before sent.

    `crossings`: of the tensors it takes, in order; None where they are not known: then they are taken as they
    are, and cloned, for the stage may overwrite them. `recompute`: how many of the first layers run again in
    backward, for their activations; `written`: names of the buffers that forward changes. `offloads`: whether
    what is saved for backward waits in the host's memory. `outputs`: what the stage behind was told to
    expect, where it was told.
    `form`: of the input, for the first stage. The last one returns the tensors of the model's output, which
    `assemble` puts together.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        crossings: Sequence[CutTensor] | None = None,
        *,
        recompute: int = 0,
        written: Sequence[str] = (),
        offloads: bool = False,
        outputs: Sequence[Tensor] | None = None,
        form: InputForm | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.crossings = None if crossings is None else tuple(crossings)
        self.recompute, self.written, self.offloads = recompute, tuple(written), offloads
        self._scripted = tuple(scripted_parts(layers)) if recompute else ()
        self.form, self.is_last = form, is_last
        self._expected = None if is_last or outputs is None else [tensor.dtype for tensor in outputs]
        self.is_told_nothing = False
        """Whether the stage behind does not know what it is sent."""
        self.output_tensors: tuple[CutTensor, ...] = ()
        """Of the latest output, as the next stage's crossings."""
        self.output_form = OutputForm()

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors to send, from those received."""
        tensors = self.receive(inputs)
        again = self.recompute if torch.is_grad_enabled() else 0
        if again:
            first = self.layers[:again]
            output = run_recomputed(first, self._layer_input, tensors, self.written, self._scripted)
            if again < len(self.layers):
                output = self.layers[again:](output)
        else:
            with self._saving(inputs):
                output = self.layers(self._layer_input(*tensors))
        return self._pack_output(output, inputs)

    def _saving(self, inputs: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
        """What is saved for backward inside goes where it is to wait."""
        if not (self.offloads and inputs and torch.is_grad_enabled()):
            return nullcontext()
        buffers = [own for name, own in self.layers.named_buffers() if name not in self.written]
        return SavedOnHost(inputs[0].device, [*inputs, *self.layers.parameters(), *buffers])

    def receive(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The layers' input, from the tensors received."""
        if self.form is not None:
            return self.form.drop_repeats(tensors)
        if self.crossings is None:
            return tuple(pass_on(tensor) if tensor.requires_grad else tensor for tensor in tensors)
        return tuple(about.receive(tensor) for about, tensor in zip(self.crossings, tensors, strict=True))

    def _layer_input(self, *tensors: Tensor) -> Any:
        """Clones of what the layers overwrite: a micro-batch is needed again to recompute."""
        pairs = zip(tensors, self.crossings or (None,) * len(tensors), strict=True)
        layer_inputs = tuple(
            tensor.clone() if about is None or about.is_overwritten else tensor for tensor, about in pairs
        )
        return as_layer_input(layer_inputs, self.crossings)

    def _pack_output(self, output: Any, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if self.is_last:
            tensors = [_output_tensor(tensor) for tensor in self.output_form.take(output)]
        else:
            in_tuple = not isinstance(output, Tensor) and len(output) == 1
            outputs = as_tuple(output)
            self.output_tensors = tuple(CutTensor.of(tensor, in_tuple=in_tuple) for tensor in outputs)
            tensors = attach_all([pack_tensor(tensor) for tensor in outputs])
            self._check_outputs(tensors)
        carried = self._without_gradients(inputs)
        if carried and tensors:
            target = max(range(len(tensors)), key=lambda i: tensors[i].requires_grad)
            tensors[target] = add_zero_gradients(tensors[target], carried)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _check_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Raises ExportError where the stage behind would take them for others."""
        about = self.output_tensors
        pairs = list(zip(tensors, about, strict=True))
        if self.is_told_nothing and any(own.in_tuple or sent.dtype != own.dtype for sent, own in pairs):
            raise ExportError(
                "what crosses a cut is no floating-point tensor, or one in a tuple, and the stages could "
                "not be run on the example input to tell the stage behind",
                "Give `build` an example input that a copy of the model takes.",
            )
        dtypes = [tensor.dtype for tensor in tensors]
        if self._expected is not None and dtypes != self._expected:
            sent, expected = (
                ", ".join(str(dtype).removeprefix("torch.") for dtype in some)
                for some in (dtypes, self._expected)
            )
            raise ExportError(
                f"a stage hands on {sent} where {expected} was expected: it runs under another autocast, "
                "or in another precision, than when it was built",
                "Call build inside the torch.autocast that the steps run in, with the model in its dtype.",
            )

    def _without_gradients(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs of which the schedule asks a gradient that they do not have."""
        if self.form is not None or self.crossings is None:
            return ()
        pairs = zip(tensors, self.crossings, strict=True)
        return tuple(tensor for tensor, about in pairs if tensor.requires_grad and not about.has_gradient)


def _output_tensor(tensor: Tensor) -> Tensor:
    """An output of the model. A weight is handed on: PyTorch detaches outputs in place, which would freeze
    it."""
    is_weight = tensor.is_leaf and tensor.requires_grad
    return pass_on(tensor) if is_weight else tensor.contiguous()


class _Tensor:
    """Stands for a tensor in an output."""


_TENSOR = _Tensor()


class OutputForm:
    """The structure of a model's output, of which runtimes hand on the tensors alone."""

    def __init__(self) -> None:
        self._structure: tuple[TreeSpec, list[Any]] | None = None

    def take(self, output: Any) -> list[Tensor]:
        """Return the tensors of an output, and remember where they stand."""
        leaves, spec = tree_flatten(output)
        markers = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._structure = None if isinstance(output, Tensor) else (spec, markers)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def build(self, output: Tensor | Sequence[Tensor]) -> Any:
        """Return the model's output, of its tensors."""
        if self._structure is None:
            return output
        spec, leaves = self._structure
        tensors = iter(as_tuple(output))
        return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec)


Loss = Callable[..., Tensor]


class LossPart(NamedTuple):
    """A micro-batch in the loss of a step.

    `target` holds `rows` samples; the other rows of the output are padding (None: there are none). The step's
    loss counts the micro-batch's by `weight`, and its gradient by `share`.
    """

    target: Any
    rows: int | None = None
    weight: float | Tensor = 1.0
    share: float | Tensor = 1.0


class StageLoss:
    """The loss of the tensors that the last stage returned, as a schedule calls it.

    `form`: of the output. `share`: the factor of the gradient, where no `parts` are set. `parts`: of the
    micro-batches of a step, whose numbers the schedule then hands over, because PyTorch cuts nothing but one
    tensor. `total` adds up their losses. Where `outputs` is a list, they are collected instead.
    """

    def __init__(self, form: OutputForm, loss_fn: Loss, share: float = 1.0) -> None:
        self.form, self.loss_fn, self.share = form, loss_fn, share
        self.parts: Sequence[LossPart] | None = None
        self.outputs: list[Any] | None = None
        self.total: Tensor | float = 0.0

    def __call__(self, tensors: Tensor | tuple[Tensor, ...], target: Any) -> Tensor:
        """Return the loss of a micro-batch."""
        part = LossPart(target, share=self.share) if self.parts is None else self.parts[int(target)]
        output = self.form.build(tensors)
        if part.rows is not None:
            output = take_rows(output, slice(part.rows))
        if self.outputs is not None:
            self.outputs.append(output)
            return as_tuple(tensors)[0].new_zeros(())
        if part.rows == 0:
            # Nothing but padding: the gradient of no element.
            loss = add_zero_gradients(as_tuple(tensors)[0].new_zeros(()), as_tuple(tensors))
        else:
            loss = self.loss_fn(output, part.target)
            self.total = self.total + loss.detach() * part.weight
        return pass_on(loss, part.share)


def take_rows(tree: Any, rows: slice) -> Any:
    """Return these samples of every tensor that is no scalar, in the same structure."""
    return tree_map_only(Tensor, lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)


@dataclass(frozen=True)
class StageShapes:
    """The tensors of one micro-batch on the meta device: a stage's inputs, outputs, and the form of its
    inputs."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    crossings: tuple[CutTensor, ...]


def trace_shapes(
    layers: nn.Sequential,
    parts: Sequence[int],
    inputs: Sequence[Tensor],
    form: InputForm,
    *,
    splits_backward: bool = False,
    device: torch.device | None = None,
) -> list[StageShapes] | None:
    """For each stage, with `inputs` of that form to the first; None where no trace runs.

    The meta device knows no autocast. If the layers are under one, switch one on, or look at values, a copy
    of a stage at a time runs for real on `device` (default: the CPU).

    PyTorch computes weight gradients apart only on what lies between an input with a gradient and the output:
    where `splits_backward`, a stage behind frozen ones has such an input all the same, and its gradient is
    zero.

    Raises ExportError where PyTorch cannot run the two parts of a stage's backward.
    """
    place, meta = device or torch.device("cpu"), torch.device("meta")
    for tracing in (meta, place):
        try:
            with _notice_autocast() as noticed, fixed_seed(0):
                take = _layers_on(layers, tracing)
                own_inputs = tuple(tensor.to(tracing) for tensor in inputs)
                stages = list(map(_on_meta, _trace_stages(take, parts, own_inputs, form, splits_backward)))
        except ExportError:
            raise
        except Exception:
            # Whatever a model does there that it does not do elsewhere.
            continue
        if tracing is not meta or not (noticed or torch.is_autocast_enabled(place.type)):
            return stages
    return None


def _layers_on(layers: nn.Sequential, device: torch.device) -> Callable[[slice], Any]:
    """Copies of slices of the layers on a device: one at a time, or parts of a copy without values."""
    if device.type == "meta":
        whole: Any = copy_to_meta(layers, "the model")
        return lambda stage: whole[stage]

    def copy_stage(stage: slice) -> Any:
        own: Any = layers[stage]
        return copy_model(own, "the model").to(device)

    return copy_stage


@contextmanager
def _notice_autocast() -> Iterator[list[bool]]:
    """Inside, every torch.autocast that is entered adds to the list."""
    entered: list[bool] = []
    enter: Any = torch.autocast.__enter__

    def noticing(context: Any) -> Any:
        entered.append(True)
        return enter(context)

    with mock.patch.object(torch.autocast, "__enter__", noticing):
        yield entered


def _on_meta(stage: StageShapes) -> StageShapes:
    """With tensors of the meta device alone."""

    def plain(tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return meta.requires_grad_(tensor.requires_grad)

    inputs, outputs = (tuple(map(plain, tensors)) for tensors in (stage.inputs, stage.outputs))
    return dataclasses.replace(stage, inputs=inputs, outputs=outputs)


def _trace_stages(
    take: Callable[[slice], Any],
    parts: Sequence[int],
    inputs: tuple[Tensor, ...],
    form: InputForm | None,
    splits_backward: bool,
) -> Iterator[StageShapes]:
    crossings = tuple(CutTensor.of(tensor) for tensor in inputs)
    for number, (first, end) in enumerate(pairwise(parts)):
        layers = take(slice(first, end))
        crossings = _mark_overwritten(layers, crossings, inputs, form)
        stage = StageModule(layers, crossings, form=form, is_last=end == parts[-1])
        if splits_backward and number:
            _check_parts(stage, inputs, number)
        outputs = as_tuple(stage(*inputs))
        frozen = splits_backward and not any(tensor.requires_grad for tensor in outputs)
        leaves = tuple(_leaf(tensor, always=frozen) for tensor in outputs)
        yield StageShapes(inputs, leaves, crossings)
        crossings, inputs, form = stage.output_tensors, leaves, None


_TWICE = "backward through the graph a second time"


def _check_parts(stage: StageModule, inputs: tuple[Tensor, ...], number: int) -> None:
    """Raises ExportError where PyTorch would go twice through a part of the stage for its weights' gradients:
    it groups weights by the operations at which their ways meet, and overlooks that a weight with ways to
    several of them makes these one group (torch 2.14)."""
    input_part, weight_part = backward_parts()
    starts = [tensor for tensor in as_tuple(stage(*inputs)) if tensor.requires_grad]
    try:
        _, groups = input_part(starts, list(map(torch.empty_like, starts)), list(inputs), stage.parameters())
        weight_part(stage.parameters(), groups)
    except RuntimeError as error:
        if _TWICE in str(error):
            raise ExportError(
                f"stage {number} uses a weight in several places, together with others: PyTorch's backward "
                "in two parts (stage_backward_weight) fails for it",
                "Use a schedule whose backward is whole: 1f1b, gpipe, interleaved.",
            ) from error


def _mark_overwritten(
    layers: nn.Sequential,
    crossings: tuple[CutTensor, ...],
    inputs: tuple[Tensor, ...],
    form: InputForm | None,
) -> tuple[CutTensor, ...]:
    """`crossings` with a mark on those that the layers change in place: their version goes up."""
    stage_inputs = StageModule(layers, crossings, form=form).receive(inputs)
    clones = tuple(tensor.clone() for tensor in stage_inputs)
    versions = [tensor_version(tensor) for tensor in clones]
    layers(as_layer_input(clones, crossings))
    changes = (tensor_version(tensor) > old for tensor, old in zip(clones, versions, strict=True))
    return tuple(
        dataclasses.replace(about, is_overwritten=is_changed)
        for about, is_changed in zip(crossings, changes, strict=True)
    )


def _leaf(tensor: Tensor, *, always: bool) -> Tensor:
    return tensor.detach().requires_grad_(always or tensor.requires_grad)
