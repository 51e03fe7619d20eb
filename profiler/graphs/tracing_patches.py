"""What is replaced in torch and transformers while a model is traced.

Calls of torch.autograd.Function: a tracer that looked through them would lose their backward.
torch.utils.checkpoint: whether a model recomputes parts of itself, which tracing looks through. The masks of
transformers, which under torch.export are other ones than in training. `len` of a tensor. torch.vmap, which a
graph that fails inside does not leave. And `training`, whose readers compute differently in the other mode.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.utils import checkpoint

from ..torch_internals import checkpoint_functions, count_transforms, leave_transforms, tree_leaves
from ..user_model.failures import short_filename


class CustomFunction(nn.Module):
    """Applies a function that has a backward of its own."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


@contextlib.contextmanager
def keep_custom_functions() -> Iterator[None]:
    """While torch.fx traces, a function is one call of a `CustomFunction`, added to the traced module."""

    def applied(apply: Callable[..., Any], function: type[Function], args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
        if proxy is None:
            return apply(*args, **kwargs)
        root: nn.Module = proxy.tracer.root  # type: ignore[attr-defined]  # TracerBase does not tell of it
        name = f"{function.__name__}_{sum(isinstance(m, CustomFunction) for m in root.modules())}"
        root.add_module(name, CustomFunction(function))
        return proxy.tracer.create_proxy("call_module", name, args, kwargs)

    with _instead_of_apply(applied):
        yield


@contextlib.contextmanager
def refuse_custom_functions() -> Iterator[None]:
    """While torch.export traces: raises NotImplementedError at a function that is not of torch's own."""

    def applied(apply: Callable[..., Any], function: type[Function], args: Any, kwargs: Any) -> Any:
        if function.__module__.partition(".")[0] == "torch":
            return apply(*args, **kwargs)
        raise NotImplementedError(f"{function.__name__} has a backward of its own, which would be lost")

    with _instead_of_apply(applied):
        yield


def _instead_of_apply(applied: Callable[..., Any]) -> Any:
    apply = Function.__dict__["apply"]

    def instead(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        return applied(apply.__get__(None, function), function, args, kwargs)

    return mock.patch.object(Function, "apply", classmethod(instead))


@contextlib.contextmanager
def notice_checkpoints() -> Iterator[list[bool]]:
    """Inside, every call of torch.utils.checkpoint adds to the list."""
    calls: list[bool] = []

    def noticed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            calls.append(True)
            return plain(*args, **options)

        return instead

    with contextlib.ExitStack() as stack:
        for owner, name in (
            *((checkpoint, name) for name in checkpoint_functions()),
            (checkpoint.CheckpointFunction, "apply"),
        ):
            plain = getattr(owner, name, None)
            if plain is not None:
                stack.enter_context(mock.patch.object(owner, name, noticed(plain)))
        yield calls


@contextlib.contextmanager
def notice_modes(model: nn.Module) -> Iterator[dict[str, str]]:
    """Collect the modules of `model` whose `training` is read or whose forward reads one, with the line.

    The two differ in `if self.block.training:`, which is code of the module around the block.
    """
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    reads: dict[str, str] = {}

    def reader(frame: FrameType | None) -> str | None:
        """Return the path of the innermost module whose forward runs."""
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                module = frame.f_locals.get(code.co_varnames[0])
                if id(module) in paths:
                    return paths[id(module)]
            frame = frame.f_back
        return None

    def read(module: nn.Module) -> Any:
        if id(module) in paths:
            here = inspect.currentframe()
            frame = here.f_back if here is not None else None
            if frame is not None and not frame.f_globals.get("__name__", "").startswith(_NO_FORWARDS):
                line = f"{short_filename(frame.f_code.co_filename)}:{frame.f_lineno}"
                for path in (paths[id(module)], reader(frame)):
                    if path is not None:
                        reads.setdefault(path, line)
        # A ScriptModule keeps it elsewhere.
        own = vars(module)
        return own["training"] if "training" in own else module.__getattr__("training")

    def write(module: nn.Module, mode: Any) -> None:
        vars(module)["training"] = mode

    with mock.patch.object(nn.Module, "training", property(read, write), create=True):
        yield reads


_NO_FORWARDS = ("torch.fx", "torch.export", "torch._", "copy")
"""Modules of Python that read `training` of a module and are no part of what it computes."""


@contextlib.contextmanager
def masks_as_in_training(*, one_text_a_row: bool = True) -> Iterator[None]:
    """While it lasts, the models of transformers are traced on the path that eager code takes.

    Otherwise a mask of four dimensions would be made that eager code leaves to the is_causal kernel, and
    another attention would be measured than is trained. `one_text_a_row`: position ids are the model's own,
    and need not be searched for several texts packed into one row; eager code finds none and goes on, but
    traced code cannot look. Does nothing where transformers is not loaded, or has no such functions.
    """
    module = sys.modules.get("transformers.masking_utils")
    replaced: dict[str, Callable[..., Any]] = {"is_torchdynamo_exporting": lambda: False}
    is_tracing = getattr(module, "is_tracing", None)
    if is_tracing is not None:
        # transformers before 5.18 asks it of masks too that are not given (None).
        replaced["is_tracing"] = lambda tensor=None: tensor is not None and is_tracing(tensor)
    if one_text_a_row:
        replaced["find_packed_sequence_indices"] = lambda *_args, **_kwargs: None
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield


@contextlib.contextmanager
def experts_on_meta() -> Iterator[None]:
    """While it lasts, experts of transformers run on meta tensors of any dtype: torch's grouped product is
    there of 16 bits alone, on a GPU of float32, too. Does nothing where transformers is not loaded."""
    module = sys.modules.get("transformers.integrations.moe")
    can_use = getattr(module, "_can_use_grouped_mm", None)
    if can_use is None:
        yield
        return

    def instead(values: Tensor, weight: Tensor, offs: Tensor) -> bool:
        is_missing = weight.is_meta and weight.dtype not in (torch.float16, torch.bfloat16)
        return not is_missing and can_use(values, weight, offs)

    with mock.patch.object(module, "_can_use_grouped_mm", instead):
        yield


@contextlib.contextmanager
def lengths_that_vary(model: nn.Module) -> Iterator[None]:
    """While it lasts, `len(tensor)` in the code of `model` is `tensor.shape[0]`, which a trace can follow:
    Python makes a plain number of what `__len__` returns."""

    def length(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor | fx.Proxy)
        return operator.getitem(value.shape, 0) if is_tensor else len(value)

    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    own = (vars(kind).get("forward") for kind in classes if not kind.__module__.startswith("torch."))
    forwards = (inspect.unwrap(forward) for forward in own if isinstance(forward, FunctionType))
    namespaces = {id(forward.__globals__): forward.__globals__ for forward in forwards}
    with contextlib.ExitStack() as stack:
        for namespace in namespaces.values():
            if "len" not in namespace:
                stack.enter_context(mock.patch.dict(namespace, {"len": length}))
        yield


@contextlib.contextmanager
def leave_vmap() -> Iterator[None]:
    """Afterwards no torch.vmap is entered that was not before.

    torch.export writes entering and leaving as operations: a graph that fails in between leaves torch.randn
    broken for the whole process.
    """
    before = count_transforms()
    try:
        yield
    finally:
        leave_transforms(before)
