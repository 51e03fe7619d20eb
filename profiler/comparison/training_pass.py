"""A forward and backward pass of a model, or of its layers, and every value that it leaves."""

from __future__ import annotations

import io
import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.tracing_patches import leave_vmap
from ..user_model.flat_output import flat
from ..user_model.loaded_model import ModelInput
from ..user_model.seeding import normal_like, random_states, repeatable_seeds, reseed

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(eq=False)
class Trainee:
    """A copy of a model, and what is run on its parameters: the copy itself, or layers bound to it."""

    model: nn.Module
    run: Callable[[ModelInput], Any]
    layers: tuple[nn.Module, ...] = ()
    _passes: int = field(default=0, init=False)

    def train_once(self, inputs: ModelInput, seed: int) -> PassResult:
        """Forward, and backward from random gradients, which add up to those of the passes before.

        The weights change after the first pass, as by an optimizer's step: what forward computed of them once
        and kept is then another. `inputs` is worked on: in place, and for gradients of what needs them.
        """
        if self._passes == 1:
            _step(self.model)
        self._passes += 1
        result = PassResult(self.model)
        # torch.fx prints where in the code of a graph an operation failed.
        with (
            torch.enable_grad(),
            leave_vmap(),
            repeatable_seeds(),
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            reseed(seed)
            result.output, result.structure = flat(self.run(inputs))
            starts = [leaf for leaf in result.output if isinstance(leaf, Tensor) and leaf.requires_grad]
            if starts:
                gradients = [normal_like(leaf, seed + index) for index, leaf in enumerate(starts)]
                torch.autograd.backward(starts, gradients)
            result.random = random_states()
        result.inputs = inputs.tensors
        return result

    def forward_once(self, inputs: ModelInput, seed: int) -> PassResult:
        """Without gradients: the output alone."""
        result = PassResult(self.model)
        with torch.no_grad(), leave_vmap(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reseed(seed)
            result.output, result.structure = flat(self.run(inputs))
        return result


def _step(model: nn.Module) -> None:
    """Changes every other element of each parameter by a few per cent, in place and without a copy."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                elements = parameter.detach()
                elements = elements.view(-1)[::2] if elements.is_contiguous() else elements
                elements.mul_(0.99 - 0.01 * (index % 5) / 5)


@dataclass(eq=False)
class PassResult:
    """What is there after a pass. Gradients and buffers are the model's own, so later passes change them."""

    model: nn.Module
    output: list[Any] = field(default_factory=list)
    structure: object = None
    inputs: tuple[Tensor, ...] = ()
    random: dict[str, Any] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """Kind, name and value of all that can be told apart, outputs first; None: no gradient."""
        for index, leaf in enumerate(self.output):
            value = leaf.detach() if isinstance(leaf, Tensor) else leaf
            yield "output", str(index), value if isinstance(value, (Tensor, *_PLAIN)) else type(value)
        for index, leaf in enumerate(self.output):
            if isinstance(leaf, Tensor):
                yield "need of a gradient", str(index), leaf.requires_grad
        for name, parameter in self.model.named_parameters():
            yield "gradient", name, _dense(parameter.grad)
        for index, tensor in enumerate(self.inputs):
            if tensor.requires_grad and tensor.is_leaf:
                yield "gradient of input", str(index), tensor.grad
        for name, buffer in self.model.named_buffers():
            yield "buffer", name, buffer.detach()
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, parameter.detach()
        for name, state in self.random.items():
            yield "random state", name, state
        yield from (("random state", name, state) for name, state in own_generators(self.model))


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Embeddings may have sparse ones."""
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def own_generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The states of random number generators that modules hold, by dotted name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator):
                yield _dotted(path, name), value.get_state()
            elif isinstance(value, random.Random):
                yield _dotted(path, name), value.getstate()
            elif type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
                yield _dotted(path, name), repr(value.bit_generator.state)


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """What modules keep in Python, by dotted name: numbers, words, counters, and lists, dicts and objects of
    them."""
    return {
        _dotted(path, name): plain
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and (plain := _plain(value)) is not _OTHER
    }


def class_attributes(model: nn.Module) -> dict[str, Any]:
    """What the classes of its modules keep, by the class and the name: all copies of the model share it."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    return {
        f"{kind.__qualname__}.{name}": plain
        for kind in classes
        if kind.__module__.partition(".")[0] not in ("torch", "builtins", "pplan")
        for name, value in vars(kind).items()
        if not name.startswith("__") and (plain := _plain(value)) is not _OTHER
    }


_OTHER = object()
"""What is neither plain nor made of plain values."""
_DEEPEST = 3
"""Objects in objects that are looked into."""


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy to compare with later ones; of what is not plain in it, nothing."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, list | tuple | set | deque):
        values = list(value)
    elif isinstance(value, dict):
        values = [part for pair in value.items() for part in pair]
    elif isinstance(value, (Tensor, nn.Module, type, FunctionType, ModuleType)) or not hasattr(
        value, "__dict__"
    ):
        return _OTHER
    else:
        values = list(vars(value).values())
    plain = [_plain(part, depth + 1) for part in values] if depth < _DEEPEST else []
    return _OTHER if values and all(part is _OTHER for part in plain) else plain


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
