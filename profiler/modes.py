"""How a model is measured: as it will be trained (compiled, autocast, layout), and where."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..cost_models.errors import MachineError, ModelError, UsageError
from .clocks import Clock
from .layer import LayerChain
from .local_machine import DTYPES, parse_dtype
from .losses import Loss
from .torch_private import COMPILER_ERRORS, tree_leaves, tree_map
from .user_model import (
    LoadedModel,
    choose_layout,
    first_line,
    own_dtype,
    refuse_unusable,
)

if TYPE_CHECKING:
    from .layer import Layer

# Autocast of CUDA on the meta device, where torch has none: the same conversions, one call at a time.
#
# Which operations run in 16 bits, which in float32, and which in the widest of their inputs' dtypes is as
# torch's documentation lists it for CUDA (https://docs.pytorch.org/docs/stable/amp.html). As there, the copy
# of
# a weight is made once and kept until the context ends.

_functional: Any = functional
_IN_16_BITS = frozenset(
    (
        *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "einsum"),
        *("__matmul__", "__rmatmul__", "chain_matmul", "multi_dot", "prelu", "scaled_dot_product_attention"),
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
        *("conv_tbc", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
    )
)
_IN_FLOAT32 = frozenset(
    (
        *("__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "acos", "asin", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity"),
        *("cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm"),
        *("hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10"),
        *("log_softmax", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "pdist", "poisson_nll_loss"),
        *("pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss"),
        *("softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss"),
    )
)
_IN_THE_WIDEST = frozenset(
    (
        *("addcdiv", "addcmul", "atan2", "bilinear", "cat", "concat", "concatenate", "cross", "dot", "vdot"),
        *("grid_sample", "index_put", "scatter_add", "stack", "tensordot"),
    )
)


class AutocastOnMeta(TorchFunctionMode):
    """What `torch.autocast("cuda", dtype)` does, while entered."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __exit__(self, *error: Any) -> None:
        self._copies.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # An exported graph calls `scaled_dot_product_attention.default`.
        name = getattr(func, "__name__", "").partition(".")[0]
        if func is _functional.multi_head_attention_forward:
            # Its own calls are converted one by one.
            with _run_itself(), _Again(self):
                return func(*args, **kwargs)
        dtype = self._dtype_of(name, (args, kwargs))
        if dtype is not None:
            args, kwargs = tree_map(lambda value: self._in(dtype, value), (args, kwargs))
        return func(*args, **kwargs)

    def _dtype_of(self, name: str, arguments: Any) -> torch.dtype | None:
        """In which an operation runs; None: as it is called."""
        if name in _IN_16_BITS:
            return self._dtype
        if name in _IN_FLOAT32:
            return torch.float32
        if name not in _IN_THE_WIDEST:
            return None
        kinds = {leaf.dtype for leaf in tree_leaves(arguments) if _is_converted(leaf)}
        return torch.float32 if torch.float32 in kinds and len(kinds) > 1 else None

    def _in(self, dtype: torch.dtype, value: Any) -> Any:
        if not _is_converted(value) or value.dtype == dtype:
            return value
        if dtype is torch.float32 or not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if id(value) not in self._copies:
            self._copies[id(value)] = value, value.to(dtype)
        return self._copies[id(value)][1]


class _Again(TorchFunctionMode):
    """The same conversions for what a function calls."""

    def __init__(self, own: AutocastOnMeta) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._own.__torch_function__(func, types, args, kwargs)


def _is_converted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def _run_itself() -> Iterator[None]:
    """The next function of torch.nn.functional that asks whether a mode takes it over is told no."""
    has_override: Callable[..., bool] = _functional.has_torch_function

    def once(arguments: Any) -> bool:  # noqa: ARG001
        _functional.has_torch_function = has_override
        return False

    _functional.has_torch_function = once
    try:
        yield
    finally:
        _functional.has_torch_function = has_override


# How the model will be trained: compiled, in channels-last layout, under autocast, with TF32.

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Modes:
    """What a training script would switch on, and is measured with.

    `compile`: torch.compile of every layer by itself and of the whole model, for one shape at a time.
    `channels_last`: the model's and the input's tensors of four and five dimensions in that layout. `amp`:
    forwards and the loss under torch.autocast, backwards outside, as training does; gradients of "fp16" are
    as torch computes them, unscaled: a GradScaler's own passes over the gradients belong to the optimizer's
    step and are not measured. `tf32`: matrix products and convolutions of float32 in TF32, on CUDA; without
    it they are as the process has them set, which for convolutions is TF32 too by torch's default.
    """

    compile: bool = False
    channels_last: bool = False
    amp: Literal["bf16", "fp16"] | None = None
    tf32: bool = False
    cudnn_benchmark: bool = False
    """torch.backends.cudnn.benchmark: the fastest of cuDNN's kernels is looked for at every new shape."""

    def check(self, device: torch.device) -> None:
        """Raises UsageError for what cannot be on `device`."""
        if self.amp is not None and self.amp not in AMP:
            raise UsageError(f"amp {self.amp!r} is not known", f"Use one of {', '.join(AMP)}.")
        if self.compile and device.type == "meta":
            raise UsageError(
                "`compile` on meta: nothing is computed there",
                "Omit `compile`, or measure with device='cpu' or 'cuda'.",
            )
        if self.cudnn_benchmark and device.type != "cuda":
            raise UsageError(
                f"`cudnn_benchmark` on {device.type}: only CUDA devices compute with cuDNN",
                "Omit `cudnn_benchmark`, or measure with device='cuda'.",
            )
        if self.tf32 and device.type != "cuda":
            raise UsageError(
                f"`tf32` on {device.type}: only CUDA devices compute in TF32",
                "Omit `tf32`, or measure with device='cuda'.",
            )

    @property
    def memory_format(self) -> torch.memory_format:
        """Of tensors of four dimensions, and of five as `choose_layout` says."""
        return torch.channels_last if self.channels_last else torch.preserve_format

    def converted(self, model: nn.Module) -> nn.Module:
        """The same model, its parameters and buffers in the layout asked for.

        One by one: `model.to(memory_format=...)` fails on tensors of five dimensions.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            layout = choose_layout(tensor, self.memory_format)
            if layout is not torch.preserve_format:
                tensor.data = tensor.data.to(memory_format=layout)
        return model

    def notes(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """What to say where `tensors`, the model's and the input's, have no layout to be changed."""
        layouts = {choose_layout(tensor, self.memory_format) for tensor in tensors}
        if not self.channels_last or layouts - {torch.preserve_format}:
            return ()
        return ("channels_last changed nothing: no parameter, buffer or input has four or five dimensions",)

    def forward_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """What a forward runs in, entered anew for each: autocast keeps converted weights until its end."""
        if self.amp is None:
            return nullcontext()
        if device.type == "meta":
            return AutocastOnMeta(AMP[self.amp])
        return torch.autocast(device.type, AMP[self.amp])

    @contextmanager
    def process(self) -> Iterator[None]:
        """Sets the process' flags, and puts them back as they were."""
        cudnn = torch.backends.cudnn.flags(benchmark=True) if self.cudnn_benchmark else nullcontext()
        with _tf32() if self.tf32 else nullcontext(), cudnn, warnings.catch_warnings():
            if self.compile:
                # Of the compiler's own look at what crosses from layer to layer.
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            try:
                yield
            finally:
                self.forget_compiled()

    def forget_compiled(self) -> None:
        """What was compiled for another micro-batch size is not to be looked through for this one."""
        if self.compile:
            torch.compiler.reset()

    def whole(self, model: nn.Module) -> nn.Module:
        """The model as it runs."""
        return _Compiled(model, "model") if self.compile else model

    def layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers as they run."""
        if not self.compile:
            return tuple(layers)
        return tuple(
            replace(layer, module=_Compiled(layer.module, f"layer_{index}"))
            for index, layer in enumerate(layers)
        )


def compiler_failure(error: BaseException) -> MachineError | None:
    """The error for what went wrong in torch.compile itself; None for other errors.

    Backwards are compiled when they first run, so it can come from there too.
    """
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    if not any(_is_compilers(type(one)) for one in chain):
        return None
    missing = next((one for one in chain if "CxxCompiler" in type(one).__name__), None)
    if missing is not None:
        return MachineError(
            f"torch.compile finds no C++ compiler: {first_line(missing)}",
            "Install one (g++, clang++), name it in the environment variable CXX, or omit `compile`.",
        )
    return MachineError(
        f"torch.compile failed: {first_line(getattr(error, 'inner_exception', error))}",
        "Check that torch.compile(model) trains, or omit `compile`.",
    )


def _is_compilers(kind: type) -> bool:
    return any(base.__module__.startswith(COMPILER_ERRORS) for base in kind.__mro__)


class _Compiled(nn.Module):
    """Runs a module through torch.compile, from a function of its own.

    torch keeps what it compiled with the code that was run. All layers of one class would share that code,
    search each other's and, past a limit, not be compiled at all.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self._modules_outside = (module,)
        code = _called.__code__.replace(co_name=name)
        own = FunctionType(code, _called.__globals__, name)
        self._run: Callable[..., Any] = torch.compile(own, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(self._modules_outside[0], args, kwargs)
        except Exception as error:
            failure = compiler_failure(error)
            if failure is None:
                raise
            raise failure from error


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


@contextmanager
def _tf32() -> Iterator[None]:
    """Matrix products, convolutions and recurrent layers in TF32.

    torch has two settings of the same thing, and reading the old one raises where they differ; so both are
    set, unless the process has set the new one already.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    new: list[Any] = [matmul, cudnn.conv, cudnn.rnn]  # type: ignore[attr-defined]
    before = [one.fp32_precision for one in new]
    old: list[Any] = []
    for one in (matmul, cudnn):
        try:
            old.append((one, one.allow_tf32))
        except RuntimeError:
            continue
    try:
        for one, _ in old:
            one.allow_tf32 = True
        for one in new:
            one.fp32_precision = "tf32"
        yield
    finally:
        for one, was in old:
            one.allow_tf32 = was
        for one, precision in zip(new, before, strict=True):
            one.fp32_precision = precision


@dataclass(frozen=True)
class MeasurementTarget:
    """The working copy of the model, its layers, and the clock."""

    loaded: LoadedModel
    chain: LayerChain
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    seed: int
    notes: tuple[str, ...] = ()
    """What the profile is to say of it."""
    modes: Modes = field(default_factory=Modes)
    """The working copy is converted already."""
    loss: Loss | None = None


@dataclass(frozen=True)
class Setup:
    """How a model is to be measured."""

    device: torch.device
    dtype: str | None
    granularity: str
    keep_together: tuple[str, ...]
    loss: str
    modes: Modes
    seed: int
    clock: Clock
    verify_seconds: float = inf
    """That comparing layers and model may take, but for a first pass."""


def dtype_for(loaded: LoadedModel, name: str | None) -> tuple[torch.dtype, tuple[str, ...]]:
    """What the model is converted to, and what is to be said of it. Raises UsageError, ModelError."""
    dtype = None if name is None else parse_dtype(name)
    module = loaded.module
    refuse_unusable(loaded.name, module)
    tensors = list(itertools.chain(module.named_parameters(), module.named_buffers()))
    for path, tensor in tensors:
        if tensor.is_complex():
            raise ModelError(
                f"{loaded.name}: {path} is {dtype_text(tensor.dtype)}; only real numbers can be measured",
                "Keep real and imaginary parts in tensors of their own (torch.view_as_real).",
            )
    if dtype is not None:
        return dtype, ()
    own = own_dtype(module)
    if own is not None and own in DTYPES.values():
        return own, ()
    kinds = sorted({dtype_text(tensor.dtype) for _, tensor in tensors if tensor.dtype.is_floating_point})
    note = f"the model is in {' and '.join(kinds)} and was measured in float32; choose another with `dtype`"
    return torch.float32, (note,) if kinds else ()


def dtype_text(dtype: torch.dtype) -> str:
    """Return the dtype's name as options say it."""
    return str(dtype).removeprefix("torch.")
